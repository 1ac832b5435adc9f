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
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if self.buffers is None or end > self.buffers[0].shape[-2]:
            self.buffers = (self._larger(key_states, end, 0), self._larger(value_states, end, 1))
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        return self._show(end)

    def keep(self, prefix: int, rows: list[int]) -> None:
        """Keep the first `prefix` rows and then `rows` of what follows, closing the gaps."""
        assert self.buffers is not None
        if rows != list(range(len(rows))):
            index = torch.tensor(rows, device=self.buffers[0].device) + prefix
            for buffer in self.buffers:
                buffer[:, :, prefix : prefix + len(rows)] = buffer[:, :, index]
        self._show(prefix + len(rows))

    def _larger(self, like: Tensor, end: int, which: int) -> Tensor:
        larger = like.new_empty((*like.shape[:2], 2 * end, like.shape[3]))
        if self.buffers is not None:
            larger[:, :, : self.length] = self.buffers[which][:, :, : self.length]
        return larger

    def _show(self, length: int) -> tuple[Tensor, Tensor]:
        assert self.buffers is not None
        self.length = length
        keys, values = (buffer[:, :, :length] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values


class TargetCache:
    """The cache of one sequence, driven by row numbers."""

    def __init__(self) -> None:
        self.hf = Cache(layer_class_to_replicate=GrowingLayer)

    @property
    def length(self) -> int:
        """How many rows are cached."""
        return int(self.hf.get_seq_length())

    def keep(self, prefix: int, rows: list[int]) -> None:
        """Keep the first `prefix` rows and then `rows` (counted from the prefix) in every layer."""
        for layer in self.hf.layers:
            assert isinstance(layer, GrowingLayer)
            layer.keep(prefix, rows)
