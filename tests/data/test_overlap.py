"""Shards are written in a thread beside the forward passes, and rows are read by several."""

import random
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.features import coding
from data.features.coding import Copying, States, copying
from data.features.extraction import extract
from data.features.source import FeatureRequest, LiveFeatures
from data.features.store import INDEX, META, SAVED, SHARDS, WAITING, DamagedError, FeatureStore, RowTensors, serialized
from data.features.stored import StoredFeatures
from heads.base import Features
from heads.common.files import claim, read_checked, write_checked
from tests import toys
from tests.data import stores
from tests.data.test_store import contents, filled, flip
from tests.data.test_stored import LAYERS, batches, extracted, steps

SPEC = stores.spec(rows=24)


class Copies(TorchDispatchMode):
    """Notes of each copy to the host whether it lets the host go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._to_copy.default and options.get("device") == torch.device("cpu"):
            self.go_on.append(options.get("non_blocking", False))
        return func(*args, **options)


class Disk:
    """A disk that holds a store's writes up until it is opened, or refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> None:
        self.opened, self.begun, self.refuses = threading.Event(), list[str](), refuses
        self.write = FeatureStore.write

        def slow(store: FeatureStore, name: str, *rest: Any) -> None:
            self.begun.append(name)
            assert self.opened.wait(10)
            if name == self.refuses:
                raise ValueError(f"shard {name} could not be written")
            self.write(store, name, *rest)

        monkeypatch.setattr(FeatureStore, "write", slow)


def is_free(store: FeatureStore, number: int) -> bool:
    with claim(store.lock(f"{number:06d}"), wait=False) as free:
        return free


def test_the_next_shards_are_computed_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may wait, and no more; each is claimed until it is written."""
    filled(tmp_path / "whole", SPEC)
    disk, store, computed = Disk(monkeypatch), FeatureStore.create(tmp_path / "store", SPEC), list[int]()

    def made(rows: list[int]) -> Copying:
        computed.extend(rows)
        return stores.ready(rows)

    thread = threading.Thread(target=lambda: extract(store, made, 2, 1, 2))
    thread.start()
    ahead = (WAITING + 1) * SPEC.shard_rows
    while len(computed) < ahead:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(computed) == ahead
    assert len(disk.begun) == 1
    assert not any(is_free(store, number) for number in range(1, 2 * WAITING + 2, 2))
    assert FeatureStore(store.folder).missing() == list(range(SPEC.rows))
    disk.opened.set()
    thread.join(10)
    assert store.missing() == []
    assert all(is_free(store, number) for number in range(SPEC.shards))
    assert contents(store.folder) == contents(tmp_path / "whole")


def test_a_write_that_fails_ends_the_extraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, store = Disk(monkeypatch, refuses="000001"), FeatureStore.create(tmp_path, SPEC)
    computed = list[int]()

    def made(rows: list[int]) -> Copying:
        computed.extend(rows)
        disk.opened.set()
        return stores.ready(rows)

    with pytest.raises(ValueError, match="shard 000001 could not be written"):
        extract(store, made, 2, 0, 1)
    assert len(computed) <= (2 + WAITING + 1) * SPEC.shard_rows
    assert all(is_free(store, number) for number in range(SPEC.shards))
    left = FeatureStore(tmp_path)
    assert left.has(0)
    assert not left.has(2)
    assert left.damaged == {}


def test_rows_that_cannot_be_computed_end_the_extraction_and_leave_whole_shards(tmp_path: Path) -> None:
    store = FeatureStore.create(tmp_path, SPEC)

    def made(rows: list[int]) -> Copying:
        if 8 in rows:
            raise ValueError("not finite")
        return stores.ready(rows)

    with pytest.raises(ValueError, match="not finite"):
        extract(store, made, 2, 0, 1)
    assert all(is_free(store, number) for number in range(SPEC.shards))
    left = FeatureStore(tmp_path)
    assert left.damaged == {}
    for row in range(SPEC.rows):
        if left.has(row):
            assert torch.equal(left.read(row)["last"], stores.made([row])["last"])


def test_a_shard_is_what_safetensors_writes_of_its_groups() -> None:
    """Whatever the dtypes, so that a store's bytes follow from its rows alone."""
    rows: RowTensors = {str(i): torch.arange(60).view(5, 3, 4).to(dtype) for i, dtype in enumerate(SAVED)}
    rows |= {f"{name}_scale": torch.rand(5, 3) for name in "ba"}
    pieces = serialized(tuple({name: part[a:b] for name, part in rows.items()} for a, b in ((0, 2), (2, 3), (3, 5))))
    assert b"".join(pieces) == save(rows)


@pytest.mark.parametrize(("number", "digits"), [(1, 64), (2, 32)])
def test_a_store_of_an_older_format_is_read_and_gone_on_with(tmp_path: Path, number: int, digits: int) -> None:
    """By the digest that it has: SHA-256, or XXH3 of 128 bits."""
    FeatureStore.create(tmp_path, SPEC)
    write_checked(tmp_path / META, {**read_checked(tmp_path / META), "format": number})
    store = filled(tmp_path, SPEC)
    assert {len(digest) for entry in store.entries.values() for digest in entry.digests} == {digits}
    before = contents(tmp_path)
    (tmp_path / INDEX / "000003.json").unlink()
    assert torch.equal(filled(tmp_path, SPEC).read(7)["last"], stores.made([7])["last"])
    assert contents(tmp_path) == before
    flip(tmp_path / SHARDS / "000002.safetensors", 1.0)
    with pytest.raises(DamagedError, match=r"row 5 is not what was written, its checksum differs"):
        FeatureStore(tmp_path).read(5)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_gpus_rows_are_encoded_and_on_their_way_before_the_host_waits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values: whoever asks for one fails."""
    order: list[str] = []

    class Event:
        def synchronize(self) -> None:
            order.append("waited")

    class Stream:
        def record_event(self) -> Event:
            order.append("recorded")
            return Event()

    monkeypatch.setattr(coding.torch.cuda, "current_stream", lambda _: Stream())
    spec = stores.spec(dtype=dtype)
    with FakeTensorMode():
        states = States(torch.empty(2, 6, 2, 8, device="cuda"), torch.empty(2, 6, 8, device="cuda"))
        with Copies() as copies:
            under_way = copying(states, spec)
        assert order == ["recorded"]
        assert {tensor.device.type for tensor in (*under_way.rows.values(), under_way.finite)} == {"cpu"}
        assert sum(tensor.nbytes for tensor in under_way.rows.values()) == 2 * spec.row_bytes
        assert copies.go_on == [True] * (len(under_way.rows) + 1)
        with pytest.raises(DataDependentOutputException):
            under_way.result()
    assert order == ["recorded", "waited"]


def test_rows_are_read_by_several_threads_and_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, packed = toys.target(), stores.packed()
    store = extracted(tmp_path, target, packed)
    read, together, calls, chance = store.read, threading.Barrier(2, timeout=10), count(), random.Random(0)

    def slow(row: int) -> RowTensors:
        if next(calls) < 2:  # a micro-batch has more rows, so two threads read
            together.wait()
        time.sleep(0.01 * chance.random())
        return read(row)

    def stored() -> list[Features]:
        source = StoredFeatures(
            store, batches(packed), FeatureRequest(LAYERS, torch.float32), torch.device("cpu"), 4, None
        )
        found = steps(source, 6)
        source.close()  # what it reads ahead is none of the next one's
        return found

    expected = stored()
    monkeypatch.setattr(store, "read", slow)
    found = stored()
    live = steps(LiveFeatures(target, batches(packed), LAYERS), 6)
    for mine, other, true in zip(found, expected, live, strict=True):
        assert torch.equal(mine.token, true.token)
        assert torch.equal(mine.hidden, other.hidden)
        assert torch.equal(mine.last_hidden, other.last_hidden)
