"""Which rule serves which draft, and the refusal of the others in one line."""

import pytest
import torch
from torch import Tensor

from inference.decode import RequestParams, autoregress, speculate
from inference.verification import rules
from inference.verification.rules import RULES, is_chain, resolve_rule
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree, ancestors
from tests import toys

CHAIN = DraftTree(torch.tensor([5, 1, 2]), torch.tensor([-1, 0, 1]))
TREE = DraftTree(torch.tensor([5, 1, 2]), torch.tensor([-1, 0, 0]))


@pytest.mark.parametrize(
    ("rule", "tree", "drawn", "named"),
    [
        ("token", TREE, True, "verifies chains"),
        ("block", TREE, True, "tree=chain"),
        ("block", CHAIN, False, "sampled from known probs"),
        ("traversal", TREE, False, "chosen without sampling"),
    ],
)
def test_a_wrong_pairing_is_refused(rule: str, tree: DraftTree, drawn: bool, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^rule={rule} .*{named}"):
        resolve_rule(rule, is_chain(tree.parent.tolist()), drawn, greedy=False)


@pytest.mark.parametrize(
    ("rule", "lossy", "named"), [("best", False, "traversal"), ("typical", False, "lossy=true"), ("best", True, "auto")]
)
def test_an_unknown_or_unallowed_rule_is_named(rule: str, lossy: bool, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RequestParams(4, GREEDY, rule=rule, lossy=lossy)


@pytest.mark.parametrize(
    ("kind", "temperature", "rule"),
    [
        ("chain", 1.0, "block"),
        ("sampled", 1.0, "traversal"),
        ("dynamic", 1.0, "point_mass"),
        ("static", 1.0, "point_mass"),
        ("sampled", 0.0, "greedy"),
    ],
)
def test_a_step_names_the_rule_that_was_used(kind: str, temperature: float, rule: str) -> None:
    drafter, settings = toys.drafter("eagle", toys.target(), kind), RequestParams(12, Sampling(temperature, 0, 1.0))
    made = speculate(toys.target(), drafter, toys.prompt(0), settings)
    assert {step.rule for step in made.steps if step.drafted} == {rule}
    assert {step.rule for step in made.steps if not step.drafted} <= {"none"}


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.threshold])
def test_a_lossy_rule_says_so_and_leaves_the_greedy_text(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "THRESHOLD", 0.02)  # the toy target is sure of itself
    monkeypatch.setattr(rules, "EPSILON", 0.02)
    target, prompt = toys.target(), toys.prompt(0)
    made = speculate(
        target, toys.drafter("eagle", target, "dynamic"), prompt, RequestParams(16, GREEDY, rule=rule, lossy=True)
    )
    assert {step.rule for step in made.steps if step.drafted} == {f"{rule} (lossy)"}
    assert made.tokens != autoregress(target, prompt, RequestParams(16, GREEDY)).tokens


def last(tree: DraftTree, p: Tensor, rule: str) -> int:
    """Return the last accepted node by a lossy rule."""
    batch, threshold = DraftTree(tree.token[None], tree.parent[None]), RULES[rule].threshold
    valid = torch.ones_like(batch.token, dtype=torch.bool)
    return int(rules.follow(batch, ancestors(batch), valid, rules.above_threshold(batch, p[None], threshold)))


PAIR, EVEN = (torch.tensor([0, 1]), torch.tensor([-1, 0])), [0.5, 0.5]
FORKED = torch.tensor([0, 0, 1, 1]), torch.tensor([-1, 0, 0, 2])
SIBLINGS = torch.tensor([0, 1, 0]), torch.tensor([-1, 0, 0])


@pytest.mark.parametrize(
    ("rule", "tree", "law", "accepted"),
    [
        # Medusa's: (0.9, 0.1) has 0.325 nats, so the bar is min(0.09, 0.3 exp(-0.325)) = 0.09, and both stand.
        ("typical", PAIR, [0.9, 0.1], 1),
        ("typical", PAIR, [0.125] * 8, 1),  # of ln 8 nats the bar is 0.3 / 8 = 0.0375: all stand
        ("typical", PAIR, [0.95, 0.05], 0),  # which stays below 0.09
        # Seven tokens of 0.14 and one of 0.02 have 2.005 nats, so the bar is 0.040; in bits it would be 0.017.
        ("typical", (torch.tensor([0, 7]), PAIR[1]), [0.14] * 7 + [0.02], 0),
        ("threshold", FORKED, EVEN, 3),  # the longest of two above_threshold paths
        ("threshold", SIBLINGS, EVEN, 1),  # of those of one length the first drafted
        ("typical", SIBLINGS, EVEN, 1),
    ],
)
def test_a_lossy_rule_accepts_what_it_says(
    rule: str, tree: tuple[Tensor, Tensor], law: list[float], accepted: int
) -> None:
    assert last(DraftTree(*tree), torch.tensor([law] * len(tree[0])), rule) == accepted


def test_rules_whose_text_is_the_targets_samples() -> None:
    emitting = {
        rule for rule in (*RULES, rules.GREEDY_WALK, rules.NOTHING, "unheard-of") if rules.equals_baseline(rule)
    }
    assert emitting == {"match", "point_mass", "coupled", rules.GREEDY_WALK, rules.NOTHING}


@pytest.mark.parametrize(("alpha", "left"), [(1.0, 1.0), (0.5, 0.0)])
def test_a_path_without_a_residual_is_sure_or_lost(alpha: float, left: float) -> None:
    """Rounding alone rejects where p and q are equal; a root that is sure must stay so."""
    half, yes = torch.tensor([[0.5, 0.5]]), torch.ones(1, dtype=torch.bool)
    frame = rules.PathNode(yes, torch.tensor([alpha]), half, half)
    frame.reject(torch.tensor([[0]]), yes, distinct=True)
    assert (frame.alpha.tolist(), frame.residual_p.tolist(), frame.residual_q.tolist()) == (
        [left],
        [[0.5, 0.5]],
        [[0.0, 1.0]],
    )
