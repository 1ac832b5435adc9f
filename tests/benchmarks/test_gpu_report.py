"""What the accelerator's measurements share: their records, merged part by part, and the page that shows them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import report, run
from benchmarks.gpu.common import ROOT, Asked, Figure, Table, merged, portable, record
from benchmarks.gpu.smoke import counted, wrong

SPEC = {
    "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
    "data": {"values": [{"x": 1, "y": 2}]},
    "mark": "point",
    "encoding": {"x": {"field": "x", "type": "quantitative"}},
}


def asked(out: Path, *, toy: bool = True) -> Asked:
    return Asked(torch.device("cpu"), toy, out)


def table(caption: str, cell: str) -> Table:
    return Table(caption, ["what"], [[cell]])


def test_parts_of_one_commit_are_one_record(tmp_path: Path) -> None:
    record(asked(tmp_path), "training", {"steps": 1, "fits": 1}, [table("A", "old"), table("B", "old")])
    record(asked(tmp_path), "training", {"steps": 2}, [table("A", "new")], [Figure("f", "c", SPEC)])
    told = json.loads((tmp_path / "training.json").read_text())
    assert told["numbers"] == {"steps": 2, "fits": 1}
    assert [(each["caption"], each["rows"]) for each in told["tables"]] == [("A", [["new"]]), ("B", [["old"]])]
    assert [each["name"] for each in told["figures"]] == ["f"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["training.json"]


@pytest.mark.parametrize("part", [{"provenance": {"revision": "b", "dirty": False}}, {"toy": True}])
def test_a_record_of_something_else_is_left_behind(part: dict[str, Any]) -> None:
    now = {"provenance": {"revision": "a", "dirty": False}, "toy": False, "device": {"name": "x"}, "numbers": {"n": 1}}
    assert merged({**now, "numbers": {"m": 1}, **part}, now) == now


def test_a_command_holds_no_folder_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "benchmarks" / "gpu" / "training.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path), "--steps", "2"])
    record(asked(tmp_path), "training", {}, [])
    said = json.loads((tmp_path / "training.json").read_text())["provenance"]["command"]
    assert said == f"python benchmarks/gpu/training.py --out {tmp_path.name.upper()} --steps 2"
    assert portable("outputs/gpu") == "outputs/gpu"


def test_the_page_keeps_what_stands_above_and_shows_every_record(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n\nWords.\n")
    for cell in ("first", "second"):
        record(asked(tmp_path), "training", {}, [table("A | b", cell)], [Figure("f", "what it shows", SPEC)])
        record(asked(tmp_path), "smoke", {}, [table("Tests", cell)])
        report.write(tmp_path, page)
    text = page.read_text()
    assert text.startswith(f"# Mine\n\nWords.\n\n{report.LINE}\n\n## Tests and the losslessness gate\n")
    assert text.index("| second |") < text.index("## Training at the shape of an 8B")
    assert "first" not in text
    assert "Toy size: no figure means anything." in text
    assert "![what it shows](gpu_f.png)" in text
    assert (tmp_path / "gpu_f.png").read_bytes().startswith(b"\x89PNG")


def test_toy_figures_do_not_go_to_the_real_page(tmp_path: Path) -> None:
    before = report.PAGE.read_bytes()
    with pytest.raises(ValueError, match="holds no record"):
        report.write(tmp_path, report.PAGE)
    record(asked(tmp_path), "training", {}, [])
    with pytest.raises(ValueError, match=r"training is of toy size, and gpu\.md shows real ones; give --page FILE"):
        report.write(tmp_path, report.PAGE)
    assert report.PAGE.read_bytes() == before


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("5 passed, 2 skipped in 3.00s", (5, 0, 2)),
        ("1 failed, 5 passed, 1 error in 3.00s", (5, 2, 0)),
        ("no tests ran in 0.01s", (0, 0, 0)),
    ],
)
def test_tests_are_counted_by_the_last_line(last: str, found: tuple[int, int, int]) -> None:
    assert tuple(counted(f"12 passed somewhere\n{last}\n").values()) == found


def test_one_command_runs_every_script_and_names_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def start(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(words)
        return subprocess.CompletedProcess(words, int(Path(words[1]).stem == "heads"))

    record(asked(tmp_path), "training", {}, [table("A", "cell")])
    monkeypatch.setattr(run.subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--toy", "--text", "texts"])
    assert run.main() == 1
    assert [Path(words[1]).stem for words in ran] == run.USUAL
    assert all(Path(words[1]).is_file() for words in ran)
    assert ran[run.USUAL.index("target")][-2:] == ["--text", "texts"]
    assert capsys.readouterr().err == "failed: heads\n"
    assert "| cell |" in (tmp_path / "gpu.md").read_text()


def test_what_failed_is_named() -> None:
    suite, gate = {"passed": 9, "failed": 0, "status": 0}, {"tokens": 48, "asked": 40, "failed": 0}
    good = {"tests": {"a": suite}, "gate: eagle, float32": gate}
    assert wrong(good) == []
    for part in ({"status": 1}, {"passed": 0}):
        assert wrong(good | {"tests": {"a": suite | part}}) == ["a"]
    for part in ({"failed": 1}, {"tokens": 39}):
        assert wrong({"gate: eagle, float32": gate | part}) == ["gate: eagle, float32"]
