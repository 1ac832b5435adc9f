"""Blocks of masked positions: after each anchor row in training, after each root in decoding."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from heads import rows
from heads.modules.attention import Pattern
from heads.modules.kv_cache import KVCache
from heads.modules.layers import grouped_attention


class MaskBlocks(NamedTuple):
    """A block of S positions after each of n anchors."""

    anchor: Int[Tensor, "B n"]  # the rows before the blocks
    position: Int[Tensor, "B n S"]  # of the S positions
    attn_pattern: Pattern  # rows up to the anchor within the head's length, and the same block


def mask_blocks_after(
    document: Int[Tensor, "B T"], anchors: Int[Tensor, "B n"] | None, size: int, length: int | None, *, causal: bool
) -> MaskBlocks:
    """Return a block of `size` positions after each anchor, None for every row.

    A position attends to the last `length` rows, None for all; if `causal` not to later positions of its block.
    """
    position = rows.positions(document)
    every = torch.arange(position.shape[1], device=position.device).expand_as(position)
    anchor = every if anchors is None else anchors
    start = position.gather(1, anchor)[..., None]
    at = start + 1 + torch.arange(size, device=anchor.device)
    row = anchor[..., None].expand_as(at)
    first = row - start
    if length is not None:
        first = torch.maximum(first, row + (at - start) - length + 1)
    return MaskBlocks(anchor, at, Pattern(first.flatten(1), row.flatten(1), distinct=True, size=size, causal=causal))


def mask_blocks_after_roots(
    cache: KVCache, sequences: int, size: int, *, causal: bool
) -> tuple[Int[Tensor, "B S"], Callable[..., Tensor]]:
    """Return the rotary positions of a block after each root, and the attention function of its layers.

    Keys and values of the block are written to the cache as drafted rows. `causal` as in `mask_blocks_after`.
    """
    length = cache.length[:sequences]
    position = length[:, None] + torch.arange(size, device=length.device)
    block = torch.ones(size, size, dtype=torch.bool, device=length.device)
    block = (block.tril() if causal else block).expand(sequences, -1, -1)
    attn_mask = torch.cat([cache.attn_mask(position, length - 1), block], -1)[:, None]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return grouped_attention(query, *cache.draft(layer, key, value, 0), attn_mask)

    return position, attend
