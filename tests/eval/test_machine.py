"""The machine, the versions and the code are named, with or without git."""

import json
from pathlib import Path

import pytest
import torch

from eval.measures import machine

CPU = torch.device("cpu")


def test_the_device_is_described() -> None:
    facts = machine.device_facts(CPU, torch.float32)
    assert (facts["type"], facts["dtype"], facts["torch"]) == ("cpu", "float32", torch.__version__)
    assert all(facts[key] for key in ("name", "cores", "threads", "platform", "transformers"))
    json.dumps(facts)


def test_memory_is_in_bytes() -> None:
    held = torch.ones(2**24)  # 64 MiB
    assert machine.peak_memory(CPU) > held.nbytes
    assert machine.peak_memory(CPU) < 2**40


def test_what_linux_says_is_read_in_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"VmHWM": ["64 kB"], "model name": ["first", "second"]}
    monkeypatch.setattr(machine, "_from_linux", lambda _, key: said[key])
    assert (machine.peak_memory(CPU), machine.cpu_name()) == (65_536, "first")


@pytest.mark.parametrize(("status", "dirty"), [(" M a.py", True), ("", False)])
def test_a_changed_checkout_is_said_to_be(status: str, dirty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "git", lambda command, *_: {"rev-parse": "0123abcd", "status": status}[command])
    assert machine.revision() == {"revision": "0123abcd", "dirty": dirty}


def test_provenance_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["eval/run.py", "run=a b"])
    made = machine.provenance()
    assert set(made) == {"revision", "dirty", "command", "date"}
    assert made["command"] == "python eval/run.py 'run=a b'"


def test_without_a_checkout_there_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert (machine.provenance()["revision"], machine.provenance()["dirty"]) == (None, None)
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git either
    assert machine.provenance()["revision"] is None


def test_where_there_is_no_git_a_file_names_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "REVISION").write_text("0123abcd\n", encoding="utf-8")
    assert machine.revision() == {"revision": "0123abcd", "dirty": False}
