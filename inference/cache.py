"""The target's key-value cache, of one sequence or of a batch: the only file that knows transformers' cache classes.

A batch's sequences lie side by side in one buffer a layer, each from its own row 0 on, so that they may differ in
length; each is at the same time a cache of its own, for its prefill.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class Store:
    """One layer's keys and values "B G S E"; the buffers double when they are full."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.both: tuple[Tensor, Tensor] | None = None

    def fit(self, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return buffers of at least `end` rows a sequence, like these keys and values."""
        if self.both is None or end > self.both[0].shape[2]:
            old = self.both or (None, None)
            self.both = self._larger(keys, old[0], end), self._larger(values, old[1], end)
        return self.both

    def _larger(self, like: Tensor, old: Tensor | None, end: int) -> Tensor:
        # Zeros: what was never written is masked, but a NaN there would come through all the same.
        larger = like.new_zeros((self.size, like.shape[1], 2 * end, like.shape[3]))
        if old is not None:
            larger.narrow(2, 0, old.shape[2]).copy_(old)
        return larger


class SequenceLayer(DynamicLayer):
    """One layer of one sequence."""

    def __init__(self, store: Store, slot: int) -> None:
        init: Any = super().__init__
        init()
        self.store, self.slot, self.length = store, slot, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append rows and return all of them."""
        new = key_states.shape[2]
        end = self.length + new
        keys, values = (each[self.slot : self.slot + 1] for each in self.store.fit(key_states, value_states, end))
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        self.length, self.is_initialized = end, True
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        """Return the number of rows; the buffers are longer."""
        return self.length


class TargetCache:
    """The cache of one sequence, driven by row numbers."""

    def __init__(self, stores: list[Store] | None = None, slot: int = 0, size: int = 1) -> None:
        self.stores, self.slot = [] if stores is None else stores, slot
        maker: Any = _maker(self.stores, size, slot)  # transformers calls it as it would a class
        self.hf = Cache(layer_class_to_replicate=maker)

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
            assert isinstance(layer, SequenceLayer)
            if layer.store.both is not None and rows != list(range(len(rows))):
                if index is None:
                    index = torch.tensor(rows, device=layer.store.both[0].device) + prefix
                for buffer in layer.store.both:
                    own = buffer[self.slot]
                    own.narrow(1, prefix, len(rows)).copy_(own.index_select(1, index))
            layer.length = prefix + len(rows)

    def move(self, slot: int) -> None:
        """Go to another slot of the batch, whose sequence has left."""
        for layer in self.hf.layers:
            assert isinstance(layer, SequenceLayer)
            if layer.store.both is not None:
                for buffer in layer.store.both:
                    buffer[slot].narrow(1, 0, layer.length).copy_(buffer[self.slot].narrow(1, 0, layer.length))
            layer.slot = slot
        self.slot = slot
        self.hf.layer_class_to_replicate = None  # all layers are there


def _maker(stores: list[Store], size: int, slot: int) -> Callable[[], SequenceLayer]:
    """Return what makes a sequence's next layer over the next store."""
    made: list[SequenceLayer] = []

    def make() -> SequenceLayer:
        if len(made) == len(stores):
            stores.append(Store(size))
        made.append(SequenceLayer(stores[len(made)], slot))
        return made[-1]

    return make


class BatchLayer(DynamicLayer):
    """One layer of the batch's first sequences, for one pass over all of them."""

    def __init__(self, store: Store, columns: Int[Tensor, "B N"], end: int) -> None:
        init: Any = super().__init__
        init()
        self.store, self.columns, self.end = store, columns, end
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write each sequence's rows at its columns and return all rows up to the end."""
        both = self.store.fit(key_states, value_states, self.end)
        count = len(self.columns)
        row = torch.arange(count, device=self.columns.device)[:, None]
        for buffer, states in zip(both, (key_states, value_states), strict=True):
            buffer[row, :, self.columns] = states.transpose(1, 2)
        return both[0][:count, :, : self.end], both[1][:count, :, : self.end]

    def get_seq_length(self) -> int:
        """Return the rows before the pass, which transformers asks for; the columns say where they really end."""
        return self.end - self.columns.shape[1]


class BatchPass:
    """One pass over the first sequences of a batch: what `Target.run` takes for a cache."""

    def __init__(self, batch: "BatchCache", columns: Int[Tensor, "B N"], end: int) -> None:
        self.hf = Cache(layers=[BatchLayer(store, columns, end) for store in batch.stores])


class BatchCache:
    """Sequences side by side. The first ones are those being decoded; each is a `TargetCache` too."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stores: list[Store] = []
        self.active: list[TargetCache] = []

    def enter(self) -> TargetCache:
        """Return the empty cache of one more sequence."""
        assert len(self.active) < self.size
        self.active.append(TargetCache(self.stores, len(self.active), self.size))
        return self.active[-1]

    def leave(self, cache: TargetCache) -> None:
        """Let a sequence go; the last one takes its slot, so that those being decoded stay the first ones."""
        last = self.active.pop()
        if last is not cache:
            last.move(cache.slot)
            self.active[cache.slot] = last

    def append(self, counts: Sequence[int]) -> None:
        """Take note of the rows that a pass wrote behind each active sequence."""
        for cache, count in zip(self.active, counts, strict=True):
            for layer in cache.hf.layers:
                assert isinstance(layer, SequenceLayer)
                layer.length += count
