"""The target's key-value cache: the only file that knows transformers' cache classes."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):
    """One layer's keys and values "B G S E" in a buffer that doubles, so that a step appends instead of copying all."""

    def __init__(self) -> None:
        init: Any = super().__init__
        init()
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append rows and return all of them."""
        new = key_states.shape[-2]
        end = self.length + new
        if self.buffers is None or end > self.buffers[0].shape[-2]:
            self.buffers = (self._larger(key_states, end, 0), self._larger(value_states, end, 1))
            self.is_initialized = True
        keys, values = self.buffers
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        self.length = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        """Return the number of rows; the buffers are longer."""
        return self.length

    def keep(self, prefix: int, rows: Tensor | None, count: int) -> None:
        """Keep the first `prefix` rows and then `count` of what follows: those at `rows`, or the first ones."""
        if rows is not None and self.buffers is not None:
            for buffer in self.buffers:
                buffer.narrow(2, prefix, count).copy_(buffer.index_select(2, rows))
        self.length = prefix + count

    def _larger(self, like: Tensor, end: int, which: int) -> Tensor:
        larger = like.new_empty((*like.shape[:2], 2 * end, like.shape[3]))
        if self.buffers is not None:
            larger.narrow(2, 0, self.length).copy_(self.buffers[which].narrow(2, 0, self.length))
        return larger


class TargetCache:
    """The cache of one sequence, driven by row numbers."""

    def __init__(self) -> None:
        self.hf = Cache(layer_class_to_replicate=GrowingLayer)

    @property
    def length(self) -> int:
        """How many rows are cached."""
        return int(self.hf.get_seq_length())

    @torch.inference_mode()
    def keep(self, prefix: int, rows: list[int], layers: int | None = None) -> None:
        """Keep the first `prefix` rows and then `rows` (counted from the prefix), closing the gaps.

        In every layer, or in the first `layers` ones, which may hold rows that the others lack.
        """
        index = None
        for layer in self.hf.layers[:layers]:
            assert isinstance(layer, GrowingLayer)
            if index is None and layer.buffers is not None and rows != list(range(len(rows))):
                index = torch.tensor(rows, device=layer.buffers[0].device) + prefix
            layer.keep(prefix, index, len(rows))
