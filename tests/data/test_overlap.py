"""Shards are written in a thread beside the forward passes, and rows are read by several."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from data.features.extraction import WAITING, extract
from data.features.store import Copying, FeatureStore
from heads.common.files import claim
from tests.data import stores

SPEC = stores.spec(rows=24)


class Disk:
    """A disk that holds a store's writes up until it is opened, or refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> None:
        self.opened, self.refuses = threading.Event(), refuses
        self.write = FeatureStore.write

        def slow(store: FeatureStore, name: str, *rest: Any) -> None:
            assert self.opened.wait(10)
            if name == self.refuses:
                raise ValueError(f"shard {name} could not be written")
            self.write(store, name, *rest)

        monkeypatch.setattr(FeatureStore, "write", slow)


def is_free(store: FeatureStore, number: int) -> bool:
    with claim(store.lock(f"{number:06d}"), wait=False) as free:
        return free


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
