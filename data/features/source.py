"""Sources of features: their configuration and protocol, and the live one, a forward pass of the target a batch."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from data.answers.client import EndpointConfig, check_url
from data.batches import Batch, Batches
from data.features.store import DTYPES
from heads.base import Features
from heads.common.ranges import Count, OneOf

T = TypeVar("T")


@dataclass(frozen=True)
class FeaturesConfig:
    """Where features come from; conf/features/live.yaml says what each key means."""

    mode: Annotated[str, OneOf(("live", "stored", "engine"))]
    path: str | None
    dtype: Annotated[str, OneOf(tuple(DTYPES))]
    on_missing: Annotated[str, OneOf(("compute", "fail"))]
    shard_mb: Count
    prefetch: Count
    micro_rows: Count
    vllm: str | None
    vllm_layers: list[int]
    url: list[str]
    endpoint: EndpointConfig

    def __post_init__(self) -> None:
        """Check that a mode with a store names it, and one with a server the server and its folder."""
        if self.mode == "stored" and not self.path:
            raise ValueError("features.path is missing: features=stored needs the store's folder")
        if self.mode != "engine":
            return
        if self.path or self.on_missing == "compute":
            raise ValueError("features=engine reads no store: leave features.path and features.on_missing out")
        if not (self.url and self.vllm):
            raise ValueError("features=engine needs features.url, and features.vllm, the folder where they write")
        for url in self.url:
            check_url("features.url", url)

    @property
    def runs_target(self) -> bool:
        """Whether training runs the target's forward pass as a matter of course."""
        return self.mode == "live"

    @property
    def folder(self) -> Path:
        """The store's, of a mode that has one."""
        assert self.path
        return Path(self.path)


class FeatureRequest(NamedTuple):
    """A head's request: feature layers, and the dtype of the floats."""

    layers: tuple[int, ...]
    dtype: torch.dtype


class MicroBatch(NamedTuple):
    """One micro-batch of a step; `read` gives its features, once, and after those of the micro-batches before it."""

    batch: Batch
    read: Callable[[], Features]


@runtime_checkable
class FeatureSource(Protocol):
    """The micro-batches of a step with the features to train on."""

    batches: Batches  # which sequences a step takes
    stall: float  # seconds that the caller has waited for features to be read

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, whose features are read when they are asked for."""
        ...

    def close(self) -> str:
        """Stop reading ahead, and return a line of statistics, or nothing."""
        ...


class ReadAhead(Generic[T]):
    """A source that reads `ahead` micro-batches ahead of training: `begin` starts one, `finish` waits for it."""

    def __init__(self, batches: Batches, request: FeatureRequest, device: torch.device, ahead: int) -> None:
        """Read nothing yet."""
        self.batches, self.request, self.device, self.ahead = batches, request, device, ahead
        self.stall = 0.0  # seconds that the caller has waited for sequences
        self._jobs: deque[tuple[int, Batch, T]] = deque()
        self._coming: Iterator[tuple[int, Batch]] = iter(())

    def begin(self, batch: Batch) -> T:
        """Start to read a micro-batch's sequences."""
        raise NotImplementedError

    def finish(self, batch: Batch, job: T) -> Features:
        """Return the features of a micro-batch by what `begin` has started."""
        raise NotImplementedError

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step; they and those of the next steps are read ahead from here on.

        `read` raises a ValueError that names the remedy where a sequence cannot be had.
        """
        if not self._jobs or self._jobs[0][0] != step:
            self._coming = ((number, batch) for number in count(step) for batch in self.batches(number))
            self._jobs.clear()
            self._fill()
        return [MicroBatch(batch, self._next) for batch in self.batches(step)]

    def _next(self) -> Features:
        _, batch, job = self._jobs.popleft()
        self._fill()
        return self.finish(batch, job)

    def _fill(self) -> None:
        while len(self._jobs) < self.ahead:
            step, batch = next(self._coming)
            self._jobs.append((step, batch, self.begin(batch)))


class LiveFeatures:
    """Features by a pass of the target, or of what computes `features` as it does, a micro-batch at a time."""

    def __init__(self, target: Any, batches: Batches, layers: tuple[int, ...]) -> None:
        self.target, self.batches, self.layers, self.stall = target, batches, layers, 0.0
        self.forwards: Callable[[], AbstractContextManager[None]] = nullcontext  # how the target's layers run

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; each read is a forward pass of the target."""
        return [MicroBatch(batch, partial(self.features, batch)) for batch in self.batches(step)]

    def features(self, batch: Batch) -> Features:
        """Return the features of a micro-batch. The loss mask stays behind in `batch`."""
        with self.forwards():
            return self.target.features(batch.token, batch.document, self.layers)

    def close(self) -> str:
        """There is nothing to end."""
        return ""
