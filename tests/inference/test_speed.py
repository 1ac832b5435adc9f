"""The speed model on numbers done by hand, and its batches against the engine's own."""

import pytest

from eval.measures.cost_model import (
    Costs,
    Replayed,
    ReplayedStep,
    at,
    between,
    cycled,
    draft_key,
    drafted,
    passes,
    predict,
    rising,
    stops_paying,
)
from inference.batch import Batch
from inference.decode import RequestParams, speculate
from inference.drafters.policy import BY_CONFIDENCE, TreeConfig
from inference.verification.sample import GREEDY
from tests import toys

TREE = TreeConfig("dynamic", 3, 2, 4, [], [])


def costs(tree: TreeConfig, batch: int = 1, factor: float = 1.0) -> Costs:
    straight, gaps = {0: 1.0, 8: 3.0}, {0: 2.0, 8: 4.0}
    verify = {0: 9.0 * factor, 4: 11.0 * factor, 8: 15.0 * factor}
    return Costs(batch, 10.0 * factor, verify, (straight, gaps), {draft_key(tree): 5.0}, {1: 1.0, 3: 2.0})


def test_the_speed_model_adds_up_the_parts_of_a_step() -> None:
    steps = [ReplayedStep(4, 0), ReplayedStep(4, 2), ReplayedStep(0, 0)]
    found = predict([Replayed(steps, 6)], TREE, {1: costs(TREE)}, 1)
    assert found.tau == 2
    assert found.nodes == pytest.approx(8 / 3)
    # nothing is drafted after the last step, so the head commits twice: one row, and three
    parts = {"draft": 5, "verify": (11 + 11 + 9) / 3, "settle": (3 + 3 + 2) / 3, "commit": (1 + 2) / 3}
    assert found.seconds == pytest.approx(parts)
    assert found.speedup == pytest.approx(2 * 10 / sum(parts.values()))
    assert found.tokens_per_second == pytest.approx(2 / sum(parts.values()))


def test_a_batch_is_as_wide_as_its_widest_and_empties_at_the_end() -> None:
    """Two places, three texts: passes over 2, 2, 2 and 1; the second text leaves after one step, the third comes in."""
    first = Replayed([ReplayedStep(4, 1), ReplayedStep(8, 1), ReplayedStep(0, 1), ReplayedStep(0, 0)], 7)
    second, third = Replayed([ReplayedStep(8, 0)], 1), Replayed([ReplayedStep(4, 3), ReplayedStep(8, 0)], 5)
    both = {1: costs(TREE), 2: costs(TREE, 2, factor=1.5)}
    found = predict([first, second, third], TREE, both, 2)
    settle = 4 + 4 + 4 + 2  # of a tree that branches the cache's gaps are closed whatever was accepted
    commit = 1.5 + 2 + 1.5  # of all passes but the last, by the text with the most rows: 2, 4 and 2
    total = {"draft": 4 * 5, "verify": 1.5 * (15 + 15 + 15) + 9, "settle": settle, "commit": commit}
    assert {part: 7 * seconds for part, seconds in found.seconds.items()} == pytest.approx(total)
    # the baseline of 7, 1 and 5 tokens: passes over two texts until the third has its 5, then one over the first
    assert found.speedup == pytest.approx((6 * 15 + 10) / sum(total.values()))


def test_passes_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    source = toys.drafter("eagle", target, "dynamic")
    prompts = [toys.prompt(seed) for seed in range(5)]
    settings = [RequestParams(5 + 4 * (seed % 3), GREEDY) for seed in range(5)]
    alone = [speculate(target, source, prompt, each).steps for prompt, each in zip(prompts, settings, strict=True)]
    real: list[list[tuple[int, int]]] = []
    step = Batch.step

    def watched(batch: Batch) -> None:
        requests = batch.running
        step(batch)
        real.append([(each.generation.steps[-1].drafted, each.generation.steps[-1].accepted) for each in requests])

    monkeypatch.setattr(Batch, "step", watched)
    speculate(target, source, prompts, settings, batch_size=3)
    expected = passes([[(one.drafted, one.accepted) for one in each] for each in alone], 3)
    assert [sorted(each) for each in real] == [sorted(each) for each in expected]
    assert {len(each) for each in real} > {3, 1}


def test_what_lies_between_measured_sizes_is_interpolated() -> None:
    both = {1: costs(TREE), 5: costs(TREE, 5, factor=3.0)}
    assert [at(both, size, lambda one: one.plain) for size in (1, 2, 3, 5)] == [10, 15, 20, 30]
    known = {1: 2.0, 3: 6.0, 7: 8.0}
    assert [between(known, where) for where in (0, 1, 2, 3, 5, 7, 9)] == [2, 2, 4, 6, 7, 8, 8]


def test_a_batch_stops_to_pay_where_no_larger_one_does() -> None:
    assert stops_paying({1: 2.0, 2: 1.1, 4: 0.9, 8: 0.8}) == 4
    assert stops_paying({1: 2.0, 2: 0.9, 4: 1.2, 8: 0.8}) == 8
    assert stops_paying({1: 2.0, 2: 1.5}) is None
    assert stops_paying({1: 0.9, 2: 0.5}) == 1


def test_items_are_cycled_to_a_count() -> None:
    assert (cycled([1, 2, 3], 7), cycled([1, 2, 3], 2)) == ([1, 2, 3, 1, 2, 3, 1], [1, 2, 3])


def test_a_chains_path_leaves_no_gaps() -> None:
    chain, tree = TreeConfig("chain", 4, 0, 0, [], []), TreeConfig("static", 0, 0, 0, [[0], [1], [0, 0]], [])
    assert [drafted(one) for one in (TREE, tree, chain)] == [4, 3, 4], "the most that a tree drafts"
    texts = [Replayed([ReplayedStep(4, 2)], 3)]
    settled = [predict(texts, each, {1: costs(each)}, 1).seconds["settle"] for each in (chain, tree)]
    assert settled == [2.0, 3.0]


def test_a_budget_costs_a_dynamic_tree_nothing() -> None:
    kinds = [[draft_key(TreeConfig(kind, 3, 2, nodes, [], [])) for nodes in (4, 9)] for kind in BY_CONFIDENCE]
    assert [len({*keys}) for keys in kinds] == [1, 2]


def test_dips_are_levelled_and_what_rises_stays() -> None:
    assert rising({0: 1.0, 2: 4.0, 1: 2.0}) == {0: 1.0, 1: 2.0, 2: 4.0}
    assert rising({0: 1.0, 1: 5.0, 2: 3.0, 3: 1.0, 4: 9.0}) == {0: 1.0, 1: 3.0, 2: 3.0, 3: 3.0, 4: 9.0}
