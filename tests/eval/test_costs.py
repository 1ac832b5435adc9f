"""The tuner's static trees, and the seconds of a step that it measures."""

import math
import time

import pytest
import torch

from eval.teacher_forced import acceptance
from eval.tune import best_static, non_increasing, step_seconds, typical
from inference.batch import Batch
from inference.decode import RequestParams, autoregress
from inference.drafters.head import HeadBatch
from inference.drafters.policy import TreeConfig
from inference.request import Request
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


@pytest.mark.parametrize("seed", range(2))
def test_no_tree_is_better(seed: int) -> None:
    raw = torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    table = raw / raw.sum(1, keepdim=True) * 0.9
    found = best_static(table, 5)
    every = all_trees(3, 3, 5)
    assert len(every) > 300
    for nodes in range(6):
        best = max(worth(tree, table) for tree in every if len(tree) <= nodes)
        paths = frozenset(map(tuple, found[:nodes]))
        assert len(paths) == nodes
        assert worth(paths, table) == pytest.approx(best)


def test_nodes_that_gain_nothing_are_left_out() -> None:
    table = torch.tensor([[0.5, 0.0], [0.0, 0.0]])
    assert best_static(table, 4) == [[0]]


def test_acceptance_counts_ranks_where_the_text_goes_on() -> None:
    rank = torch.tensor([[0, 1], [0, 5], [1, 0], [7, -1], [0, -1]])
    expected = [[3 / 5, 1 / 5, 0.0], [1 / 3, 1 / 3, 0.0]]
    torch.testing.assert_close(acceptance(rank, 3), torch.tensor(expected, dtype=torch.float64))


def test_no_rank_counts_more_than_a_better_one() -> None:
    table = torch.tensor([[0.5, 0.1, 0.3, 0.0], [0.2, 0.4, 0.3, 0.05]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.2, 0.2, 0.0], [0.3, 0.3, 0.3, 0.05]], dtype=torch.float64)
    torch.testing.assert_close(non_increasing(table), expected)


def test_a_chance_hit_of_a_low_rank_draws_no_lone_node_there() -> None:
    """Of ten tokens one had rank 3 and none rank 1 or 2: the raw table drafts ranks 0 and 3, the even one not."""
    table = torch.tensor([[0.9, 0.0, 0.0, 0.1]], dtype=torch.float64)
    assert best_static(table, 2) == [[0], [3]]
    assert best_static(non_increasing(table), 2) == [[0], [1]]


SETTINGS = RequestParams(12, GREEDY)
TREES = [toys.TREES["chain"], toys.TREES["dynamic"], TreeConfig("best_first", 3, 0, 6, [], [])]


@pytest.mark.parametrize("batch", [1, 2])
def test_every_trees_step_is_timed_on_the_text_of_the_baseline(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """A step's seconds are told by a clock that counts what it drafted, and the first ones of each tree are dropped."""
    ticks, steps, requests = [0.0], list[tuple[str, int]](), list[Request]()
    step, prefill = Batch.step, Request.prefill

    def counted(self: Batch) -> None:
        running = self.running
        step(self)
        name = self.draft_batch.policy.label if isinstance(self.draft_batch, HeadBatch) else "baseline"
        spent = {"baseline": 1.0, **{tree.label: 2.0 + i for i, tree in enumerate(TREES)}}[name]
        first = (name, batch) not in steps
        steps.append((name, len(running)))
        ticks[0] += 100.0 if first and name != "baseline" else spent

    def begun(request: Request, *args: object) -> object:
        requests.append(request)
        return prefill(request, *args)

    monkeypatch.setattr(Batch, "step", counted)
    monkeypatch.setattr(Request, "prefill", begun)
    monkeypatch.setattr(time, "perf_counter", lambda: ticks[0])
    target = toys.target()
    prompts = [toys.prompt(seed) for seed in range(2)]
    found = step_seconds(target, toys.head("eagle", target), TREES, prompts, SETTINGS, 3, batch)
    assert found == (1.0, [2.0, 3.0, 4.0])
    assert {size for _, size in steps} == {batch}
    assert [sum(name == tree.label for name, _ in steps) for tree in TREES] == [4] * 3
    answers = {tuple(prompt): autoregress(target, prompt, SETTINGS).tokens for prompt in prompts}
    for request in requests:
        made = request.generation.tokens
        prompt = request.token_ids[: len(request.token_ids) - len(made)]
        assert made == answers[tuple(prompt)][: len(made)]


def test_a_typical_value_drops_single_outliers_and_keeps_the_mean() -> None:
    assert typical([2.0, 4.0]) == 3.0
    assert typical([1.0] * 9 + [50.0] + [0.0] + [1.0] * 9) == 1.0
    assert typical(torch.arange(20.0).tolist()) == 9.5
