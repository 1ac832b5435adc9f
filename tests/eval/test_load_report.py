"""What the report makes of requests that come at a rate."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.report.breakdown import speedup_breakdown
from eval.report.sections import firsts, paying
from eval.report.view import results_of
from eval.report.write import Report
from tests.eval.stubs import markdown
from tests.eval.test_load import GREEN, RED, loaded


def test_a_tile_says_that_its_ratio_is_one_of_latencies() -> None:
    gates = {"plain": GREEN, "eagle": GREEN}
    (slow,) = firsts(Report({}, {}, {}, gates, loaded(GREEN)).as_dict())
    assert slow.over == "the baseline's mean latency over its own"
    (closed,) = firsts(Report({}, {}, {}, gates, loaded(GREEN)).as_dict() | {"rows": rated(None)})
    assert closed.over == "times the same engine without drafts"
    (red,) = firsts(Report({}, {}, {}, {"plain": GREEN, "eagle": RED}, loaded(RED)).as_dict())
    assert red.speedup == "withheld"


def rated(rate: float | None) -> list[dict[str, Any]]:
    """Return rows as report.json has them, at another rate."""
    return [{**row, "request_rate": rate} for row in Report({}, {}, {}, {}, loaded(GREEN)).as_dict()["rows"]]


def test_rows_of_several_reports_are_told_apart() -> None:
    rows = [replace(row, report=name) for name in ("one", "two") for row in loaded(GREEN)]
    told = markdown(Report({}, {}, {}, {f"eagle of {name}": GREEN for name in ("one", "two")}, rows))
    part = told.split("## Under load")[1]
    for name in ("one", "two"):
        assert f"| eagle at 2 req/s of {name} | 0 |" in part


def test_a_red_gate_withholds_the_ratio_in_tables_and_plots(tmp_path: Path) -> None:
    rows = [row for rate in (2.0, 4.0) for row in loaded(RED, rate)]
    rows = [replace(row, lossless=GREEN.counts()) for row in rows]  # the verdict stands with the gates
    made = Report({"name": "toy"}, {"name": "a CPU", "dtype": "float32"}, {}, {"plain": GREEN, "eagle": RED}, rows)
    made.write(tmp_path)
    part = (tmp_path / "report.md").read_text(encoding="utf-8").split("## Under load")[1]
    line = next(each for each in part.splitlines() if each.startswith("| eagle"))
    assert line.endswith("| withheld |")
    assert paying(results_of(made.as_dict())) == []


def test_the_rates_at_which_drafts_pay_are_named() -> None:
    rows = [row for rate in (None, 2.0, 4.0) for row in loaded(GREEN, rate)]
    made = Report({}, {}, {}, {"plain": GREEN, "eagle": GREEN}, rows).as_dict()
    (line,) = paying(results_of(made))
    assert re.fullmatch(r"eagle: (pays|loses) at requests per second 2 \(.*\), 4 \(.*\)", line)
    assert paying(results_of({**made, "rows": made["rows"][:4]})) == []  # a single rate


def test_there_is_no_ladder_of_latencies() -> None:
    plain, eagle = ({**vars(row)} for row in loaded(GREEN))
    assert speedup_breakdown(eagle, plain) is None
    assert speedup_breakdown({**eagle, "request_rate": None}, plain) is not None
