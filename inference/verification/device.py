"""Acceptance on the device: what rules.follow walks on the host, for the trees of a whole batch at once.

Nothing here is read by the host. The shapes depend on the trees' sizes alone.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from inference.verification.tree import DraftTree


class Accepted(NamedTuple):
    """The accepted paths of B trees that are at most P - 1 deep.

    Attributes:
        path: each tree's accepted nodes from the root on; behind them the last one again.
        committed: how many there are, which is how many tokens are committed.
        token: the committed tokens: those of the accepted nodes but for the root, then the next one.
    """

    path: Int[Tensor, "B P"]
    committed: Int[Tensor, "B"]
    token: Int[Tensor, "B P"]


def follow(
    tree: DraftTree, above: Bool[Tensor, "#B N N"], best: Int[Tensor, "B N"], room: Int[Tensor, "B"], deepest: int
) -> Accepted:
    """Follow the target's token at each node while it was drafted; siblings are different tokens.

    Args:
        tree: the trees "B N".
        above: each node's ancestors, itself included.
        best: the target's own token after each node.
        room: how many drafted tokens may be accepted; what lies deeper counts as not drafted.
        deepest: the depth of the deepest node.
    """
    size, depth = tree.token.shape[-1], above.sum(-1) - 1
    right = (tree.token == best.gather(1, tree.parent.clamp_min(0))) | (tree.parent < 0)
    alive = ~(above & ~right[:, None]).any(-1) & (depth <= room[:, None])
    reached = torch.where(alive, depth, -1)
    last = reached.argmax(1, keepdim=True)
    line = above.expand(len(last), -1, -1).take_along_dim(last[..., None], 1)[:, 0]
    node = torch.arange(size, device=line.device)
    path = torch.where(line, node, size).sort(1).values[:, : deepest + 1]  # parents come before children
    path = torch.where(path < size, path, last)
    count = reached.gather(1, last)[:, 0] + 1
    after = torch.cat([tree.token.gather(1, path[:, 1:]), last], 1)
    token = torch.where(
        torch.arange(deepest + 1, device=line.device) == count[:, None] - 1, best.gather(1, last), after
    )
    return Accepted(path, count, token)


def ranks(tree: DraftTree) -> Int[Tensor, "B N"]:
    """Return each node's rank among its siblings, as they were drafted."""
    siblings = tree.parent[:, :, None] == tree.parent[:, None]
    return siblings.tril(-1).sum(-1)
