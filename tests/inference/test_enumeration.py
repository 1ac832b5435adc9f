"""Test 5 of the design: the law of the emitted tokens is the target's, for every rule, by exact enumeration."""

import functools

import pytest
import torch

from inference.verification.tree import DraftTree
from inference.verification.verify import RULES
from tests.enumeration import (
    EXACT,
    FAMILIES,
    SAMPLINGS,
    TREES,
    Draft,
    Law,
    Passed,
    Replay,
    Tables,
    distance,
    drafts,
    one_pass,
    verify,
)

ANY = ("match", "point_mass")
FITTING = {
    "chain": (*ANY, "token", "block", "recursive", "recursive_replacement", "traversal", "traversal_replacement"),
    **dict.fromkeys(("static", "uneven", "dynamic"), ANY),
    **dict.fromkeys(("sampled", "single", "siblings", "ragged"), (*ANY, "recursive", "traversal")),
    **dict.fromkeys(("independent", "independent ragged"), (*ANY, "recursive_replacement", "traversal_replacement")),
}
CASES = [(tree, rule) for tree, fitting in FITTING.items() for rule in fitting]
# Each rule on the one shape that asks most of it; `slow` runs every shape under everything.
CORE = [
    ("chain", "token"),
    ("chain", "block"),
    ("static", "match"),
    ("static", "point_mass"),
    ("sampled", "recursive"),
    ("sampled", "traversal"),
    ("independent", "recursive_replacement"),
    ("independent", "traversal_replacement"),
]
LAWS = [("close", sampling) for sampling in SAMPLINGS] + [(family, "T1") for family in FAMILIES if family != "close"]


@functools.cache
def tables(family: str, seed: int) -> Tables:
    return Tables(seed, family)


@functools.cache
def drafted(tree: str, family: str, sampling: str, seed: int) -> list[Draft]:
    return drafts(tables(family, seed), TREES[tree], SAMPLINGS[sampling])


@functools.cache
def passed(tree: str, rule: str, family: str, sampling: str = "T1", seed: int = 0) -> Passed:
    return one_pass(drafted(tree, family, sampling, seed), SAMPLINGS[sampling], rule)


@functools.cache
def expected(family: str, sampling: str, seed: int) -> Law:
    return tables(family, seed).target_law(SAMPLINGS[sampling])


def error(tree: str, rule: str, family: str, sampling: str, seed: int = 0) -> float:
    found = passed(tree, rule, family, sampling, seed).law
    return distance(tables(family, seed).continued(found, SAMPLINGS[sampling]), expected(family, sampling, seed))


def test_every_lossless_rule_is_enumerated() -> None:
    lossless = {name for name, rule in RULES.items() if not rule.lossy}
    assert {rule for _, rule in CASES} == {rule for _, rule in CORE} == lossless - {"coupled"}  # test_coupled.py


@pytest.mark.parametrize(("family", "sampling"), LAWS)
@pytest.mark.parametrize(("tree", "rule"), CORE)
def test_emitted_law_is_the_targets(tree: str, rule: str, family: str, sampling: str) -> None:
    assert error(tree, rule, family, sampling) < EXACT


@pytest.mark.parametrize(("family", "sampling"), [("close", "all"), ("zeros", "T1")])
@pytest.mark.parametrize(("tree", "rule"), [case for case in CASES if case not in CORE])
def test_emitted_law_is_the_targets_on_every_shape(tree: str, rule: str, family: str, sampling: str) -> None:
    assert error(tree, rule, family, sampling) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("tree", "rule"), CASES)
def test_emitted_law_is_the_targets_everywhere(tree: str, rule: str, family: str, sampling: str) -> None:
    for seed in range(2):
        assert error(tree, rule, family, sampling, seed) < EXACT


@pytest.mark.parametrize("tree", ["chain", "sampled", "ragged", "independent"])
def test_draft_that_equals_the_target_is_always_accepted(tree: str) -> None:
    depth = 2
    for rule in FITTING[tree][2:]:
        if tree == "ragged":  # the first child has no children
            continue
        assert passed(tree, rule, "equal").tokens == pytest.approx(depth + 1)


# What is proven or claimed to accept at least as much, on the same drafts or the same shape.
ORDER = [
    (("chain", "match"), ("chain", "token")),
    (("chain", "token"), ("chain", "block")),
    (("sampled", "match"), ("sampled", "recursive")),
    (("sampled", "recursive"), ("sampled", "traversal")),
    (("ragged", "recursive"), ("ragged", "traversal")),
    (("independent", "recursive_replacement"), ("independent", "traversal_replacement")),
    (("independent", "recursive_replacement"), ("sampled", "recursive")),
    (("independent", "traversal_replacement"), ("sampled", "traversal")),
    (("chain", "block"), ("independent", "traversal_replacement")),
    (("chain", "traversal_replacement"), ("chain", "block")),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("less", "more"), ORDER)
def test_acceptance_is_ordered(less: tuple[str, str], more: tuple[str, str], family: str) -> None:
    assert passed(*less, family).tokens <= passed(*more, family).tokens + EXACT


def test_an_alpha_of_one_stays_one() -> None:
    """Rounding once let the root of a traversal be rejected: mass / (mass + 1 - 1) is not 1 for every mass."""
    generator = torch.Generator().manual_seed(0)
    tree = DraftTree(torch.tensor([0, 0, 1, 2]), torch.tensor([-1, 0, 0, 0]))
    for _ in range(200):
        p, q = (torch.rand(2, 1, 3, generator=generator) + 1e-3).expand(2, 4, 3)
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        path, _ = verify(tree, p, q, Never(), "traversal")
        assert len(path) <= 2


class Never(Replay):
    """Rejects whatever is not certain."""

    def __init__(self) -> None:
        super().__init__([])

    def accept(self, probability: float) -> bool:
        return probability >= 1
