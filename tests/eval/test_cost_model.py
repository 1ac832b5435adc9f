"""Predicted speeds against passes that are counted by hand, and what a report makes of them for other trees."""

from dataclasses import replace
from typing import Any, cast

import pytest

from eval import explain
from eval.config import eval_config
from eval.explain import explained, price, scaled
from eval.inputs.texts import Text
from eval.measures.cost_model import (
    Costs,
    Replayed,
    ReplayedStep,
    at,
    at_context,
    cycled,
    draft_key,
    drafted,
    predict,
    rising,
    stops_paying,
)
from eval.tuning.grid import OWN, Tried
from tests import toys
from tests.eval.stubs import StubTarget

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


def test_another_context_costs_every_sequence_of_a_batch_what_its_own_cache_takes() -> None:
    moved = at_context(KNOWN, {0: 1.0, 4: 2.0}, {0: 1.5, 4: 3.0})
    assert (moved[1].plain, moved[1].verify) == (1.5, {0: 1.5, 4: 3.0})
    assert (moved[2].plain, moved[2].verify) == (2.5, {0: 2.5, 4: 5.0})


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


GOOD = Tried("chain", replace(CHAIN, depth=2), [replayed((2, 2), (2, 2))], [replayed((2, 0), (2, 0))])
POOR = Tried("chain", CHAIN, [replayed((4, 0))], [replayed((4, 1))])
MINE = Tried(OWN, WIDE, [replayed((4, 1), (4, 1))], [replayed((4, 1), (2, 1))])


def test_the_best_tree_is_chosen_on_one_half_of_the_texts_and_predicted_for_the_other() -> None:
    known = {size: replace(one, draft={**one.draft, draft_key(GOOD.tree): 0.1}) for size, one in KNOWN.items()}
    found = explained([POOR, MINE, GOOD], known)
    assert (found["best"]["tree"], found["best"]["tau"], found["best"]["nodes"]) == (GOOD.tree.label, 1.0, 2.0)
    assert (found["own"]["tree"], found["own"]["tau"], found["own"]["nodes"]) == (WIDE.label, 2.0, 3.0)
    gains = {
        key: [tree.predicted(known, size).speedup for size in (1, 2)] for key, tree in (("own", MINE), ("best", GOOD))
    }
    assert [(load["batch_size"], load["own"], load["best"]) for load in found["loads"]] == [
        (size, *pair) for size, *pair in zip((1, 2), *gains.values(), strict=True)
    ]
    assert found["stops_paying"] == {
        key: stops_paying(dict(zip((1, 2), gain, strict=True))) for key, gain in gains.items()
    }
    assert (found["measured"], found["costs"]["2"]) == ([1, 2], {"plain": 1500, "verify": {"0": 1500, "4": 3000}})
    without = explained([GOOD], known)
    assert (without["own"], [*without["stops_paying"]]) == (None, ["best"])
    assert explained([GOOD], {}) == {"trees": [{**found["best"], "speedup": None}]}


def test_in_a_batch_the_best_tree_of_each_family_is_timed_and_others_are_as_much_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert scaled({"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 1.5, "b": 2.0}) == {"a": 1.5, "b": 2.0, "c": 5.0}
    asked: dict[int, list[str]] = {}

    def measured(_: Any, __: Any, texts: list[Text], trees: list[Any], *rest: Any) -> Costs:
        batch = rest[3] if len(rest) > 3 else 1
        asked[batch] = [tree.label for tree in trees]
        assert [(len(text.token), text.limit) for text in texts] == [(5 + explain.TIMED, explain.TIMED)]
        return replace(costs(batch, 1.0), draft={draft_key(tree): 0.1 * batch for tree in trees})

    monkeypatch.setattr(explain.costing, "measure", measured)
    config, drafter = eval_config(max_new_tokens=99), cast(Any, None)
    tuner = replace(config.tuner, batch_sizes=[4, 1])
    trees = [POOR, replace(GOOD, held=[replayed((2, 2))]), MINE]
    found = price(tuner, config, StubTarget(takes_trees=True), drafter, trees, [Text([0] * 104, 5, 99)])
    labels = [tree.tree.label for tree in trees]
    assert (asked[1], sorted(asked[4])) == (labels, sorted(labels[1:]))
    assert [*found[4].draft.values()] == pytest.approx([0.4] * 3)
    assert list(price(tuner, config, StubTarget(takes_trees=False), drafter, trees, [Text([0] * 104, 5, 99)])) == [1]
