"""Shards are written in a thread beside the forward passes, and rows are read by several."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.features import coding
from data.features.coding import Copying, States, copying
from data.features.extraction import WAITING, extract
from data.features.store import FeatureStore
from heads.common.files import claim
from tests.data import stores
from tests.data.test_store import contents, filled

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


@pytest.mark.parametrize("fault", ["shard 000001 could not be written", "not finite"])
def test_a_shard_that_fails_ends_the_extraction_and_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    bad = fault == "not finite"
    disk, store = Disk(monkeypatch, refuses="" if bad else "000001"), FeatureStore.create(tmp_path, SPEC)
    computed = list[int]()

    def made(rows: list[int]) -> Copying:
        if bad and 2 in rows:
            raise ValueError(fault)
        computed.extend(rows)
        disk.opened.set()
        return stores.ready(rows)

    with pytest.raises(ValueError, match=fault):
        extract(store, made, 2, 0, 1)
    assert len(computed) <= (2 + WAITING + 1) * SPEC.shard_rows
    assert all(is_free(store, number) for number in range(SPEC.shards))
    left = FeatureStore(tmp_path)
    assert not left.has(2)
    assert left.damaged == {}
    assert torch.equal(left.read(0)["last"], stores.made([0])["last"])


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
