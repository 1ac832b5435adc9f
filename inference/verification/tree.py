"""Draft trees: a frozen pair of tensors, and pure functions on it.

Node 0 is the root, the last committed token, after which the target has not run yet. Parents come before children.
N counts the nodes, the root included; P the committed tokens before the root; R the look-ahead tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Tokens

PerNode = Int[Tensor, "N"]
AncestorMask = Bool[Tensor, "#B N N"]  # each node's ancestors, itself included
Forward = Callable[..., Any]  # of a module
LOOK_AHEAD = -2  # the parent of a look-ahead token, which is not a node


class DraftTree(NamedTuple):
    """Tokens and parents of a draft tree; the root's parent is -1. A token of -1 is padding."""

    token: PerNode
    parent: PerNode


class LookAhead(NamedTuple):
    """Look-ahead tokens: they run in a verification pass with the tree and are neither verified nor committed.

    They attend to all committed positions and, as `attn_mask` says, to the N tree nodes and the R look-ahead tokens.
    Nodes never attend to them, so the target's logits at the nodes, and with them the output, stay the same. `stack` is
    called instead of the target's decoder stack; it must treat the nodes as that does, and gives no feature layers.
    """

    token: Int[Tensor, "R"]
    offset: Int[Tensor, "R"]  # position, counted from the root's
    attn_mask: Bool[Tensor, "R M"]  # M = N + R
    stack: Forward | None = None


def root(token: int, device: torch.device) -> DraftTree:
    """Return the tree that drafts nothing: autoregressive decoding."""
    return DraftTree(torch.tensor([token], device=device), torch.tensor([-1], device=device))


def chain(token: PerNode) -> DraftTree:
    """Return the tree in which each token follows the one before."""
    return DraftTree(token, torch.arange(-1, len(token) - 1, device=token.device))


def ancestors(tree: DraftTree) -> Bool[Tensor, "*b N N"]:
    """Return the mask of each node's ancestors, itself included; trees may be batched.

    By doubling: a node's mask of `reach` ancestors, joined with the mask of the last of them, has twice as many. So the
    host need not read the tree, for which it would have to wait for the device.
    """
    size = tree.parent.shape[-1]
    mask = torch.eye(size, dtype=torch.bool, device=tree.parent.device).expand(*tree.parent.shape, -1)
    up, reach = tree.parent.clamp_min(0), 1  # the root is its own parent, which adds nothing
    while reach < size:
        mask = mask | mask.gather(-2, up[..., None].expand_as(mask))
        up, reach = up.gather(-1, up), 2 * reach
    return mask


def layout(tree: DraftTree, prefix: int) -> tuple[PerNode, Bool[Tensor, "N S"]]:
    """Return positions of the N nodes, and which of S = P + N entries each attends to."""
    on_path = ancestors(tree)
    return prefix + on_path.sum(-1) - 1, torch.cat([on_path.new_ones(len(on_path), prefix), on_path], 1)


def children(tree: DraftTree) -> list[list[int]]:
    """Return each node's children in the order in which they were drafted."""
    result: list[list[int]] = [[] for _ in range(len(tree.parent))]
    for node, parent in enumerate(tree.parent.tolist()):
        if parent >= 0:
            result[parent].append(node)
    return result


def agreed(tree: DraftTree, following: Tokens) -> int:
    """Return the number of following tokens that are on a path of the tree."""
    node, below, token = 0, children(tree), tree.token.tolist()
    for count, expected in enumerate(following):
        child = next((child for child in below[node] if token[child] == expected), None)
        if child is None:
            return count
        node = child
    return len(following)


def keep(tree: DraftTree, selected: Bool[Tensor, "N"]) -> tuple[DraftTree, Int[Tensor, "K"]]:
    """Return the subtree of the selected nodes together with all their ancestors, and their old indices."""
    alive = (ancestors(tree) & ~selected).sum(-1) == 0
    index = alive.nonzero()[:, 0]
    renumber = alive.cumsum(0) - 1
    parent = tree.parent[index]
    return DraftTree(tree.token[index], torch.where(parent < 0, parent, renumber[parent.clamp_min(0)])), index


def best_n(tree: DraftTree, score: Float[Tensor, "*b N"], count: int) -> DraftTree:
    """Return the tree of the root and the `count` best-scored other nodes; trees may be batched.

    Scores must not rise from parent to child (cumulative probabilities do not), so the best nodes form a tree; ties
    go to the earlier node, which is the ancestor.
    """
    rank = score.clone()
    rank[..., 0] = float("inf")
    index = rank.sort(descending=True, stable=True).indices[..., : count + 1].sort().values
    new_index = torch.full_like(tree.parent, -1)
    new_index.scatter_(-1, index, torch.arange(index.shape[-1], device=index.device).expand_as(index))
    parent = tree.parent.gather(-1, index)
    above = torch.where(parent < 0, parent, new_index.gather(-1, parent.clamp_min(0)))
    return DraftTree(tree.token.gather(-1, index), above)
