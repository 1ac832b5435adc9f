"""The report: a red gate silences every speedup, what was written is read back, several are put side by side."""

import errno
import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eval.measures.losslessness import UNCHECKED, ChiSquareTest, Divergence, FailedChecks, Gate, SampledGate
from eval.measures.metrics import quantiles
from eval.measures.results import TEACHER_FORCED, ResultRow
from eval.report import render
from eval.report.render import library, terminal
from eval.report.write import Report, read_report, row_of
from tests.eval.stubs import ROW, markdown
from tests.refusals import refuses

GREEN = Gate(8, 7, 1, 0)
RED = Gate(8, 7, 0, 1, Divergence("p2", 5, 11, 12, 3.5))
SILENT = replace(ROW, speedup=None, speedup_ci=None, speedup_hf=None, lossless=RED.counts())
CONTRACT = (
    "drafter rule tree workload temperature batch_size steps tokens tau tau_ci tau_request_mean accepted_by_depth "
    "conditional_by_depth draft_tokens accepted_per_draft_token tokens_per_second speedup speedup_ci speedup_hf "
    "seconds latency_s memory_bytes lossless category prompts by_request prefill_s whole_tokens_per_second "
    "whole_speedup whole_speedup_ci tier request_rate ladder"
)
SPEEDUPS = ("1.77", "1.61", "1.93", "2.46")


def report(row: ResultRow = ROW, gate: Gate = GREEN) -> Report:
    return Report({"name": "tiny"}, {"name": "a CPU", "dtype": "float32"}, {"prompts": 8}, {"eagle": gate}, [row])


def shown(made: Report) -> str:
    """Return everything that a person reads."""
    text = io.StringIO()
    Console(file=text, width=200).print(terminal(made.as_dict()))
    return text.getvalue() + markdown(made)


def test_json_has_the_contracts_keys() -> None:
    told = json.loads(json.dumps(report().as_dict(), allow_nan=False))
    assert list(told) == ["schema", "target", "device", "settings", "rows"]
    assert told["schema"] == 1
    assert " ".join(told["rows"][0]) == CONTRACT
    assert list(told["rows"][0]["seconds"]) == ["draft", "verify", "other"]
    assert list(told["rows"][0]["lossless"]) == ["checked", "identical", "near_tie", "failed"]
    assert told["rows"][0]["tau_ci"] == [1.81, 2.24]
    gate = told["settings"]["gate"]["eagle"]
    assert {key: gate[key] for key in (*GREEN.counts(), "passed", "first")} == {
        **GREEN.counts(), "passed": True, "first": None,
    }  # fmt: skip


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    odd = replace(ROW, tau=math.nan, tau_ci=(math.nan, math.inf), tokens_per_second=math.inf, speedup=None)
    report(odd).write(tmp_path)
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    row = json.loads(text)["rows"][0]
    assert (row["tau"], row["tau_ci"], row["tokens_per_second"]) == (None, [None, None], None)
    assert "nan" not in (tmp_path / "report.md").read_text(encoding="utf-8").split("## How")[0]


def test_an_interval_of_few_prompts_is_warned_of_once() -> None:
    few = replace(ROW, prompts=4)
    many, alone = replace(ROW, prompts=8), replace(ROW, prompts=1, tau_ci=None, speedup_ci=None)
    unmeasured = replace(alone, tau=None, speedup=None)
    made = report(few)
    (warning,) = made.as_dict()["warnings"]
    assert warning.startswith("4 prompts of tiny are few for a bootstrap interval")
    assert f"**Compare with care:** {warning}." in markdown(made)
    for row in (many, unmeasured, replace(few, category="code")):
        assert report(row).warnings() == []
    assert report(alone).warnings() == ["1 prompts of tiny are few for a bootstrap interval: give prompts=8 or more"]


def test_a_lossy_gate_is_red_without_a_failure() -> None:
    gate = replace(GREEN, lossy=True)
    made = report(replace(SILENT, rule="typical (lossy)", lossless=GREEN.counts()), gate)
    assert not made.passed
    assert made.failures() == [
        "eagle: its rule is lossy by choice; 0 of 8 prompts differ from the reference; speedup withheld"
    ]
    assert "typical (lossy)" in shown(made)
    assert "withheld" in shown(made)


def test_a_green_report_shows_the_numbers() -> None:
    text = shown(report())
    assert all(number in text for number in (*SPEEDUPS, "2.03", "123.4", "0.75 0.28", "7/8, 1 near tie"))
    assert "| 10.00 | 20.00 | 1.00 | 2.0 | 0.50 |" in text  # draft, verify, other in ms a step, drafted a step
    assert report().passed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("gate", "reason"), [(RED, "prompt p2, position 5: token 12"), (UNCHECKED, "no prompt was")])
def test_a_red_gate_shows_no_speedup_and_says_why(gate: Gate, reason: str, temperature: float) -> None:
    made = report(replace(SILENT, temperature=temperature, lossless=UNCHECKED.counts()), gate)
    assert not made.passed
    assert not any(number in shown(made) for number in SPEEDUPS)
    assert "withheld" in shown(made)
    assert reason in shown(made)
    assert reason in made.failures()[0]
    row = made.as_dict()["rows"][0]
    assert (row["speedup"], row["speedup_ci"], row["speedup_hf"]) == (None, None, None)
    first = made.as_dict()["settings"]["gate"]["eagle"]["first"]
    assert (first is None) == (gate is UNCHECKED)


@pytest.mark.parametrize("kept", [{"speedup": 1.77}, {"speedup_ci": (1.6, 1.9)}, {"speedup_hf": 2.46}])
def test_a_speedup_beside_a_red_gate_cannot_be_built(kept: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="has a speedup and failed"):
        report(replace(SILENT, **kept), RED)
    with pytest.raises(AssertionError, match="has a speedup and failed"):
        report(replace(SILENT, lossless=UNCHECKED.counts(), **kept), RED)


def test_categories_are_those_of_the_clock_where_one_ran() -> None:
    whole, part = ROW, replace(ROW, category="math", workload="tiny/math")
    along = [
        replace(SILENT, tier=TEACHER_FORCED, category=row.category, workload=row.workload) for row in (whole, part)
    ]
    both = replace(report(), rows=[whole, part, *along])
    assert markdown(both).split("## By category")[1].split("##")[0].count("| eagle, tiny/math |") == 1
    alone = replace(report(), rows=along)
    assert "| eagle, tiny/math, teacher forced |" in markdown(alone).split("## By category")[1]
    assert "Where the time goes" in markdown(both)
    assert "Where the time goes" not in markdown(alone)


FILES = ["report.json", "report.md", "report.html"]


@pytest.mark.parametrize("file", FILES)
def test_a_full_disk_leaves_no_half_and_no_old_file_beside_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    report(replace(ROW, tau=9.0)).write(tmp_path)
    sync, old = os.fsync, (tmp_path / "report.json").read_bytes()

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"{file} cannot be written .No space left on device.: free space there, or"):
        report().write(tmp_path)
    there = FILES if file == FILES[0] else FILES[: FILES.index(file)]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(there)
    assert ((tmp_path / "report.json").read_bytes() == old) == (file == FILES[0])


def test_where_the_page_cannot_be_made_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report(replace(ROW, tau=9.0)).write(tmp_path)
    monkeypatch.setattr(render, "library", library.__wrapped__)
    monkeypatch.setattr(render, "BUNDLE", "import os, signal; os.kill(os.getpid(), signal.SIGTRAP)")  # as V8 ends
    report().write(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(FILES[:2])
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"][0]["tau"] == ROW.tau
    assert "2.03" in (tmp_path / "report.md").read_text(encoding="utf-8")
    (line,) = caplog.messages
    assert re.search(r"report\.html is not written, .*V8 ended with status -5; .*ulimit -v", line)
    assert "\n" not in line


def test_names_from_outside_are_no_markup_and_move_no_cursor(tmp_path: Path) -> None:
    evil = "[/bold][red]x\x1b[2J\r\u202e<script>y</script>![z](http://h/i.png)\n| a |"
    made = report(replace(ROW, drafter=evil, rule=evil, workload=evil), RED)
    made = replace(made, target={"name": evil}, device={"name": evil}, rows=[replace(made.rows[0], tree="\ud800")])
    screen, file = io.StringIO(), tmp_path / "report.md"
    Console(file=screen, width=2000, force_terminal=True).print(terminal(made.as_dict()))
    made.write(tmp_path)
    for text in (screen.getvalue(), markdown(made), file.read_text(encoding="utf-8")):
        assert "[/bold][red]x" in text
        assert not any(mark in text for mark in ("\x1b[2J", "\r", "\u202e"))
    assert "<script" not in markdown(made)
    assert "](" not in markdown(made)
    assert "\n| a |" not in markdown(made)
    assert {each.name for each in tmp_path.iterdir()} == {*FILES}


LAW = ChiSquareTest(1000, 2, 7, 6.0, 0.5, 0.2, 0.9, 1e-3, 0.0)
TIE = Divergence("p1", 3, 4, None, 1e-6)
TREE = {"label": "chain", "note": "", "paths": [[0]], "accepted": [0.5], "steps": 10}
GATES = {"eagle": Gate(8, 7, 1, 0, ties=(TIE,)), "medusa": RED, "typical": Gate(8, 8, 0, 0, lossy=True)}
SILENT_ROW = replace(ROW, speedup=None, speedup_ci=None, speedup_hf=None)
HOT = [
    SampledGate("eagle", 1.0, Gate(8, 8, 0, 0), LAW, ""),
    SampledGate("eagle", 0.5, RED, None, "no draws", (1, 4), 4),
    SampledGate("eagle", 0.7, Gate(8, 8, 0, 0), replace(LAW, control_p=0.5), ""),
]


def full_report() -> Report:
    """Return a report with green, red, lossy and sampled gates, and a row with all that a row may hold."""
    full = replace(ROW, prompts=8, by_request={"tau": quantiles([1.5, 2.0])})
    hot = [replace(SILENT_ROW, temperature=t) for t in (0.5, 0.7)]
    rows = [full, replace(SILENT_ROW, drafter="medusa"), replace(SILENT_ROW, drafter="typical"), *hot]
    return Report({"name": "tiny"}, {"name": "a CPU"}, {"prompts": 8}, GATES, rows, HOT, {"trees": {"eagle": TREE}})


def written(folder: Path, told: Any) -> Path:
    (folder / "report.json").write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")
    return folder / "report.json"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = full_report()
    found = read_report(written(tmp_path, made.as_dict()))
    assert found == made.as_dict()
    assert [row_of(row) for row in found["rows"]] == made.rows
    gates = {name: Gate.read(check) for name, check in found["settings"]["gate"].items()}
    assert gates == made.gates
    assert gates["eagle"].ties == (TIE,)
    assert [SampledGate.read(check) for check in found["settings"]["sampled_gate"]] == made.sampled
    failed = FailedChecks.of(found["settings"])
    assert [failed.result(row) for row in found["rows"]] == [False, True, True, True, True]


def test_a_report_of_earlier_days_lacks_what_rows_hold_since(tmp_path: Path) -> None:
    told = full_report().as_dict()
    told["rows"] = [{key: row[key] for key in list(row)[: list(row).index("category")]} for row in told["rows"]]
    told["settings"] = {"prompts": 8}
    file = written(tmp_path, told)
    first = row_of(read_report(file)["rows"][0])
    assert (first.tier, first.tau_ci) == ("live", ROW.tau_ci)


def changed(key: str, value: Any) -> dict[str, Any]:
    told = full_report().as_dict()
    told["rows"][1] = {**told["rows"][1], key: value}
    return told


def with_gate(gate: Any) -> dict[str, Any]:
    told = full_report().as_dict()
    told["settings"]["gate"]["eagle"] = gate
    return told


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (json.dumps(full_report().as_dict())[:-40], r"damaged \(.*; evaluate again"),
        ("[" * 100_000, "damaged"),
        ([1, 2], "is no report: give a report.json"),
        ({"schema": 1, "rows": {}}, "is no report"),
        ({**full_report().as_dict(), "schema": 2}, "has schema 2, this version reads 1: evaluate again"),
        ({**full_report().as_dict(), "device": None}, r"damaged in its device"),
        (changed("speedup", "fast"), r"row 1 \(speedup: .*fast.*\): evaluate again"),
        (changed("verdict", "good"), r"row 1 \(verdict is not a known key"),
        ({**full_report().as_dict(), "rows": [3]}, r"row 0 \(3 is no row"),
        (with_gate({"checked": 8}), "is damaged in its gates"),
        (with_gate(3), "is damaged in its gates"),
        (with_gate({**GATES["eagle"].counts(), "passed": True, "first": {"prompt": 1}}), "is damaged in its gates"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, told: Any, why: str) -> None:
    file = written(tmp_path, told)
    assert str(file) in refuses(why, read_report, file)


def test_a_missing_report_and_a_folder_are_named(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=why) as error:
            read_report(file)
        assert str(file) in str(error.value)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="damaged"):
        read_report(tmp_path / "bytes.json")
