"""Features from a store, read ahead of training in threads; rows that it lacks are computed if configured."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch, Batches
from data.features.coding import decode_rows, join
from data.features.source import FeatureRequest, ReadAhead
from data.features.store import DamagedError, FeatureStore, RowTensors, split
from heads.base import Features, to_device

log = logging.getLogger(__name__)
READERS = 4  # threads: hashing and copying of rows hold no lock of Python's
Compute = Callable[[Int[Tensor, "B T"], Int[Tensor, "B T"]], RowTensors]


class StoredFeatures(ReadAhead[Future[list[RowTensors | None]]]):
    """Features of a store's rows; computed ones are encoded and decoded too, so that training is the same for both."""

    def __init__(
        self, store: FeatureStore, batches: Batches, request: FeatureRequest, device: torch.device, ahead: int,
        compute: Compute | None,
    ) -> None:  # fmt: skip
        """Read nothing yet. Without `compute`, a forward pass, a row that is missing or damaged is an error."""
        super().__init__(batches, request, device, ahead)
        self.store, self.compute = store, compute
        self.computed = self.read = 0  # rows, by the target and from the store
        self._reader = ThreadPoolExecutor(READERS)
        self._warned: set[int] = set()

    def begin(self, batch: Batch) -> Future[list[RowTensors | None]]:
        """Start to read a micro-batch's rows, those that are there."""
        return self._reader.submit(self._read, batch.index)

    def close(self) -> str:
        """Stop reading, and return how many rows were read and computed."""
        self._reader.shutdown(cancel_futures=True)
        return f"features: {self.read} rows read, {self.computed} computed"

    def _read(self, index: Int[Tensor, "B"]) -> list[RowTensors | None]:
        numbers = index.clamp_min(0).tolist()  # a row that only fills up has the first one's tokens
        if self.compute is not None and not all(map(self.store.has, numbers)):
            self.store.refresh()
        rows = [self._row(row) for row in numbers]
        if self.device.type != "cuda":
            return rows
        return [row and {name: tensor.pin_memory() for name, tensor in row.items()} for row in rows]

    def _row(self, row: int) -> RowTensors | None:
        """Return a row's tensors, None where they are to be computed."""
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
            if row not in self._warned:
                self._warned.add(row)
                log.warning("%s; it is computed", error)
            return None

    def finish(self, batch: Batch, job: Future[list[RowTensors | None]]) -> Features:
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
        self.computed += len(lacking)
        self.read += len(rows) - len(lacking)
        moved = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in (row or {}).items()} for row in rows
        ]
        token, document = to_device(batch.token, self.device), to_device(batch.document, self.device)
        return decode_rows(join(moved), token, document, self.request, self.store.spec)
