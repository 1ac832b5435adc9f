"""The numbers that a report's plots and tables show are those of the report, each at its own place."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eval.measures.cost_model import Costs, Prediction
from eval.report import columns, plots
from eval.report.text import markdown, title
from eval.report.view import results_of
from eval.report.write import Report
from eval.tuning.results import AtBatch, Candidate, Measured, candidate_table, cost_table
from tests import toys
from tests.eval.stubs import ROW

PLAIN = replace(
    ROW, drafter="plain", rule="none", tau=1.0, tau_ci=None, speedup=1.0, speedup_ci=(1.0, 1.0), tokens_per_second=70.0,
    seconds={"draft": 0.0, "verify": 0.15, "other": 0.021}, memory_bytes=3 * 2**20, accepted_by_depth=[],
    conditional_by_depth=[],
)  # fmt: skip
TREES = [
    {"family": "chain", "tree": "chain-2", "tau": 1.5, "nodes": 2.0, "speedup": 1.2},
    {"family": "static", "tree": "static-9", "tau": 2.5, "nodes": 9.0, "speedup": 1.1},
    {"family": "dynamic", "tree": "dynamic-d4k3n9", "tau": 2.0, "nodes": 8.0, "speedup": 1.4},
]
EXTRAS: dict[str, Any] = {
    "training": {
        "eagle": {
            "steps": [{"step": 5, "loss": 3.0, "accuracy": [0.5, 0.25]}, {"step": 9, "loss": 2.0, "accuracy": [0.6]}],
            "tau": [{"step": 9, "tau": 2.0, "low": 1.5, "high": 2.5}],
        }
    },
    "teacher_forced": {
        "eagle": {"rank": [[0.6, 0.2], [0.4, 0.1]], "n_alpha": [0.6, 0.4], "at_every_token": [0.6, 0.3]},
        "mlp": {"rank": [[0.5]], "n_alpha": [0.5], "at_every_token": [0.55]},
    },
    "other_trees": {
        "eagle": {
            "trees": TREES, "own": TREES[0], "best": TREES[2], "stops_paying": {"own": 4, "best": None},
            "loads": [
                {"batch_size": 1, "own": 1.2, "best": 1.4, "tree": "dynamic-d4k3n9"},
                {"batch_size": 4, "own": None, "best": 1.1, "tree": "chain-2"},
            ],
        }
    },
}  # fmt: skip


def content(**changes: Any) -> dict[str, Any]:
    made = Report({"name": "tiny"}, {"name": "a CPU"}, {}, {}, [PLAIN, replace(ROW, **changes)], extras=EXTRAS)
    return made.as_dict()


def data(found: list[plots.Plot]) -> list[list[Any]]:
    """Return the values of each plot's records."""
    return [[tuple(record.values()) for record in plot.spec["data"]["values"]] for plot in found]


def test_plots_show_each_number_at_its_step_depth_rank_and_load() -> None:
    report = content()
    loss, accuracy, tau = data(plots.training(report))
    assert (loss, tau) == ([("eagle", 5, 3.0), ("eagle", 9, 2.0)], [("eagle", 9, 2.0, 1.5, 2.5)])
    assert accuracy == [("depth 1", 5, 0.5), ("depth 2", 5, 0.25), ("depth 1", 9, 0.6)]
    eagle, mlp, curves = data(plots.along(report))
    assert (eagle, mlp) == ([(1, 1, 0.6), (1, 2, 0.2), (2, 1, 0.4), (2, 2, 0.1)], [(1, 1, 0.5)])
    assert curves[:4] == [
        (f"eagle, {name}", d, share)
        for name, shares in (("n-alpha", (0.6, 0.4)), ("P(a≥k)", (0.6, 0.3)))
        for d, share in enumerate(shares, 1)
    ]
    assert data(plots.trees(report)) == [[tuple(tree.values()) for tree in TREES]] * 2
    assert data(plots.loads(report)) == [
        [
            ("eagle, its own tree", 1, "", 1.2),
            ("eagle, best tree", 1, "dynamic-d4k3n9", 1.4),
            ("eagle, best tree", 4, "chain-2", 1.1),
        ]
    ]
    assert data(plots.acceptance(report)) == [[("eagle", 1, 0.75, 0.75), ("eagle", 2, 0.28, 0.37)]]
    assert data(plots.with_intervals(report, "tau", "τ")) == [
        [("plain", "plain", 1.0, 1.0, 1.0), ("eagle", "eagle", 2.03, 1.81, 2.24)]
    ]


def test_a_steps_milliseconds_and_what_became_of_tau_are_drawn_to_scale() -> None:
    (bars,) = data(plots.time_split(content()))
    assert bars[3:] == [
        ("eagle", part, i, pytest.approx(ms))
        for i, (part, ms) in enumerate((("verify", 20), ("draft", 10), ("other", 1)))
    ]
    (drawn,) = data(plots.breakdown(content()))
    ladder = content()["rows"][1]["ladder"]["rungs"]
    costs = [*ladder][1:]
    lost = [(cost, low, high) for cost, high, low in zip(costs, ladder.values(), [*ladder.values()][1:], strict=False)]
    assert drawn[0] == ("eagle", "speedup", 0, ladder["overhead"], ladder["overhead"])
    assert drawn[1:] == [
        ("eagle", f"lost to {cost}", low, high, high - low) for cost, low, high in reversed(lost) if high > low
    ]


def test_tables_of_trees_loads_and_ranks_have_each_heads_own_numbers() -> None:
    report = content()
    assert [line[2] for line in columns.other_trees(report, 2).texts()] == ["dynamic-d4k3n9", "chain-2"], "promise most"
    unpriced = [{**tree, "speedup": None} for tree in TREES]
    without = {"other_trees": {"eagle": {"trees": unpriced}}}
    assert [line[2:] for line in columns.other_trees(without, 1).texts()] == [["static-9", "9.00", "2.50", "-"]]
    assert columns.other_loads(report).texts() == [
        ["eagle", "1", "1.20", "1.40", "dynamic-d4k3n9"], ["eagle", "4", "-", "1.10", "chain-2"],
    ]  # fmt: skip
    assert columns.ranks(report).texts() == [
        ["eagle", "1", "0.600", "0.600", "0.600", "0.200"],
        ["eagle", "2", "0.400", "0.300", "0.400", "0.100"],
        ["mlp", "1", "0.500", "0.550", "0.500", "-"],
    ]
    cuts = {f"p{level}": level / 10 for level in (5, 25, 50, 75, 95)}
    shown = columns.requests(results_of(content(by_request={"tau": cuts, "latency_s": cuts, "speedup": cuts})))
    assert [line[:4] for line in shown.texts()] == [["eagle", "tiny", "0", what] for what in ("tau", "speedup")]
    assert shown.texts()[0][4:] == ["0.50", "2.50", "5.00", "7.50", "9.50"]


def test_a_title_and_the_peak_of_all_rows_are_in_the_text() -> None:
    assert "Peak memory: 3 MiB." in markdown(content(), [])
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
    contexts = {16: {0: 0.001, 4: 0.002, 8: 0.003}}
    table = cost_table([AtBatch(2, costs, [], None, "")], contexts)
    assert [str(column.header) for column in table.columns][1:] == ["plain", "0", "8"]
    assert cells(table) == [["2, workload", "4.00", "4.00", "9.00"], ["1, 16 tokens", "", "1.00", "3.00"]]
    foreseen = Prediction(2.1, 4.0, {}, 81.5, 1.5)
    measured = Measured(2.0, 90.0, 60.0, 1.25, None, {"failed": 0}, {}, 1.0)
    one = Candidate("chain", toys.TREES["chain"], foreseen, {16: 1.4}, measured)
    failed = replace(one, measured=replace(measured, speedup=None), at_contexts={})
    table = candidate_table(2, [replace(one, measured=None), one, failed])
    assert "plain 60.0 tokens/s" in str(table.title)
    predicted = ["chain", "chain-4", "2.10", "81.5", "1.50"]
    assert cells(table) == [
        [*predicted, "", "", "", "", "16: 1.40"],
        [*predicted, "2.00", "90.0", "1.25", "+20.0 %", "16: 1.40"],
        [*predicted, "2.00", "90.0", "withheld", "", ""],
    ]
