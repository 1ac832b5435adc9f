"""The tuner's static trees, predicted speeds against passes counted by hand, and the costs that it measures."""

import itertools
import math
import statistics
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from eval.inputs.workloads import write
from eval.measures.cost_model import (
    Costs,
    Replayed,
    ReplayedStep,
    at,
    cycled,
    draft_key,
    drafted,
    predict,
    rising,
    stops_paying,
)
from eval.tuning import costs as costing
from eval.tuning.costs import PlaybackBatch, measure, planted, typical
from eval.tuning.grid import acceptance, best_static, levelled
from heads.base import LevelNodes, NewRows
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


@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("nodes", [1, 16, 60])
def test_a_large_tree_holds_the_likeliest_paths(nodes: int) -> None:
    table = random_table(9, 5, 6)
    every = [path for length in range(1, 6) for path in itertools.product(range(6), repeat=length)]
    chances = sorted((worth(frozenset([path]), table) for path in every), reverse=True)
    found = best_static(table, 60)
    assert found.value[nodes] == pytest.approx(sum(chances[:nodes]))
    assert (
        len(TreeConfig("static", 0, 0, 0, found.paths(nodes), []).shape()) == nodes
    )  # whole: no node lacks its parent


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


CHAIN, WIDE = toys.TREES["chain"], toys.TREES["dynamic"]


def replayed(*steps: tuple[int, int]) -> Replayed:
    """Return a text whose steps draft and accept so many."""
    return Replayed([ReplayedStep(*step) for step in steps], sum(accepted + 1 for _, accepted in steps))


def costs(batch: int, factor: float) -> Costs:
    """Return costs that differ in every part, `factor` times those of one sequence."""
    f = factor
    settle = {0: 0.1 * f, 4: 0.3 * f}, {0: 0.2 * f, 4: 0.6 * f}
    draft = {draft_key(CHAIN): 0.5 * f, draft_key(WIDE): 0.7 * f}
    return Costs(batch, f, {0: f, 4: 2 * f}, settle, draft, {1: 0.1 * f, 3: 0.3 * f})


TEXTS = [replayed((2, 1), (4, 0), (0, 0)), replayed((4, 2), (2, 0)), replayed((4, 1))]
KNOWN = {1: costs(1, 1.0), 2: costs(2, 1.5)}


def test_a_step_costs_its_parts_and_the_last_one_of_a_text_no_commit() -> None:
    found = predict(TEXTS, CHAIN, KNOWN, 1)
    seconds = {"draft": 6 * 0.5, "verify": 1.5 + 2 + 1 + 2 + 1.5 + 2, "settle": 1.4, "commit": 0.2 + 0.1 + 0.3}
    assert found.seconds == pytest.approx({name: total / 6 for name, total in seconds.items()})
    whole = sum(seconds.values())
    assert (found.tau, found.nodes) == (10 / 6, 16 / 6)
    assert (found.tokens_per_second, found.speedup) == pytest.approx((10 / whole, 10 / whole))  # a plain step: 1 s
    gaps = predict(TEXTS, WIDE, KNOWN, 1).seconds
    assert (gaps["settle"], gaps["draft"]) == pytest.approx((2.8 / 6, 0.7))


def test_a_pass_of_a_batch_is_as_wide_as_its_widest_draft_and_texts_follow_each_other() -> None:
    """Two texts share three passes: the third text enters when the second has ended."""
    found = predict(TEXTS, CHAIN, KNOWN, 2)
    seconds = {"draft": 3 * 0.75, "verify": 3 * 3.0, "settle": 3 * 0.45, "commit": 0.45 + 0.15}
    assert found.seconds == pytest.approx({name: total / 6 for name, total in seconds.items()})
    plain = 4 * 1.5 + 2 * 1.0  # of four tokens two texts share, then two tokens of one
    assert found.speedup == pytest.approx(plain / sum(seconds.values()))
    assert at({1: KNOWN[1], 3: KNOWN[2]}, 2, lambda one: one.plain) == 1.25


def test_a_load_stops_paying_where_no_larger_one_pays() -> None:
    assert stops_paying({8: 0.8, 1: 1.5, 2: 0.9, 16: 1.0, 4: 1.1}) == 8
    assert stops_paying({1: 0.9, 2: 0.8}) == 1
    assert stops_paying({1: 0.9, 2: 1.1}) is None


def test_dips_are_pooled_with_all_that_they_fall_below() -> None:
    assert rising({1: 1.0, 2: 3.0, 4: 2.0, 8: 2.6}) == {1: 1.0, 2: 2.5, 4: 2.5, 8: 2.6}
    assert rising({4: 1.0, 0: 4.0, 1: 1.0}) == {0: 2.0, 1: 2.0, 4: 2.0}


def test_items_come_again_in_their_order_and_none_is_left_out() -> None:
    assert (cycled([1, 2, 3], 5), cycled([1, 2, 3], 2)) == ([1, 2, 3, 1, 2], [1, 2, 3])
    assert (drafted(WIDE), drafted(CHAIN)) == (WIDE.nodes, CHAIN.depth)


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

    def decoded(*_: Any) -> Iterator[list[Step]]:
        for accepted in itertools.cycle(range(4)):  # of a tree's path one is in place, and more leave gaps
            yield [Step(3, accepted, 1 + accepted, 0.0, 1.0, 5.0 if accepted > 1 else 2.0)]

    monkeypatch.setattr(costing, "decode", decoded)
    assert measure(target, None, texts, [], [3], 2, SETTINGS).settle == ({3: 2.0}, {3: 5.0})


@pytest.mark.parametrize("batch", [1, 2])
def test_the_played_back_text_is_what_plain_decoding_writes(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    made: list[tuple[str, list[Step]]] = []
    decode = costing.decode

    def kept(batch: Batch, *args: Any) -> Iterator[list[Step]]:
        name = batch.free[0].name
        for row in decode(batch, *args):
            made.append((name, row))
            yield row

    requests: list[Request] = []
    prefill = Request.prefill

    def begun(request: Request) -> None:
        requests.append(request)
        prefill(request)

    shapes: list[torch.Size] = []
    draft_trees = PlaybackBatch.draft_trees

    def noted(self: PlaybackBatch, *args: Any, **named: Any) -> Any:
        tree, above, q = draft_trees(self, *args, **named)
        shapes.append(tree.token.shape)
        return tree, above, q

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


def test_passes_of_a_batch_are_of_all_its_sequences_and_their_seconds_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts its readings every part costs the readings it spans, in a batch for every sequence."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(costing.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(costing, "typical", statistics.median)  # where all sequences end, a step commits nothing
    target = toys.target()
    texts = write(target, [toys.prompt(seed) for seed in range(3)], SHORT)
    chain = toys.TREES["chain"]
    head = HeadDrafter(toys.head("eagle", target), chain, "head")
    found = measure(target, head, texts, [chain], SIZES, 1, SHORT, batch=3)
    # A proposal spans one reading, a pass over all one; a step of the baseline five, for all sequences at once.
    assert (found.batch, found.draft[draft_key(chain)], set(found.commit.values())) == (3, 1.0, {1.0})
    assert set(found.verify.values()) == {1.0}
    assert found.plain == 5.0


def test_the_head_drafts_for_all_sequences_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that a level moves on by 1, and the committed rows of however many sequences by 10."""
    target, now, batches = toys.target(), [0.0], set[int]()
    own: Any = toys.head("eagle", target)
    extend, expand = type(own).extend, type(own).expand

    def extended(self: Any, state: Any, new: NewRows) -> Any:
        now[0] += 10 if new.counts is not None else 0  # a prompt has none
        return extend(self, state, new)

    def expanded(self: Any, state: Any, level: Any, nodes: LevelNodes) -> Any:
        now[0] += 1
        batches.add(len(nodes.token))
        return expand(self, state, level, nodes)

    monkeypatch.setattr(type(own), "extend", extended)
    monkeypatch.setattr(type(own), "expand", expanded)
    monkeypatch.setattr(costing.time, "perf_counter", lambda: now[0])
    texts = write(target, [toys.prompt(seed) for seed in range(3)], SHORT)
    found = measure(target, HeadDrafter(own, MEASURED[0], "head"), texts, MEASURED[:2], SIZES, 1, SHORT, batch=3)
    assert found.draft == {draft_key(tree): 3.0 for tree in MEASURED[:2]}
    assert set(found.commit.values()) == {10.0}
    assert batches == {3}


def test_a_draft_that_costs_nothing_needs_no_head() -> None:
    target = toys.target()
    texts = write(target, [toys.prompt(0)], SHORT)
    found = measure(target, None, texts, [], SIZES, 1, SHORT, batch=2)
    assert (found.draft, found.commit) == ({}, {1: 0.0})
    assert set(found.verify) == set(SIZES)


def test_a_machine_that_slows_down_for_a_while_slows_plain_decoding_and_playback_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the clock's readings, every 180 take three times as long as the next 180: the ratio stays."""
    readings, now = count(), [0.0]

    def slow() -> float:
        now[0] += 3.0 if next(readings) % 360 < 180 else 1.0
        return now[0]

    monkeypatch.setattr(costing.time, "perf_counter", slow)
    monkeypatch.setattr(costing, "TURNS", 96)  # so many that turns and phases do not keep step
    target = toys.target()
    texts = write(target, [toys.prompt(seed) for seed in range(2)], SETTINGS)
    found = measure(target, None, texts, [], [0], 5, SETTINGS)
    assert found.verify[0] / found.plain == pytest.approx(1 / 5, rel=0.05)  # one reading of a plain step's five


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
