"""The command that extracts features: what it says first, what it refuses, and what it leaves."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra.core.global_hydra import GlobalHydra

from data.features import extraction
from data.features.store import FeatureStore
from data.run import main
from tests.data import stores
from tests.data.test_store import contents
from tests.train import jobs

Call = Callable[..., None]


class Job(NamedTuple):
    """A toy target's folder, and the overrides that name it and its data."""

    folder: Path
    overrides: list[str]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    made = [each for each in jobs.make(folder) if each.startswith(("model.", "data."))]
    return Job(folder, [*made, "head=eagle3", "head.feature_layers=[0,1,2]", "features.dtype=fp32", "data.limit=12"])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, job: Job) -> Call:
    """Return a function that runs the command with overrides."""

    def run(*overrides: str) -> None:
        monkeypatch.setattr(sys, "argv", ["run.py", *job.overrides, *overrides])
        GlobalHydra.instance().clear()
        main()

    return run


def error_of(call: Call, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    with pytest.raises(SystemExit) as caught:
        call(*overrides)
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


def test_it_estimates_extracts_and_goes_on(call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "store"
    words = ["features=stored", f"features.path={folder}", "features.shard_mb=1"]
    call(*words, "head.draft_vocab=20")  # a pruned vocabulary has the same layers
    said = capsys.readouterr().out
    store = FeatureStore(folder)
    assert store.spec.layers == (0, 1, 2)
    assert store.missing() == []
    assert f"{store.spec.rows} sequences to extract: 0.00" in said
    assert f"{folder}: {store.spec.shards} shards written by process 0" in said
    before = contents(folder)
    call(*words)
    assert f"{folder}: 0 shards written" in capsys.readouterr().out
    assert contents(folder) == before
    (folder / "index" / "000000.json").unlink()
    call(*words, "layers=[2]")  # a store of more layers is gone on with as it is
    assert contents(folder) == before
    call("features=stored", f"features.path={tmp_path / 'none'}", "layers=[]")
    assert FeatureStore(tmp_path / "none").spec.layers == ()


def test_what_does_not_fit_is_refused_before_the_first_byte(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    words = ["features=stored", f"features.path={folder}"]
    usage: Any = extraction.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda _: usage)
    assert "and the disk has 0.000 GB free" in error_of(call, capsys, *words)
    assert not folder.exists()


def test_only_the_rows_that_a_store_lacks_are_left(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path, stores.spec())
    extraction.extract(store, stores.ready, 2, 0, 2)
    for entry in sorted((tmp_path / "index").glob("*.json"))[3:]:
        entry.unlink()
    fewer = replace(store.spec, layers=store.spec.layers[:1])  # the store goes on with its own
    assert extraction.sequences_left(tmp_path, fewer) == (store.spec, 11 - 6)


def test_a_layer_that_the_target_has_not_is_refused(
    call: Call, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = error_of(call, capsys, "features=stored", "features.path=x", "layers=[3]")
    assert "layers is [3]: give different layers from 0 to 2" in said
    assert not list(tmp_path.iterdir())
