"""Index arithmetic on rows and depths; the notation is in heads/base.py."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from heads.shapes import Anchors, Nodes, Paths, PerSequence, RowMask, Sequences

PerRow = Shaped[Tensor, "B T *rest"]


def positions(document: Sequences) -> Sequences:
    """Return each row's position within its own document, counted from 0."""
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values


def visible(document: Sequences) -> Bool[Tensor, "B T T"]:
    """Return the attention mask of packed documents: a row attends to itself and the earlier rows of its document."""
    same = document[:, :, None] == document[:, None, :]
    return same & torch.ones_like(same[0]).tril()


def shift_left(x: PerRow, count: int) -> PerRow:
    """Return row t+count of `x` at row t; the last `count` rows, where `valid` is false, repeat the last row."""
    if count == 0:
        return x
    index = (torch.arange(x.shape[1], device=x.device) + count).clamp_max(x.shape[1] - 1)
    return x[:, index]


def last_rows(x: PerRow, count: PerSequence | None) -> Shaped[Tensor, "B 1 *rest"]:
    """Return each sequence's last row; with `count` the sequences have that many rows instead of T."""
    return x[:, -1:] if count is None else x[torch.arange(len(x), device=x.device)[:, None], count[:, None] - 1]


def gather_rows(x: PerRow, row: Anchors) -> Shaped[Tensor, "B n *rest"]:
    """Return the given rows of each sequence; None returns all."""
    return x if row is None else x.flatten(0, 1).index_select(0, _flat(row, x.shape[1])).unflatten(0, row.shape)


def scatter_rows(x: Shaped[Tensor, "B n D"], row: Anchors, length: int) -> Shaped[Tensor, "B T D"]:
    """Undo `gather_rows`: return the rows at their indices among T = `length`, zeros elsewhere."""
    if row is None:
        return x
    full = x.new_zeros(len(x) * length, x.shape[-1]).index_copy(0, _flat(row, length), x.flatten(0, 1))
    return full.unflatten(0, (len(x), length))


def _flat(row: Int[Tensor, "B n"], length: int) -> Int[Tensor, "N"]:
    """Return the rows' indices into the flattened batch: torch is faster with one index than with two."""
    return (row + length * torch.arange(len(row), device=row.device)[:, None]).flatten()


def gather_parents(x: Shaped[Tensor, "B K D"], parent: Nodes) -> Shaped[Tensor, "B N D"]:
    """Return the entry of `x` at each node's parent."""
    return x[torch.arange(len(x), device=x.device)[:, None], parent]


def next_token(token: Sequences) -> Sequences:
    """Return the token t+1 that row t holds."""
    return shift_left(token, 1)


def drafted_token(token: Sequences, depth: int, path: Paths = None) -> Sequences:
    """Return token t+d, the input of row t at depth d of `unroll`; with `path` the drafted token at that depth."""
    return shift_left(token, depth) if path is None else token.gather(1, path[..., depth - 1])


def teacher(x: PerRow, depth: int) -> PerRow:
    """Return row t+d of `x` at row t: the last hidden state whose lm_head is the teacher of (t, d)."""
    return shift_left(x, depth)


def valid(document: Sequences, mask: Sequences | RowMask, depth: int) -> RowMask:
    """Return the mask of trained (t, d): token t+1+d is in row t's document and the target would write it.

    The mask is shifted with the label, so that the first draft after a prompt is supervised (SpecForge#885).
    """
    reach = 1 + depth
    exists = torch.arange(document.shape[1], device=document.device) + reach < document.shape[1]
    return exists & (shift_left(document, reach) == document) & (document >= 0) & shift_left(mask, reach).bool()
