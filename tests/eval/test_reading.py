"""A report read back is the report that was written, and everything else is refused in one line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.measures.losslessness import ChiSquareTest, Divergence, Gate, SampledGate
from eval.measures.metrics import quantiles
from eval.report.write import Report, read_report, report_of
from tests.eval.stubs import ROW, markdown

LAW = ChiSquareTest(1000, 2, 7, 6.0, 0.5, 0.2, 0.9, 1e-3, 0.0)
TIE = Divergence("p1", 3, 4, None, 1e-6)
RED = Gate(8, 7, 0, 1, Divergence("p2", 5, 11, 12, 3.5))
TREE = {"label": "chain", "note": "", "paths": [[0]], "accepted": [0.5], "steps": 10}
GATES = {"eagle": Gate(8, 7, 1, 0, ties=(TIE,)), "medusa": RED, "typical": Gate(8, 8, 0, 0, lossy=True)}
SILENT = replace(ROW, speedup=None, speedup_ci=None, speedup_hf=None)
HOT = [
    SampledGate("eagle", 1.0, Gate(8, 8, 0, 0), LAW, ""),
    SampledGate("eagle", 0.5, RED, None, "no draws", (1, 4), 4),
    SampledGate("eagle", 0.7, Gate(8, 8, 0, 0), replace(LAW, control_p=0.5), ""),
]


def report() -> Report:
    """Return a report with green, red, lossy and sampled gates, and a row with all that a row may hold."""
    odd = {"dtype": "float32", "checked": 8, "identical": 7, "near_tie": 0, "beyond": 1, "gaps": [0.25, math.inf]}
    full = replace(
        ROW, prompts=8, agreement=odd, tau_within_depth=[1.5, None], by_request={"tau": quantiles([1.5, 2.0])}
    )
    hot = [replace(SILENT, temperature=t) for t in (0.5, 0.7)]
    rows = [full, replace(SILENT, drafter="medusa"), replace(SILENT, drafter="typical"), *hot]
    return Report({"name": "tiny"}, {"name": "a CPU"}, {"prompts": 8}, GATES, rows, HOT, {"trees": {"eagle": TREE}})


def written(folder: Path, told: Any) -> Path:
    (folder / "report.json").write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")
    return folder / "report.json"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = report()
    file = written(tmp_path, made.as_dict())
    found = report_of(read_report(file), str(file))
    assert found == made
    assert found.gates["eagle"].ties == (TIE,)
    assert found.as_dict() == made.as_dict()
    assert markdown(found) == markdown(made)
    assert found.failures() == made.failures()
    assert [found.failed(row) for row in found.rows] == [False, True, True, True, True]


def test_a_report_of_earlier_days_lacks_what_rows_hold_since(tmp_path: Path) -> None:
    told = report().as_dict()
    told["rows"] = [{key: row[key] for key in list(row)[: list(row).index("category")]} for row in told["rows"]]
    told["settings"] = {"prompts": 8}
    file = written(tmp_path, told)
    found = report_of(read_report(file), str(file))
    assert (found.rows[0].tier, found.rows[0].report, found.gates) == ("live", "", {})
    assert found.rows[0].tau_ci == ROW.tau_ci


def changed(key: str, value: Any) -> dict[str, Any]:
    told = report().as_dict()
    told["rows"][1] = {**told["rows"][1], key: value}
    return told


def besides_plain(**odd: float | None) -> dict[str, Any]:
    """Return a report whose first row has the baseline beside it, which has odd numbers."""
    told = report().as_dict()
    return {**told, "rows": [{**told["rows"][0], "drafter": "plain", **odd}, *told["rows"]]}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (json.dumps(report().as_dict())[:-40], r"is damaged \(.*: evaluate again"),
        ("", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ([1, 2], "is no report: give a report.json"),
        ({"loss": 2.5}, "is no report"),
        ({"schema": 1, "rows": {}}, "is no report"),
        ({**report().as_dict(), "schema": 2}, "has schema 2, this version reads 1: evaluate again"),
        ({**report().as_dict(), "device": None}, "has no device"),
        (changed("speedup", "fast"), "row 1: speedup: .*fast.*; evaluate again"),
        (changed("verdict", "good"), "row 1: verdict is not a known key"),
        ({**report().as_dict(), "rows": [3]}, "row 0: 3 is no row"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, told: Any, why: str) -> None:
    file = written(tmp_path, told)
    with pytest.raises(ValueError, match=why) as error:
        read_report(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["tau", "tokens_per_second", "steps"])
def test_where_plain_decoding_was_not_measured_there_is_no_ladder(tmp_path: Path, key: str) -> None:
    nothing: dict[str, Any] = {key: 0 if key == "steps" else None}
    file = written(tmp_path, besides_plain(**nothing))
    assert report_of(read_report(file), str(file)).as_dict()["rows"][1]["ladder"] is None


def test_a_missing_report_and_a_folder_are_named(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=why) as error:
            read_report(file)
        assert str(file) in str(error.value)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="damaged"):
        read_report(tmp_path / "bytes.json")


@pytest.mark.parametrize(
    "gate", [{"checked": 8}, 3, {**GATES["eagle"].counts(), "passed": True, "first": {"prompt": 1}}]
)
def test_damaged_gates_are_named(gate: Any) -> None:
    told = report().as_dict()
    told["settings"]["gate"]["eagle"] = gate
    with pytest.raises(ValueError, match="report mine has damaged gates") as error:
        report_of(told, "mine")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [{"failed_at": ""}, {"failed_at": [1]}, {"batch_sizes": ["1"]}, {"batch_sizes": None}])
def test_damaged_batch_sizes_of_a_gate_are_refused(part: dict[str, Any]) -> None:
    told = report().as_dict()
    told["settings"]["sampled_gate"][0]["coupled"] |= part
    with pytest.raises(ValueError, match="report mine has damaged gates") as error:
        report_of(told, "mine")
    assert "\n" not in str(error.value)


def test_a_speedup_beside_a_red_gate_was_not_written_by_us() -> None:
    with pytest.raises(ValueError, match="report mine: medusa has a speedup and failed its check"):
        report_of(changed("speedup", 2.0), "mine")
