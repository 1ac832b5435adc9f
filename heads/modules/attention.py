"""Training-time-test attention over packed sequences: exact, block-wise, memory linear in length.

A row drafted from row t attends to the context, the true rows that row t sees, and to the rows drafted before it from
the same t, one a step: the training-time test of EAGLE-3 (arXiv 2503.01840). Its scores are one matrix product with the
context and a column for each drafted step, so neither a mask nor scores over all steps' rows are ever materialised. The
two parts are merged by their log-sum-exp (LSE). Queries are processed in blocks and the backward pass recomputes a
block's P from the LSE (FlashAttention, arXiv 2205.14135), so memory grows with the length and the steps, not with a
square of either. A block is scored with no row before its documents begin, so that time grows with the documents, not
with the row.

A row sees an interval of the context: from the start of its document or its window up to itself.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
BLOCK = 128  # queries at a time


class Pattern(NamedTuple):
    """The attention pattern of N queries: each sees an interval of the context, `first` to `upto`, both included.

    `upto` is None where query n stands for row n and sees up to itself; then none of the rows that it sees lies more
    than `reach` rows before it. `drafted` says which of the drafted steps each query sees, None for all.
    """

    first: Int[Tensor, "B N"]
    upto: Int[Tensor, "B N"] | None = None
    reach: int | None = None
    drafted: Bool[Tensor, "N n"] | None = None

    def seen(self, block: "QueryBlock") -> Bool[Tensor, "B N S"]:
        """Return which context rows a block of queries sees."""
        column = torch.arange(block.least, block.most, device=self.first.device)
        upto = torch.arange(self.first.shape[1], device=self.first.device)[None] if self.upto is None else self.upto
        queries = slice(block.begin, block.end)
        return (column >= self.first[:, queries, None]) & (column <= upto[:, queries, None])

    def blocks(self, length: int) -> list["QueryBlock"]:
        """Return the blocks of queries over a context of `length` rows, with the rows that each may see."""
        blocks = []
        lows = None if torch.compiler.is_compiling() else self.lows()
        for i, begin in enumerate(range(0, self.first.shape[1], BLOCK)):
            end = min(begin + BLOCK, self.first.shape[1])
            least = 0 if self.upto is not None or self.reach is None else max(0, begin - self.reach)
            most = length if self.upto is not None else end
            if lows is not None:
                least = min(lows[i], most - 1)  # who sees no context row is scored with one all the same, and masked
            blocks.append(QueryBlock(begin, end, least, most))
        return blocks

    def lows(self) -> list[int]:
        """Return the first context row that each block sees: documents packed in a row do not see the others."""
        return [int(low) for low in torch.stack([block.min() for block in self.first.split(BLOCK, 1)]).tolist()]


class QueryBlock(NamedTuple):
    """The queries `begin` … `end` - 1, which see nothing of the context but rows `least` to `most` - 1."""

    begin: int
    end: int
    least: int
    most: int


def pattern(position: Int[Tensor, "B T"], length: int | None, ahead: int = 0) -> Pattern:
    """Return the pattern of rows drafted `ahead` positions behind their row.

    Args:
        position: the rows' positions within their documents, 0, 1, 2, … each.
        length: how many positions a row looks back over, its own included; None for all.
        ahead: the distance of the drafted row to row t, from which it is drafted.
    """
    row = torch.arange(position.shape[1], device=position.device)
    back = position if length is None else position.clamp_max(length - 1 - ahead)
    return Pattern(row - back, reach=None if length is None else max(length - 1 - ahead, 0))


def attend_rows(
    query: Float[Tensor, "B H N E"], context: KeyValue, drafted: list[KeyValue], seen: Pattern
) -> Float[Tensor, "B H N F"]:
    """Attend from each query to the context rows that `seen` gives it and to the rows drafted for it.

    Args:
        query: the queries.
        context: keys and values "B G T E" of the true rows.
        drafted: keys and values "B G N E" of each step drafted so far, seen by the query of the same n alone.
        seen: the rows of both that each query sees, at least one.
    """
    apply: Any = _Rows.apply
    # Under autocast values come from a linear layer, but normed queries and keys are wider; the products are not.
    dtype = context[1].dtype
    inputs = [tensor.to(dtype) for tensor in (query, *context, *(tensor for pair in drafted for tensor in pair))]
    out: Tensor = apply(seen, *inputs)
    return out


class _Rows(torch.autograd.Function):
    """The attention with its gradient. Heads of a group are folded into the queries: "B G M E", M = heads x queries.

    Names are FlashAttention's: S scores, P probabilities, O output, LSE; dX is the gradient of X, delta = rowsum(dO O).
    """

    @staticmethod
    def forward(ctx: Any, seen: Pattern, query: Tensor, key: Tensor, value: Tensor, *drafted: Tensor) -> Tensor:
        """Return O, and keep its LSE."""
        out = query.new_empty((*query.shape[:3], value.shape[-1]))
        lse = torch.empty(query.shape[:3], dtype=_wide(query.dtype), device=query.device)
        ctx.blocks = seen.blocks(key.shape[2])
        for block in ctx.blocks:
            queries = slice(block.begin, block.end)
            s, s_drafted = _scores(query, key, drafted, seen, block)
            largest = torch.maximum(s.amax(-1), s_drafted.amax(-1)) if drafted else s.amax(-1)
            p, p_drafted = s.sub_(largest[..., None]).exp2_(), (s_drafted - largest[..., None]).exp2()
            total = p.sum(-1) + p_drafted.sum(-1)
            o = _fold(p.to(value.dtype)) @ value[:, :, block.least : block.most]
            o = o.view(*p.shape[:-1], -1)
            for i, v_drafted in enumerate(drafted[1::2]):
                o = o + p_drafted[..., i, None].to(value.dtype) * v_drafted[:, :, None, queries]
            out[:, :, queries] = (o / total[..., None].to(o.dtype)).flatten(1, 2)
            lse[:, :, queries] = (total.log2() + largest).flatten(1, 2)
        ctx.seen = seen
        ctx.save_for_backward(query, key, value, out, lse, *drafted)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, from P that is recomputed a block at a time."""
        query, key, value, out, lse, *drafted = ctx.saved_tensors
        scale, groups = query.shape[-1] ** -0.5, key.shape[1]
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        d_drafted = [torch.empty_like(tensor) for tensor in drafted]
        for block in ctx.blocks:
            queries, keys = slice(block.begin, block.end), slice(block.least, block.most)
            s, s_drafted = _scores(query, key, drafted, ctx.seen, block)
            q, d_o, o = (_grouped(x[:, :, queries], groups) for x in (query, grads[0], out))
            lse_block = lse[:, :, queries].unflatten(1, (groups, -1))[..., None]
            p, p_drafted = s.sub_(lse_block).exp2_(), (s_drafted - lse_block).exp2()
            delta = (d_o.to(lse.dtype) * o).sum(-1, keepdim=True)
            d_value[:, :, keys] += _fold(p.to(value.dtype)).mT @ _fold(d_o)
            d_p = (_fold(d_o) @ value[:, :, keys].mT).view_as(p)
            d_s = _fold(p.mul_(d_p.sub_(delta)).to(query.dtype))
            d_q = (d_s @ key[:, :, keys]).view_as(q) * scale
            d_key[:, :, keys] += d_s.mT @ (_fold(q) * scale)
            for i in range(len(drafted) // 2):
                p_i, v_i = p_drafted[..., i, None], drafted[2 * i + 1][:, :, None, queries]
                d_s_i = (p_i * ((d_o * v_i).sum(-1, keepdim=True) - delta) * scale).to(query.dtype)
                d_q = d_q + d_s_i * drafted[2 * i][:, :, None, queries]
                d_drafted[2 * i][:, :, queries] = (d_s_i * q).sum(2)
                d_drafted[2 * i + 1][:, :, queries] = (p_i.to(d_o.dtype) * d_o).sum(2)
            d_query[:, :, queries] = d_q.flatten(1, 2)
        return (None, d_query, d_key, d_value, *d_drafted)


def _scores(
    query: Tensor, key: Tensor, drafted: Any, seen: Pattern, block: QueryBlock
) -> tuple[Float[Tensor, "B G r N S"], Float[Tensor, "B G r N n"]]:
    """Return a block's scores with the context, and with each drafted step's row, in a wide dtype and for base 2.

    Base 2, since a CPU's exp takes ten to fifty times longer where it underflows, as at all that is not seen.
    """
    queries = slice(block.begin, block.end)
    q = _grouped(query[:, :, queries], key.shape[1])
    scale, wide, never = query.shape[-1] ** -0.5 / math.log(2), _wide(query.dtype), float("-inf")
    # The scale goes to the queries, and the rest works in place: scores are by far the largest tensor here.
    s = ((_fold(q) * scale) @ key[:, :, block.least : block.most].mT).view(*q.shape[:-1], -1).to(wide)
    s += torch.zeros_like(s[:, 0, 0]).masked_fill_(~seen.seen(block), never)[:, None, None]
    if not drafted:
        return s, s.new_zeros((*s.shape[:-1], 0))
    s_drafted = torch.stack([(q * k[:, :, None, queries]).sum(-1).to(wide) * scale for k in drafted[::2]], -1)
    return s, s_drafted if seen.drafted is None else s_drafted.masked_fill(~seen.drafted[queries], never)


def _grouped(x: Float[Tensor, "B H N E"], groups: int) -> Float[Tensor, "B G r N E"]:
    return x.unflatten(1, (groups, -1))


def _fold(x: Float[Tensor, "B G r N E"]) -> Float[Tensor, "B G M E"]:
    return x.flatten(2, 3)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
