"""Reports side by side: all that their rows hold, red gates stay red, and what forbids to compare them is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.config import eval_config
from eval.measures.losslessness import Gate, SampledGate
from eval.report.sections import sentence, why
from eval.report.write import Report, folder_of, named, shared, side_by_side
from tests.eval.small import run_main
from tests.eval.stubs import ROW, markdown
from tests.eval.test_page import Reader, lines
from tests.eval.test_page import report as page_report
from tests.eval.test_paying import EAGLE, PLAIN
from tests.eval.test_reading import RED, SILENT

TOLD = {"name": "tiny", "fingerprint": "33b80c3e0db7aa", "path": "/models/tiny"}
DEVICE = {"name": "a CPU", "type": "cpu", "dtype": "float32", "load": [0.5, 1.0]}
SETTINGS = {"prompts": 8, "max_new_tokens": 128, "gate_tv": 0.02, "provenance": {"revision": "c0ffee", "date": "May"}}


def make(folder: Path, name: str, report: Report) -> str:
    report.write(folder / name)
    return str(folder / name / "report.json")


def plain_and(*rows: Any, gates: dict[str, Gate], **changes: Any) -> Report:
    plain = replace(
        ROW, drafter="plain", tau=1.0, tau_ci=None, speedup=1.0, speedup_ci=(1.0, 1.0), accepted_by_depth=[]
    )
    given = {"target": TOLD, "device": DEVICE, "settings": SETTINGS} | changes
    return Report(**given, gates=gates, rows=[replace(plain, conditional_by_depth=[]), *rows])


TREE = {"label": "chain", "note": "", "paths": [[0], [0, 0]], "accepted": [0.6, 0.3], "steps": 10}


def test_a_reports_own_warnings_stay(tmp_path: Path) -> None:
    green = {"eagle": Gate(8, 8, 0, 0)}
    short = plain_and(ROW, gates=green, extras={"warnings": ["4 of 16 prompts"]})
    paths = [make(tmp_path, "short", short), make(tmp_path, "whole", plain_and(ROW, gates=green))]
    warned = side_by_side(paths).extras["warnings"]
    assert "short: 4 of 16 prompts" in warned
    assert not any("another version" in line for line in warned)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Return two reports, of which the second has a red gate and was measured elsewhere."""
    first = plain_and(ROW, gates={"eagle": Gate(8, 7, 1, 0)})
    hot = SampledGate("hydra", 1.0, RED, None, "no draws")
    second = plain_and(
        replace(SILENT, lossless=RED.counts()),
        replace(ROW, drafter="medusa", batch_size=4, tokens_per_second=99.5),
        replace(SILENT, drafter="hydra", temperature=1.0),
        gates={"eagle": RED, "medusa x4": Gate(8, 8, 0, 0)},
        sampled=[hot],
        device={**DEVICE, "name": "a GPU", "dtype": "bfloat16", "load": [9.0, 9.0]},
        settings={**SETTINGS, "max_new_tokens": 64, "gate_tv": 0.1, "turns": "all"},
        extras={
            "trees": {
                "medusa": {"label": "chain", "note": "", "paths": [[0], [0, 0]], "accepted": [0.6, 0.3], "steps": 10}
            }
        },
    )
    return [make(tmp_path, "one", first), make(tmp_path, "two", second)]


def test_every_row_is_kept_as_it_was_and_names_its_report(two: list[str]) -> None:
    made = side_by_side(two).as_dict()
    before = [
        {**row, "report": name}
        for name, file in zip(("one", "two"), two, strict=True)
        for row in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
    ]
    assert made["rows"] == before
    assert any(row["ladder"] for row in before)
    assert made["schema"] == 1
    assert {"reports", "warnings", "trees"} <= made.keys()


def test_a_red_gate_stays_red_in_its_own_report_alone(two: list[str]) -> None:
    made = side_by_side(two)
    red = {(row.report, row.drafter, row.temperature) for row in made.rows if made.failed(row)}
    assert red == {("two", "eagle", 0.0), ("two", "hydra", 1.0)}
    assert not made.passed
    assert [line.split(":")[0] for line in made.failures()] == ["eagle of two", "hydra of two at T=1"]
    text = markdown(made)
    (mine,) = (line for line in text.splitlines() if line.startswith("| eagle of one | 0 | chain-2 | point mass"))
    (other,) = (line for line in text.splitlines() if line.startswith("| eagle of two | 0 | chain-2 | point mass"))
    assert "1.77 [1.61, 1.93]" in mine
    assert "withheld" in other
    assert "| medusa x4 of two |" in text


def test_differences_that_forbid_a_comparison_are_told(two: list[str]) -> None:
    made = side_by_side(two)
    own, device, settings, work = made.extras["warnings"]
    assert "speedups are each over the baseline of their own session" in own
    assert device == (
        "they differ in the device: name (a CPU in one; a GPU in two), dtype (float32 in one; bfloat16 in two)"
    )
    assert settings == (
        "they differ in the settings: max_new_tokens (128 in one; 64 in two), turns (unknown in one; all in two)"
    )
    assert work == ("they differ in the work: temperature (0 in one; 0, 1 in two), batch_size (1 in one; 1, 4 in two)")
    assert made.device["dtype"] == "float32 / bfloat16"
    assert made.target == TOLD
    text = markdown(made)
    assert text.startswith("# tiny on a CPU / a GPU, float32 / bfloat16\n")
    assert all(f"**Compare with care:** {warning}." in text for warning in made.extras["warnings"])
    assert "| two | tiny | a GPU | bfloat16 | 64 | 8 |" in text


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("target", {"fingerprint": "4a5f90"}, "the target: fingerprint (33b80c3e0db7 in one; 4a5f90 in two)"),
        ("settings", {"prompts": 16}, "the settings: prompts (8 in one; 16 in two)"),
        ("settings", {"provenance": {"revision": "beef"}}, "the code: revision (c0ffee in one; beef in two)"),
        ("device", {"load": [3.0, 2.0]}, None),
        ("target", {"path": "/elsewhere"}, None),
    ],
)
def test_each_difference_is_found(tmp_path: Path, part: str, changes: dict[str, Any], told: str | None) -> None:
    given = {"target": TOLD, "device": DEVICE, "settings": SETTINGS}
    reports = [given, {**given, part: {**given[part], **changes}}]
    made = [plain_and(ROW, gates={"eagle": Gate(8, 8, 0, 0)}, **each) for each in reports]
    files = [make(tmp_path, name, each) for name, each in zip(("one", "two"), made, strict=True)]
    assert side_by_side(files).extras["warnings"][1:] == ([] if told is None else [f"they differ in {told}"])


def test_a_workload_that_differs_is_told(tmp_path: Path) -> None:
    rows = [replace(ROW, drafter="eagle", workload=name) for name in ("tiny", "code")]
    files = [
        make(tmp_path, row.workload, Report(TOLD, DEVICE, SETTINGS, {"eagle": Gate(8, 8, 0, 0)}, [row])) for row in rows
    ]
    (line,) = side_by_side(files).extras["warnings"][1:]
    assert line == "they differ in the work: workload (tiny in tiny; code in code)"


def test_the_page_tells_the_reports_apart(tmp_path: Path, two: list[str]) -> None:
    third = make(tmp_path, "three", page_report())
    made = side_by_side([*two, third])
    made.write(tmp_path / "all")
    read = Reader((tmp_path / "all" / "report.html").read_text(encoding="utf-8"))
    told = json.loads((tmp_path / "all" / "report.json").read_text(encoding="utf-8"))
    assert [line["name"] for line in lines(read, "reports")] == ["one", "two", "three"]
    assert [line["device"] for line in lines(read, "reports")] == ["a CPU", "a GPU", "a CPU"]
    results = lines(read, "results")
    assert len(results) == len(told["rows"]) == 2 + 4 + 12
    assert len({(line["drafter"], line["T"]) for line in results}) == len(results)
    assert {line["drafter"]: line["speedup [95%]"] for line in results}["eagle of one"] == "1.77 [1.61, 1.93]"
    assert sum(line["speedup [95%]"] == "withheld" for line in results) == 2
    text = (tmp_path / "all" / "report.html").read_text(encoding="utf-8")
    assert text.count("Compare with care:") == len(told["warnings"])
    assert "img" not in read.elements
    assert {each["drafter"] for each in told["answers"]} == {
        f"{name} of three" for name in page_report().extras["trees"]
    }
    assert "medusa of two" in told["trees"]
    assert ["medusa of two", "chain", "1", "1", "0.600"] in [list(line.values()) for line in lines(read, "tree")]


def test_each_rows_numbers_are_of_its_own_target_and_device(tmp_path: Path) -> None:
    files = []
    for name, experts in (("one", None), ("two", [8, 2])):
        target = {"name": f"target-{name}", "experts": experts}
        files.append(make(tmp_path, name, Report(target, DEVICE, SETTINGS, {}, [*PLAIN, *EAGLE])))
    made = side_by_side(files).as_dict()
    assert "target-one writes" in sentence(made), "the first of two equally fast"
    assert [" of two over" in line for line in why(made) if "8 experts a layer" in line] == [True]


def test_names_are_short_where_they_tell_reports_apart(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a/report.json", "b/report.json", "mine.json")]
    assert list(named(files)) == ["a", "b", "mine"]
    assert folder_of(files) == Path("outputs/compare-a-b-mine")
    assert list(named(["x/a/report.json", "y/a/report.json"])) == ["x/a/report.json", "y/a/report.json"]
    assert folder_of(["x/a/report.json", "y/a/report.json"]) == Path("outputs/compare-x-a-report.json-y-a-report.json")


def test_what_all_share_stays_as_it_is() -> None:
    found = shared(
        [{"a": 1, "b": {"c": 2, "d": [1]}, "e": None}, {"a": 1, "b": {"c": 3, "d": [1]}, "f": True}, {"a": 1}]
    )
    assert found == {"a": 1, "b": {"c": "2 / 3", "d": [1]}, "e": None, "f": "- / True"}


def test_the_command_measures_nothing_and_says_what_differs(
    two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(f"compare=[{two[0]},{two[1]}]") == 1  # a gate is red
    printed = capsys.readouterr()
    assert "NOT LOSSLESS: eagle of two: " in printed.err
    assert "compare with care: they differ in the device: " in printed.err
    assert "eagle of one" in printed.out
    assert {file.name for file in Path("outputs/compare-one-two").iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
    }
    third = make(tmp_path, "three", plain_and(ROW, gates={"eagle": Gate(8, 8, 0, 0)}))
    assert run_main(f"compare=[{two[0]},{third}]", "out=there") == 0
    assert (tmp_path / "there" / "report.html").is_file()
    capsys.readouterr()
    again = Path("outputs/compare-one-two/report.json")
    assert run_main(f"compare=[{again},{third}]", "out=again") == 2
    assert "several side by side already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare=[ONE,none.json]"], "error: report none.json cannot be read (No such file or directory)"),
        (["compare=[ONE,bad.json]"], "error: report bad.json is damaged ("),
        (["compare=[ONE,other.json]"], "error: other.json is no report: "),
        (["compare=[ONE,new.json]"], "error: report new.json has schema 2, this version reads 1: evaluate again"),
        (["compare=[ONE,outputs/tiny-eagle]"], "error: compare names the report "),
        (["compare=[ONE,TWO]", "run=outputs/tiny-eagle"], "error: compare names the report "),
        (["compare=[ONE]"], "give two reports or more"),
        (["compare=[ONE,ONE]"], "twice: leave one out"),
        (["compare=[ONE,TWO]", "tune=true"], "error: tune=true takes the head of one run"),
        (
            ["run=outputs/tiny-eagle", "tune=true", "engine.compile_drafts=true"],
            "error: tune=true times the parts of drafts",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    two: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"schema": 1, "rows"', encoding="utf-8")
    Path("other.json").write_text('{"loss": 1}', encoding="utf-8")
    Path("new.json").write_text('{"schema": 2, "rows": []}', encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    given = [word.replace("ONE", two[0]).replace("TWO", two[1]) for word in words]
    assert run_main(*given, "out=there") == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_are_still_measured_together() -> None:
    config = eval_config(run="a", compare=["b", "c.json.d"])
    assert config.reports() == []
