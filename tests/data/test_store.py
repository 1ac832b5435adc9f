"""The store's files: written whole, read checked, shared by writers, and every fault named."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from data.features.extraction import extract
from data.features.store import (
    INDEX,
    META,
    SHARDS,
    WAITING,
    DamagedError,
    FeatureStore,
    StoreSpec,
    WriteQueue,
    serialized,
)
from heads.common import files
from heads.common.files import claim, read_checked, write_checked
from tests.data import stores

ROOT = Path(__file__).resolve().parents[2]


def filled(folder: Path, spec: StoreSpec = stores.SPEC) -> FeatureStore:
    store = FeatureStore.create(folder, spec)
    extract(store, stores.ready, 2, 0, 1)
    return FeatureStore(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def flip(file: Path, at: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    file.write_bytes(bytes(data))


def test_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.missing() == []
    for row in range(stores.SPEC.rows):
        found, wanted = store.read(row), stores.made([row])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    tensors = sum(part.nbytes for part in stores.made([0]).values())
    assert tensors == stores.SPEC.row_bytes


def test_a_reader_sees_what_was_finished_meanwhile(tmp_path: Path) -> None:
    writer = FeatureStore.create(tmp_path, stores.SPEC)
    readers = [FeatureStore(tmp_path), FeatureStore(tmp_path)]
    assert not readers[0].has(2)
    writer.write("000001", [2, 3], stores.made([2, 3]))
    for reader in readers:
        reader.refresh()
        assert [row for row in range(11) if reader.has(row)] == [2, 3]
        assert torch.equal(reader.read(3)["last"], stores.made([3])["last"])


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("target", "another", "fingerprint of the target's weights"),
        ("quantize", "int8", "quantisation"),
        ("data", "other rows", "fingerprint of the packed sequences"),
        ("length", 7, "data.length"),
        ("width", 9, "by the width"),
        ("vocab", 41, "vocabulary"),
        ("rows", 12, "number of packed sequences"),
        ("layers", (0, 1), "feature layers"),
        ("dtype", "fp8", "features.dtype"),
    ],
)
def test_a_foreign_store_is_named_and_left_alone(tmp_path: Path, key: str, value: Any, named: str) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=named) as error:
        FeatureStore.create(tmp_path, stores.spec(**{key: value}))
    assert str(tmp_path) in str(error.value)
    assert contents(tmp_path) == before


def test_a_store_of_more_layers_serves_fewer_in_any_order(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for layers in ((2,), (2, 0)):
        store.check(stores.spec(layers=layers), ("layers",))
    with pytest.raises(ValueError, match="feature layers"):
        store.check(stores.spec(layers=(1,)), ("layers",))


@pytest.mark.parametrize("at", [0.3, 0.6, 0.9, 1.0])
def test_a_flipped_bit_in_a_shard_is_named(tmp_path: Path, at: float) -> None:
    store = filled(tmp_path)
    flip(tmp_path / SHARDS / "000002.safetensors", at)
    said = {}
    for row in range(store.spec.rows):
        try:
            store.read(row)
        except DamagedError as error:
            said[row] = str(error)
    assert said
    assert set(said) <= {4, 5}
    assert all("000002.safetensors" in each and "on_missing=compute" in each for each in said.values())


def test_a_damaged_shard_is_extracted_again_once_its_entry_is_gone(tmp_path: Path) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    flip(tmp_path / SHARDS / "000002.safetensors", 0.9)
    (tmp_path / INDEX / "000002.json").unlink()
    filled(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9])
def test_a_flipped_bit_in_an_entry_is_named_and_mended(tmp_path: Path, at: float) -> None:
    filled(tmp_path)
    before = contents(tmp_path)
    flip(tmp_path / INDEX / "000001.json", at)
    store = FeatureStore(tmp_path)
    assert store.missing() == [2, 3]
    assert "000001.json" in store.damaged["000001"]
    filled(tmp_path)
    assert contents(tmp_path) == before
    store.refresh()
    assert store.damaged == {}


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9])
def test_a_flipped_bit_in_the_meta_file_is_named(tmp_path: Path, at: float) -> None:
    filled(tmp_path)
    flip(tmp_path / META, at)
    with pytest.raises(ValueError, match=r"meta\.json: damaged.*put a copy in its place"):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("fault", ["gone", "short"])
def test_a_shard_that_is_not_whole_is_named_and_written_again(tmp_path: Path, fault: str) -> None:
    filled(tmp_path)
    before, shard = contents(tmp_path), tmp_path / SHARDS / "000003.safetensors"
    if fault == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-5])
    store = FeatureStore(tmp_path)
    assert store.missing() == [6, 7]
    assert str(shard) in store.damaged["000003"]
    filled(tmp_path)
    assert contents(tmp_path) == before


def test_a_shard_that_vanishes_while_it_is_read_is_named(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (tmp_path / SHARDS / "000000.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"000000\.safetensors: row 1 cannot be read"):
        store.read(1)


def test_no_store_and_another_format_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no feature store; extract one: python data/run\.py"):
        FeatureStore(tmp_path / "none")
    filled(tmp_path)
    meta = read_checked(tmp_path / META)
    for number in (0, 3, "1", True, [1], None):
        write_checked(tmp_path / META, {**meta, "format": number})
        with pytest.raises(ValueError, match="another format"):
            FeatureStore(tmp_path)


def test_a_claim_is_exclusive_and_freed(tmp_path: Path) -> None:
    with claim(tmp_path / "x", wait=False) as mine, claim(tmp_path / "x", wait=False) as yours:
        assert (mine, yours) == (True, False)
    with claim(tmp_path / "x", wait=False) as again:
        assert again


def test_a_full_disk_costs_the_unfinished_shard_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    filled(whole)
    folder = tmp_path / "store"
    store = FeatureStore.create(folder, stores.SPEC)
    sync, left = os.fsync, 9

    def full(number: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ValueError, match=r"shard 000002 could not be written \(No space left on device\).*goes on"):
        extract(store, stores.ready, 2, 0, 1)
    monkeypatch.undo()
    assert not list(folder.rglob(".partial-*"))
    assert FeatureStore(folder).missing() == list(range(4, 11))
    filled(folder)
    assert contents(folder) == contents(whole)


SMALL_DISK = """
import sys
sys.path[0] = {root!r}
from pathlib import Path
from data.features.extraction import extract
from data.features.store import FeatureStore
from tests.data import stores
spec = stores.spec(rows=400, shard_rows=50)
store = FeatureStore.create(Path({folder!r}), spec)
try:
    extract(store, stores.ready, 50, 0, 1)
except ValueError as error:
    print("said:", error)
print("whole:", sum(len(FeatureStore(store.folder).read(row)) == 2 for row in range(400) if store.has(row)))
"""


@pytest.mark.slow
def test_a_small_file_system_that_fills_up(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    mount = [str(unshare), "-rm", "sh", "-c", f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$@"', "sh"]
    if unshare is None or subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = SMALL_DISK.format(root=str(ROOT), folder=str(tmp_path / "store"))
    done = subprocess.run([*mount, sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "No space left on device" in done.stdout, done.stderr
    whole = int(done.stdout.split("\nwhole:")[1])
    assert 0 < whole < 400
    assert whole % 50 == 0


def test_a_shard_has_the_bytes_that_safetensors_writes() -> None:
    groups = [{"last": torch.randn(n, 6, 3).to(torch.float8_e4m3fn), "last_scale": torch.randn(n, 6)} for n in (1, 2)]
    whole = {name: torch.cat([group[name] for group in groups]) for name in groups[0]}
    assert b"".join(serialized(tuple(groups))) == save(whole)


def test_few_shards_wait_to_be_written() -> None:
    """So that a disk slower than the target does not fill the memory."""
    free = threading.Event()

    def slow() -> None:
        free.wait()

    with WriteQueue() as queue:
        for _ in range(WAITING):
            queue.put(slow)
        threading.Timer(0.1, free.set).start()
        queue.put(slow)
        assert free.is_set()


def test_an_entry_is_small_and_says_its_rows(tmp_path: Path) -> None:
    filled(tmp_path)
    entry = json.loads((tmp_path / INDEX / "000005.json").read_text())
    assert entry["rows"] == [10]
    assert entry["bytes"] == (tmp_path / SHARDS / "000005.safetensors").stat().st_size


def test_an_entry_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    """Another process may rename it at any moment, so that it is gone when it is opened."""
    filled(tmp_path)
    (tmp_path / INDEX / ".partial-000099.json").write_text("{")
    store = FeatureStore(tmp_path)
    assert store.damaged == {}
    assert not any(name.startswith(".") for name in store.entries)
