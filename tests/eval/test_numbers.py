"""The numbers that a report's plots and tables show are those of the report, each at its own place."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eval.measures.cost_model import Costs, Prediction
from eval.report import plots
from eval.report.render import markdown, title
from eval.report.view import results_of
from eval.report.write import Report
from eval.tune import AtBatch, Candidate, Measured, candidate_table, cost_table
from tests import toys
from tests.eval.stubs import ROW

PLAIN = replace(
    ROW, drafter="plain", rule="none", tau=1.0, tau_ci=None, speedup=1.0, speedup_ci=(1.0, 1.0), tokens_per_second=70.0,
    seconds={"draft": 0.0, "verify": 0.15, "other": 0.021}, memory_bytes=3 * 2**20, accepted_by_depth=[],
    conditional_by_depth=[],
)  # fmt: skip
EXTRAS: dict[str, Any] = {
    "training": {
        "eagle": {
            "steps": [{"step": 5, "loss": 3.0, "accuracy": [0.5, 0.25]}, {"step": 9, "loss": 2.0, "accuracy": [0.6]}],
            "tau": [{"step": 9, "tau": 2.0, "low": 1.5, "high": 2.5}],
        }
    },
}  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    made = Report({"name": "tiny"}, {"name": "a CPU"}, {}, {}, [PLAIN, replace(ROW, **changes)], extras=EXTRAS)
    return made.as_dict()


def data(shown: plots.Plot | None) -> list[tuple[Any, ...]]:
    """Return the values of a plot's records."""
    assert shown
    return [tuple(record.values()) for record in shown.spec["data"]["values"]]


def test_plots_show_each_number_at_its_depth_step_and_drafter() -> None:
    report = content()
    results = results_of(report)
    assert data(plots.learning_curve(report["training"])) == [
        ("eagle, loss", 5, 3.0), ("eagle, loss", 9, 2.0), (9, 2.0, 1.5, 2.5, "eagle, τ"),
    ]  # fmt: skip
    assert [values[1:] for values in data(plots.acceptance(results))] == [(1, 0.75, 0.75), (2, 0.28, 0.37)]
    assert data(plots.speedup(results)) == [("eagle", "eagle", ROW.speedup, *ROW.speedup_ci)]
    assert data(plots.time_of_pass(results))[3:] == [
        ("eagle", part, i, pytest.approx(ms))
        for i, (part, ms) in enumerate((("verify", 20), ("draft", 10), ("other", 1)))
    ]


def test_a_result_is_read_as_its_row_says() -> None:
    deep = replace(ROW, accepted_by_depth=[0.5] * 8, conditional_by_depth=[0.5] * 8)
    deeper = replace(deep, accepted_by_depth=[0.5] * 9, tier="teacher_forced", speedup=0.999)
    found = results_of(Report({"name": "tiny"}, {"name": "a CPU"}, {}, {}, [PLAIN, deep, deeper]).as_dict())
    assert [each.overall for each in found] == [True, True, False]
    assert ["slower" in each.speedup for each in found] == [False, False, True]
    assert [each.accepted for each in found[1:]] == [" ".join(["0.50"] * 8), " ".join(["0.50"] * 8) + " …"]


def test_a_title_and_the_peak_of_all_rows_are_in_the_text() -> None:
    assert "Peak memory: 3 MiB of" in markdown(content(), [])
    target = {"name": "t", "quantized": "int8", "adapter": "a"}
    assert title({"target": target, "device": {"name": "d", "dtype": "bf16"}}) == (
        "t with adapter a on d, bf16, weights quantised (int8)"
    )
    assert title({"target": {"name": "t"}, "device": {"name": "d", "dtype": None}}) == "t on d"


def cells(table: Table) -> list[list[str]]:
    Console(file=io.StringIO(), width=400).print(table)
    return [list(line) for line in zip(*(map(str, column.cells) for column in table.columns), strict=True)]


def test_a_tunings_tables_are_in_milliseconds_and_percent() -> None:
    costs = Costs(2, 0.004, {0: 0.004, 8: 0.009}, ({}, {}), {}, {})
    table = cost_table([AtBatch(2, costs, [], None, "")])
    assert [str(column.header) for column in table.columns][1:] == ["plain", "0", "8"]
    assert cells(table) == [["2", "4.00", "4.00", "9.00"]]
    foreseen = Prediction(2.1, 4.0, {}, 81.5, 1.5)
    measured = Measured(2.0, 90.0, 60.0, 1.25, None, {"failed": 0}, {}, 1.0)
    one = Candidate("chain", toys.TREES["chain"], foreseen, measured)
    failed = replace(one, measured=replace(measured, speedup=None))
    table = candidate_table(2, [replace(one, measured=None), one, failed])
    assert "plain 60.0 tokens/s" in str(table.title)
    predicted = ["chain", "chain-4", "2.10", "81.5", "1.50"]
    assert cells(table) == [
        [*predicted, "", "", "", ""],
        [*predicted, "2.00", "90.0", "1.25", "+20.0 %"],
        [*predicted, "2.00", "90.0", "withheld", ""],
    ]
