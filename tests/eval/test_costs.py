"""The tuner's static trees, predicted speeds against passes counted by hand, and the costs that it measures."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eval.inputs.workloads import write
from eval.measures.cost_model import (
    draft_key,
)
from eval.tuning import costs as costing
from eval.tuning.costs import PlaybackBatch, measure, planted, typical
from eval.tuning.grid import acceptance, best_static, levelled
from inference.batch import Batch
from inference.decode import RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.request import Request, Step
from inference.verification import tree as trees
from inference.verification.sample import GREEDY
from tests import toys

Path = tuple[int, ...]


def all_trees(depth: int, ranks: int, nodes: int) -> set[frozenset[Path]]:
    """Return every tree of at most this many nodes."""
    found = layer = {frozenset[Path]()}
    for _ in range(nodes):
        layer = {
            tree | {(*above, rank)}
            for tree in layer
            for above in [(), *tree]
            for rank in range(ranks)
            if len(above) < depth and (*above, rank) not in tree
        }
        found = found | layer
    return found


def worth(tree: frozenset[Path], table: torch.Tensor) -> float:
    """Return the expected number of accepted tokens."""
    return sum(math.prod(float(table[d, rank]) for d, rank in enumerate(path)) for path in tree)


def random_table(seed: int, depth: int, ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(depth, ranks, generator=generator, dtype=torch.float64)
    return raw / raw.sum(1, keepdim=True) * 0.9


@pytest.mark.parametrize("seed", range(2))
def test_no_tree_is_better(seed: int) -> None:
    table = random_table(seed, 3, 3)
    found = best_static(table, 5)
    every = all_trees(3, 3, 5)
    assert len(every) > 300
    for nodes in range(6):
        best = max(worth(tree, table) for tree in every if len(tree) <= nodes)
        paths = frozenset(map(tuple, found.paths(nodes)))
        assert len(paths) == nodes
        assert found.value[nodes] == pytest.approx(best)
        assert worth(paths, table) == pytest.approx(best)


def test_nodes_that_gain_nothing_are_left_out() -> None:
    table = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert best_static(table, 4).paths(4) == [[0]]


def test_acceptance_counts_ranks_where_the_text_goes_on() -> None:
    rank = torch.tensor([[0, 1], [0, 5], [1, 0], [7, -1], [0, -1]])
    expected = [[3 / 5, 1 / 5, 0.0], [1 / 3, 1 / 3, 0.0]]
    torch.testing.assert_close(acceptance(rank, 3), torch.tensor(expected, dtype=torch.float64))


def test_no_rank_counts_more_than_a_better_one() -> None:
    table = torch.tensor([[0.5, 0.1, 0.3, 0.0], [0.2, 0.4, 0.3, 0.05]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.2, 0.2, 0.0], [0.3, 0.3, 0.3, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(levelled(table), expected)


def test_a_chance_hit_of_a_low_rank_draws_no_lone_node_there() -> None:
    """Of ten tokens one had rank 3 and none rank 1 or 2: the raw table drafts ranks 0 and 3, the levelled one not."""
    table = torch.tensor([[0.9, 0.0, 0.0, 0.1]], dtype=torch.float64)
    assert best_static(table, 2).paths(2) == [[0], [3]]
    assert best_static(levelled(table), 2).paths(2) == [[0], [1]]


SETTINGS, SHORT = RequestParams(30, GREEDY), RequestParams(12, GREEDY)
MEASURED = [toys.TREES["chain"], toys.TREES["dynamic"], TreeConfig("best_first", 3, 0, 6, [], [])]
SIZES = [0, 3, 8]


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costing, "TURNS", 2)


@pytest.mark.parametrize(("tokens", "size"), [([], 3), ([7], 4), ([7, 8, 9], 3), ([7, 8, 9], 11)])
def test_a_planted_tree_holds_the_tokens_and_nothing_else_that_is_right(tokens: list[int], size: int) -> None:
    tree = planted(5, tokens, size, toys.target())
    assert len(tree.token) == size + 1
    assert trees.agreed(tree, [*tokens, 1]) == len(tokens)
    assert int(trees.depth(tree).max()) == max(len(tokens), 1)


def test_a_target_that_takes_chains_alone_gets_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    monkeypatch.setattr(target, "takes_trees", False)
    tree = planted(5, [7, 8], 6, target)
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert trees.agreed(tree, [7, 8, 1]) == 2
    chain = toys.TREES["chain"]
    head = HeadDrafter(toys.head("eagle", target), chain, "head")
    texts = write(target, [toys.prompt(0)], SETTINGS)
    assert measure(target, head, texts, [chain], SIZES, 1, SETTINGS).draft[draft_key(chain)] > 0


def test_every_part_of_a_step_is_measured() -> None:
    target = toys.target()
    texts = write(target, [toys.prompt(seed) for seed in range(2)], SETTINGS)
    head = HeadDrafter(toys.head("eagle", target), toys.TREES["chain"], "head")
    found = measure(target, head, texts, MEASURED, SIZES, 3, SETTINGS)
    assert set(found.draft) == {draft_key(tree) for tree in MEASURED}
    assert set(SIZES) <= set(found.verify)
    assert {1, 2, 3} <= set(found.commit)
    assert set(found.settle[1]) <= set(found.settle[0]) == set(found.verify)
    every = [found.plain, *found.verify.values(), *found.draft.values(), *found.commit.values()]
    assert min([*every, *found.settle[0].values(), *found.settle[1].values()]) > 0


def test_paths_that_leave_gaps_are_settled_at_a_price_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    texts = write(target, [toys.prompt(0)], SETTINGS)

    def decoded(batch: Batch, _texts: Any, _settings: Any, begin: Any) -> Iterator[list[Step]]:
        for chain in itertools.cycle((True, False)):  # a chain's path is in place, and a tree's leaves gaps
            begin()
            batch.drafts.chain = chain
            yield [Step(3, 2, 3, 0.0, 1.0, 2.0 if chain else 5.0)]

    monkeypatch.setattr(costing, "decode", decoded)
    assert measure(target, None, texts, [], [3], 2, SETTINGS).settle == ({3: 2.0}, {3: 5.0})


@pytest.mark.parametrize("batch", [1, 2])
def test_the_played_back_text_is_what_plain_decoding_writes(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    made: list[tuple[str, list[Step]]] = []
    decode = costing.decode

    def kept(batch: Batch, *args: Any) -> Iterator[list[Step]]:
        name = batch.drafter.name
        for row in decode(batch, *args):
            made.append((name, row))
            yield row

    requests: list[Request] = []
    prefill = Request.prefill

    def begun(request: Request, *args: Any) -> Any:
        requests.append(request)
        return prefill(request, *args)

    shapes: list[torch.Size] = []
    draft_trees = PlaybackBatch.draft_trees

    def noted(self: PlaybackBatch, *args: Any, **named: Any) -> Any:
        drafted = draft_trees(self, *args, **named)
        shapes.append(drafted.tree.token.shape)
        return drafted

    monkeypatch.setattr(costing, "decode", kept)
    monkeypatch.setattr(PlaybackBatch, "draft_trees", noted)
    monkeypatch.setattr(Request, "prefill", begun)
    target = toys.target()
    texts = write(target, [toys.prompt(seed) for seed in range(2)], SETTINGS)
    del requests[:]
    head = HeadDrafter(toys.head("eagle", target), toys.TREES["chain"], "head")
    measure(target, head, texts, MEASURED, SIZES, 3, SETTINGS, batch)
    known = {tuple(text.token[: text.start]): text.token[text.start :] for text in texts}
    for request in requests:
        prompt = request.context[: len(request.context) - len(request.generation.tokens)]
        assert known[tuple(prompt)][: len(request.generation.tokens)] == request.generation.tokens
    rows = [row for name, row in made if name == "playback"]
    assert {len(row) for row in rows} == {batch}
    assert {*shapes} == {(batch, 1 + size) for size in SIZES}
    assert max(step.accepted for row in rows for step in row) > 1
    assert {step.drafted for row in rows for step in row} >= set(SIZES)


def test_a_draft_that_costs_nothing_needs_no_head() -> None:
    target = toys.target()
    texts = write(target, [toys.prompt(0)], SHORT)
    found = measure(target, None, texts, [], SIZES, 1, SHORT, batch=2)
    assert (found.draft, found.commit) == ({}, {1: 0.0})
    assert set(found.verify) == set(SIZES)


def test_no_draft_is_left_without_a_price_however_few_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costing, "ROUNDS", 1)
    target = toys.target()
    texts = write(target, [toys.prompt(0)], RequestParams(3, GREEDY))
    trees = [TreeConfig("chain", depth, 0, 0, [], []) for depth in range(1, 5)] + [
        TreeConfig("best_first", depth, 0, 4, [], []) for depth in range(1, 9)
    ]
    head = HeadDrafter(toys.head("eagle", target), trees[0], "eagle")
    found = measure(target, head, texts, trees, (1, 4), 50, RequestParams(3, GREEDY))
    assert set(found.draft) == {draft_key(tree) for tree in trees}


def test_a_typical_value_drops_single_outliers_and_keeps_the_mean() -> None:
    assert typical([2.0, 4.0]) == 3.0
    assert typical([1.0] * 9 + [50.0] + [0.0] + [1.0] * 9) == 1.0
    assert typical(torch.arange(20.0).tolist()) == 9.5
