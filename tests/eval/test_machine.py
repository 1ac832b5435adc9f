"""The machine, the versions and the code are named, with or without git."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from data.text.filters import Counts
from data.text.prompts import TrainingData
from eval.measures import machine
from heads.common.resolvers import ROOT
from tests import toys
from train.build import provenance as train_provenance

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
    said = {"cpu MHz": ["1000.0", "3000.0"], "VmHWM": ["64 kB"], "model name": ["first", "second"]}
    monkeypatch.setattr(machine, "_from_linux", lambda _, key: said[key])
    assert (machine.clock_mhz(CPU), machine.peak_memory(CPU), machine.cpu_name()) == (2000.0, 65_536, "first")


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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell it otherwise")
def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    large = 2**30
    held = bytearray(b"x") * large
    code = "import torch; from eval.measures.machine import peak_memory; print(peak_memory(torch.device('cpu')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 2**26 < int(done.stdout) < len(held) <= machine.peak_memory(CPU)


def test_where_there_is_no_git_a_file_names_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.revision() == {"revision": None, "dirty": None}
    (tmp_path / "REVISION").write_text("0123abcd\n", encoding="utf-8")
    assert machine.revision() == {"revision": "0123abcd", "dirty": False}


def test_a_training_run_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", absent)
    data = TrainingData([], [], Counts())
    assert train_provenance(1, "none", data, toys.target().tokenizer)["git_revision"] is None


def test_a_clock_that_the_driver_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        """The errors of the driver's library, which are no RuntimeError."""

    monkeypatch.setattr(torch.cuda, "clock_rate", Mock(side_effect=NVMLError("Not Supported")))
    assert machine.clock_mhz(torch.device("cuda")) is None
