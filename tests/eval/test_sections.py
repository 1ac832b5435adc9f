"""What a report says of its numbers: where drafts pay, from τ down to the speedup, plots, tables and sentences."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from eval.measures.losslessness import Gate
from eval.measures.metrics import SpecDecodingStats
from eval.measures.results import MeasuredRequest, ResultRow
from eval.report import sections
from eval.report.render import grid
from eval.report.sections import paying
from eval.report.view import STAGES, acceptance_gain, results_of, speedup_breakdown, with_breakdowns
from eval.report.write import Report
from tests.eval.stubs import ROW, markdown
from tests.eval.test_load import GREEN, loaded


def row(drafter: str, load: float, speedup: float, key: str = "batch_size", **changes: Any) -> ResultRow:
    """Return a result at a batch size or a rate of requests, of which each takes 0.8 s to answer."""
    by_request = {"user_tokens_per_second": {"p50": 50.0}, "latency_s": {"p50": 1.0}, "queue_s": {"p50": 0.2}}
    ends = (1.0, 1.0) if drafter == "plain" else (speedup - 0.1, speedup + 0.1)
    at = {"batch_size": 4, "request_rate": None, key: load}
    values = {"prompts": 64, "by_request": by_request, "speedup": speedup, "speedup_ci": ends}
    return replace(ROW, drafter=drafter, **values | at | changes)


def report(*rows: ResultRow) -> Report:
    return Report({"name": "tiny"}, {"name": "a GPU", "dtype": "float32"}, {}, {}, list(rows))


PLAIN = [row("plain", size, 1.0) for size in (1, 2, 4)]
EAGLE = [row("eagle", size, speedup) for size, speedup in ((4, 0.95), (1, 1.5), (2, 1.2))]


def test_the_batch_sizes_at_which_drafts_pay_are_named_and_plotted() -> None:
    made = report(*PLAIN, *EAGLE)
    results = results_of(made.as_dict())
    (line,) = paying(results)
    assert line == (
        "eagle: pays at batch size 1 (1.50 [1.40, 1.60]), 2 (1.20 [1.10, 1.30]); "
        "loses at batch size 4 (0.95 [0.85, 1.05])"
    )
    assert f"- {line}" in markdown(made).split("## Under load")[1]
    drawn = sections.batch_plot(results)
    assert drawn is not None
    values = [(point["batch size"], point["speedup"], point["low"]) for point in drawn["data"]["values"]]
    assert values == [(1, 1.5, 1.4), (2, 1.2, 1.1), (4, 0.95, 0.85)]
    single = results_of(report(*PLAIN[:1], *EAGLE[:1]).as_dict())
    assert (paying(single), sections.batch_plot(single)) == ([], None)


def test_batches_of_other_conditions_and_rates_are_other_draft_settings() -> None:
    hot = [replace(one, temperature=1.0) for one in EAGLE]
    rated = [row("eagle", rate, 1.3, "request_rate") for rate in (1.0, 2.0)]
    lines = paying(results_of(report(*EAGLE, *hot, *rated).as_dict()))
    assert [line.split(":")[0] for line in lines] == ["eagle, temperature 0", "eagle, temperature 1", "eagle"]
    assert lines[2] == "eagle: pays at requests per second 1 (1.30 [1.20, 1.40]), 2 (1.30 [1.20, 1.40])"


@pytest.mark.parametrize(("rate", "doubted"), [(2.0, False), (5.0, False), (5.1, True)])
def test_requests_that_come_faster_than_they_are_answered_are_warned_of(rate: float, doubted: bool) -> None:
    """Four at a time, 0.8 s each."""
    warned = report(row("eagle", rate, 1.3, "request_rate")).warnings()
    assert [line.split(":")[0] for line in warned] == [f"eagle at {rate:g} req/s"] * doubted


def test_a_user_sees_the_tokens_after_the_first_by_the_clock() -> None:
    """Four share the passes, so that a fourth of the time counts as this request's."""
    request = MeasuredRequest(
        SpecDecodingStats(20, 10, 10, 10, [10]), (20, 1.0), (21, 1.5), 0.5, latencies={"latency_s": 4.5}
    )
    assert request.user_speed == 5.0
    served = replace(request, prefill_s=0.1, latencies={"latency_s": 4.5, "ttft_s": 2.5})
    assert served.user_speed == 10.0
    assert replace(request, latencies={"latency_s": 4.5, "ttft_s": None}).user_speed is None


def test_there_is_no_ladder_of_latencies() -> None:
    plain, eagle = ({**vars(row)} for row in loaded(GREEN))
    assert speedup_breakdown(eagle, plain) is None
    assert speedup_breakdown({**eagle, "request_rate": None}, plain) is not None


BASELINE = replace(
    ROW, drafter="plain", rule="none", tau=1.0, tau_ci=None, speedup=1.0, speedup_ci=(1.0, 1.0), tokens_per_second=70.0,
    seconds={"draft": 0.0, "verify": 0.15, "other": 0.021}, memory_bytes=3 * 2**20, accepted_by_depth=[],
    conditional_by_depth=[],
)  # fmt: skip
EXTRAS: dict[str, Any] = {
    "training": {
        "eagle": {
            "steps": [{"step": 5, "loss": 3.0}, {"step": 9, "loss": 2.0}],
            "tau": [{"step": 9, "tau": 2.0, "low": 1.5, "high": 2.5}],
        }
    },
}  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    made = Report({"name": "tiny"}, {"name": "a CPU"}, {}, {}, [BASELINE, replace(ROW, **changes)], extras=EXTRAS)
    return made.as_dict()


def data(shown: sections.Spec | None) -> list[tuple[Any, ...]]:
    """Return the values of a plot's records."""
    assert shown
    return [tuple(record.values()) for record in shown["data"]["values"]]


def test_plots_show_each_number_at_its_depth_step_and_drafter() -> None:
    report = content()
    results = results_of(report)
    assert data(sections.learning_curve(report["training"])) == [
        ("eagle, loss", 5, 3.0), ("eagle, loss", 9, 2.0), (9, 2.0, 1.5, 2.5, "eagle, τ"),
    ]  # fmt: skip
    assert [values[1:] for values in data(sections.acceptance_plot(results))] == [(1, 0.75, 0.75), (2, 0.28, 0.37)]
    assert data(sections.speedup_plot(results)) == [("eagle", "eagle", ROW.speedup, *ROW.speedup_ci)]
    assert data(sections.time_plot(results))[3:] == [
        ("eagle", part, i, pytest.approx(ms))
        for i, (part, ms) in enumerate((("verify", 20), ("draft", 10), ("other", 1)))
    ]


def test_a_result_is_read_as_its_row_says() -> None:
    deep = replace(ROW, accepted_by_depth=[0.5] * 8, conditional_by_depth=[0.5] * 8)
    deeper = replace(deep, accepted_by_depth=[0.5] * 9, tier="teacher_forced", speedup=0.999)
    found = results_of(Report({"name": "tiny"}, {"name": "a CPU"}, {}, {}, [BASELINE, deep, deeper]).as_dict())
    assert [each.overall for each in found] == [True, True, False]
    assert ["slower" in each.speedup for each in found] == [False, False, True]
    assert [each.accepted for each in found[1:]] == [" ".join(["0.50"] * 8), " ".join(["0.50"] * 8) + " …"]


def report_of(*changes: Mapping[str, Any], gate: Gate | None = None) -> dict[str, Any]:
    gates = {} if gate is None else {"eagle": gate}
    rows = [replace(ROW, **change) for change in changes]
    return Report({"name": "tiny"}, {"name": "a CPU", "dtype": "float32"}, {"prompts": 8}, gates, rows).as_dict()


@pytest.mark.parametrize(
    ("change", "words", "others"),
    [
        ({}, "writes the same text 1.77 times as fast (1.61 to 1.93)", "not shown to be faster"),
        ({"speedup_ci": (0.99, 2.5)}, "(not shown to be faster; more prompts narrow the interval)", "under coupled"),
        ({"speedup_ci": (1.0, 2.5)}, "(not shown to be faster", "under coupled"),
        ({"speedup_ci": (1.01, 2.5)}, "(1.01 to 2.50)", "not shown"),
        ({"speedup": 0.9, "speedup_ci": (0.8, 1.1)}, "0.90 times as fast (0.80 to 1.10)", "not shown"),  # as is said
        ({"temperature": 1.0, "rule": "coupled"}, "the same text", "under coupled"),
        ({"temperature": 1.0, "rule": "block"}, "text of the same distribution", "the same text"),
        ({"temperature": 1.0, "rule": "coupled + block"}, "identical under coupled noise", "the same text"),
        ({"speedup_hf": None}, "7 of 8 answers identical, 1 the same but for rounding.", "HF generate"),
        ({"speedup_hf": 2.0}, "2.00 times HF generate", "was not checked"),
        ({"lossless": {"checked": 0}}, "; whether the text is the same was not checked.", "writes the same text"),
    ],
)
def test_the_sentence_for_everybody(change: dict[str, Any], words: str, others: str) -> None:
    said = sections.sentence(report_of(change))
    assert words in said
    assert others not in said


def test_without_a_lossless_speedup_there_is_no_sentence() -> None:
    silent = {"speedup": None, "speedup_ci": None, "speedup_hf": None}
    assert sections.sentence(report_of(silent)) == ""
    assert sections.sentence(report_of({"drafter": "plain"})) == ""
    assert sections.sentence(report_of({"request_rate": 2.0})) == ""
    assert sections.sentence(report_of(silent, gate=Gate(8, 7, 0, 1))) == ""


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.1, 0.3, "], clear"), (-0.3, -0.1, "], clear"), (-0.1, 0.1, "], not clear"), (0.0, 0.2, "], not clear")],
)
def test_a_difference_is_clear_of_zero_where_its_interval_is(low: float, high: float, words: str) -> None:
    change = {"difference": (low + high) / 2, "low": low, "high": high}
    pair = {"drafter": "eagle", "base": "mlp", "prompts": 8, "workload": "w", "temperature": 0.0, "batch_size": 1}
    (line,) = sections.compared({"paired": [pair | {"tau": change, "tokens_per_second": change}]})
    assert line.count(f"{words} of zero") == 2


# A plain step takes 10 ms, 9 of them the pass.
PLAIN_STEPS: dict[str, Any] = {
    "drafter": "plain", "workload": "tiny", "temperature": 0.0, "batch_size": 1, "steps": 200, "tau": 1.0,
    "tokens_per_second": 100.0, "speedup": 1.0, "seconds": {"draft": 0.0, "verify": 1.8, "other": 0.2},
    "conditional_by_depth": [],
}  # fmt: skip
# A step takes 20 ms: 15 the pass, 3 the draft, 2 the rest; it commits 3 tokens.
STEPS = {
    **PLAIN_STEPS, "drafter": "eagle", "steps": 100, "tau": 3.0, "tokens_per_second": 150.0, "speedup": 1.5,
    "seconds": {"draft": 0.3, "verify": 1.5, "other": 0.2}, "conditional_by_depth": [0.9, 0.5],
}  # fmt: skip


def test_each_cost_has_its_rung() -> None:
    found = speedup_breakdown(STEPS, PLAIN_STEPS)
    assert found is not None
    expected = [3.0, 3 * 10 / 16, 3 * 10 / 19, 1.5]
    assert list(found["rungs"]) == list(STAGES)
    assert list(found["rungs"].values()) == pytest.approx(expected)
    assert found["oracle"] == pytest.approx(3 * 10 / 11)


def test_the_greatest_of_the_smaller_losses_is_named() -> None:
    found = speedup_breakdown(STEPS, PLAIN_STEPS)
    assert found is not None
    less = {
        "verification": 30 / 19.4,
        "draft": 30 / 19.7,
        "overhead": 30 / 19.9,
        "acceptance": 1.5 * acceptance_gain([0.9, 0.5]),
    }
    assert found["less"] == pytest.approx(less)
    assert found["most"] == max(less, key=lambda key: less[key])
    slow = {**STEPS, "tokens_per_second": 50.0, "speedup": 0.5, "seconds": {"draft": 4.3, "verify": 1.5, "other": 0.2}}
    drafts = speedup_breakdown(slow, PLAIN_STEPS)
    assert drafts is not None
    assert drafts["most"] == "draft"
    assert sections.advice(**drafts).startswith("a cheaper draft (0.5")


def test_fewer_rejections_mean_more_tokens() -> None:
    assert acceptance_gain([0.9, 0.5]) == pytest.approx((1 + 0.91 + 0.91 * 0.55) / (1 + 0.9 + 0.9 * 0.5))
    assert acceptance_gain([]) == 1


@pytest.mark.parametrize(
    ("plain", "own", "there"),
    [
        ({}, {}, True),
        ({}, {"speedup": None}, False),
        *(
            ({key: "another"}, {}, False)
            for key in ("workload", "category", "temperature", "batch_size", "request_rate")
        ),
        *((nothing, {}, False) for nothing in ({"tau": None}, {"tokens_per_second": None}, {"steps": 0})),
    ],
)
def test_a_ladder_needs_a_speedup_and_plain_decoding_measured_in_the_same_session(
    plain: dict[str, Any], own: dict[str, Any], there: bool
) -> None:
    rows = with_breakdowns([PLAIN_STEPS | plain, STEPS | own])
    assert [row["ladder"] is not None for row in rows] == [False, there]


def test_a_name_ends_neither_its_cell_nor_its_line() -> None:
    table = grid(("drafter", "workload"), [["eagle", "my|log\nof may.jsonl"]])
    assert table.splitlines() == ["| drafter | workload |", "| --- | --- |", "| eagle | my\\|log of may.jsonl |"]
