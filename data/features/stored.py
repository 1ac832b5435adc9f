"""Features from a store, prefetched in threads; missing sequences are computed if configured."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch, Batches
from data.features.coding import decode_sequences, join
from data.features.source import FeatureRequest, ReadAhead
from data.features.store import DamagedError, FeatureStore, SequenceTensors, split
from heads.base import Features, to_device

log = logging.getLogger(__name__)
READERS = 4  # threads: hashing and copying release Python's lock
Compute = Callable[[Int[Tensor, "B T"], Int[Tensor, "B T"]], SequenceTensors]


class StoredFeatures(ReadAhead[Future[list[SequenceTensors | None]]]):
    """Features from a store; computed ones are encoded and decoded too, so that training is the same for both."""

    def __init__(
        self, store: FeatureStore, batches: Batches, request: FeatureRequest, device: torch.device, ahead: int,
        compute: Compute | None,
    ) -> None:  # fmt: skip
        """Read nothing yet. Without `compute` (a forward pass) a missing or damaged sequence is an error."""
        super().__init__(batches, request, device, ahead)
        self.store, self.compute = store, compute
        self.computed = self.read = 0  # numbers of sequences
        self._reader = ThreadPoolExecutor(READERS)
        self._warned: set[int] = set()

    def begin(self, batch: Batch) -> Future[list[SequenceTensors | None]]:
        """Start to read a micro-batch's sequences, as far as they are stored."""
        return self._reader.submit(self._read, batch.index)

    def close(self) -> str:
        """Stop reading, and return the numbers of sequences read and computed."""
        self._reader.shutdown(cancel_futures=True)
        return f"features: {self.read} sequences read, {self.computed} computed"

    def _read(self, index: Int[Tensor, "B"]) -> list[SequenceTensors | None]:
        numbers = index.clamp_min(0).tolist()  # a filler has the first sequence's tokens
        if self.compute is not None and not all(map(self.store.has, numbers)):
            self.store.refresh()
        sequences = [self._sequence(sequence) for sequence in numbers]
        if self.device.type != "cuda":
            return sequences
        return [sequence and {name: tensor.pin_memory() for name, tensor in sequence.items()} for sequence in sequences]

    def _sequence(self, sequence: int) -> SequenceTensors | None:
        """Return a sequence's tensors, None if they must be computed."""
        if not self.store.has(sequence):
            if self.compute is None:
                raise DamagedError(
                    f"{self.store.folder}: sequence {sequence} is in no shard; extract it, or give "
                    "features.on_missing=compute"
                )
            return None
        try:
            return self.store.read(sequence)
        except DamagedError as error:
            if self.compute is None:
                raise
            if sequence not in self._warned:
                self._warned.add(sequence)
                log.warning("%s; it is computed", error)
            return None

    def finish(self, batch: Batch, job: Future[list[SequenceTensors | None]]) -> Features:
        """Return the features of a micro-batch; missing sequences are computed."""
        begin = time.perf_counter()
        sequences = job.result()
        self.stall += time.perf_counter() - begin
        lacking = [i for i, sequence in enumerate(sequences) if sequence is None]
        if lacking:
            assert self.compute is not None
            computed = split(self.compute(batch.token[lacking], batch.document[lacking]))
            for i, sequence in zip(lacking, computed, strict=True):
                sequences[i] = sequence
        self.computed += len(lacking)
        self.read += len(sequences) - len(lacking)
        moved = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in (sequence or {}).items()}
            for sequence in sequences
        ]
        token, document = to_device(batch.token, self.device), to_device(batch.document, self.device)
        return decode_sequences(join(moved), token, document, self.request, self.store.spec)
