"""From τ down to the speedup: the last rung is the measured one, and each cost stands on its own rung."""

from itertools import combinations, product
from typing import Any

import pytest

from eval.measures.cost_model import activated
from eval.report.breakdown import STAGES, advice, closer, experts, sentence, speedup_breakdown, with_breakdowns

# A plain step takes 10 ms, 9 of them the pass.
PLAIN: dict[str, Any] = {
    "drafter": "plain", "workload": "tiny", "temperature": 0.0, "batch_size": 1, "steps": 200, "tau": 1.0,
    "tokens_per_second": 100.0, "speedup": 1.0, "seconds": {"draft": 0.0, "verify": 1.8, "other": 0.2},
    "conditional_by_depth": [],
}  # fmt: skip
# A step takes 20 ms: 15 the pass, 3 the draft, 2 the rest; it commits 3 tokens.
ROW = {
    **PLAIN, "drafter": "eagle", "steps": 100, "tau": 3.0, "tokens_per_second": 150.0, "speedup": 1.5,
    "seconds": {"draft": 0.3, "verify": 1.5, "other": 0.2}, "conditional_by_depth": [0.9, 0.5],
}  # fmt: skip


def test_each_cost_has_its_rung() -> None:
    found = speedup_breakdown(ROW, PLAIN)
    assert found is not None
    expected = [3.0, 3 * 10 / 16, 3 * 10 / 19, 1.5]
    assert list(found["rungs"]) == list(STAGES)
    assert list(found["rungs"].values()) == pytest.approx(expected)
    assert found["oracle"] == pytest.approx(3 * 10 / 11)


@pytest.mark.parametrize(
    ("interval", "stages", "noise"),
    [
        ([1.4, 1.51], [3.0, 3 * 10 / 16, 1.5, 1.5], ["overhead"]),
        ([1.49, 1.51], [3.0, 3 * 10 / 16, 3 * 10 / 20.4, 1.5], []),
        (None, [3.0, 3 * 10 / 16, 1.5, 1.5], ["overhead"]),  # one prompt: how noisy it is cannot be known
    ],
)
def test_a_rise_is_shown_only_where_it_is_more_than_noise(
    interval: list[float] | None, stages: list[float], noise: list[str]
) -> None:
    """The rest of the step takes 0.4 ms less than the baseline's."""
    seconds = {"draft": 0.44, "verify": 1.5, "other": 0.06}
    record = speedup_breakdown({**ROW, "seconds": seconds, "speedup_ci": interval}, PLAIN)
    assert record is not None
    assert (list(record["rungs"].values()), record["noise"]) == (pytest.approx(stages), noise)
    assert record["less"]["overhead"] == 1.5  # no time is to be saved there
    text = sentence("eagle", record)
    assert ("the measured 1.50 (no cost beyond noise)" in text) == bool(noise)
    assert ("the measured 1.50 (cheaper than the baseline's)" in text) == (not noise)


def test_a_pass_that_seems_cheaper_than_a_plain_step_leaves_tau() -> None:
    cheap = {**ROW, "tokens_per_second": 280.0, "speedup": 2.8, "speedup_ci": [2.78, 3.2]}
    record = speedup_breakdown({**cheap, "seconds": {"draft": 0.1, "verify": 0.85, "other": 0.12}}, PLAIN)
    assert record is not None
    assert record["noise"] == ["verification"]
    assert list(record["rungs"].values()) == pytest.approx([3.0, 3.0, 3 * 10 / 10.5, 2.8])
    record = speedup_breakdown({**cheap, "seconds": {"draft": 0.2, "verify": 0.85, "other": 0.02}}, PLAIN)
    assert record is not None
    assert record["noise"] == ["verification", "overhead"]
    assert list(record["rungs"].values()) == pytest.approx([3.0, 3.0, 2.8, 2.8])


def test_the_greatest_of_the_smaller_losses_is_named() -> None:
    found = speedup_breakdown(ROW, PLAIN)
    assert found is not None
    less = {
        "verification": 30 / 19.4,
        "draft": 30 / 19.7,
        "overhead": 30 / 19.9,
        "acceptance": 1.5 * closer([0.9, 0.5]),
    }
    assert found["less"] == pytest.approx(less)
    assert found["most"] == max(less, key=lambda key: less[key])
    slow = {**ROW, "tokens_per_second": 50.0, "speedup": 0.5, "seconds": {"draft": 4.3, "verify": 1.5, "other": 0.2}}
    drafts = speedup_breakdown(slow, PLAIN)
    assert drafts is not None
    assert drafts["most"] == "draft"
    assert advice(drafts).startswith("a cheaper draft (0.5")


def test_fewer_rejections_mean_more_tokens() -> None:
    assert closer([0.9, 0.5]) == pytest.approx((1 + 0.91 + 0.91 * 0.55) / (1 + 0.9 + 0.9 * 0.5))
    assert closer([]) == 1


def test_rows_without_a_speedup_or_plain_decoding_beside_them_have_none() -> None:
    red, alone = {**ROW, "speedup": None}, {**ROW, "temperature": 1.0}
    told = with_breakdowns([PLAIN, ROW, red, alone])
    assert [row["ladder"] is not None for row in told] == [False, True, False, False]


def test_a_batch_is_compared_with_the_plain_decoding_of_that_batch() -> None:
    batched = {**PLAIN, "batch_size": 4, "tokens_per_second": 300.0}
    (found,) = (
        row["ladder"] for row in with_breakdowns([PLAIN, batched, {**ROW, "batch_size": 4, "speedup": 0.5}])[2:]
    )
    assert found["rungs"]["overhead"] == pytest.approx(0.5)


@pytest.mark.parametrize("key", ["report", "workload", "category", "temperature", "batch_size", "request_rate"])
def test_a_baseline_of_another_session_is_not_a_rows_baseline(key: str) -> None:
    assert with_breakdowns([{**PLAIN, key: "another"}, ROW])[1]["ladder"] is None


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_activated_experts_are_those_of_all_ways_to_choose(tokens: int) -> None:
    ways = [set().union(*chosen) for chosen in product(combinations(range(5), 2), repeat=tokens)]
    assert activated(5, 2, tokens) == pytest.approx(sum(map(len, ways)) / len(ways))


def test_a_report_says_what_a_tree_costs_a_target_with_experts() -> None:
    words = experts("eagle", ROW | {"draft_tokens": 1500, "batch_size": 2}, 128, 8)
    assert "8 of the target's 128 experts" in words
    assert "over 16.0 nodes a sequence reads about 111.8 of them" in words
    assert "one of the baseline 15.5: where reading weights takes the time, that is 7.2 times" in words
