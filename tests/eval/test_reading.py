"""A report read back is the report that was written, and everything else is refused in one line."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.measures.chi_square import ChiSquareTest
from eval.measures.losslessness import Divergence, Gate, SampledGate
from eval.measures.metrics import quantiles
from eval.report.reading import read_report, report_of
from eval.report.write import Report
from tests.eval.stubs import ROW, markdown

LAW = ChiSquareTest(1000, 2, 7, 6.0, 0.5, 0.2, 0.9, 1e-3, 0.0)
TIE = Divergence("p1", 3, 4, None, 1e-6)
RED = Gate(8, 7, 0, 1, Divergence("p2", 5, 11, 12, 3.5))
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
    return Report({"name": "tiny"}, {"name": "a CPU"}, {"prompts": 8}, GATES, rows, HOT, {"trees": {"eagle": {}}})


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
        ({**report().as_dict(), "plots": {}}, "'plots' is not a known key"),
        ({**report().as_dict(), "trees": []}, "'trees' is not a known key, or not of its kind"),
        ({**report().as_dict(), "answers": [{"drafter": 3}]}, "has damaged answers"),
        ({**report().as_dict(), "trees": {"x": [{"_target_": "os.system"}]}}, "names code to run by the key _target_"),
        (changed("agreement", {"gaps": [{}]}), r"agreement\.gaps is \[\{\}\], expected a list of numbers"),
        (changed("speedup", "fast"), "row 1: speedup: .*fast.*; evaluate again"),
        (changed("verdict", "good"), "row 1: verdict is not a known key"),
        (changed("lossless", {"checked": 8}), "row 1: .*failed are missing"),
        (changed("seconds", {"draft": 1.0}), "row 1: seconds.verify is missing"),
        ({**report().as_dict(), "rows": [3]}, "row 0: 3 is no row"),
        ({**report().as_dict(), "rows": [3] * 20_000}, "has 20000 rows, 2000 are read: evaluate fewer drafters"),
        (changed("tau", math.nan), "'tau' is nan, no number that is measured"),
        (changed("tau_ci", [1.0, 1e308]), r"'tau_ci' is 1e\+308, no number"),
        (changed("memory_bytes", 10**400), "'memory_bytes' is 1000.*, no number"),
        (
            changed("accepted_by_depth", [0.5] * 5000),
            "row 1: 'accepted_by_depth' has a length of 5000, at most 4000 is",
        ),
        (changed("drafter", "x" * 5000), "row 1: 'drafter' has a length of 5000, at most 4000 is read"),
        (besides_plain(tokens_per_second=5e-324), "seconds, steps and tokens of its rows contradict each other"),
        (besides_plain(tau=5e-324), "contradict each other: evaluate again"),
        ({**report().as_dict(), "device": {"count": "- / 2"}}, "device.count is '- / 2', no number of devices"),
        ({**report().as_dict(), "target": {"experts": [8]}}, r"target.experts is \[8\], not how many a layer has"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, told: Any, why: str) -> None:
    file = written(tmp_path, told)
    with pytest.raises(ValueError, match=why) as error:
        read_report(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_no_report_fills_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.report.reading.MOST_BYTES", 1 << 20)
    file = written(tmp_path, " " * (2 << 20))
    with pytest.raises(ValueError, match="it has more than 1 MiB"):
        read_report(file)


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


CURVES: dict[str, Any] = {
    "steps": [{"step": 1, "loss": None, "accuracy": [0.5]}],
    "tau": [{"step": 1, "tau": 2.0, "low": 1.5, "high": 2.5}],
}
NODES: dict[str, Any] = {"label": "t", "note": "", "steps": 9, "paths": [[0], [0, 1]], "accepted": [0.5, 0.2]}
ALONG: dict[str, Any] = {"rank": [[0.5, 0.1]], "n_alpha": [0.5], "at_every_token": [0.5]}
LIKE: dict[str, Any] = {"family": "chain", "tree": "chain-2", "tau": 2.0, "nodes": 2.0, "speedup": 1.5}
LOAD: dict[str, Any] = {"batch_size": 1, "own": None, "best": 1.5, "tree": "chain-2"}
OTHERS: dict[str, Any] = {"trees": [LIKE], "own": None, "best": LIKE, "loads": [LOAD], "stops_paying": {"best": None}}
ANSWER: dict[str, Any] = {
    "drafter": "eagle", "prompt": "p0", "question": "?", "temperature": 0, "steps": [[1, 1, 2]],
    "pieces": [{"text": "a", "source": "draft", "step": 1}],
}  # fmt: skip


def beside(**parts: Any) -> dict[str, Any]:
    """Return a report with these parts beside its rows, of the drafter eagle."""
    return {**report().as_dict(), **{part: {"eagle": each} for part, each in parts.items()}}


def test_what_stands_beside_the_rows_is_read(tmp_path: Path) -> None:
    whole = beside(training=CURVES, trees=NODES, teacher_forced=ALONG, other_trees=OTHERS) | {"answers": [ANSWER]}
    assert read_report(written(tmp_path, whole)) == whole
    older = beside(training={"steps": []}, trees={}, other_trees={"trees": [LIKE | {"speedup": None}]})
    older["answers"] = [ANSWER | {"pieces": [["a", "draft", 1]]}]
    assert read_report(written(tmp_path, older)) == older


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (beside(trees=3), "damaged trees, that of 'eagle': 3, expected a mapping; evaluate again"),
        (beside(trees=NODES | {"paths": "all"}), "damaged trees, that of 'eagle': paths is 'all'"),
        (beside(trees=NODES | {"accepted": [0.5, "much"]}), "damaged trees.*accepted is "),
        (beside(trees=NODES | {"accepted": [0.5]}), "damaged trees.*1 shares for 2 paths"),
        (beside(trees=NODES | {"paths": [[1], [0, 1]]}), "damaged trees.*paths are no tree"),
        (beside(trees=NODES | {"paths": [[0], [0]]}), "damaged trees.*paths are no tree"),
        (beside(trees=NODES | {"paths": [[], [0]]}), "damaged trees.*paths are no tree"),
        (beside(training=CURVES | {"steps": [{"step": 1}]}), "damaged training, that of 'eagle': steps is "),
        (beside(training=CURVES | {"steps": {"step": 1}}), "damaged training.*steps is "),
        (beside(training=CURVES | {"tau": [3]}), "damaged training.*tau is "),
        (beside(teacher_forced=ALONG | {"n_alpha": []}), "damaged teacher_forced.*another number of depths"),
        (beside(teacher_forced=ALONG | {"rank": [0.5]}), "damaged teacher_forced.*rank is "),
        (beside(other_trees=OTHERS | {"trees": [{"tree": "x"}]}), "damaged other_trees.*trees is "),
        (beside(other_trees=OTHERS | {"loads": []}), "damaged other_trees.*loads are empty"),
        (beside(other_trees={"trees": [LIKE], "loads": [LOAD]}), "damaged other_trees.*own is missing"),
        (beside(other_trees=OTHERS | {"stops_paying": {"own": 4}}), "damaged other_trees.*stops_paying has 'own'"),
        ({**report().as_dict(), "answers": [ANSWER | {"pieces": ["a"]}]}, "damaged answers.*a piece is 'a'"),
        ({**report().as_dict(), "answers": [ANSWER | {"steps": 3}]}, "damaged answers, that of 0: steps is 3"),
        ({**report().as_dict(), "settings": {"provenance": "May"}}, "has damaged provenance: evaluate again"),
        ({**report().as_dict(), "settings": {"gate": {"eagle": 3}}}, "has damaged gates: evaluate again"),
        ({**report().as_dict(), "settings": {"sampled_gate": [{}]}}, "has damaged gates of sampling: evaluate again"),
        (changed("drafter", 3), "row 1: drafter is 3, expected a text"),
        (changed("conditional_by_depth", []), "row 1: accepted_by_depth and conditional_by_depth differ in length"),
    ],
)
def test_what_is_damaged_beside_the_rows_is_refused_in_one_line(tmp_path: Path, told: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        read_report(written(tmp_path, told))
    assert "\n" not in str(error.value)


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
