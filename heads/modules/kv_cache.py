"""The KV cache of heads with attention: the verified rows of several sequences, followed by the drafted rows of a tree.

The sliding window of `length` rows is that of Longformer (arXiv 2004.05150), in training and in decoding: attention
depends on rotary positions only through their distance, and a head that was trained on sequences of `length` tokens has
seen no larger distance. Earlier rows are overwritten. With `length` None there is no window.

This file also builds the blocks of masked positions that parallel heads draft from: after each anchor row in training,
after each root in decoding.
"""

from collections.abc import Callable
from copy import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads import rows
from heads.base import NewRows
from heads.modules.attention import KeyValue, Pattern
from heads.modules.layers import Attention, grouped_attention
from heads.shapes import Anchors, KeyRows, Nodes, PerSequence, Sequences

SPARE = 64  # entries of the ring buffer beyond the window: the most rows that one call may write
UNBOUNDED = 1 << 40  # the ring size of a cache without a window


class KVCache:
    """Keys and values of up to `size` sequences, one pair of buffers "B G C E" per layer.

    A ring buffer: the row at position p is entry p % ring_size, so a sequence of any length needs `window` entries and
    a few. An entry's position follows from the sequence's length, and nothing is moved as it grows. Drafted rows are
    written after the entries in use, where the next tree overwrites them.

    Attributes:
        first: the slot of the first sequence; not 0 in the view of one sequence of a batch.
        length: the number of verified rows of each sequence.
        longest: an upper bound of the largest `length`, on the host.
        reserved: entries allocated at the start, enough for the longest sequence and a tree.
        fresh: whether the cache is empty except for the rows being written.
    """

    def __init__(self, size: int, window: int | None, device: torch.device, capacity: int = 0, tree: int = 0) -> None:
        self.size, self.window, self.first = size, window, 0
        self.ring_size = UNBOUNDED if window is None else window + SPARE
        with torch.inference_mode(False):  # a compiled step cannot write to inference tensors
            self.length = torch.zeros(size, dtype=torch.long, device=device)
        self.longest, self.fresh = 0, True
        self.reserved = min(capacity, self.ring_size) + tree
        self.layers: list[KeyValue] = []

    def for_new_sequence(self, slot: int) -> "KVCache":
        """Return a view of one slot, emptied for a new sequence; it shares the buffers."""
        one = copy(self)
        one.first, one.longest, one.length = slot, 0, self.length[slot : slot + 1].zero_()
        return one

    def nbytes(self, head: nn.Module) -> int:
        """Return the reserved bytes of a head's keys and values, allocated or not."""
        weights = [layer.k_proj.weight for layer in head.modules() if isinstance(layer, Attention)]
        return 2 * self.size * self.reserved * sum(len(weight) * weight.itemsize for weight in weights)

    @property
    def num_entries(self) -> int:
        """Return the number of entries that may hold verified rows."""
        return min(self.longest, self.ring_size)

    @classmethod
    def opened(cls, state: "KVCache | None", window: int | None, token: Sequences) -> tuple["KVCache", Sequences]:
        """Return the cache for more rows, one of each token, a new cache for new sequences; and their positions."""
        sequences, count = token.shape
        cache = cls(sequences, window, token.device) if state is None else state
        cache.fresh = cache.longest == 0
        cache.longest += count
        return cache, cache.length[:sequences, None] + torch.arange(count, device=token.device)

    def commit(self, new: NewRows) -> None:
        """Count rows as verified, once all layers have their keys and values."""
        self.length[: len(new.token)] += new.token.shape[1] if new.counts is None else new.counts

    def attn_mask(self, query: Sequences, last: PerSequence) -> Bool[Tensor, "B T S"]:
        """Return the queries' attention mask over S entries; `last` is the position of the newest row."""
        entry = torch.arange(self.num_entries, device=query.device)
        position = (last[:, None] - (last[:, None] - entry) % self.ring_size)[:, None]  # negative for empty entries
        mask = (position >= 0) & (position <= query[..., None])
        return mask if self.window is None else mask & (query[..., None] - position < self.window)

    def append(self, layer: int, key: KeyRows, value: Float[Tensor, "B G T F"], position: Sequences) -> KeyValue:
        """Write rows at their positions; return the keys and values of all entries."""
        # In a prompt longer than the ring, no later row attends to the first rows.
        newest = slice(-self.ring_size, None)
        key, value, position = key[:, :, newest], value[:, :, newest], position[:, newest]
        sequence, entry = torch.arange(len(position), device=position.device)[:, None], position % self.ring_size
        sequence = sequence + self.first
        for buffer, new in zip(self._fit(layer, key, value, self.num_entries), (key, value), strict=True):
            buffer[sequence, :, entry] = new.detach().transpose(1, 2)
        return self._first(layer, len(position), self.num_entries)

    def draft(self, layer: int, key: KeyRows, value: Float[Tensor, "B G T F"], earlier: int) -> KeyValue:
        """Write drafted rows after the tree's `earlier` rows; return all keys and values, the tree's included."""
        begin = self.num_entries + earlier
        end = begin + key.shape[2]
        for buffer, new in zip(self._fit(layer, key, value, end), (key, value), strict=True):
            buffer[self.first : self.first + len(new), :, begin:end] = new.detach()
        return self._first(layer, len(key), end)

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [self.length, *(half for pair in self.layers for half in pair)]

    def drafted(self, layer: int, sequences: int, count: int) -> KeyValue:
        """Return copies of the first `count` drafted rows."""
        key, value = self._first(layer, sequences, self.num_entries + count)
        return key[:, :, -count:].clone(), value[:, :, -count:].clone()

    def move(self, from_slot: int, slot: int) -> None:
        """Move a sequence into another slot."""
        self.length[slot] = self.length[from_slot]
        for pair in self.layers:
            for buffer in pair:
                buffer[slot, :, : self.num_entries] = buffer[from_slot, :, : self.num_entries]

    def _first(self, layer: int, sequences: int, end: int) -> KeyValue:
        key, value = self.layers[layer]
        slots = slice(self.first, self.first + sequences)
        return key[slots, :, :end], value[slots, :, :end]

    def _fit(self, layer: int, key: Tensor, value: Tensor, end: int) -> KeyValue:
        """Return a layer's buffers with at least `end` entries; full buffers double in size."""
        if layer == len(self.layers):
            self.layers.append((self._buffer(key, end), self._buffer(value, end)))
        held = self.layers[layer]
        if end > held[0].shape[2]:
            key, value = (self._buffer(buffer, end) for buffer in held)
            for before, after in zip(held, (key, value), strict=True):
                after[:, :, : before.shape[2]] = before
            held = self.layers[layer] = key, value
        return held

    def _buffer(self, like: Tensor, end: int) -> Tensor:
        # Zeros, since a mask does not hide a NaN in an unwritten entry.
        num_entries = self.reserved if end <= self.reserved else max(end, min(2 * end, self.ring_size) + SPARE)
        with torch.inference_mode(False):
            return like.new_zeros((self.size, like.shape[1], num_entries, like.shape[3]))


def mask_blocks_after(
    document: Sequences, anchors: Anchors, size: int, length: int | None, *, causal: bool
) -> tuple[Nodes, Int[Tensor, "B S"], Pattern]:
    """Return blocks of `size` positions: the anchors before them, None for every row, and the blocks' positions.

    A position attends to the last `length` rows (None: all) and to its block, if `causal` only up to itself.
    """
    position = rows.positions(document)
    anchor = torch.arange(position.shape[1], device=position.device).expand_as(position) if anchors is None else anchors
    start = rows.gather_rows(position, anchors)[..., None]
    at = start + 1 + torch.arange(size, device=anchor.device)
    row = anchor[..., None].expand_as(at)
    first = row - start
    if length is not None:
        first = torch.maximum(first, row + (at - start) - length + 1)
    return anchor, at.flatten(1), Pattern(first.flatten(1), row.flatten(1), size=size, causal=causal)


def mask_blocks_after_roots(
    cache: KVCache, sequences: int, size: int, *, causal: bool
) -> tuple[Nodes, Callable[..., Tensor]]:
    """Return the rotary positions of a block after each root, and the attention function of its layers.

    Keys and values of the block are written to the cache as drafted rows. `causal` is that of `mask_blocks_after`.
    """
    length = cache.length[:sequences]
    position = length[:, None] + torch.arange(size, device=length.device)
    block = torch.ones(size, size, dtype=torch.bool, device=length.device)
    block = (block.tril() if causal else block).expand(sequences, -1, -1)
    attn_mask = torch.cat([cache.attn_mask(position, length - 1), block], -1)[:, None]
    return position, lambda layer, q, k, v: grouped_attention(q, *cache.draft(layer, k, v, 0), attn_mask)
