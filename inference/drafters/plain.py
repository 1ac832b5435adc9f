"""No drafting: the tree is its root, and the engine decodes autoregressively."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from inference.protocol import Context, DraftBatch, Drafter, DrafterState, Proposal
from inference.verification.tree import DraftTree, root


class Plain(Drafter, DrafterState):
    """The baseline; a sequence has no state."""

    name, tree = "plain", "root"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, prompt: list[int]) -> "Plain":
        """Return the state of any sequence: none."""
        return self

    def propose(self, context: Context) -> Proposal:
        """Return the root alone."""
        return Proposal(root(context.token[-1], self.device))

    def clones(self, size: int) -> tuple[Sequence[Drafter], DraftBatch]:
        """Return itself for every sequence, and the batch of none."""
        return [self] * size, PlainBatch(self)


class PlainBatch(DraftBatch):
    """No drafting for several sequences, of which there is no state."""

    feature_layers: tuple[int, ...] = ()
    deepest, nodes, chain, nbytes, sampled, form = 0, 1, True, 0, None, 0

    def __init__(self, plain: Plain) -> None:
        self.plain = plain

    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        """Return the roots alone."""
        return [self.plain.propose(context) for context in contexts]

    def ranked(
        self, roots: Any, room: Int[Tensor, "B"], *, waits: bool
    ) -> tuple[DraftTree, Bool[Tensor, "1 1 1"], None]:
        """Return the roots alone."""
        return *alone(roots.token), None

    def tensors(self) -> list[Tensor]:
        """Return none."""
        return []


def alone(token: Int[Tensor, "B 1"]) -> tuple[DraftTree, Bool[Tensor, "1 1 1"]]:
    """Return the trees of roots alone, and their nodes' ancestors."""
    return DraftTree(token, torch.full_like(token, -1)), token.new_ones(1, 1, 1, dtype=torch.bool)
