"""At which loads drafts pay, the speed of one user, and rates of requests without a steady state."""

from dataclasses import replace
from typing import Any

import pytest

from eval.measures.metrics import SpecDecodingStats
from eval.measures.results import Request, ResultRow
from eval.report import plots
from eval.report.sections import paying
from eval.report.view import results_of
from eval.report.write import Report
from tests.eval.stubs import ROW, markdown


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
    drawn = plots.speedup_by_batch(results)
    assert drawn is not None
    values = [(point["batch size"], point["speedup"], point["low"]) for point in drawn.spec["data"]["values"]]
    assert values == [(1, 1.5, 1.4), (2, 1.2, 1.1), (4, 0.95, 0.85)]
    single = results_of(report(*PLAIN[:1], *EAGLE[:1]).as_dict())
    assert (paying(single), plots.speedup_by_batch(single)) == ([], None)


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
    request = Request(SpecDecodingStats(20, 10, 10, 10, [10]), (20, 1.0), (21, 1.5), 0.5, waits={"latency_s": 4.5})
    assert request.user_speed == 5.0
    served = replace(request, prefill_s=0.1, waits={"latency_s": 4.5, "ttft_s": 2.5})
    assert served.user_speed == 10.0
    assert replace(request, waits={"latency_s": 4.5, "ttft_s": None}).user_speed is None
