"""The store's files: written whole, read checked, shared by writers, and every fault named."""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data.features.extraction import extract
from data.features.store import (
    DTYPES,
    INDEX,
    META,
    SHARDS,
    Copying,
    DamagedError,
    FeatureStore,
    StoreSpec,
    decode,
    encode,
)
from heads.common import files
from heads.common.files import read_checked, write_checked
from tests.data import stores


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
    assert tensors == stores.SPEC.sequence_bytes
    (tmp_path / INDEX / ".partial-000099.json").write_text("{")  # another process may rename it at any moment
    again = FeatureStore(tmp_path)
    assert (again.damaged, any(name.startswith(".") for name in again.entries)) == ({}, False)
    (tmp_path / SHARDS / "000000.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"000000\.safetensors: sequence 1 cannot be read"):
        again.read(1)


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


@pytest.mark.parametrize("at", [0.6, 1.0])
def test_a_flipped_bit_in_a_shard_is_named(tmp_path: Path, at: float) -> None:
    store, before = filled(tmp_path), contents(tmp_path)
    flip(tmp_path / SHARDS / "000002.safetensors", at)
    said = {}
    for row in range(store.spec.rows):
        try:
            store.read(row)
        except DamagedError as error:
            said[row] = str(error)
    assert said
    assert set(said) <= {4, 5}
    assert all("000002.safetensors" in each and "extract again" in each for each in said.values())
    (tmp_path / INDEX / "000002.json").unlink()  # then it is extracted again
    filled(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("fault", ["gone", "short", "flipped"])
def test_a_shard_or_an_entry_that_is_not_whole_is_named_and_written_again(tmp_path: Path, fault: str) -> None:
    filled(tmp_path)
    before, file = contents(tmp_path), tmp_path / SHARDS / "000003.safetensors"
    if fault == "gone":
        file.unlink()
    elif fault == "short":
        file.write_bytes(file.read_bytes()[:-5])
    else:
        file = tmp_path / INDEX / "000003.json"
        flip(file, 0.5)
    store = FeatureStore(tmp_path)
    assert store.missing() == [6, 7]
    assert str(file) in store.damaged["000003"]
    filled(tmp_path)
    assert contents(tmp_path) == before
    store.refresh()
    assert store.damaged == {}


def test_no_store_and_another_format_are_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no feature store; extract one: python data/run\.py"):
        FeatureStore(tmp_path / "none")
    filled(tmp_path)
    meta = read_checked(tmp_path / META)
    for number in (1, 3, "2", None):
        write_checked(tmp_path / META, {**meta, "format": number})
        with pytest.raises(ValueError, match="another format"):
            FeatureStore(tmp_path)


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
    with pytest.raises(ValueError, match=r"shard 000002 could not be written \(No space left on device\).*continues"):
        extract(store, stores.ready, 2, 0, 1)
    monkeypatch.undo()
    assert not list(folder.rglob(".partial-*"))
    assert FeatureStore(folder).missing() == list(range(4, 11))
    filled(folder)
    assert contents(folder) == contents(whole)


SPEC = stores.spec(rows=24)


def slowly(rows: list[int]) -> Copying:
    time.sleep(0.002)
    return stores.ready(rows)


def forked(work: Callable[[], None]) -> int:
    """Do something in a child of this process, which shares all that is imported."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def write(folder: Path, rank: int = 0, world: int = 1) -> None:
    extract(FeatureStore.create(folder, SPEC), slowly, 2, rank, world)


def test_a_writer_that_is_killed_anywhere_is_taken_up_where_it_was(tmp_path: Path) -> None:
    begin = time.perf_counter()
    assert os.waitpid(forked(lambda: write(tmp_path / "whole")), 0)[1] == 0
    seconds, whole = time.perf_counter() - begin, contents(tmp_path / "whole")
    draw = random.Random(0)
    for point in range(3):
        folder = tmp_path / f"killed{point}"
        child = forked(lambda folder=folder: write(folder))
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (folder / "meta.json").exists():
            found = FeatureStore(folder)
            held = [row for row in range(SPEC.rows) if found.has(row)]
            assert all(torch.equal(found.read(row)["last"], stores.made([row])["last"]) for row in held)
        filled(folder, SPEC)
        assert contents(folder) == whole

    def stuck(rows: list[int]) -> Copying:
        if 6 in rows:  # the shard is claimed by now; its lock file is there a moment before it is
            (tmp_path / "stuck").touch()
            time.sleep(60)
        return stores.ready(rows)

    folder = tmp_path / "claimed"
    child = forked(lambda: extract(FeatureStore.create(folder, SPEC), stuck, 2, 0, 1) and None)
    while not (tmp_path / "stuck").exists():
        time.sleep(0.005)
    write(folder)
    assert FeatureStore(folder).missing() == [6, 7], "the claimed shard is its writer's"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write(folder)
    assert contents(folder) == whole


def test_writers_share_a_store_and_leave_what_one_leaves(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    children = [forked(lambda rank=rank: write(tmp_path / "shared", rank, 2)) for rank in (0, 1)]
    children += [forked(lambda: write(tmp_path / "shared"))]  # another command, which knows nothing of the two
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


def states(width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, width, generator=generator) * torch.logspace(-4, 4, 7)[:, None]
    x[0, 0] *= 0
    x[1, 1, 3] = 1e6  # an outlier, as massive activations are
    x[2, 2] = 1e-42
    return x


def bound(x: torch.Tensor, dtype: str) -> torch.Tensor:
    most = x.abs().amax(-1, keepdim=True).double()
    tiny = torch.finfo(torch.float32).tiny
    error = {
        "fp32": torch.zeros_like(x).double(),
        "bf16": x.abs().double() / 2**8,
        "fp8": x.abs().double() / 2**4 + most / 448 / 2**10,
    }[dtype]
    return error * (1 + 1e-5) + (tiny if dtype != "fp32" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_bounded(dtype: str) -> None:
    x = states()
    found = decode(encode(x, dtype), torch.float32)
    assert ((found.double() - x.double()).abs() <= bound(x, dtype)).all()
    assert found.isfinite().all()
    assert (found[0, 0] == 0).all()


def test_bf16_of_bf16_is_exact() -> None:
    x = states().bfloat16()
    assert torch.equal(decode(encode(x, "bf16"), torch.bfloat16), x)
    found, wanted = encode(x, "fp8"), encode(x.float(), "fp8")
    assert found.scale is not None
    assert wanted.scale is not None
    assert found.scale.equal(wanted.scale)
    assert found.value.float().equal(wanted.value.float())
