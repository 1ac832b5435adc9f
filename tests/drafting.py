"""Drafting for one sequence: the methods of a head without their dimension of sequences."""

from typing import Any

from torch import Tensor

from heads.base import Features, LevelNodes, LevelOutput, NewRows
from heads.modules.vocab import scatter_logits


def extend(head: Any, state: Any, features: Features, token: Tensor) -> tuple[Any, LevelOutput]:
    """Commit rows, whose next tokens are (T,)."""
    state, level = head.extend(state, NewRows(features, token[None]))
    return state, level


def expand(head: Any, state: Any, level: LevelOutput, token: Tensor, parent: Tensor, mask: Tensor) -> LevelOutput:
    """Expand nodes (N,) of one depth, which is that of the path that the first of them sees."""
    made: LevelOutput = head.expand(state, level, LevelNodes(token[None], parent[None], mask[None], int(mask[0].sum())))
    return made


def logits(head: Any, level: LevelOutput) -> Tensor:
    """Return a level's logits (N, V) over the target's vocabulary."""
    return scatter_logits(getattr(head, "vocab", None), level.logits[0])
