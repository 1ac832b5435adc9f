"""The target's key-value cache, of one sequence or of a batch: the only file that knows transformers' cache classes.

A batch's sequences lie side by side in one buffer a layer, each from its own row 0 on, so that they may differ in
length; each is at the same time a cache of its own, for its prefill.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

STRIDE = 256  # of the sizes, in rows, that passes of a few sizes have
LEAST = 2048  # rows of a fixed store: each time that it grows, the passes that write to it are captured anew


class Store:
    """One layer's keys and values "B G S E"; the buffers double when they are full.

    A `fixed` one starts long enough for most sequences and tells the compiler that its addresses stay.
    """

    def __init__(self, size: int, fixed: bool = False) -> None:
        self.size, self.fixed = size, fixed
        self.both: tuple[Tensor, Tensor] | None = None

    def fit(self, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Return buffers of at least `end` rows a sequence, like these keys and values."""
        if self.both is None or end > self.both[0].shape[2]:
            old = self.both or (None, None)
            self.both = self._larger(keys, old[0], end), self._larger(values, old[1], end)
        return self.both

    def reach(self, end: int) -> tuple[Tensor, Tensor]:
        """Return the buffers, which rows were written to before, with at least `end` rows a sequence."""
        assert self.both is not None
        return self.fit(*self.both, end)

    def _larger(self, like: Tensor, old: Tensor | None, end: int) -> Tensor:
        # Zeros: what was never written is masked, but a NaN there would come through all the same.
        rows = max(2 * end, LEAST) if self.fixed else 2 * end
        larger = like.new_zeros((self.size, like.shape[1], rows, like.shape[3]))
        if old is not None:
            larger.narrow(2, 0, old.shape[2]).copy_(old)
        if self.fixed:
            torch._dynamo.mark_static_address(larger)
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
        keys, values = (tensor[self.slot : self.slot + 1] for tensor in self.store.fit(key_states, value_states, end))
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        self.length, self.is_initialized = end, True
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        """Return the number of rows; the buffers are longer."""
        return self.length


class BatchLayer(DynamicLayer):
    """One layer's buffers "B G C E", for one pass over several sequences, each with its own columns to write."""

    def __init__(self, keys: Tensor, values: Tensor, columns: Int[Tensor, "B N"], end: int) -> None:
        init: Any = super().__init__
        init()
        self.both, self.columns, self.end = (keys, values), columns, end
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write each sequence's rows at its columns and return all rows up to the end."""
        count = len(self.columns)
        columns = self.columns.to(key_states.device)  # layers may lie on several
        row = torch.arange(count, device=columns.device)[:, None]
        for buffer, states in zip(self.both, (key_states, value_states), strict=True):
            buffer[row, :, columns] = states.transpose(1, 2)
        return self.both[0][:count, :, : self.end], self.both[1][:count, :, : self.end]

    def get_seq_length(self) -> int:
        """Return the rows before the pass, which transformers asks for; the columns say where they really end."""
        return self.end - self.columns.shape[1]


class BatchPass(NamedTuple):
    """One pass over the first sequences of a batch: all buffers, the columns to write, and where the rows end."""

    keys: list[Tensor]
    values: list[Tensor]
    columns: Int[Tensor, "B N"]
    end: int

    @property
    def hf(self) -> Cache:
        """What transformers takes for a cache."""
        return Cache(
            layers=[BatchLayer(*both, self.columns, self.end) for both in zip(self.keys, self.values, strict=True)]
        )


def _pass(stores: list[Store], columns: Int[Tensor, "B N"], end: int) -> BatchPass:
    both = [store.reach(roomy(end + columns.shape[1])) for store in stores]
    return BatchPass([keys for keys, _ in both], [values for _, values in both], columns, end)


def roomy(end: int) -> int:
    """Return the end of the rows in a pass of one of a few sizes; every pass finds room for it."""
    return -(-end // STRIDE) * STRIDE


class TargetCache:
    """The cache of one sequence, driven by row numbers."""

    def __init__(
        self, stores: list[Store] | None = None, slot: int = 0, store: Callable[[], Store] = lambda: Store(1)
    ) -> None:
        self.stores, self.slot = [] if stores is None else stores, slot
        maker: Any = _maker(self.stores, store, slot)  # transformers calls it as it would a class
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
                    entries = buffer[self.slot]
                    entries.narrow(1, prefix, len(rows)).copy_(entries.index_select(1, index.to(entries.device)))
            layer.length = prefix + len(rows)

    def over(self, columns: Int[Tensor, "B N"], end: int) -> BatchPass:
        """Return a pass over this sequence alone; rows that it writes behind the others count after `append`."""
        whole = _pass(self.stores, columns, end)
        if len(whole.keys[0]) == 1:
            return whole
        slot = slice(self.slot, self.slot + 1)
        return whole._replace(keys=[key[slot] for key in whole.keys], values=[value[slot] for value in whole.values])

    def append(self, count: int) -> None:
        """Take note of the rows that a pass wrote behind the others."""
        for layer in self.hf.layers:
            assert isinstance(layer, SequenceLayer)
            layer.length += count

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


def _maker(stores: list[Store], store: Callable[[], Store], slot: int) -> Callable[[], SequenceLayer]:
    """Return what makes a sequence's next layer over the next store."""
    layers: list[SequenceLayer] = []

    def make() -> SequenceLayer:
        if len(layers) == len(stores):
            stores.append(store())
        layers.append(SequenceLayer(stores[len(layers)], slot))
        return layers[-1]

    return make


class BatchCache:
    """Sequences side by side. The first ones are those being decoded; each is a `TargetCache` too."""

    def __init__(self, size: int, stores: list[Store] | None = None, store: Callable[[int], Store] = Store) -> None:
        self.size, self.store = size, partial(store, size)
        self.stores: list[Store] = [] if stores is None else stores
        self.active: list[TargetCache] = []

    def enter(self) -> TargetCache:
        """Return the empty cache of one more sequence."""
        assert len(self.active) < self.size
        self.active.append(TargetCache(self.stores, len(self.active), self.store))
        return self.active[-1]

    def leave(self, cache: TargetCache) -> None:
        """Let a sequence go; the last one takes its slot, so that those being decoded stay the first ones."""
        last = self.active.pop()
        if last is not cache:
            last.move(cache.slot)
            self.active[cache.slot] = last

    def over(self, columns: Int[Tensor, "B N"], end: int) -> BatchPass:
        """Return a pass over the first sequences; rows that it writes behind the others count after `append`."""
        return _pass(self.stores, columns, end)


class Pool:
    """Lends caches whose buffers outlive their sequences: a compiled pass wants to find them where they were."""

    def __init__(self, fixed: bool) -> None:
        self.store = partial(Store, fixed=fixed)
        self.free: defaultdict[int, list[list[Store]]] = defaultdict(list)

    def sequence(self) -> TargetCache:
        """Return an empty cache for one sequence; when it is dropped, its buffers come back."""
        stores = self._take(1)
        cache = TargetCache(stores, 0, partial(self.store, 1))
        weakref.finalize(cache, self.free[1].append, stores)
        return cache

    def batch(self, size: int) -> BatchCache:
        """Return an empty cache for up to `size` sequences; when it is dropped, its buffers come back."""
        stores = self._take(size)
        cache = BatchCache(size, stores, self.store)
        weakref.finalize(cache, self.free[size].append, stores)
        return cache

    def _take(self, size: int) -> list[Store]:
        return self.free[size].pop() if self.free[size] else []
