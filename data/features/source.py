"""Sources of features: their configuration and protocol, and the live one, a forward pass of the target a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch, Batches
from data.features.quantize import DTYPES
from heads.base import Features
from heads.common.ranges import Amount, Count, OneOf
from heads.modules.top_k import TopLogProbs


@dataclass(frozen=True)
class FeaturesConfig:
    """Where features come from; conf/features/live.yaml says what each key means."""

    mode: Annotated[str, OneOf(("live", "stored", "hybrid"))]
    path: str | None
    dtype: Annotated[str, OneOf(tuple(DTYPES))]
    teacher: Annotated[str, OneOf(("state", "top_k"))]
    k: Count
    budget_gb: Amount | None
    on_missing: Annotated[str, OneOf(("compute", "fail"))]
    shard_mb: Count
    prefetch: Count
    micro_rows: Count
    vllm: str | None
    vllm_layers: list[int]

    def __post_init__(self) -> None:
        """Check that a mode with a store names it."""
        if self.mode != "live" and not self.path:
            raise ValueError(f"features.path is missing: features={self.mode} needs the store's folder")

    @property
    def folder(self) -> Path:
        """The store's, of a mode that has one."""
        assert self.path
        return Path(self.path)


class TrainingInput(NamedTuple):
    """The input of a training step: features, and the teacher's top-k where `last` was not stored (then of width 0)."""

    features: Features
    top: TopLogProbs | None


class MicroBatch(NamedTuple):
    """One micro-batch of a step; `read` gives its features, once, and after those of the micro-batches before it."""

    batch: Batch
    read: Callable[[], TrainingInput]


@runtime_checkable
class Forward(Protocol):
    """A model that computes features in a forward pass: a `Target`."""

    device: torch.device

    def features(self, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], layers: tuple[int, ...]) -> Features:
        """Return the features of packed rows, of these decoder layers, on its device; the rows may lie on the host."""
        ...


@runtime_checkable
class FeatureSource(Protocol):
    """The micro-batches of a step with the features to train on."""

    batches: Batches  # which rows a step takes
    stall: float  # seconds that the caller has waited for features to be read

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step, whose features are read when they are asked for."""
        ...

    def close(self) -> str:
        """Stop reading ahead, and return a line of statistics, or nothing."""
        ...


class Live:
    """Features by a pass of the target, a micro-batch at a time."""

    def __init__(self, target: Forward, batches: Batches, layers: tuple[int, ...]) -> None:
        self.target, self.batches, self.layers, self.stall = target, batches, layers, 0.0

    def __call__(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches; each read is a forward pass of the target."""
        return [MicroBatch(batch, partial(self.features, batch)) for batch in self.batches(step)]

    def features(self, batch: Batch) -> TrainingInput:
        """Return the features of a micro-batch. The loss mask stays behind in `batch`."""
        return TrainingInput(forward(self.target, batch.token, batch.document, self.layers), None)

    def close(self) -> str:
        """There is nothing to end."""
        return ""


def forward(
    target: Forward, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"], layers: tuple[int, ...]
) -> Features:
    """Return the target's features of packed rows, on the target's device."""
    with torch.no_grad():
        return target.features(token, document, layers)
