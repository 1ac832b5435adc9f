"""From a batch to the target's features, live: in the same process, right before the head reads them."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from data.batches import Batch
from heads.base import Features


@runtime_checkable
class FeatureSource(Protocol):
    """What gives features for tokens: a `Target`."""

    device: torch.device

    def features(self, token: Int[Tensor, "B T"], document: Int[Tensor, "B T"]) -> Features:
        """Return the features of packed rows."""
        ...


def batch_features(target: FeatureSource, batch: Batch) -> Features:
    """Return the target's features of a batch, on the target's device. The loss mask stays behind in `batch`."""
    with torch.no_grad():
        return target.features(batch.token.to(target.device), batch.document.to(target.device))
