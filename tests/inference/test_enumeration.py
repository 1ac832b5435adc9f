"""Test 5 of the design: the law of the emitted tokens is the target's, for every rule, by exact enumeration."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference.verification.rules import RULES
from inference.verification.sample import Sampling, distribution
from inference.verification.tree import DraftTree
from tests import oracle
from tests.enumeration import (
    EXACT,
    FAMILIES,
    PROMPT,
    SAMPLINGS,
    TREES,
    VOCAB,
    Draft,
    Law,
    Passed,
    Replay,
    Rule,
    Tables,
    distance,
    drafts,
    one_pass,
    texts,
    verify,
    verify_on_device,
)
from tests.oracle import PathNode, Rng, paths

T1 = SAMPLINGS["T1"]
Found = tuple[list[int], int]
ANY = ("match", "point_mass")
FITTING = {
    "chain": (*ANY, "token", "block", "recursive", "traversal"),
    **dict.fromkeys(("static", "uneven", "dynamic"), ANY),
    **dict.fromkeys(("sampled", "single", "siblings", "ragged"), (*ANY, "recursive", "traversal")),
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
    lossless = {name for name, rule in RULES.items() if rule.threshold is None}
    assert {rule for _, rule in CASES} == {rule for _, rule in CORE} == lossless - {"coupled"}  # below


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


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_draft_that_equals_the_target_is_always_accepted(tree: str) -> None:
    depth = 2
    for rule in FITTING[tree][2:]:
        assert passed(tree, rule, "equal").tokens == pytest.approx(depth + 1)


# What is proven or claimed to accept at least as much, on the same drafts or the same shape.
ORDER = [
    (("chain", "match"), ("chain", "token")),
    (("chain", "token"), ("chain", "block")),
    (("sampled", "match"), ("sampled", "recursive")),
    (("sampled", "recursive"), ("sampled", "traversal")),
    (("ragged", "recursive"), ("ragged", "traversal")),
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
        path, _ = verify_on_device(tree, p.log(), q[:1], T1, Never(), "traversal")
        assert len(path) <= 2


class Never(Replay):
    """Rejects whatever is not certain."""

    def __init__(self) -> None:
        super().__init__([])

    def accept(self, probability: float) -> bool:
        return probability >= 1


def gap(tables: Tables, tree: str, sampling: Sampling, rule: str | Rule) -> float:
    law = one_pass(drafts(tables, TREES[tree], sampling), sampling, rule).law
    return distance(tables.continued(law, sampling), tables.target_law(sampling))


def block(tree: DraftTree, p: Tensor, q: Tensor, rng: Rng, stop: bool) -> Found:
    """Block verification (arXiv 2403.10444), literally: every length has a coin, the longest accepted one stands."""
    length = len(tree.token) - 1
    alpha, tau, left = 1.0, 0, p[0]
    for i in range(length + 1):
        if i > 0:
            x = tree.token[i]
            alpha = min(1.0, alpha * float(p[i - 1, x] / q[i - 1, x]))
        residual = (alpha * p[i] - q[i]).clamp_min(0)
        mass = float(residual.sum())
        bar = alpha if i == length else mass / (mass + (1 - alpha)) if mass else float(i == 0)
        if rng.accept(bar):
            tau, left = i, p[i] if i == length or not mass else residual / mass
        elif stop and i > 0:
            break
    return list(range(tau + 1)), rng.sample(left[None])[0]


@pytest.mark.parametrize("family", ["mild", "peaky", "close", "zeros"])
def test_block_verification_is_its_papers(family: str) -> None:
    tables = Tables(0, family)
    found = drafts(tables, TREES["chain"], T1)
    literal = one_pass(found, T1, lambda tree, p, q, rng: block(tree, p, q, rng, stop=False))
    ours = one_pass(found, T1, "block")
    assert distance(ours.law, literal.law) < 1e-10  # of whole texts, their lengths included


def test_coupled_outputs_are_the_targets_whatever_is_drafted() -> None:
    """Exact: with each position's token fixed by the noise, every tree over the vocabulary leads to that text."""
    p = torch.softmax(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), -1)
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 2])
    for tokens in itertools.product(range(3), repeat=4):
        tree = DraftTree(torch.tensor([0, tokens[0], tokens[1], tokens[2], tokens[3], tokens[2], tokens[3]]), parent)
        laws = p[[0, 1, 1, 2, 2, 2, 2]]  # a law a depth, so that the text does not depend on the path
        for seed in range(4):
            rng = oracle.Coins(seed, 3)
            path, token = verify(tree, laws, None, rng, "coupled")
            text = [int(tree.token[node]) for node in path[1:]] + [token]
            assert text == [rng.sample(laws[[0, 1, 3]][[i]], i + 1)[0] for i in range(len(text))]


def one_sample_per_path(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Resample the target for every root-leaf path and keep the longest match (Medusa's and REST's nucleus mode)."""
    best: Found = ([0], rng.sample(p[:1])[0])
    for path in paths(tree):
        matched = [0]
        for node in path[1:]:
            if rng.sample(p[matched[-1]][None])[0] != int(tree.token[node]):
                break
            matched.append(node)
        if len(matched) > len(best[0]):
            best = (matched, rng.sample(p[matched[-1]][None])[0])
    return best


def pruned_by_own_value(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Drop sampled nodes that the draft itself finds unlikely: the law they were drawn from is no longer q."""
    likely = [0] + [i for i in range(1, len(tree.parent)) if q[tree.parent[i], tree.token[i]] > 0.3]
    kept = [i for i in likely if i == 0 or int(tree.parent[i]) in likely]
    number = {old: new for new, old in enumerate(kept)}
    parent = torch.tensor([-1 if i == 0 else number[int(tree.parent[i])] for i in kept])
    smaller = DraftTree(tree.token[kept], parent)
    path, bonus = verify(smaller, p[kept], q[kept], rng, "recursive")
    return [kept[node] for node in path], bonus


def wrong_replacement(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Test siblings drawn without replacement as if they had been drawn with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "without", lambda probs, _: probs)
        return oracle.recursive(tree, p, q, rng)


def stopping_block(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Stop at the first rejected length, as token-level verification does."""
    return block(tree, p, q, rng, stop=True)


def stale_residual(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Traversal that tries the next sibling against the law from before the rejection."""

    def reject(frame: PathNode, x: int) -> None:
        left = frame.draft.clone()
        left[x] = 0
        frame.draft = left / left.sum() if left.sum() > 0 else left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "reject", reject)
        return oracle.traversal(tree, p, q, rng)


def stale_alpha(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Traversal that keeps a node's probability when what hangs below it was rejected."""
    reject = oracle.reject

    def stale(frame: PathNode, x: int) -> None:
        alpha = frame.alpha
        reject(frame, x)
        frame.alpha = alpha

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "reject", stale)
        return oracle.traversal(tree, p, q, rng)


BROKEN: dict[str, tuple[str, Rule]] = {
    "typical acceptance": ("static", oracle.typical),
    "fixed threshold": ("static", oracle.threshold),
    "one sample per path": ("static", one_sample_per_path),
    "sampled nodes pruned by their own value": ("chain", pruned_by_own_value),
    "residual with replacement on drafts without": ("sampled", wrong_replacement),
    "block verification that stops at a rejection": ("chain", stopping_block),
    "traversal with a stale residual": ("sampled", stale_residual),
    "traversal with a stale alpha": ("sampled", stale_alpha),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(name: str) -> None:
    tree, rule = BROKEN[name]
    assert max(gap(Tables(seed, "mild"), tree, T1, rule) for seed in range(2)) > 0.004


def test_greedy_draft_with_softmax_ratio_is_caught() -> None:
    tables = Tables(0, "mild")

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        # The commonest published defect: children are the top of q, but are tested as if they were drawn from q.
        laws = torch.stack([distribution(tables.logits(text)[1], T1) for text in texts(tree)])
        return verify(tree, p, laws, rng, "recursive")

    assert gap(tables, "static", T1, rule) > 0.01


def test_a_bonus_without_the_processors_is_caught() -> None:
    tables, sampling = Tables(0, "mild"), SAMPLINGS["top-k"]

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        path, bonus = verify(tree, p, q, rng)
        if len(path) == 3:
            bonus = rng.sample(tables.logits(texts(tree)[path[-1]])[0].softmax(-1)[None])[0]
        return path, bonus

    assert gap(tables, "chain", sampling, rule) > 0.01


def test_a_penalty_for_the_roots_prefix_at_every_node_is_caught() -> None:
    tables, sampling = Tables(0, "mild"), replace(T1, repetition_penalty=3.0)
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[PROMPT] = True

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        raw = torch.stack([tables.logits(text)[0] for text in texts(tree)])
        scaled = torch.where(raw < 0, raw * 3.0, raw / 3.0)
        return verify(tree, distribution(torch.where(seen, scaled, raw), T1), q, rng)

    assert gap(tables, "chain", sampling, "auto") < 1e-10
    assert gap(tables, "chain", sampling, rule) > 0.01
