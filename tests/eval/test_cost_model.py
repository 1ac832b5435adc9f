"""Predicted speeds against passes that are counted by hand."""

import pytest

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
from tests import toys

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
