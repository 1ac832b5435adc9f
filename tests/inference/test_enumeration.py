"""Test 5 of the design: the law of the emitted tokens is the target's, by running the real code on every outcome.

`Exhaustive` stands in for the random generator: each random choice forks, and every fork is run with its probability.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import Draft, Features, Level
from inference.policy import TreeConfig, grow
from inference.sample import Sampling, distribution
from inference.tree import DraftTree
from inference.verify import Rng, verify

VOCAB, HORIZON = 3, 3
EXACT = 1e-10


class Replay:
    """An Rng that follows a script of choices and notes the alternatives it did not take."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.taken, self.probability = script, [], 1.0
        self.open: list[list[int]] = []

    def choose(self, weights: list[float]) -> int:
        """Take the scripted option, or the first possible one."""
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else possible[0]
        if at >= len(self.script):
            self.open += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.probability *= weights[choice]
        return choice

    def draw(self, law: Tensor) -> Sequence[int]:
        """Return tokens that are drawn only when they are read."""
        replay = self

        class Lazy(list):
            def __getitem__(self, row: Any) -> int:
                return replay.choose(law[row].tolist())

        return Lazy()

    def distinct(self, law: Tensor, count: int) -> Tensor:
        """Draw without replacement, one after another."""
        rows = []
        for row in law:
            left, drawn = row.clone(), []
            for _ in range(min(count, len(row))):
                if left.sum() <= 0:
                    drawn.append(-1)
                    continue
                drawn.append(self.choose((left / left.sum()).tolist()))
                left[drawn[-1]] = 0
            rows.append(drawn)
        return torch.tensor(rows)

    def accept(self, probability: float) -> bool:
        """Fork on acceptance."""
        probability = min(1.0, probability)
        return self.choose([1 - probability, probability]) == 1


def outcomes(program: Callable[[Rng], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Return the exact law of a program's result."""
    law: dict[tuple[int, ...], float] = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        rng = Replay(scripts.pop())
        result = program(rng)
        law[result] = law.get(result, 0.0) + rng.probability
        scripts += rng.open
    assert abs(sum(law.values()) - 1) < EXACT
    return law


class Tables:
    """A target and a draft head that are tables: random logits for every sequence of tokens after the root."""

    config = None
    max_depth = 8
    feature_layers: tuple[int, ...] = ()

    def unroll(self, features: Features, depths: int) -> list[Draft]:
        raise AssertionError("a table is not trained")

    def extend(self, state: None, features: Features, token: Tensor) -> tuple[None, Level]:
        raise AssertionError("a table has no features")

    def __init__(self, seed: int, spread: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.spread = spread
        self.p: dict[tuple[int, ...], Tensor] = {}
        self.q: dict[tuple[int, ...], Tensor] = {}
        self.known: list[tuple[int, ...]] = []

    def logits(self, table: dict[tuple[int, ...], Tensor], path: tuple[int, ...]) -> Tensor:
        if path not in table:
            table[path] = torch.randn(VOCAB, generator=self.generator, dtype=torch.float64) * self.spread
        return table[path]

    def level(self, paths: list[tuple[int, ...]]) -> Level:
        start = len(self.known)
        self.known += paths
        index = torch.arange(start, len(self.known), dtype=torch.float64)[:, None]
        return Level(torch.stack([self.logits(self.q, path) for path in paths]), index, ())

    def expand(self, state: None, level: Level, token: Tensor, parent: Tensor, mask: Tensor) -> Level:
        above = [self.known[int(i)] for i in level.hidden[parent, 0]]
        return self.level([(*path, t) for path, t in zip(above, token.tolist(), strict=True)])

    def paths(self, tree: DraftTree) -> list[tuple[int, ...]]:
        made: list[tuple[int, ...]] = []
        for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
            made.append(() if parent < 0 else (*made[parent], token))
        return made

    def p_of(self, tree: DraftTree, sampling: Sampling) -> Tensor:
        return distribution(torch.stack([self.logits(self.p, path) for path in self.paths(tree)]), sampling)

    def target_law(self, sampling: Sampling) -> dict[tuple[int, ...], float]:
        """Return the law of the first HORIZON tokens by plain sampling."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(HORIZON):
            law = {
                (*path, t): weight * float(distribution(self.logits(self.p, path), sampling)[t])
                for path, weight in law.items()
                for t in range(VOCAB)
            }
        return law


Rule = Callable[[DraftTree, Tensor, Tensor | None, Rng], tuple[list[int], int]]


def one_pass(tables: Tables, config: TreeConfig, sampling: Sampling, rule: Rule) -> dict[tuple[int, ...], float]:
    """Return the law of HORIZON tokens: one drafted and verified pass, then plain sampling."""

    def program(rng: Rng) -> tuple[int, ...]:
        tree, q = grow(tables, None, tables.level([()]), 0, config, sampling, rng, room=HORIZON - 1)
        path, bonus = rule(tree, tables.p_of(tree, sampling), q, rng)
        emitted = [int(tree.token[node]) for node in path[1:]] + [bonus]
        while len(emitted) < HORIZON:
            law = distribution(tables.logits(tables.p, tuple(emitted)), sampling)
            emitted.append(rng.draw(law[None])[0])
        return tuple(emitted[:HORIZON])

    return outcomes(program)


def distance(found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]) -> float:
    """Return the total variation between two laws."""
    return 0.5 * sum(abs(found.get(k, 0.0) - expected.get(k, 0.0)) for k in {*found, *expected})


TREES = {
    "chain": TreeConfig("chain", 2, 0, 0, [], []),
    "static": TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0], [0, 1]], []),
    "ragged": TreeConfig("static", 0, 0, 0, [[0], [1], [2], [2, 1], [2, 0]], []),
    "dynamic": TreeConfig("dynamic", 2, 2, 4, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [2, 1]),
    "all siblings": TreeConfig("sampled", 0, 0, 0, [], [3]),
}
SAMPLINGS = {
    "greedy": Sampling(0.0, 0, 1.0),
    "T1": Sampling(1.0, 0, 1.0),
    "T0.6": Sampling(0.6, 0, 1.0),
    "top-k": Sampling(1.0, 2, 1.0),
    "top-p": Sampling(0.8, 0, 0.7),
    "both": Sampling(1.3, 2, 0.9),
}


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tree", TREES)
def test_emitted_law_is_the_targets(tree: str, sampling: str, spread: float) -> None:
    for seed in range(2):
        tables = Tables(seed, spread)
        found = one_pass(tables, TREES[tree], SAMPLINGS[sampling], verify)
        assert distance(found, tables.target_law(SAMPLINGS[sampling])) < EXACT


@pytest.mark.parametrize("tree", ["chain", "sampled"])
def test_draft_that_equals_the_target_is_always_accepted(tree: str) -> None:
    tables = Tables(0, 1.0)
    tables.q = tables.p
    depths = []

    def rule(drafted: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> tuple[list[int], int]:
        path, bonus = verify(drafted, p, q, rng)
        if isinstance(rng, Replay) and rng.probability > 1e-12:
            depths.append(len(path) - 1)
        return path, bonus

    one_pass(tables, TREES[tree], SAMPLINGS["T1"], rule)
    assert set(depths) == {2}


def typical_acceptance(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> tuple[list[int], int]:
    """Medusa's rule: accept what is likely enough, in order."""
    node, path = 0, [0]
    while True:
        law = p[node]
        entropy = -(law * law.clamp_min(1e-12).log()).sum()
        bar = min(0.09, float(0.3 * torch.exp(-entropy)))
        child = next((i for i in range(len(tree.parent)) if tree.parent[i] == node and law[tree.token[i]] > bar), None)
        if child is None:
            return path, rng.draw(law[None])[0]
        node = child
        path.append(node)


def one_sample_per_path(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> tuple[list[int], int]:
    """Sample the target anew for every root-leaf path and keep the longest match (Medusa's and REST's nucleus mode)."""
    best: tuple[list[int], int] = ([0], rng.draw(p[:1])[0])
    for leaf in range(1, len(tree.parent)):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = int(tree.parent[node])
        path = path[::-1]
        matched = [0]
        for node in path[1:]:
            if rng.draw(p[matched[-1]][None])[0] != int(tree.token[node]):
                break
            matched.append(node)
        if len(matched) > len(best[0]):
            best = (matched, rng.draw(p[matched[-1]][None])[0])
    return best


def pruned_by_own_value(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> tuple[list[int], int]:
    """Drop sampled nodes that the draft itself finds unlikely: the law they were drawn from is no longer q."""
    assert q is not None
    likely = [0] + [i for i in range(1, len(tree.parent)) if q[tree.parent[i], tree.token[i]] > 0.3]
    kept = [i for i in likely if i == 0 or int(tree.parent[i]) in likely]
    number = {old: new for new, old in enumerate(kept)}
    parent = torch.tensor([-1 if i == 0 else number[int(tree.parent[i])] for i in kept])
    smaller = DraftTree(tree.token[kept], parent)
    path, bonus = verify(smaller, p[kept], q[kept], rng)
    return [kept[node] for node in path], bonus


BROKEN: dict[str, tuple[str, Rule]] = {
    "typical acceptance": ("static", typical_acceptance),
    "one sample per path": ("static", one_sample_per_path),
    "sampled nodes pruned by their own value": ("chain", pruned_by_own_value),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(name: str) -> None:
    tree, rule = BROKEN[name]
    tables = Tables(0, 1.0)
    found = one_pass(tables, TREES[tree], SAMPLINGS["T1"], rule)
    assert distance(found, tables.target_law(SAMPLINGS["T1"])) > 0.01


def test_greedy_draft_with_softmax_ratio_is_caught() -> None:
    tables = Tables(0, 1.0)
    sampling = SAMPLINGS["T1"]

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> tuple[list[int], int]:
        # The commonest published defect: children are the top of q, but are tested as if they were drawn from q.
        laws = torch.stack([distribution(tables.logits(tables.q, path), sampling) for path in tables.paths(tree)])
        return verify(tree, p, laws, rng)

    found = one_pass(tables, TREES["static"], sampling, rule)
    assert distance(found, tables.target_law(sampling)) > 0.01
