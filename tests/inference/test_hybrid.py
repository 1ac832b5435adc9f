"""The choice between a head and a lookup: by what each is worth, with the output and both records right."""

from typing import Any

import pytest
import torch

from inference.decode import Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.hybrid import Hybrid
from inference.protocol import Commit, Context, Proposal, Verified
from inference.target.model import TargetOutput
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree, agreed
from tests import toys
from tests.inference import model_free

CPU = torch.device("cpu")


class Fixed:
    """A source that always drafts the same chain and promises the same."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, chain: list[int], score: float, name: str) -> None:
        self.chain, self.score, self.name, self.tree = chain, score, name, name
        self.calls: list[str] = []

    def reset(self, prompt: list[int]) -> None:
        self.calls.append("reset")

    def forget(self) -> None:
        self.calls.append("forget")

    def observe(self, commit: Commit) -> None:
        self.calls.append("observe")

    def propose(self, context: Context) -> Proposal:
        self.calls.append("propose")
        token = torch.tensor([context.token[-1], *self.chain])
        return Proposal(DraftTree(token, torch.arange(-1, len(self.chain))))


def hybrid(head: Fixed, lookup: Fixed, expected: float = 2.0, weight: float = 0.5) -> Hybrid:
    return Hybrid(Hybrid.Config(expected, weight, {}), head, lookup, "hybrid")


def settle(source: Hybrid, following: list[int]) -> None:
    """Propose, verify against the text that follows, and report."""
    tree = source.propose(Context([0], GREEDY, Generator(0, CPU), 9)).tree
    path = list(range(agreed(tree, following) + 1))
    rows = TargetOutput(torch.zeros(1, len(path), 0, 1), torch.zeros(1, len(path), 1), None)
    token = torch.tensor(following[: len(path)])
    source.observe(Commit(token, rows, Verified(tree, path, torch.zeros(len(tree.token), 9), None)))


@pytest.mark.parametrize(("score", "drafts"), [(2.5, "lookup"), (2.0, "head"), (0.0, "head")])
def test_the_higher_expectation_drafts_and_an_idle_head_costs_nothing(score: float, drafts: str) -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2, 3], score, "lookup")
    source = hybrid(head, lookup)
    tree = source.propose(Context([0], GREEDY, Generator(0, CPU), 9)).tree
    assert tree.token.tolist() == [0, *(lookup if drafts == "lookup" else head).chain]
    assert head.calls == (["propose"] if drafts == "head" else [])


def test_the_heads_record_follows_what_was_accepted_of_it() -> None:
    source = hybrid(Fixed([1, 2, 3, 4], 0.0, "head"), Fixed([9], 0.5, "lookup"))
    settle(source, [1, 2, 3, 4, 5])
    assert source.expected == 3.0  # half of 2, half of 4
    settle(source, [1, 7])
    assert source.expected == 2.0
    source.forget()
    assert source.expected == 2.0


def test_a_lookup_that_promises_too_much_is_believed_less() -> None:
    head, lookup = Fixed([5], 0.0, "head"), Fixed([5, 6, 7, 8], 4.0, "lookup")
    source = hybrid(head, lookup, expected=1.5)
    chosen = []
    for _ in range(6):
        settle(source, [5, 0])  # one of the four promised comes true
        chosen.append(source.chosen is lookup)
    assert chosen[0]
    assert not chosen[-1]
    # It drafts no more, but what it would have been worth goes on to count: it may win back its trust.
    for _ in range(4):
        settle(source, [5, 6, 7, 8])
    before = source.kept / source.promised
    settle(source, [0])
    assert source.kept / source.promised < before


def test_both_sources_see_every_commit_and_both_forget() -> None:
    head, lookup = Fixed([1], 0.0, "head"), Fixed([2], 3.0, "lookup")
    source = hybrid(head, lookup)
    source.reset([0])
    settle(source, [2, 4])
    source.forget()
    assert head.calls == ["reset", "observe", "forget"]
    assert lookup.calls == ["reset", "propose", "observe", "forget"]


@pytest.mark.parametrize("mode", ["path", "tree"])
def test_the_output_is_the_targets_and_both_sources_draft(mode: str) -> None:
    target = toys.target()
    own: Any = toys.head("eagle", target)
    head = HeadDrafter(own, toys.TREES["dynamic"], "eagle")
    source = Hybrid(Hybrid.Config(0.3, 0.3, {}), head, model_free.make("suffix", target, mode=mode), "hybrid")
    used = set()
    for seed in range(2):
        prompt = toys.prompt(seed) * 3
        made = speculate(target, source, prompt, Settings(40, GREEDY), lambda *_: used.add(source.chosen.name))
        assert made.tokens == autoregress(target, prompt, Settings(40, GREEDY)).tokens
    assert used == {"eagle", "suffix"}


@pytest.mark.parametrize(
    ("expected", "weight", "named"),
    [(2.0, 0.0, "drafter.hybrid.weight is 0.0"), (2.0, 1.5, "drafter.hybrid.weight"), (-1.0, 0.5, "hybrid.expected")],
)
def test_bad_values(expected: float, weight: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Hybrid.Config(expected, weight, {})
