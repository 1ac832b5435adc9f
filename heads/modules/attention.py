"""The attention of training: rows of packed documents, each drafting on by itself, exact and in little memory.

A row drafted from row t attends to the true rows that row t sees and to the rows drafted before it from the same t, one
for each step: the training-time test of EAGLE-3 (arXiv 2503.01840). Its scores are one matrix product with the true
rows and a column for each own step, so neither a mask nor scores over all steps' rows are ever made. The two parts are
merged by their log-sum-exp. Queries go through in blocks and the backward pass makes a block's weights again from the
sum (FlashAttention, arXiv 2205.14135), so memory grows with the length and the steps, not with a square of either. A
block is scored with no row before its documents begin, so that time grows with the documents, not with the row.

What a row sees of the true rows is an interval: from where its document or its window begins, up to itself.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KeyValue = tuple[Tensor, Tensor]
BLOCK = 128  # queries at a time


class Pattern(NamedTuple):
    """What each of N queries sees of the true rows, an interval: from `first` to `upto`, both included.

    `upto` is None where query n stands for row n and sees up to itself; then none of the rows that it sees lies more
    than `reach` rows before it. `own` says which of the own steps each query sees, None for all.
    """

    first: Int[Tensor, "B N"]
    upto: Int[Tensor, "B N"] | None = None
    reach: int | None = None
    own: Bool[Tensor, "N n"] | None = None

    def seen(self, block: "Part") -> Bool[Tensor, "B N S"]:
        """Return which true rows a block of queries sees."""
        column = torch.arange(block.least, block.most, device=self.first.device)
        upto = torch.arange(self.first.shape[1], device=self.first.device)[None] if self.upto is None else self.upto
        part = slice(block.begin, block.end)
        return (column >= self.first[:, part, None]) & (column <= upto[:, part, None])

    def parts(self, true: int) -> list["Part"]:
        """Return the blocks that queries over so many true rows go through in, and what each may see."""
        found = []
        lows = None if torch.compiler.is_compiling() else self.lows()
        for i, begin in enumerate(range(0, self.first.shape[1], BLOCK)):
            end = min(begin + BLOCK, self.first.shape[1])
            least = 0 if self.upto is not None or self.reach is None else max(0, begin - self.reach)
            most = true if self.upto is not None else end
            if lows is not None:
                least = min(lows[i], most - 1)  # who sees no true row is scored with one all the same, and masked
            found.append(Part(begin, end, least, most))
        return found

    def lows(self) -> list[int]:
        """Return the first true row that each block's queries see: documents packed in a row do not see the others."""
        return [int(low) for low in torch.stack([part.min() for part in self.first.split(BLOCK, 1)]).tolist()]


class Part(NamedTuple):
    """The queries `begin` … `end` - 1, which see nothing of the true rows but from `least` to `most` - 1."""

    begin: int
    end: int
    least: int
    most: int


def pattern(position: Int[Tensor, "B T"], length: int | None, ahead: int = 0) -> Pattern:
    """Return the pattern of rows drafted `ahead` positions behind their own row.

    Args:
        position: the rows' positions within their documents, 0, 1, 2, … each.
        length: how many positions a row looks back over, its own included; None for all.
        ahead: how far behind row t the row that is drafted from it stands.
    """
    row = torch.arange(position.shape[1], device=position.device)
    back = position if length is None else position.clamp_max(length - 1 - ahead)
    return Pattern(row - back, reach=None if length is None else max(length - 1 - ahead, 0))


def attend_rows(
    query: Float[Tensor, "B H N E"], true: KeyValue, own: list[KeyValue], seen: Pattern
) -> Float[Tensor, "B H N F"]:
    """Attend from each query to the true rows that `seen` gives it and to its own rows.

    Args:
        query: the queries.
        true: keys and values "B G T E" of the true rows.
        own: keys and values "B G N E" of each step drafted so far, seen by the query of the same n alone.
        seen: what of both is seen; every query sees something.
    """
    apply: Any = _Rows.apply
    # Under autocast values are what a linear layer made, but normed queries and keys are wider; the products are not.
    dtype = true[1].dtype
    parts = [tensor.to(dtype) for tensor in (query, *true, *(tensor for pair in own for tensor in pair))]
    out: Tensor = apply(seen, *parts)
    return out


class _Rows(torch.autograd.Function):
    """The attention with its gradient. Heads of a group are folded into the queries: "B G M E", M = heads x queries."""

    @staticmethod
    def forward(ctx: Any, seen: Pattern, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        """Return the outputs, and keep their log-sum-exp."""
        out = query.new_empty((*query.shape[:3], value.shape[-1]))
        total = torch.empty(query.shape[:3], dtype=_wide(query.dtype), device=query.device)
        ctx.parts = seen.parts(key.shape[2])
        for part in ctx.parts:
            here = slice(part.begin, part.end)
            score, mine = _scores(query, key, own, seen, part)
            largest = torch.maximum(score.amax(-1), mine.amax(-1)) if own else score.amax(-1)
            weight, light = score.sub_(largest[..., None]).exp2_(), (mine - largest[..., None]).exp2()
            amount = weight.sum(-1) + light.sum(-1)
            made = _fold(weight.to(value.dtype)) @ value[:, :, part.least : part.most]
            made = made.view(*weight.shape[:-1], -1)
            for i, each in enumerate(own[1::2]):
                made = made + light[..., i, None].to(value.dtype) * each[:, :, None, here]
            out[:, :, here] = (made / amount[..., None].to(made.dtype)).flatten(1, 2)
            total[:, :, here] = (amount.log2() + largest).flatten(1, 2)
        ctx.seen = seen
        ctx.save_for_backward(query, key, value, out, total, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, from weights that are made again a block at a time."""
        query, key, value, out, total, *own = ctx.saved_tensors
        scale, groups = query.shape[-1] ** -0.5, key.shape[1]
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        d_own = [torch.empty_like(each) for each in own]
        for part in ctx.parts:
            here, there = slice(part.begin, part.end), slice(part.least, part.most)
            score, mine = _scores(query, key, own, ctx.seen, part)
            asked, gone, done = (_grouped(x[:, :, here], groups) for x in (query, grads[0], out))
            sums = total[:, :, here].unflatten(1, (groups, -1))[..., None]
            weight, light = score.sub_(sums).exp2_(), (mine - sums).exp2()
            level = (gone.to(sums.dtype) * done).sum(-1, keepdim=True)
            d_value[:, :, there] += _fold(weight.to(value.dtype)).mT @ _fold(gone)
            pull = (_fold(gone) @ value[:, :, there].mT).view_as(weight)
            d_score = _fold(weight.mul_(pull.sub_(level)).to(query.dtype))
            d_asked = (d_score @ key[:, :, there]).view_as(asked) * scale
            d_key[:, :, there] += d_score.mT @ (_fold(asked) * scale)
            for i in range(len(own) // 2):
                one, mine_value = light[..., i, None], own[2 * i + 1][:, :, None, here]
                d_mine = (one * ((gone * mine_value).sum(-1, keepdim=True) - level) * scale).to(query.dtype)
                d_asked = d_asked + d_mine * own[2 * i][:, :, None, here]
                d_own[2 * i][:, :, here] = (d_mine * asked).sum(2)
                d_own[2 * i + 1][:, :, here] = (one.to(gone.dtype) * gone).sum(2)
            d_query[:, :, here] = d_asked.flatten(1, 2)
        return (None, d_query, d_key, d_value, *d_own)


def _scores(
    query: Tensor, key: Tensor, own: Any, seen: Pattern, part: Part
) -> tuple[Float[Tensor, "B G r N S"], Float[Tensor, "B G r N n"]]:
    """Return a block's scores with the true rows, and with each own step's row, in a wide dtype and for base 2.

    Base 2, since a CPU's exp takes ten to fifty times longer where it underflows, as at all that is not seen.
    """
    here = slice(part.begin, part.end)
    asked = _grouped(query[:, :, here], key.shape[1])
    scale, wide, never = query.shape[-1] ** -0.5 / math.log(2), _wide(query.dtype), float("-inf")
    # The scale goes to the queries, and what follows works in place: scores are by far the largest tensor here.
    score = ((_fold(asked) * scale) @ key[:, :, part.least : part.most].mT).view(*asked.shape[:-1], -1).to(wide)
    score += torch.zeros_like(score[:, 0, 0]).masked_fill_(~seen.seen(part), never)[:, None, None]
    if not own:
        return score, score.new_zeros((*score.shape[:-1], 0))
    mine = torch.stack([(asked * each[:, :, None, here]).sum(-1).to(wide) * scale for each in own[::2]], -1)
    return score, mine if seen.own is None else mine.masked_fill(~seen.own[here], never)


def _grouped(x: Float[Tensor, "B H N E"], groups: int) -> Float[Tensor, "B G r N E"]:
    return x.unflatten(1, (groups, -1))


def _fold(x: Float[Tensor, "B G r N E"]) -> Float[Tensor, "B G M E"]:
    return x.flatten(2, 3)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
