"""What a hybrid run keeps: nothing written over, no more waiting than memory has room for, any refusal survived."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from data.features import stored
from data.features.store import INDEX, WAITING, FeatureStore, Row, split
from data.features.stored import StoreWriter
from tests.data import stores


def rows(*numbers: int) -> dict[int, Row]:
    return {number: split(stores.made([number]))[0] for number in numbers}


def keeper_of(folder: Path) -> StoreWriter:
    return StoreWriter(FeatureStore.create(folder, stores.SPEC), None)


def test_no_shard_is_written_over_after_an_entry_was_removed(tmp_path: Path) -> None:
    first = keeper_of(tmp_path)
    first.keep(rows(0, 1, 2, 3, 4, 5))
    first.close()
    (tmp_path / INDEX / "keep-000001.json").unlink()  # as the message on a damaged row says
    second = keeper_of(tmp_path)
    second.keep(rows(6, 7, 2, 3))
    second.close()
    store = FeatureStore(tmp_path)
    assert store.missing() == [8, 9, 10]
    for row in range(8):
        assert all(part.equal(rows(row)[row][name]) for name, part in store.read(row).items())


def test_a_slow_disk_holds_training_up_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, goes_on = keeper_of(tmp_path), threading.Event()
    write, most = made.store.write, 0

    def slow(*given: Any) -> None:
        assert goes_on.wait(10)
        write(*given)

    monkeypatch.setattr(made.store, "write", slow)
    threading.Timer(0.1, goes_on.set).start()
    for row in range(10):
        made.keep(rows(row))
        if not goes_on.is_set():
            most = max(most, len(made.pending))
    made.close()
    assert most <= (WAITING + 1) * stores.SPEC.shard_rows
    assert FeatureStore(tmp_path).missing() == [10]


def test_a_lock_that_the_disk_refuses_ends_keeping_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = keeper_of(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "claim", refuse)
    with caplog.at_level(logging.WARNING):
        made.keep(rows(0, 1))
        made.close()
    assert "No space left on device; training goes on, and keeps no more" in caplog.text
    assert made.pending == {}
