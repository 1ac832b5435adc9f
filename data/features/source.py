"""Feature sources: their configuration and protocol; live features by the target's passes; stored ones, prefetched."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from data.answers.client import EndpointConfig, check_url
from data.batches import Batch, Batches
from data.features.store import FeatureRequest, FeatureStore, StoredDtype, decode_sequences
from heads.base import Features, NamedTensors, to_device
from heads.common.typed import Count, OneOf
from heads.shapes import PerSequence, Sequences

T = TypeVar("T")
READERS = 4  # threads; hashing and copying release the GIL


@dataclass(frozen=True)
class FeaturesConfig:
    """The configuration of the feature source; conf/features/live.yaml explains the keys."""

    mode: Annotated[str, OneOf(("live", "stored", "engine"))]
    path: str | None
    dtype: StoredDtype
    shard_mb: Count
    prefetch: Count
    micro_rows: Count
    vllm: str | None
    vllm_layers: list[int]
    url: list[str]
    endpoint: EndpointConfig

    def __post_init__(self) -> None:
        """Check that features=stored has a path, and features=engine a URL and a folder."""
        if self.mode == "stored" and not self.path:
            raise ValueError("features.path is missing: features=stored needs the store's folder")
        if self.mode != "engine":
            return
        if self.path:
            raise ValueError("features=engine reads no store: leave features.path out")
        if not (self.url and self.vllm):
            raise ValueError("features=engine needs features.url, and features.vllm, the folder where they write")
        for url in self.url:
            check_url("features.url", url)

    @property
    def folder(self) -> Path:
        """The store's folder."""
        assert self.path
        return Path(self.path)


class MicroBatch(NamedTuple):
    """A micro-batch of a step; call `read` once per micro-batch, in order, for the features."""

    batch: Batch
    read: Callable[[], Features]


@runtime_checkable
class FeatureSource(Protocol):
    """A source of a step's micro-batches with their features."""

    batches: Batches  # the micro-batches of a step
    stall: float  # seconds that training has waited for features

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, whose features are read lazily."""

    def close(self) -> str:
        """Stop prefetching, and return a line of statistics, or an empty line."""


class ReadAhead(Generic[T]):
    """A feature source that prefetches `ahead` micro-batches: `begin` starts one, `finish` waits for it."""

    def __init__(self, batches: Batches, request: FeatureRequest, device: torch.device, ahead: int) -> None:
        self.batches, self.request, self.device, self.ahead = batches, request, device, ahead
        self.stall = 0.0  # seconds that training has waited
        self._jobs: deque[tuple[int, Batch, T]] = deque()
        self._coming: Iterator[tuple[int, Batch]] = iter(())

    def begin(self, batch: Batch) -> T:
        """Start to read the sequences of a micro-batch."""
        raise NotImplementedError

    def finish(self, token: Sequences, document: Sequences, job: T) -> Features:
        """Return the features of a micro-batch, whose tokens are on the device, from the job that `begin` started."""
        raise NotImplementedError

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, and start to prefetch these and the next steps'.

        `read` raises a ValueError with the remedy if a sequence is not available.
        """
        if not self._jobs or self._jobs[0][0] != step:
            self._coming = ((number, batch) for number in count(step) for batch in self.batches(number))
            self._jobs.clear()
            self._fill()
        return [MicroBatch(batch, self._next) for batch in self.batches(step)]

    def _next(self) -> Features:
        _, batch, job = self._jobs.popleft()
        self._fill()
        return self.finish(to_device(batch.token, self.device), to_device(batch.document, self.device), job)

    def _fill(self) -> None:
        while len(self._jobs) < self.ahead:
            step, batch = next(self._coming)
            self._jobs.append((step, batch, self.begin(batch)))


class LiveFeatures:
    """Live features: a forward pass of the target for each micro-batch."""

    def __init__(self, target: Any, batches: Batches, layers: tuple[int, ...]) -> None:
        self.target, self.batches, self.layers, self.stall = target, batches, layers, 0.0
        # The context in which the target's layers run.
        self.forwards: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; each read is a forward pass of the target."""
        return [MicroBatch(batch, partial(self.features, batch)) for batch in self.batches(step)]

    def features(self, batch: Batch) -> Features:
        """Return the features of a micro-batch, without its loss mask."""
        with self.forwards():
            return self.target.features(batch.token, batch.document, self.layers)

    def close(self) -> str:
        """Return an empty line."""
        return ""


class StoredFeatures(ReadAhead[Future[list[NamedTensors]]]):
    """Features from a store."""

    def __init__(
        self, store: FeatureStore, batches: Batches, request: FeatureRequest, device: torch.device, ahead: int
    ) -> None:
        super().__init__(batches, request, device, ahead)
        self.store = store
        self.read = 0  # number of sequences
        self._reader = ThreadPoolExecutor(READERS)

    def begin(self, batch: Batch) -> Future[list[NamedTensors]]:
        """Start to read a micro-batch's sequences."""
        return self._reader.submit(self._read, batch.index)

    def close(self) -> str:
        """Stop reading, and return a line with the number of sequences read."""
        self._reader.shutdown(cancel_futures=True)
        return f"features: {self.read} sequences read"

    def _read(self, index: PerSequence) -> list[NamedTensors]:
        # A padding sequence has the first sequence's tokens.
        sequences = [self.store.read(sequence) for sequence in index.clamp_min(0).tolist()]
        if self.device.type != "cuda":
            return sequences
        return [{name: tensor.pin_memory() for name, tensor in sequence.items()} for sequence in sequences]

    def finish(self, token: Sequences, document: Sequences, job: Future[list[NamedTensors]]) -> Features:
        """Return the features of a micro-batch."""
        begin = time.perf_counter()
        sequences = job.result()
        self.stall += time.perf_counter() - begin
        self.read += len(sequences)
        moved = [
            {name: tensor.to(self.device, non_blocking=True) for name, tensor in sequence.items()}
            for sequence in sequences
        ]
        joined = {name: torch.cat([sequence[name] for sequence in moved]) for name in moved[0]}
        return decode_sequences(joined, token, document, self.request, self.store.spec)
