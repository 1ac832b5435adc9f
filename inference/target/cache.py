"""The target's KV cache, of one sequence or of a batch: the only file that knows transformers' cache classes.

An entry holds the keys and values of one token. All layers of equal spec share one tensor over layers, sequences and
entries. It is allocated once for the current requests, so nothing grows or is copied during decoding; entries are
compacted in all layers at once. Each sequence has a slot and fills it from entry 0 on, so sequences may differ in
length; a slot is also a `TargetCache`, for the prefill.

A recurrent layer (a state space, a gated delta rule, a short convolution) keeps one state, which a pass advances by all
its tokens. So a verification pass keeps the states before it and the mixers' inputs; if a part of the chain is
rejected, only the mixers run again, over the accepted tokens. In a tree each path would need its own states: such
targets verify chains.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from heads.common.typed import Json
from heads.modules.attention import KeyValue
from heads.shapes import Nodes, PerSequence
from inference.verification.tree import AncestorMask

Args = tuple[Any, ...]  # a call's, by position
KV_BUCKET = 256  # padded passes read a multiple of this many entries
CAPACITY_MULTIPLE = 64  # capacities are multiples of it, so attention can be split into equal pieces
STATE = ("conv_states", "recurrent_states", "has_previous_state")  # the attributes of a layer that a pass changes
MIN_CAPACITY = 2048  # least capacity with `few_sizes`: when a storage grows, graphs are captured again


class KVSpec(NamedTuple):
    """The shape and dtype of one layer's keys or values; layers of equal spec share a tensor."""

    groups: int
    width: int
    dtype: torch.dtype
    device: torch.device


# The specs of each layer's keys and values, for the layers that a first pass caches.
Layout = dict[int, tuple[KVSpec, KVSpec]]


class BatchLayer(DynamicLayer):
    """One layer's buffers "B G C E" in one pass over several sequences; each writes its own entries."""

    def __init__(self, keys: Tensor, values: Tensor, slot: Int[Tensor, "B #N"], write_index: Nodes, end: int) -> None:
        init: Any = super().__init__
        init()
        self.both, self.slot, self.write_index, self.end = (keys, values), slot, write_index, end
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeyValue:
        """Write each sequence's new entries and return all entries up to the end."""
        slot, write_index = (index.to(key_states.device) for index in (self.slot, self.write_index))  # to its device
        for buffer, states in zip(self.both, (key_states, value_states), strict=True):
            buffer[slot, :, write_index] = states.transpose(1, 2)
        keys, values = (buffer[:, :, : self.end] for buffer in self.both)
        return (keys, values) if slot.shape[1] > 1 else (keys[: len(slot)], values[: len(slot)])

    def get_seq_length(self) -> int:
        """Return a number of entries before the pass for transformers; `write_index` has each sequence's own."""
        return max(0, self.end - self.write_index.shape[1])


class BatchPass(NamedTuple):
    """One pass over the first sequences of a batch: all buffers, the entries to write, and the end of attention.

    With `fixed_shapes` it is captured in a graph. With `slot` its T tokens are one row, each with its sequence's slot.
    """

    keys: list[Tensor]
    values: list[Tensor]
    write_index: Nodes
    end: int
    fixed_shapes: bool = False
    slot: Int[Tensor, "1 T"] | None = None

    @property
    def hf(self) -> Cache:
        """The cache object for transformers."""
        slot = self.slot
        if slot is None:
            slot = torch.arange(len(self.write_index), device=self.write_index.device)[:, None]
        both = zip(self.keys, self.values, strict=True)
        return Cache(layers=[BatchLayer(*pair, slot, self.write_index, self.end) for pair in both])


def round_up_kv_length(end: int) -> int:
    """Round the number of entries up to one of a few sizes."""
    return -(-end // KV_BUCKET) * KV_BUCKET


class Storage:
    """Keys and values of all layers for `size` sequences, a tensor "L B G C E" for each spec.

    Attributes:
        layers: each layer's keys and values, views "B G C E".
        capacity: C, the entries of a sequence; `reserve` raises it, and a longer sequence doubles it.
        few_sizes: whether capacities have only few values, for compiled passes.
    """

    def __init__(self, size: int, layout: Layout, few_sizes: bool = False) -> None:
        self.size, self.layout, self.capacity, self.few_sizes = size, layout, 0, few_sizes
        self.blocks: list[Tensor] = []
        self.layers: dict[int, KeyValue] = {}

    @property
    def nbytes(self) -> Counter[torch.device]:
        """Bytes of all layers' keys and values by device, allocated or not."""
        total = Counter[torch.device]()
        for spec in (spec for pair in self.layout.values() for spec in pair):
            total[spec.device] += spec.groups * spec.width * spec.dtype.itemsize * self.size * self.capacity
        return total

    def reserve(self, capacity: int) -> None:
        """Allocate at least `capacity` entries a sequence."""
        if self.few_sizes:
            capacity = max(round_up_kv_length(capacity), MIN_CAPACITY)
        else:
            capacity = -(-capacity // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        if capacity > self.capacity:
            self.capacity, old = capacity, self.layers
            self.blocks, self.layers = [], {}
            self._add({layer: self.layout[layer] for layer in old})
            for layer, pair in old.items():
                for before, after in zip(pair, self.layers[layer], strict=True):
                    after[:, :, : before.shape[2]] = before

    def fit(self, layer: int, keys: Tensor, values: Tensor, end: int) -> KeyValue:
        """Return a layer's buffers of at least `end` entries a sequence, for keys and values of this spec."""
        if end > self.capacity:
            self.reserve(2 * end)
        if layer not in self.layers:
            key, value = (KVSpec(x.shape[1], x.shape[3], x.dtype, x.device) for x in (keys, values))
            self.layout.setdefault(layer, (key, value))
            self._add({i: specs for i, specs in self.layout.items() if i not in self.layers})
        return self.layers[layer]

    def tree_pass(
        self, length: PerSequence, ancestor_mask: AncestorMask, depth: Nodes, end: int, *, fixed_shapes: bool = False
    ) -> tuple[BatchPass, Bool[Tensor, "B N S"], Int[Tensor, "B S"]]:
        """Return a pass over trees whose entries follow each sequence's first `length` ones.

        Also return each node's mask of the first S = `end` entries, false after its tree, and the entries' positions.
        """
        size, begin = depth.shape[1], length[:, None]
        column = torch.arange(end, device=length.device) - begin  # relative to the root
        node = column.clamp(0, size - 1)
        within = (column >= 0) & (column < size)
        on_path = ancestor_mask.expand(len(length), -1, -1).gather(2, node[:, None].expand(-1, size, -1))
        seen = (column < 0)[:, None] | (within[:, None] & on_path)
        if end > self.capacity:
            self.reserve(2 * end)
        write_index = begin + torch.arange(size, device=length.device)
        layers = self.layers.values()
        rows = BatchPass([keys for keys, _ in layers], [values for _, values in layers], write_index, end, fixed_shapes)
        return rows, seen, begin + torch.where(within, depth.gather(1, node), column)

    def compact(self, slot: Int[Tensor, "B 1"], source: Int[Tensor, "B P"], dest: Int[Tensor, "B P"]) -> None:
        """Copy each sequence's entries at `source` to `dest` in all layers; all reads come before the writes."""
        for block in self.blocks:
            at, begin, end = (index.to(block.device) for index in (slot, source, dest))
            block[:, at, :, end] = block[:, at, :, begin]

    def _add(self, layout: Layout) -> None:
        specs = [spec for pair in layout.values() for spec in pair]
        buffers = {}
        for spec in dict.fromkeys(specs):
            # Zeros: unwritten entries are masked, but a NaN would come through a mask.
            shape = specs.count(spec), self.size, spec.groups, self.capacity, spec.width
            self.blocks.append(torch.zeros(shape, dtype=spec.dtype, device=spec.device))
            buffers[spec] = iter(self.blocks[-1])
        self.layers |= {layer: (next(buffers[keys]), next(buffers[values])) for layer, (keys, values) in layout.items()}


class SequenceLayer(DynamicLayer):
    """One layer's cache of one sequence."""

    def __init__(self, storage: Storage, index: int, slot: int) -> None:
        init: Any = super().__init__
        init()
        self.storage, self.index, self.slot, self.length = storage, index, slot, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeyValue:
        """Append entries and return all of them."""
        new, slot = key_states.shape[2], slice(self.slot, self.slot + 1)
        end = self.length + new
        keys, values = (buffer[slot] for buffer in self.storage.fit(self.index, key_states, value_states, end))
        keys.narrow(2, self.length, new).copy_(key_states)
        values.narrow(2, self.length, new).copy_(value_states)
        self.length, self.is_initialized = end, True
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        """Return the number of entries; the buffers are longer."""
        return self.length


class TargetCache:
    """The KV cache of one sequence."""

    def __init__(self, storage: Storage, slot: int = 0) -> None:
        self.storage, self.slot = storage, slot
        layers = (SequenceLayer(storage, index, slot) for index in itertools.count())
        maker: Any = layers.__next__  # transformers calls it like a class
        self.hf: Any = Cache(layer_class_to_replicate=maker)

    @property
    def length(self) -> int:
        """The number of entries."""
        return int(self.hf.get_seq_length())

    def snapshot(self) -> None:
        """Prepare for a pass whose entries may be dropped; recurrent states are copied, entries need nothing."""
        return

    @torch.inference_mode()
    def keep(self, prefix: int, entries: list[int]) -> None:
        """Compact: keep the first `prefix` entries and then `entries` (counted from the prefix)."""
        if entries != list(range(len(entries))):
            dest = torch.arange(len(entries))[None]
            self.storage.compact(torch.tensor([[self.slot]]), prefix + torch.tensor([entries]), prefix + dest)
        self.set_length(prefix + len(entries))

    def set_length(self, length: int) -> None:
        """Set the number of entries."""
        for layer in self.hf.layers:
            layer.length = length

    @torch.inference_mode()
    def move(self, slot: int) -> None:
        """Move to a free slot of the batch."""
        for block in self.storage.blocks:
            block[:, slot, :, : self.length] = block[:, self.slot, :, : self.length]
        for layer in self.hf.layers:
            layer.slot = slot
        self.slot = slot
        self.hf.layer_class_to_replicate = None  # no further layers are made


class BatchCache:
    """The KV cache of a batch; the first slots are the sequences being decoded, each a `TargetCache` too."""

    def __init__(self, storage: Storage, make: Callable[[Storage, int], TargetCache]) -> None:
        self.storage, self.make = storage, make
        self.active: list[TargetCache] = []

    def allocate(self, slot: int | None = None) -> TargetCache:
        """Return the empty cache of a sequence in a slot, by default the next one."""
        slot = len(self.active) if slot is None else slot
        assert slot < self.storage.size
        self.active[slot : slot + 1] = [self.make(self.storage, slot)]
        return self.active[slot]


class Call(NamedTuple):
    """A call of a mixer: its arguments."""

    mixer: nn.Module
    args: Args
    kwargs: Json

    def replay(self, total: int, count: int) -> None:
        """Run the mixer over the first `count` of `total` tokens."""

        def first(value: Any) -> Any:
            is_by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == total
            return value[:, :count] if is_by_token else value

        self.mixer(*map(first, self.args), **{key: first(value) for key, value in self.kwargs.items()})


class RecordingCache(Cache):
    """The cache object for transformers; it records the mixers' calls by layer while `calls` is a dict."""

    calls: dict[int, Call] | None = None


class HybridLayer(LinearAttentionAndFullAttentionLayer):
    """A layer with a recurrent mixer and an attention; `entries` is the attention's cache."""

    def __init__(self, entries: SequenceLayer) -> None:
        super().__init__()
        self.entries = entries

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeyValue:
        """Append entries and return all of them."""
        return self.entries.update(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of entries."""
        return self.entries.get_seq_length()


class Recurrence:
    """The recurrent layers of a target; `mixers` are the modules that advance their states."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.mixers: dict[int, nn.Module] = {}
        for module in layers.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.register_forward_pre_hook(self.note, with_kwargs=True)
                module.register_forward_hook(self.find, with_kwargs=True)

    def note(self, module: Any, args: Args, kwargs: Json) -> None:
        """Record a mixer's arguments."""
        states, index = _states(args, kwargs), module.layer_idx
        if states is not None and states.calls is not None and index in self.mixers and self.mixers[index] is module:
            states.calls[index] = Call(module, args, kwargs)

    def find(self, module: Any, args: Args, kwargs: Json, _output: Any) -> None:
        """Find a layer's mixer: the innermost module after whose first call the layer has a state."""
        index, states = module.layer_idx, _states(args, kwargs)
        if index in self.mixers or states is None:
            return
        layer = states.layers[index]
        if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
            self.mixers[index] = module


def recurrence(config: PreTrainedConfig, layers: nn.ModuleList) -> Recurrence | None:
    """Return a target's recurrent layers; None if it has only attention, or its own cache."""
    try:
        kinds = DynamicCache(config=config).layers
    except (AttributeError, LookupError, ValueError):
        return None
    return Recurrence(layers) if any(isinstance(kind, LinearAttentionCacheLayerMixin) for kind in kinds) else None


class RecurrentCache(TargetCache):
    """The cache of one sequence with recurrent layers."""

    def __init__(self, storage: Storage, slot: int, config: PreTrainedConfig) -> None:
        super().__init__(storage, slot)
        layers: list[Any] = list(DynamicCache(config=config).layers)  # transformers' caches for states
        self.attention: list[SequenceLayer] = []
        for index, layer in enumerate(layers):
            if isinstance(layer, CacheLayerMixin):
                self.attention.append(SequenceLayer(storage, index, slot))
                is_hybrid = isinstance(layer, LinearAttentionCacheLayerMixin)
                layers[index] = HybridLayer(self.attention[-1]) if is_hybrid else self.attention[-1]
        self.hf = RecordingCache(layers=layers)
        self.before: dict[int, Json] | None = None

    @property
    def recurrent(self) -> dict[int, Any]:
        """The layers with states."""
        return {i: layer for i, layer in enumerate(self.hf.layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}

    def set_length(self, length: int) -> None:
        """Set the number of entries of the attention layers."""
        for layer in self.attention:
            layer.length = length

    def snapshot(self) -> None:
        """Copy the states, so that the next pass can be undone."""
        self.before = {i: {name: dict(getattr(layer, name)) for name in STATE} for i, layer in self.recurrent.items()}
        for states in self.before.values():
            for state in states.values():
                state |= {i: value.clone() for i, value in state.items() if isinstance(value, Tensor)}
        self.hf.calls = {}

    @torch.inference_mode()
    def keep(self, prefix: int, entries: list[int]) -> None:
        """Keep the `prefix` entries before the snapshot, and the first entries of the pass after it."""
        assert entries == list(range(len(entries)))
        total, count = self.length - prefix, len(entries)
        if count < total:
            assert self.before is not None
            calls, self.hf.calls = self.hf.calls or {}, None
            for index, layer in self.recurrent.items():
                vars(layer).update(self.before[index])
                if count:
                    calls[index].replay(total, count)
        self.before = self.hf.calls = None
        self.set_length(prefix + count)


def _states(args: Args, kwargs: Json) -> RecordingCache | None:
    """Return the `RecordingCache` among a module's arguments, if there is one."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, RecordingCache)), None)
