"""No drafting: the tree is its root, and the engine decodes autoregressively."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from heads.shapes import PerSequence
from inference.protocol import DraftBatch, Drafted, Drafter, DraftInputs
from inference.verification.tree import DraftTree


@dataclass(frozen=True)
class Baseline(Drafter, DraftBatch):
    """The baseline. It has no state; all baselines of a device are equal, so that they share an idle batch."""

    device: torch.device
    name, tree = "plain", "root"

    def batch(self, size: int) -> DraftBatch:
        """Return itself, for every batch."""
        return self

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: PerSequence, longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return trees of only the roots."""
        return root_trees(roots.token)


def root_trees(token: Int[Tensor, "B 1"]) -> Drafted:
    """Return the trees of roots without drafts."""
    return Drafted(DraftTree(token, torch.full_like(token, -1)), token.new_ones(1, 1, 1, dtype=torch.bool))
