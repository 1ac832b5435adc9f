"""What the report makes of requests that come at a rate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.report import columns, plots
from eval.report.breakdown import speedup_breakdown
from eval.report.page import headlines
from eval.report.view import results_of
from eval.report.write import Report
from tests.eval.stubs import markdown
from tests.eval.test_load import GREEN, RED, loaded


def test_a_tile_says_that_its_ratio_is_one_of_latencies() -> None:
    gates = {"plain": GREEN, "eagle": GREEN}
    (slow,) = headlines(Report({}, {}, {}, gates, loaded(GREEN)).as_dict())
    assert slow["unit"].partition(",")[0] == "the baseline's mean latency over its own"
    (closed,) = headlines(Report({}, {}, {}, gates, loaded(GREEN)).as_dict() | {"rows": rated(None)})
    assert closed["unit"].partition(",")[0] == "times the same engine without drafts"
    (red,) = headlines(Report({}, {}, {}, {"plain": GREEN, "eagle": RED}, loaded(RED)).as_dict())
    assert (red["speedup"], red["unit"]) == ("withheld", "")


def rated(rate: float | None) -> list[dict[str, Any]]:
    """Return rows as report.json has them, at another rate."""
    return [{**row, "request_rate": rate} for row in Report({}, {}, {}, {}, loaded(GREEN)).as_dict()["rows"]]


def test_rows_of_several_reports_are_told_apart() -> None:
    rows = [replace(row, report=name) for name in ("one", "two") for row in loaded(GREEN)]
    told = markdown(Report({}, {}, {}, {f"eagle of {name}": GREEN for name in ("one", "two")}, rows))
    part = told.split("## Under load")[1]
    for name in ("one", "two"):
        assert f"| eagle of {name} | tiny | 0 | 2 |" in part


def test_a_red_gate_withholds_the_ratio_in_tables_and_plots(tmp_path: Path) -> None:
    rows = [row for rate in (2.0, 4.0) for row in loaded(RED, rate)]
    rows = [replace(row, lossless=GREEN.counts()) for row in rows]  # the verdict stands with the gates
    made = Report({"name": "toy"}, {"name": "a CPU", "dtype": "float32"}, {}, {"plain": GREEN, "eagle": RED}, rows)
    made.write(tmp_path)
    part = (tmp_path / "report.md").read_text(encoding="utf-8").split("## Under load")[1]
    line = next(each for each in part.splitlines() if each.startswith("| eagle"))
    assert line.endswith("| withheld |")
    (shown,) = plots.latencies(made.as_dict() | {"settings": {"gate": {"eagle": {"passed": False}}}})
    assert {each["name"] for each in shown.spec["data"]["values"]} == {"plain"}
    assert columns.topic("load", results_of(made.as_dict())).failed == [False, True, False, True]


def test_the_plot_has_both_quantiles_at_every_rate() -> None:
    rows = [row for rate in (None, 2.0, 4.0) for row in loaded(GREEN, rate)]
    made = Report({}, {}, {}, {"plain": GREEN, "eagle": GREEN}, rows).as_dict()
    (drawn,) = plots.latencies(made)
    found = {(each["name"], each["rate"], each["mark"]) for each in drawn.spec["data"]["values"]}
    assert found == {
        (name, rate, mark) for name in ("plain", "eagle") for rate in (2.0, 4.0) for mark in ("p50", "p95")
    }
    assert plots.latencies({**made, "rows": made["rows"][:4]}) == []  # a single rate


def test_there_is_no_ladder_of_latencies() -> None:
    plain, eagle = ({**vars(row)} for row in loaded(GREEN))
    assert speedup_breakdown(eagle, plain) is None
    assert speedup_breakdown({**eagle, "request_rate": None}, plain) is not None
