"""Formulas on runs whose answers were worked out by hand, and intervals that cover what they should."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.live import timed
from eval.measures import metrics
from inference.decode import Generation
from tests.eval.stubs import generation

# 1 + (3 + 1) + (0 + 1) + (1 + 1) = 8 tokens in 3 steps, and 1 + (2 + 1) = 4 tokens in 1 step.
LONG = generation(8, [(4, 3), (4, 0), (4, 1)], seconds=2.0)
SHORT = generation(4, [(4, 2)], seconds=0.5)


def test_acceptance_by_hand() -> None:
    found = metrics.acceptance([LONG, SHORT])
    assert (found.steps, found.tokens, found.draft_tokens) == (4, 10, 16)
    assert found.tau == 10 / 4 == 1 + sum(found.accepted_by_depth)
    assert metrics.acceptance([SHORT, generation(1, seconds=0.0)]).tau_request_mean == 3
    assert found.tau_request_mean == pytest.approx((7 / 3 + 3 / 1) / 2)
    assert found.accepted_by_depth == [3 / 4, 2 / 4, 1 / 4]
    assert found.conditional_by_depth == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found.accepted_per_draft_token == 6 / 16


def test_counts_that_one_request_lacks_are_unknown_of_all() -> None:
    known, unknown = metrics.SpecDecodingStats(5, 2, 6, 3, (2, 1, 0)), metrics.SpecDecodingStats(4, 2, None, 2, (2,))
    total = metrics.SpecDecodingStats(9, 4, 8, 5, (3, 2, 0))
    found = metrics.pool([known, unknown])
    assert (found.draft_tokens, found.accepted_per_draft_token) == (0, None)
    deep = metrics.SpecDecodingStats(5, 2, 4, 3, ())  # depths that nobody counted
    assert [metrics.pool(each).accepted_by_depth for each in ([known, deep], [deep, known])] == [[], []]
    apart = metrics.pool([known, unknown], total)
    assert (apart.draft_tokens, apart.accepted_by_depth) == (8, [3 / 4, 2 / 4])


def test_a_pass_whose_draft_ends_the_answer_commits_no_bonus() -> None:
    found = metrics.acceptance([generation(6, [(3, 2), (3, 2)]), generation(3, [(3, 0), (3, 0)])])
    assert (found.tokens, found.steps, found.draft_tokens) == (7, 4, 12)


def test_tokens_cut_off_at_a_stop_are_not_counted() -> None:
    assert metrics.acceptance([generation(3, [(4, 3)])]).tau == 2  # of four committed, the second ended the answer


def test_plain_decoding_has_tau_one() -> None:
    found = metrics.acceptance([generation(5, [(0, 0)] * 4)])
    assert (found.tau, found.accepted_by_depth, found.conditional_by_depth) == (1, [], [])
    assert found.accepted_per_draft_token is None


def test_speed_is_a_ratio_of_sums_without_the_prefill() -> None:
    assert metrics.speed(metrics.decoding([LONG, SHORT])) == 10 / 2.5
    plain = [generation(8, seconds=7.0), generation(4, seconds=1.0)]
    assert metrics.speed_ratio(metrics.decoding([LONG, SHORT]), metrics.decoding(plain)) == pytest.approx(
        (10 / 2.5) / (10 / 8)
    )


def test_a_side_without_a_speed_has_no_ratio_and_no_difference() -> None:
    pairs, ended = [(3, 1.0)] * 2, [(0, 0.0)] * 2
    assert metrics.speed_ratio(pairs, ended) is metrics.speed_ratio(ended, pairs) is None
    assert metrics.difference(pairs, ended, 0) is metrics.difference(ended, pairs, 0) is None


def test_quantiles_are_of_what_was_measured() -> None:
    expected = {"p5": 1.2, "p25": 2, "p50": 3, "p75": 4, "p95": 4.8}
    assert metrics.quantiles([None, 5, 1, 2, None, 4, 3]) == pytest.approx(expected)
    assert metrics.quantiles([None]) == {}


def test_the_rules_are_those_of_steps_with_a_draft() -> None:
    other = generation(4, [(2, 1)])
    other.steps[0] = other.steps[0]._replace(rule="block")
    assert metrics.rules_used([LONG, other, generation(3, [(0, 0)] * 2)]) == "block + point_mass"
    assert metrics.rules_used([generation(3, [(0, 0)] * 2)]) == "none"


def test_seconds_are_those_of_the_steps() -> None:
    both = [timed(run).seconds for run in (LONG, SHORT)]
    sums = {key: sum(seconds[key] for seconds in both) for key in metrics.PARTS}
    assert sums == pytest.approx({"draft": 0.625, "verify": 1.25, "other": 0.625})


def test_where_one_request_alone_decoded_there_is_no_interval() -> None:
    """Whichever were resampled, the ratio would be that request's: an interval of no width."""
    ended = [generation(1, seconds=0.0)] * 3
    plain = [generation(8, seconds=3.0), *ended]
    pairs, base = metrics.decoding([LONG, *ended]), metrics.decoding(plain)
    assert metrics.tau_interval([LONG, *ended], 0) is metrics.tau_interval([LONG], 0) is None
    assert metrics.paired_interval(pairs, base, 0) is None
    assert metrics.difference(pairs, base, 0) is None
    assert metrics.tau_interval([LONG, SHORT, *ended], 0) == pytest.approx((7 / 3, 3))  # no draw of the ended alone


def test_nothing_decoded_is_none_and_not_a_division_by_zero() -> None:
    ended = [generation(1, seconds=0.0), generation(1, seconds=0.0)]
    found = metrics.acceptance(ended)
    assert (found.steps, found.tau, found.tau_request_mean) == (0, None, None)
    assert metrics.speed(metrics.decoding(ended)) is None
    assert metrics.speed_ratio(metrics.decoding(ended), metrics.decoding(ended)) is None
    assert metrics.tau_interval(ended, 0) is None
    assert metrics.paired_interval(metrics.decoding(ended), metrics.decoding(ended), 0) is None


@pytest.mark.parametrize(("times", "middle"), [([3.0, 1.0, 2.0], 2.0), ([5.0], 5.0), ([4.0, 1.0, 2.0, 9.0], 2.0)])
def test_the_median_repeat(times: list[float], middle: float) -> None:
    assert metrics.median_run([generation(2, seconds=time) for time in times]).decode_s == middle


def test_the_interval_is_seeded_and_holds_the_estimate() -> None:
    runs = [generation(1 + tokens, [(4, 0)] * 10) for tokens in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 49)]
    interval = metrics.tau_interval(runs, 7)
    assert interval is not None
    assert interval == metrics.tau_interval(runs, 7) != metrics.tau_interval(runs, 8)
    assert interval[0] < 3 < interval[1]


def test_pairing_cancels_what_slows_a_request_for_both() -> None:
    times = [0.1, 3.0, 0.7, 20.0, 1.3]
    fast = [generation(11, seconds=time / 2) for time in times]
    slow = [generation(11, seconds=time) for time in times]
    assert metrics.paired_interval(metrics.decoding(fast), metrics.decoding(slow), 0) == pytest.approx((2.0, 2.0))


TURNS = [generation(1 + tokens, [(4, 0)] * 5, seconds=tokens / 7) for tokens in (5, 11, 13, 17, 19, 6)]
OF = [3, 3, 8, 8, 8, 5]  # their conversations


def intervals(runs: Sequence[Generation], base: Sequence[Generation], groups: metrics.Groups) -> list[object]:
    pairs: list[Any] = [metrics.decoding, lambda runs: [timed(run).end_to_end for run in runs]]
    speeds = [metrics.paired_interval(each(runs), each(base), 1, groups) for each in pairs]
    return [metrics.tau_interval(runs, 1, groups), *speeds]


def test_turns_of_one_conversation_are_drawn_together() -> None:
    plain = [generation(len(run.tokens), [(0, 0)] * 4, seconds=3.0) for run in TURNS]
    assert intervals(TURNS, plain, [0] * len(TURNS)) == [None] * 3
    assert None not in intervals(TURNS, plain, OF)
    sums = torch.tensor([[16, 10], [49, 15], [6, 5]], dtype=torch.float64)
    assert metrics.tau_interval(TURNS, 1, OF) == metrics.bootstrap(sums, lambda s: s[:, 0] / s[:, 1], 1)
    mixed = [TURNS[i] for i in (2, 0, 3, 1, 4, 5)]  # the groups in another order, and apart
    sums = sums[[1, 0, 2]]
    assert metrics.tau_interval(mixed, 1, [8, 3, 8, 3, 8, 5]) == metrics.bootstrap(sums, lambda s: s[:, 0] / s[:, 1], 1)


def test_a_difference_has_the_interval_of_paired_sums() -> None:
    fast, slow = metrics.decoding(TURNS), [(5, 2.1), (9, 3.3), (7, 2.7), (3, 1.9), (8, 3.1), (2, 1.3)]
    sums = torch.zeros(3, 4, dtype=torch.float64)
    for group, ours, theirs in zip([0, 0, 1, 1, 1, 2], fast, slow, strict=True):
        sums[group] += torch.tensor([*ours, *theirs], dtype=torch.float64)
    interval = metrics.bootstrap(sums, lambda s: s[:, 0] / s[:, 1] - s[:, 2] / s[:, 3], 1)
    assert interval is not None
    total = sums.sum(0)
    found = metrics.difference(fast, slow, 1, OF)
    expected = {"difference": float(total[0] / total[1] - total[2] / total[3]), "low": interval[0], "high": interval[1]}
    assert found == pytest.approx(expected, rel=1e-12)
    assert metrics.paired_interval(fast, slow, 1, OF, torch.sub) == pytest.approx(interval, rel=1e-12)


def test_copies_of_a_prompt_say_no_more_than_one() -> None:
    assert metrics.cluster_prompts([[1, 2], [3], [1, 2], [1]]) == [0, 1, 0, 3]
    assert metrics.cluster_prompts(["a", "b", "a"], [5, 5, 7]) == [5, 5, 5]


def test_end_to_end_the_prefills_token_and_seconds_count_too() -> None:
    runs = [replace(generation(6, [(0, 0)] * 5, seconds=1.0), prefill_s=0.5) for _ in range(2)]
    assert metrics.speed([timed(run).end_to_end for run in runs]) == pytest.approx(6 / 1.5)
    assert metrics.speed(metrics.decoding(runs)) == pytest.approx(5 / 1.0)


def test_an_interval_is_of_95_percent() -> None:
    """Of many alike requests as wide as a normal one: 2 * 1.96 standard errors, where 90 % would take 2 * 1.64."""
    tokens = 5.0 + torch.randn(400, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    columns = torch.cat([tokens, torch.ones(400, 1, dtype=torch.float64)], 1)
    found = metrics.bootstrap(columns, lambda total: total[:, 0] / total[:, 1], 0)
    assert found is not None
    assert found[1] - found[0] == pytest.approx(2 * 1.96 * float(tokens.std()) / 20, rel=0.08)
    assert sum(found) / 2 == pytest.approx(float(tokens.mean()), rel=0.01)
