"""The driver of a device's minutes: what hangs or crashes costs one piece; and the whole of it, rehearsed on a CPU."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import carry, results, run, smollm2
from benchmarks.gpu.items import FIRST, ITEMS, named
from heads.common.resolvers import ROOT

MIB = 2**20
NAMES = list(named())
# A process that does what its first words say: "PIECE=hang", "PIECE=crash"; all other pieces are measured.
WORK = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from benchmarks.gpu import results, run
out, work, names = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:]
plans = dict(plan.split("=") for plan in sys.argv[4].split(","))
if "early" in plans:
    sys.exit(7)
(work / "facts.json").write_text("{}")
for name in names:
    run.write_status(work / "status.json", name)
    plan = plans.get(name, "")
    print(name, plan, flush=True)
    if plan == "crash":
        sys.exit(9)
    if plan:
        time.sleep(60 if plan == "hang" else float(plan))
    results.keep(out, name, {"seconds": 0.0, "rows": [["speed", 2.0, 1.0]]})
"""


def driver(folder: Path, plans: dict[str, str], items: list[int], **limits: float) -> run.Driver:
    """Return a driver whose process does as planned."""
    out, work = folder / "out", folder / "work"
    for each in (out, work):
        each.mkdir()
    words = ",".join(f"{name}={plan}" for name, plan in plans.items()) or "="
    fixed = {"pieces": None, "minutes": 1.0, "scale": 1.0, "toy": True}
    options = argparse.Namespace(out=out, work=work, items=items, **fixed | limits)
    return run.Driver(options, [sys.executable, "-c", WORK, str(ROOT), str(out), str(work), words])


def of_item(number: int) -> list[str]:
    return [name for name, (item, _) in named().items() if item == number]


def test_what_hangs_or_crashes_costs_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "POLL", 0.02)
    first, second, *rest = of_item(1)
    job = driver(tmp_path, {first: "hang", second: "crash"}, [1], scale=0.02)
    monkeypatch.setattr(run, "START", 40)
    monkeypatch.setattr(run, "ITEMS", tuple(item._replace(minutes=30) for item in ITEMS))
    job.run()
    entries = results.read(tmp_path / "out")
    assert entries[first]["failed"] == "took longer than its 1.4 s"
    assert entries[second]["failed"] == "its process ended with status 9"
    assert f"{second} crash" in entries[second]["log"]
    assert all(entries[name]["rows"] for name in rest)
    assert job.process is not None
    assert job.process.poll() is not None
    page = (tmp_path / "out" / "gpu.md").read_text()
    assert "| speed | 2 | 1 | **2.00** |" in page
    assert f"| **{first}** | failed: took longer" in page


def test_an_item_leaves_the_rest_when_its_minutes_are_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is no failure: the next call begins with it."""
    monkeypatch.setattr(run, "POLL", 0.02)
    first, second, *_ = of_item(1)
    monkeypatch.setattr(run, "ITEMS", tuple(item._replace(minutes=0.6) for item in ITEMS))
    driver(tmp_path, {second: "hang"}, [1, 3], scale=0.05).run()
    assert list(results.read(tmp_path / "out")) == [first, *of_item(3)]
    (tmp_path / "call").mkdir()
    began = time.monotonic()
    driver(tmp_path / "call", {second: "hang"}, [1, 3], minutes=0.03).run()  # nothing goes on behind the call's minutes
    assert time.monotonic() - began < 40
    assert list(results.read(tmp_path / "call" / "out")) == [first]


def test_a_process_that_cannot_begin_ends_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "POLL", 0.02)
    with pytest.raises(SystemExit, match="nothing can be measured: its process ended with status 7"):
        driver(tmp_path, {"early": "crash"}, [1]).run()
    assert results.read(tmp_path / "out") == {}


def test_a_piece_is_done_for_this_code_on_this_device() -> None:
    facts = {"revision": "a", "device": "x", "toy": False}
    assert results.is_done(facts | {"failed": "no"}, facts)
    assert not results.is_done(None, facts)
    assert not any(results.is_done(facts | {key: "other"}, facts) for key in facts)


def test_all_pieces_exist_and_fit_their_item() -> None:
    for name, (item, piece) in named().items():
        module, function = piece.call.split(".")
        source = (ROOT / "benchmarks" / "gpu" / f"{module}.py").read_text()
        assert f"\ndef {function}(bench: Bench" in source, name
        assert piece.seconds <= 60 * ITEMS[item - 1].minutes, name


def test_the_model_travels_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.write_bytes(bytes(range(255)))
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path)
    _, second = carry.cut(model, tmp_path)
    second.rename(tmp_path / "late")
    with pytest.raises(FileNotFoundError, match=r"1 of 2 parts .* --again"):
        smollm2.joined()
    (tmp_path / "late").rename(second)
    assert smollm2.joined().read_bytes() == model.read_bytes()


# A machine without network and without the packages that the image lacks.
BARE = """
import socket
from importlib.machinery import PathFinder
LACKING, FIND, CONNECT = set({lacking!r}), PathFinder.find_spec, socket.socket.connect
def find(name, path=None, target=None):
    return None if name.partition(".")[0] in LACKING else FIND(name, path, target)
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"NO NETWORK: {{address}}")
    CONNECT(self, address)
PathFinder.find_spec, socket.socket.connect = find, connect
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout as it travels: without .git, with the carried folder and REVISION."""
    folder = tmp_path_factory.mktemp("travels") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    carry.carry(folder / "carried")
    (folder / "REVISION").write_text("rehearsed\n")
    return folder


@pytest.fixture(scope="module")
def bare(tree: Path) -> dict[str, str]:
    """Return the environment of such a machine: of its own there is no command but timeout."""
    there = {*carry.closure([*carry.PROVIDED, *carry.CARRIED]), "headstart"}
    packages = packages_distributions().items()
    lacking = {name for name, owners in packages if not there & {carry.canonicalize_name(owner) for owner in owners}}
    assert {"datasets", "wandb", "vl_convert"} <= lacking
    place, commands = tree.parent / "bare", tree.parent / "bin"
    for folder in (place, commands):
        folder.mkdir()
    (place / "sitecustomize.py").write_text(BARE.format(lacking=sorted(lacking)))
    (commands / "timeout").symlink_to(str(shutil.which("timeout")))
    return {"PATH": str(commands), "PYTHONPATH": str(place), "HOME": str(tree.parent), "OMP_NUM_THREADS": "1"}


# Of a device machine's Python, torch and transformers where the variable names an interpreter that has them.
PYTHON = os.environ.get("HEADSTART_DEVICE_PYTHON", sys.executable)


@pytest.mark.slow
def test_the_rehearsal_measures_every_piece_within_its_share(tree: Path, bare: dict[str, str], tmp_path: Path) -> None:
    def call(out: Path, *words: str) -> dict[str, Any]:
        where = ["--out", str(out), "--work", str(tmp_path / "work"), "--minutes", "30"]
        command = [PYTHON, "benchmarks/gpu/run.py", "--toy", *where, *words]
        done = subprocess.run(command, cwd=tree, env=bare, capture_output=True, text=True, check=False)
        log = (out / "log.txt").read_text()
        assert done.returncode == 0, done.stdout + done.stderr + log[-6000:]
        assert "NO NETWORK" not in log
        return results.read(out)

    assert sum(file.stat().st_size for file in (tree / "carried").rglob("*") if file.is_file()) < 20 * MIB
    assert sum(file.stat().st_size for file in tree.rglob("*") if file.is_file()) < 64 * MIB
    entries = call(tmp_path / "out")
    assert set(entries) == set(NAMES)
    for number, item in enumerate(ITEMS, 1):
        mine = [entries[name] for name in of_item(number)]
        assert sum(entry["seconds"] for entry in mine) < 60 * item.minutes
        assert all(entry["rows"] for entry in mine)
        assert any(estimate is not None for entry in mine for *_, estimate in entry["rows"]), (
            f"{item.title}: no estimate"
        )
        assert not [row for entry in mine for row in entry["rows"] if row[0].startswith("failed: ")]
    assert {entry["revision"] for entry in entries.values()} == {"rehearsed"}
    files = list((tmp_path / "out").iterdir())
    profiled = ("tree_1_eager", "tree_1_captured", "training", "training_compiled")
    profiled += tuple(f"{kind}_{size}_compiled" for kind, size in FIRST)
    traces = {f"trace_{name}.json.gz" for name in profiled}
    assert {file.name for file in files} == {"gpu.json", "gpu.md", "log.txt", *traces}
    assert all(file.stat().st_size < 16 * MIB for file in files)
    assert (tmp_path / "out" / "gpu.json").stat().st_size < MIB
    assert call(tmp_path / "next", "--earlier", str(tmp_path / "out")) == entries, "nothing is measured twice"
