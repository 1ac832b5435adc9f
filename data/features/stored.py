"""Features from a store, read ahead of training in a thread; missing rows are computed, and written if configured."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch, Batches
from data.features.coding import FeatureRequest, decode_rows, join, split
from data.features.source import MicroBatch, TrainingInput
from data.features.store import DamagedError, FeatureStore, Row
from data.features.writer import StoreWriter

log = logging.getLogger(__name__)

Compute = Callable[[Int[Tensor, "B T"], Int[Tensor, "B T"]], Row]


class Fallback(NamedTuple):
    """The remedy for missing or damaged rows: a forward pass, and the writer that adds them to the store, if any."""

    compute: Compute
    writer: StoreWriter | None


class Job(NamedTuple):
    """A micro-batch that is being read: its step, and the tensors of each row, None for a missing one."""

    step: int
    batch: Batch
    rows: Future[list[Row | None]]


class Stored:
    """Features of a store's rows.

    A computed row is encoded and decoded as the store does, so that training is the same whatever the store holds
    already.

    Attributes:
        stall: seconds that the caller has waited for rows.
        read, computed: how many rows came from the store, and from the target.
    """

    def __init__(
        self, store: FeatureStore, batches: Batches, form: FeatureRequest, device: torch.device, ahead: int,
        fallback: Fallback | None,
    ) -> None:  # fmt: skip
        """Read nothing yet, and later `ahead` micro-batches ahead. Without `fallback` a missing row is an error."""
        self.store, self.batches, self.form, self.device = store, batches, form, device
        self.ahead, self.fallback = ahead, fallback
        self.stall, self.computed, self.read = 0.0, 0, 0
        self._reader = ThreadPoolExecutor(1)
        self._jobs: deque[Job] = deque()
        self._coming: Iterator[tuple[int, Batch]] = iter(())
        self._warned: set[str] = set()

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step; they and those of the next steps are read ahead from here on.

        `read` raises a ValueError that names a row that is missing or damaged and is not to be computed.
        """
        if not self._jobs or self._jobs[0].step != step:
            self._coming = self._from(step)
            self._jobs.clear()
            self._fill()
        return [MicroBatch(batch, self.next) for batch in self.batches(step)]

    def next(self) -> TrainingInput:
        """Return the features of the next micro-batch, which may have to be waited for."""
        job = self._jobs.popleft()
        begin = time.perf_counter()
        rows = job.rows.result()
        self.stall += time.perf_counter() - begin
        self._fill()
        return self._decoded(job.batch, rows)

    def close(self) -> str:
        """Stop reading, write what is kept, and return how many rows were read and computed."""
        self._reader.shutdown(cancel_futures=True)
        writer = self.fallback.writer if self.fallback is not None else None
        written = writer.close() if writer is not None else ""
        return f"features: {self.read} rows read, {self.computed} computed{written}"

    def _from(self, step: int) -> Iterator[tuple[int, Batch]]:
        while True:
            for batch in self.batches(step):
                yield step, batch
            step += 1

    def _fill(self) -> None:
        while len(self._jobs) < self.ahead:
            step, batch = next(self._coming)
            self._jobs.append(Job(step, batch, self._reader.submit(self._read, batch.index)))

    def _read(self, index: Int[Tensor, "B"]) -> list[Row | None]:
        numbers = index.clamp_min(0).tolist()  # a row that only fills up has the first one's tokens
        if self.fallback is not None and not all(self.store.has(row) for row in numbers):
            self.store.refresh()
        rows = [self._row(row) for row in numbers]
        if self.device.type != "cuda":
            return rows
        return [row and {name: tensor.pin_memory() for name, tensor in row.items()} for row in rows]

    def _row(self, row: int) -> Row | None:
        """Return a row's tensors, None where they are to be computed."""
        writer = self.fallback.writer if self.fallback is not None else None
        pending = writer.pending.get(row) if writer is not None else None
        if pending is not None:
            return pending
        if not self.store.has(row):
            if self.fallback is None:
                raise DamagedError(
                    f"{self.store.folder}: row {row} is in no shard; extract it, or give features.on_missing=compute"
                )
            return None
        try:
            return self.store.read(row)
        except DamagedError as error:
            if self.fallback is None:
                raise
            if str(error) not in self._warned:
                self._warned.add(str(error))
                log.warning("%s; it is computed", error)
            return None

    def _decoded(self, batch: Batch, rows: list[Row | None]) -> TrainingInput:
        lacking = [i for i, row in enumerate(rows) if row is None]
        if lacking:
            assert self.fallback is not None
            computed = split(self.fallback.compute(batch.token[lacking], batch.document[lacking]))
            numbers = batch.index[lacking].tolist()
            if self.fallback.writer is not None:
                new = {number: row for number, row in zip(numbers, computed, strict=True) if number >= 0}
                self.fallback.writer.keep(new)
            for i, row in zip(lacking, computed, strict=True):
                rows[i] = row
        self.computed += len(lacking)
        self.read += len(rows) - len(lacking)
        moved = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in (row or {}).items()} for row in rows
        ]
        token, document = batch.token.to(self.device), batch.document.to(self.device)
        return decode_rows(join(moved), token, document, self.form, self.store.spec)
