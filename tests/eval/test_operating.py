"""The tokens of all users against those of one: where drafts lose, on what curves, and how sure that is."""

from dataclasses import replace
from typing import Any

import pytest

from eval.measures.metrics import Passes
from eval.measures.results import Request, Row
from eval.report import operating
from eval.report.page import page
from eval.report.write import Report
from tests.eval.stubs import ROW, markdown


def row(drafter: str, load: float, speedup: float, key: str = "batch_size", **changes: Any) -> Row:
    """Return a result at a load, at which one user sees 100 / load tokens a second of plain decoding."""
    user = 100 / load * speedup
    by_request = {"user_tokens_per_second": {"p50": user}, "latency_s": {"p50": 1.0}, "queue_s": {"p50": 0.2}}
    whole = {"whole_tokens_per_second": None, "tokens_per_second": 90 * speedup}
    ends = (speedup - 0.1, speedup + 0.1)
    speed = {"speedup": speedup, "speedup_ci": (1.0, 1.0) if drafter == "plain" else ends}
    at = {"batch_size": 4, "request_rate": None, key: load}
    return replace(
        ROW, drafter=drafter, tree="chain-2", prompts=64, by_request=by_request, **whole, **speed, **at | changes
    )


def report(*rows: Row, **device: Any) -> dict[str, Any]:
    settings = {"warmup": 1}
    return Report({"name": "tiny"}, {"name": "a GPU", "dtype": "float32"} | device, settings, {}, list(rows)).as_dict()


SWEEP = [row("plain", size, 1.0) for size in (1, 2, 4)]
EAGLE = [row("eagle", size, speedup) for size, speedup in ((1, 1.5), (2, 1.2), (4, 0.95))]


def test_a_curve_is_a_draft_setting_and_its_loads_in_order() -> None:
    content = report(*SWEEP, *EAGLE[::-1], count=2)
    swept = [(one.curve, one.load, one.user) for one in operating.points(content)]
    assert swept[:3] == [("plain", 1, 100.0), ("plain", 2, 50.0), ("plain", 4, 25.0)]
    assert swept[3:] == [
        ("eagle, chain-2", load, pytest.approx(user)) for load, user in ((1, 150), (2, 60), (4, 23.75))
    ]
    (drawn,) = operating.plots(content)
    assert [point["all"] for point in drawn.spec["data"]["values"][:1]] == [45.0], "of each of two devices"
    assert "of a device" in drawn.caption
    assert "of the server" in operating.plots(report(*SWEEP, *EAGLE, type="endpoint"))[0].caption
    text = markdown(Report({"name": "tiny"}, {"dtype": "float32"}, {"warmup": 1}, {}, [*SWEEP, *EAGLE]))
    assert "| eagle, chain-2 | batch size 4 | 23.8 | 85.5 | 64 | 0.95 [0.85, 1.05] |" in text
    assert "Throughput against the speed of one user" in page(content, [])
    assert operating.plots(report(*SWEEP[:1], *EAGLE[:1])) == [], "a single load is no sweep"


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        (
            (1.5, 1.2, 0.95),
            "pays up to batch size 2, loses from batch size 4 on (speedup 0.95 [0.85, 1.05], not clear of 1); it",
        ),
        ((1.5, 0.8, 0.7), "pays up to batch size 1, loses from batch size 2 on (speedup 0.80 [0.70, 0.90]); it"),
        (
            (0.8, 0.7, 0.6),
            "loses at every load measured, from batch size 1 on (speedup 0.80 [0.70, 0.90]); plain serves more",
        ),
        (
            (1.5, 0.8, 1.2),
            "still pays at batch size 4, the greatest load measured (speedup 1.20 [1.10, 1.30]), but loses at batch",
        ),
    ],
)
def test_the_load_from_which_on_drafts_lose_is_named(speedups: tuple[float, ...], words: str) -> None:
    eagle = [row("eagle", size, speedup) for size, speedup in zip((1, 2, 4), speedups, strict=True)]
    (line,) = operating.crossings(report(*SWEEP, *eagle))
    assert line.startswith(f"eagle, chain-2: {words}")


def test_rates_have_curves_of_their_own_and_ratios_of_latencies() -> None:
    rated = [
        row(name, rate, speedup, "request_rate")
        for rate in (1.0, 2.0)
        for name, speedup in (("plain", 1.0), ("eagle", 1.3))
    ]
    content = report(*SWEEP, *EAGLE, *rated)
    curves = dict.fromkeys(one.curve for one in operating.points(content))
    assert list(curves) == ["plain", "eagle, chain-2", "plain, at a rate", "eagle, chain-2, at a rate"]
    assert (
        "still pays at 2 requests a second, the greatest load measured (latency ratio 1.30"
        in operating.crossings(content)[1]
    )


def test_a_point_that_is_not_steady_is_doubted() -> None:
    steady = "steady state, and enough requests, at every point"
    assert operating.checks(report(*SWEEP)) == ["warm-up before each session: warmup=1", steady]
    few = [replace(one, prompts=8) for one in SWEEP]
    assert operating.checks(report(*few))[1:] == ["few requests, give prompts=16 or more: plain at batch size 4"]
    fast = [row("plain", rate, 1.0, "request_rate") for rate in (2.0, 8.0)]  # 0.8 s each, 4 at a time
    (doubt,) = operating.checks(report(*fast))[1:]
    assert doubt.startswith("no steady state")
    assert doubt.endswith(": plain, at a rate at 8 requests a second")
    cold = {**report(*SWEEP), "settings": {}}
    assert operating.checks(cold)[0].startswith("no warm-up")
    assert operating.checks(report(*SWEEP[:1])) == []


def test_a_user_sees_the_tokens_after_the_first_by_the_clock() -> None:
    """Four share the passes, so that a fourth of the time counts as this request's."""
    request = Request(Passes(20, 10, 10, 10, [10]), (20, 1.0), (21, 1.5), 0.5, waits={"latency_s": 4.5})
    assert request.user_speed == 5.0
    served = replace(request, prefill_s=0.1, waits={"latency_s": 4.5, "ttft_s": 2.5})
    assert served.user_speed == 10.0
    assert replace(request, waits={"latency_s": 4.5, "ttft_s": None}).user_speed is None


def test_the_speed_is_named_above_which_drafts_serve_more_users() -> None:
    """Plain decoding has 90 of all at 100, 50 and 25 of one; the head 135 at 150, 108 at 60 and 85.5 at 23.75."""
    (line,) = operating.crossings(report(*SWEEP, *EAGLE))
    assert line.endswith("; it serves more users than plain at every speed")
    wide = [replace(one, tokens_per_second=120.0) for one in SWEEP[1:]]  # of all, at 50 and 25 of one
    (line,) = operating.crossings(report(SWEEP[0], *wide, *[replace(one, tokens_per_second=95.0) for one in EAGLE]))
    assert line.endswith("; it serves more users than plain where one is to see more than 50.0 tokens a second")
