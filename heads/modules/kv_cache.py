"""The KV cache of a head with attention: its verified rows, and how far back it looks.

Rotary positions enter attention as distances alone. A head that was trained on rows of `length` tokens has met no
distance of `length` or more, so it looks at the last `length` rows, its own included, in training and in decoding: text
of any length brings it no distance that it was not built for, and earlier rows are dropped. A sliding window
as in Longformer (arXiv 2004.05150); a `length` of None looks at everything.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heads.modules.attention import KeyValue


class Committed(NamedTuple):
    """The KV cache of verified rows: their number, and keys and values "1 G S E" of the last S, one pair a layer."""

    length: int
    layers: tuple[KeyValue, ...]

    def position(self) -> Int[Tensor, "S"]:
        """Return the positions of the cached rows."""
        key = self.layers[0][0]
        return torch.arange(self.length - key.shape[2], self.length, device=key.device)

    def trimmed(self, length: int | None) -> "Committed":
        """Return the cache without the rows that no later row looks at."""
        if length is None:
            return self
        return Committed(self.length, tuple((key[:, :, -length:], value[:, :, -length:]) for key, value in self.layers))


def near(query: Int[Tensor, "*n T"], key: Int[Tensor, "*n S"], length: int | None) -> Bool[Tensor, "*n T S"]:
    """Return which keys lie less than `length` positions before a query; those behind it count as near too."""
    distance = query[..., :, None] - key[..., None, :]
    return torch.ones_like(distance, dtype=torch.bool) if length is None else distance < length


def committing(state: Committed, position: Int[Tensor, "T"], length: int | None) -> Bool[Tensor, "T S"]:
    """Return which of the S cached and new rows each new row looks at, the new ones being at `position`."""
    every = torch.cat([state.position(), position])
    return (every <= position[:, None]) & near(position, every, length)


def joined(before: KeyValue | None, new: KeyValue) -> KeyValue:
    """Return keys and values with new rows behind the earlier ones."""
    return new if before is None else (torch.cat([before[0], new[0]], 2), torch.cat([before[1], new[1]], 2))
