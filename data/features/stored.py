"""Features from a store, read ahead of training in threads; missing rows are computed, and written if configured.

What a hybrid run computes is gathered to shards, and written beside training, within a budget.
"""

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch, Batches
from data.features.coding import decode_rows, join
from data.features.source import FeatureRequest, ReadAhead
from data.features.store import DamagedError, FeatureStore, Row, WriteQueue, split
from heads.base import Features, to_device
from heads.common.files import claim

log = logging.getLogger(__name__)

LOCK = "keep"
READERS = 4  # threads: hashing and copying of rows hold no lock of Python's
Compute = Callable[[Int[Tensor, "B T"], Int[Tensor, "B T"]], Row]


class StoreWriter:
    """Gathers rows to shards and writes those one at a time, among all processes."""

    def __init__(self, store: FeatureStore, budget: float | None) -> None:
        """Take a store object of its own, since it is used in another thread, and the limit of the store's bytes."""
        self.store, self.budget = store, budget
        self.pending: dict[int, Row] = {}  # rows that wait to be written, or are being written
        self.rows_written = 0  # to the store, by this process
        self.is_full = False  # whether budget or disk are used up, after which nothing more is written
        self._gathered: list[int] = []
        self._queue = WriteQueue()

    def keep(self, rows: dict[int, Row]) -> None:
        """Add rows, and write a shard once there are enough; wait while too many shards are still to be written."""
        if self.is_full:
            return
        fresh = {row: tensors for row, tensors in rows.items() if row not in self.pending}
        self.pending.update(fresh)
        self._gathered += list(fresh)
        while len(self._gathered) >= self.store.spec.shard_rows:
            self._submit(self.store.spec.shard_rows)

    def close(self) -> str:
        """Write the pending rows, and describe how many rows were written."""
        if self._gathered and not self.is_full:
            self._submit(len(self._gathered))
        self._queue.close()
        return f", {self.rows_written} kept in {self.store.folder}"

    def _submit(self, size: int) -> None:
        rows, self._gathered = self._gathered[:size], self._gathered[size:]
        self._queue.put(partial(self._write, rows))

    def _write(self, rows: list[int]) -> None:
        try:
            with claim(self.store.lock(LOCK), wait=True):
                self.store.refresh()
                fresh = [row for row in rows if not self.store.has(row)]
                if fresh and self._fits(len(fresh)):
                    self.store.write(self.store.free_name(LOCK), fresh, *(self.pending[row] for row in fresh))
                    self.rows_written += len(fresh)
        except (ValueError, OSError) as error:
            self.is_full = True
            log.warning("%s; training goes on, and keeps no more", error)
        for row in rows:
            self.pending.pop(row, None)

    def _fits(self, rows: int) -> bool:
        size = rows * self.store.spec.row_bytes
        left = shutil.disk_usage(self.store.folder).free
        if self.budget is not None:
            left = min(left, int(self.budget) - self.store.bytes())
        if size > left and not self.is_full:
            self.is_full = True
            log.warning("%s: the disk budget is used up; training goes on, and keeps no more", self.store.folder)
        return not self.is_full


class Fallback(NamedTuple):
    """The remedy for missing or damaged rows: a forward pass, and the writer that adds them to the store, if any."""

    compute: Compute
    writer: StoreWriter | None


class Stored(ReadAhead[Future[list[Row | None]]]):
    """Features of a store's rows; computed ones are encoded and decoded too, so that training is the same for both."""

    def __init__(
        self, store: FeatureStore, batches: Batches, form: FeatureRequest, device: torch.device, ahead: int,
        fallback: Fallback | None,
    ) -> None:  # fmt: skip
        """Read nothing yet. Without `fallback` a row that is missing or damaged is an error."""
        super().__init__(batches, form, device, ahead)
        self.store = store
        self.compute = fallback.compute if fallback else None
        self.writer = fallback.writer if fallback else None
        self.computed = self.read = 0  # rows, by the target and from the store
        self._reader = ThreadPoolExecutor(READERS)

    def begin(self, batch: Batch) -> Future[list[Row | None]]:
        """Start to read a micro-batch's rows, those that are there."""
        return self._reader.submit(self._read, batch.index)

    def close(self) -> str:
        """Stop reading, write what is kept, and return how many rows were read and computed."""
        self._reader.shutdown(cancel_futures=True)
        written = self.writer.close() if self.writer is not None else ""
        return f"features: {self.read} rows read, {self.computed} computed{written}"

    def _read(self, index: Int[Tensor, "B"]) -> list[Row | None]:
        numbers = index.clamp_min(0).tolist()  # a row that only fills up has the first one's tokens
        if self.compute is not None and not all(map(self.store.has, numbers)):
            self.store.refresh()
        rows = [self._row(row) for row in numbers]
        if self.device.type != "cuda":
            return rows
        return [row and {name: tensor.pin_memory() for name, tensor in row.items()} for row in rows]

    def _row(self, row: int) -> Row | None:
        """Return a row's tensors, None where they are to be computed."""
        if self.writer is not None and (pending := self.writer.pending.get(row)) is not None:
            return pending
        if not self.store.has(row):
            if self.compute is None:
                raise DamagedError(
                    f"{self.store.folder}: row {row} is in no shard; extract it, or give features.on_missing=compute"
                )
            return None
        try:
            return self.store.read(row)
        except DamagedError as error:
            if self.compute is None:
                raise
            self.warn(str(error), "it is computed")
            return None

    def finish(self, batch: Batch, job: Future[list[Row | None]]) -> Features:
        """Return the features of a micro-batch, whose missing rows are computed."""
        begin = time.perf_counter()
        rows = job.result()
        self.stall += time.perf_counter() - begin
        lacking = [i for i, row in enumerate(rows) if row is None]
        if lacking:
            assert self.compute is not None
            computed = split(self.compute(batch.token[lacking], batch.document[lacking]))
            for i, row in zip(lacking, computed, strict=True):
                rows[i] = row
            if self.writer is not None:
                numbers = batch.index[lacking].tolist()
                self.writer.keep({number: row for number, row in zip(numbers, computed, strict=True) if number >= 0})
        self.computed += len(lacking)
        self.read += len(rows) - len(lacking)
        moved = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in (row or {}).items()} for row in rows
        ]
        token, document = to_device(batch.token, self.device), to_device(batch.document, self.device)
        return decode_rows(join(moved), token, document, self.form, self.store.spec)
