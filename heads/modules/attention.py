"""Training-time-test attention over packed sequences: exact, block-wise, memory linear in length.

A row drafted from row t attends to the context, which is the verified rows up to t, and to the rows drafted before it
from the same t, one per step: the training-time test of EAGLE-3 (arXiv 2503.01840). Its scores are one matmul with the
context and a column for each drafted step, so neither a mask nor scores over all steps' rows are materialised. The two
parts are merged by their log-sum-exp (LSE). Queries are processed in blocks and the backward pass recomputes a block's
P from the LSE (FlashAttention, arXiv 2205.14135), so memory is linear in the length and the number of steps. A block
skips all rows before the start of its documents, so time grows with the documents, not with the packed sequence.

A row attends to an interval of the context: from the start of its document or window up to itself.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heads.modules.flex import block_mask, kernel
from heads.modules.flex import runs as runs_fused
from heads.shapes import HeadOutputs, HeadRows, KeyRows, Nodes

KeyValue = tuple[Tensor, Tensor]
BLOCK = 128  # queries of a block


@dataclass(frozen=True, eq=False)
class Pattern:
    """The attention pattern of N queries: each attends to rows `first` to `last_row` of the context, both included."""

    first: Nodes
    last_row: Nodes | None = None  # increases every `size` queries; None if query n is row n and attends up to itself
    size: int = 1  # queries in a group, which share their drafted rows
    causal: bool = False  # whether later queries' drafted rows are masked
    masks: dict[tuple[int, int], Any] = field(default_factory=dict)  # (length, steps) -> mask of the fused kernel

    @cached_property
    def last(self) -> Nodes:
        """Return the last context row of each query."""
        if self.last_row is not None:
            return self.last_row
        return torch.arange(self.first.shape[1], device=self.first.device).expand_as(self.first)

    def blocks(self, length: int) -> list["QueryBlock"]:
        """Return the blocks of queries over a context of `length` rows, each with its range of context rows."""
        blocks, count = [], self.first.shape[1]
        for i, begin in enumerate(range(0, count, BLOCK)):
            end = min(begin + BLOCK, count)
            most = end if self.last_row is None else length - (count - end) // self.size
            # A query without context rows is scored with one row, which is masked.
            blocks.append(QueryBlock(begin, end, min(self.first_rows[i], most - 1), most))
        return blocks

    @cached_property
    def first_rows(self) -> list[int]:
        """Return each block's first context row, the start of its documents or window."""
        return torch.stack([block.min() for block in self.first.split(BLOCK, 1)]).tolist()

    def shared(self, x: KeyRows) -> list[KeyRows]:
        """Return, for i below `size`, the i-th drafted row of each query's group."""
        if self.size == 1:
            return [x]
        groups = x.unflatten(2, (-1, self.size))
        return [groups[:, :, :, i, None].expand(-1, -1, -1, self.size, -1).flatten(2, 3) for i in range(self.size)]

    def mask(self, length: int, steps: int) -> Any:
        """Return the fused kernel's mask over `length` context rows and `steps` steps of drafted rows."""
        if (length, steps) not in self.masks:
            query = torch.arange(self.first.shape[1], device=self.first.device).expand_as(self.first)
            begin = query - query % self.size
            newest = query if self.causal else begin + self.size - 1
            bounds = torch.stack([self.first, self.last, -1 - newest, -1 - begin])
            self.masks[length, steps] = block_mask(bounds, length, steps)
        return self.masks[length, steps]


class QueryBlock(NamedTuple):
    """The queries `begin` … `end` - 1, whose context is in rows `least` to `most` - 1."""

    begin: int
    end: int
    least: int
    most: int


def pattern(position: Nodes, length: int | None, ahead: int = 0, row: Nodes | None = None) -> Pattern:
    """Return the pattern of rows drafted `ahead` positions after row t.

    `position` are the rows' positions in their documents, counted from 0; `length` is the size of the attention window,
    the row itself included, None for all; `row` are the rows, in order, None for all of the context.
    """
    back = position if length is None else position.clamp_max(length - 1 - ahead)
    if row is not None:
        return Pattern(row - back, row)
    return Pattern(torch.arange(position.shape[1], device=position.device) - back)


def attend_rows(query: HeadRows, context: KeyValue, drafted: list[KeyValue], attn_pattern: Pattern) -> HeadOutputs:
    """Attend from each query to its context rows and its drafted rows, at least one, given by `attn_pattern`.

    `context` are the keys and values "B G T E" of the verified rows, `drafted` those "B G N E" of each step so far; row
    n was drafted for query n. Training on CUDA uses one fused kernel (heads/modules/flex.py), everything else blocks.
    """
    # Under autocast normed queries and keys are wider than values; the products use the values' dtype.
    dtype = context[1].dtype
    query, pairs = query.to(dtype), [(key.to(dtype), value.to(dtype)) for key, value in (context, *drafted)]
    return (attend_fused if runs_fused(query, context[1]) else attend_blocks)(query, pairs, attn_pattern)


def attend_fused(query: HeadRows, pairs: list[KeyValue], attn_pattern: Pattern) -> HeadOutputs:
    """Attend to the context (first of `pairs`) and to the drafted rows (the others) by one fused kernel."""
    mask = attn_pattern.mask(pairs[0][0].shape[2], len(pairs) - 1)
    key, value = (torch.cat(halves, 2) for halves in zip(*pairs, strict=True))
    return kernel()(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])


def attend_blocks(query: HeadRows, pairs: list[KeyValue], attn_pattern: Pattern) -> HeadOutputs:
    """Attend as `attend_fused` does, block by block, on every device and in every dtype; the reference for it."""
    drafted = [
        half for pair in pairs[1:] for halves in zip(*map(attn_pattern.shared, pair), strict=True) for half in halves
    ]
    apply: Any = _BlockwiseAttention.apply
    return apply(attn_pattern, query, *pairs[0], *drafted)


class _BlockwiseAttention(torch.autograd.Function):
    """Block-wise attention with its gradient, over queries "B G M E"; M = heads of a group x queries.

    Names are FlashAttention's: S scores, P probabilities, O output, LSE; dX is the gradient of X, delta = rowsum(dO O).
    """

    @staticmethod
    def forward(ctx: Any, attn_pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, *drafted: Tensor) -> Tensor:
        """Return O, and save the LSE."""
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty((*query.shape[:3], value.shape[-1]))
        lse = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        k = key.to(wide)
        ctx.blocks = attn_pattern.blocks(key.shape[2])
        for block in ctx.blocks:
            q, *drafts = _queries(block, key.shape[1], query, *drafted)
            s, s_drafted = _scores(q, k, drafts[::2], attn_pattern, block)
            largest = torch.maximum(s.amax(-1), s_drafted.amax(-1)) if drafted else s.amax(-1)
            p, p_drafted = s.sub_(largest[..., None]).exp2_(), (s_drafted - largest[..., None]).exp2()
            total = p.sum(-1) + p_drafted.sum(-1)
            o = _product(_fold(p), value[:, :, block.least : block.most]).view(*p.shape[:-1], -1)
            for i, v_drafted in enumerate(drafts[1::2]):
                o = o + p_drafted[..., i, None] * v_drafted
            out[:, :, block.begin : block.end] = (o / total[..., None]).flatten(1, 2)
            lse[:, :, block.begin : block.end] = (total.log2() + largest).flatten(1, 2)
        ctx.attn_pattern = attn_pattern
        ctx.save_for_backward(query, key, value, out, lse, *drafted)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; P is recomputed block by block."""
        query, key, value, out, lse, *drafted = ctx.saved_tensors
        scale, groups, k = query.shape[-1] ** -0.5, key.shape[1], key.to(lse.dtype)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(k), torch.zeros_like(value, dtype=lse.dtype)
        d_drafted = [torch.empty_like(tensor) for tensor in drafted]
        for block in ctx.blocks:
            queries, keys = slice(block.begin, block.end), slice(block.least, block.most)
            q, d_o, o, lse_block, *drafts = _queries(block, groups, query, grads[0], out, lse[..., None], *drafted)
            s, s_drafted = _scores(q, k, drafts[::2], ctx.attn_pattern, block)
            p, p_drafted = s.sub_(lse_block).exp2_(), (s_drafted - lse_block).exp2()
            delta = (d_o * o).sum(-1, keepdim=True)
            d_value[:, :, keys] += _product(_fold(p).mT, _fold(d_o).to(value.dtype))
            d_p = _product(_fold(d_o), value[:, :, keys].mT).view_as(p)
            d_s = _fold(p.mul_(d_p.sub_(delta)))
            d_q = _product(d_s, key[:, :, keys]).view_as(q) * scale
            d_key[:, :, keys] += _product(d_s.mT, (_fold(q) * scale).to(key.dtype))
            for i, (k_i, v_i) in enumerate(zip(drafts[::2], drafts[1::2], strict=True)):
                p_i = p_drafted[..., i, None]
                d_s_i = p_i * ((d_o * v_i).sum(-1, keepdim=True) - delta) * scale
                d_q = d_q + d_s_i * k_i
                d_drafted[2 * i][:, :, queries] = (d_s_i * q).sum(2)
                d_drafted[2 * i + 1][:, :, queries] = (p_i * d_o).sum(2)
            d_query[:, :, queries] = d_q.flatten(1, 2)
        return (None, d_query, d_key.to(key.dtype), d_value.to(value.dtype), *d_drafted)


def _product(a: Float[Tensor, "*n M K"], b: Float[Tensor, "*n K N"]) -> Float[Tensor, "*n M N"]:
    """Multiply in the dtype of `b`, as fused kernels do with P and dS, and return the dtype of `a`."""
    return (a.to(b.dtype) @ b).to(a.dtype)


def _queries(block: QueryBlock, groups: int, *tensors: Tensor) -> list[Float[Tensor, "B G r N E"]]:
    """Return a block's rows of each tensor, split into groups of heads, in the accumulation dtype."""
    slices = [tensor[:, :, block.begin : block.end] for tensor in tensors]
    return [x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(1, (groups, -1)) for x in slices]


def _scores(
    q: Float[Tensor, "B G r N E"], key: KeyRows, drafted: list[Tensor], attn_pattern: Pattern, block: QueryBlock
) -> tuple[Float[Tensor, "B G r N S"], Float[Tensor, "B G r N n"]]:
    """Return a block's base-2 scores with the context and with the row of each drafted step.

    Base 2: on a CPU exp is ten to fifty times slower than exp2 where it underflows, as at masked scores.
    """
    scale, never = q.shape[-1] ** -0.5 / math.log(2), float("-inf")
    # Only the queries are scaled, and later operations are in place: scores are by far the largest tensor.
    s = ((_fold(q) * scale) @ key[:, :, block.least : block.most].mT).view(*q.shape[:-1], -1)
    column, queries = torch.arange(block.least, block.most, device=q.device), slice(block.begin, block.end)
    seen = (column >= attn_pattern.first[:, queries, None]) & (column <= attn_pattern.last[:, queries, None])
    s += torch.zeros_like(s[:, 0, 0]).masked_fill_(~seen, never)[:, None, None]
    if not drafted:
        return s, s.new_zeros((*s.shape[:-1], 0))
    s_drafted = torch.stack([(q * k).sum(-1) * scale for k in drafted], -1)
    if attn_pattern.causal:
        slot = torch.arange(block.begin, block.end, device=q.device) % attn_pattern.size
        later = torch.arange(len(drafted), device=q.device) % attn_pattern.size > slot[:, None]
        s_drafted = s_drafted.masked_fill(later, never)
    return s, s_drafted


def _fold(x: Float[Tensor, "B G r N E"]) -> Float[Tensor, "B G M E"]:
    return x.flatten(2, 3)
