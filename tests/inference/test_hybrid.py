"""The choice between a head and a lookup: by what each is worth, with the output and both records right."""

from typing import Any

import pytest
import torch

from heads.common.typed import build
from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.hybrid import Hybrid, HybridState, Record
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Verified
from inference.target.model import TargetOutput
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree, agreed
from tests import toys
from tests.inference import model_free

CPU = torch.device("cpu")


class Fixed(Drafter, DrafterState):
    """A source that always drafts the same chain and promises the same."""

    def __init__(self, chain: list[int], score: float, name: str) -> None:
        self.chain, self.score, self.name, self.tree = chain, score, name, name
        self.calls: list[str] = []

    def start(self, prompt: list[int]) -> "Fixed":
        self.calls.append("start")
        return self

    def reset(self) -> None:
        self.calls.append("forget")

    def update(self, commit: Commit) -> None:
        self.calls.append("update")

    def propose(self, context: Context) -> Proposal:
        self.calls.append("propose")
        token = torch.tensor([context.token[-1], *self.chain])
        return Proposal(DraftTree(token, torch.arange(-1, len(self.chain))), expected=self.score)


def hybrid(head: Fixed, lookup: Fixed, expected: float = 2.0, weight: float = 0.5) -> Hybrid:
    return Hybrid(Hybrid.Config(expected, weight, {}), head, lookup, "hybrid")


def settle(state: HybridState, following: list[int]) -> None:
    """Propose, verify against the text that follows, and report."""
    tree = state.propose(Context([0], GREEDY, Generator(0, CPU), 9)).tree
    path = list(range(agreed(tree, following) + 1))
    rows = TargetOutput(torch.zeros(1, len(path), 0, 1), torch.zeros(1, len(path), 1), None)
    token = torch.tensor(following[: len(path)])
    state.update(Commit(token, rows, Verified(tree, path, torch.zeros(len(tree.token), 9), None)))


@pytest.mark.parametrize(("score", "drafts"), [(2.5, "lookup"), (2.0, "head"), (0.0, "head")])
def test_the_higher_expectation_drafts_and_an_idle_head_costs_nothing(score: float, drafts: str) -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2, 3], score, "lookup")
    tree = hybrid(head, lookup).start([0]).propose(Context([0], GREEDY, Generator(0, CPU), 9)).tree
    assert tree.token.tolist() == [0, *(lookup if drafts == "lookup" else head).chain]
    assert head.calls == (["start", "propose"] if drafts == "head" else ["start"])


def test_the_heads_record_follows_what_was_accepted_of_it() -> None:
    source = hybrid(Fixed([1, 2, 3, 4], 0.0, "head"), Fixed([9], 0.5, "lookup"))
    state = source.start([0])
    settle(state, [1, 2, 3, 4, 5])
    assert source.record.accepted == 3.0  # half of 2, half of 4
    settle(state, [1, 7])
    assert source.record.accepted == 2.0
    settle(state, [7])
    assert source.record.accepted == 1.0
    source.reset()
    assert source.record == Record(2.0)


def test_a_lookup_that_promises_too_much_is_believed_less() -> None:
    head, lookup = Fixed([5], 0.0, "head"), Fixed([5, 6, 7, 8], 4.0, "lookup")
    source = hybrid(head, lookup, expected=1.5)
    state, chosen = source.start([0]), []
    for _ in range(6):
        settle(state, [5, 0])  # one of the four promised comes true
        chosen.append(state.took_lookup)
    assert chosen[0]
    assert not chosen[-1]
    # It drafts no more, but what it would have been worth goes on to count: it may win back its trust.
    for _ in range(4):
        settle(state, [5, 6, 7, 8])
    before = source.record.lookup_accepted / source.record.lookup_expected
    settle(state, [0])
    assert source.record.lookup_accepted / source.record.lookup_expected < before


def test_both_sources_see_every_commit_and_both_forget() -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2], 3.0, "lookup")
    source = hybrid(head, lookup)
    settle(source.start([0]), [2, 4])
    source.reset()
    assert head.calls == ["start", "update", "forget"]
    assert lookup.calls == ["start", "propose", "update", "forget"]


class Watched(Hybrid):
    """Keeps the state of the sequence at hand."""

    def start(self, prompt: list[int]) -> HybridState:
        self.state = super().start(prompt)
        return self.state


@pytest.mark.parametrize("mode", ["path", "tree"])
def test_the_output_is_the_targets_and_both_sources_draft(mode: str) -> None:
    target = toys.target()
    own: Any = toys.head("eagle", target)
    head = HeadDrafter(own, toys.TREES["dynamic"], "eagle")
    source = Watched(Hybrid.Config(0.3, 0.3, {}), head, model_free.make("suffix", target, mode=mode), "hybrid")
    used = set()
    for seed in range(2):
        prompt = toys.prompt(seed) * 3
        made = speculate(target, source, prompt, Settings(40, GREEDY), lambda *_: used.add(source.state.took_lookup))
        assert made.tokens == autoregress(target, prompt, Settings(40, GREEDY)).tokens
    assert used == {False, True}


@pytest.mark.parametrize(
    ("expected", "weight", "named"),
    [(2.0, 0.0, "drafter.hybrid.weight is 0.0"), (2.0, 1.5, "drafter.hybrid.weight"), (-1.0, 0.5, "hybrid.expected")],
)
def test_bad_values(expected: float, weight: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(Hybrid.Config, {"expected": expected, "weight": weight, "lookup": {}}, "drafter.hybrid")
