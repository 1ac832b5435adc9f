"""Mask slots: a block of them behind each anchor row in training, or behind each root, and what they attend to."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads import rows
from heads.modules.attention import Pattern
from heads.modules.kv_cache import KVCache
from heads.modules.layers import masked_attention


class Slots(NamedTuple):
    """S slots behind each of n anchors.

    Attributes:
        anchor: the rows that they stand behind.
        position: of the slots.
        seen: their pattern: the true rows up to the anchor, within the head's length, and slots of the same block.
    """

    anchor: Int[Tensor, "B n"]
    position: Int[Tensor, "B n S"]
    seen: Pattern


def behind(
    document: Int[Tensor, "B T"], anchors: Int[Tensor, "B n"] | None, size: int, length: int | None, *, causal: bool
) -> Slots:
    """Return the slots behind these rows, or behind every row, for the positions from the anchor's next one on.

    Args:
        document: the rows' documents.
        anchors: the rows.
        size: slots behind each.
        length: how far a slot looks back; None for all rows.
        causal: whether a slot sees no later slots.
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
    return Slots(anchor, at, Pattern(first.flatten(1), row.flatten(1), size=size, causal=causal))


def at_rows(state: Float[Tensor, "B n X"], anchor: Int[Tensor, "B n"], length: int) -> Float[Tensor, "B T X"]:
    """Return states of anchors at their rows of T = `length`, zeros at the others."""
    full = state.new_zeros(len(state), length, state.shape[-1])
    return full.scatter(1, anchor[..., None].expand_as(state), state)


def behind_roots(
    cache: KVCache, sequences: int, size: int, *, causal: bool
) -> tuple[Int[Tensor, "B S"], Callable[..., Tensor]]:
    """Return the positions of slots behind the newest rows of a cache, and their attention, given a layer's number.

    Args:
        cache: the head's KV cache, to which the slots' keys and values are added as drafted rows.
        sequences: B, the first ones of the cache.
        size: slots behind each root.
        causal: whether a slot sees no later slots.
    """
    length = cache.length[:sequences]
    position = length[:, None] + torch.arange(size, device=length.device)
    block = torch.ones(size, size, dtype=torch.bool, device=length.device)
    block = (block.tril() if causal else block).expand(sequences, -1, -1)
    sees = torch.cat([cache.sees(position, length - 1), block], -1)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return masked_attention(query, *cache.draft(layer, key, value, 0), sees)

    return position, attend
