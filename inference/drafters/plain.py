"""No drafting: the tree is its root, and the engine decodes autoregressively."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from inference.protocol import Context, DraftBatch, Drafter, DrafterState, Proposal, Roots
from inference.verification.tree import DraftTree, root


class Baseline(Drafter, DrafterState, DraftBatch):
    """The baseline; neither a sequence nor a batch has a state, and all of a device are equal: they share a batch."""

    name, tree = "plain", "root"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) is Baseline and self.device == other.device)

    def __hash__(self) -> int:
        return hash(self.device)

    def start(self, prompt: list[int]) -> "Baseline":
        """Return the state of any sequence: none."""
        return self

    def clones(self, size: int) -> tuple[Sequence[Drafter], DraftBatch]:
        """Return itself, for every sequence and for all."""
        return [self] * size, self

    def propose(self, context: Context) -> Proposal:
        """Return the root only."""
        return Proposal(root(context.token[-1], self.device))

    def propose_all(self, contexts: Sequence[Context]) -> list[Proposal]:
        """Return the roots only."""
        return [self.propose(context) for context in contexts]

    def draft_trees(
        self, roots: Roots, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> tuple[DraftTree, Bool[Tensor, "1 1 1"], None]:
        """Return the roots only."""
        return *root_trees(roots.token), None


def root_trees(token: Int[Tensor, "B 1"]) -> tuple[DraftTree, Bool[Tensor, "1 1 1"]]:
    """Return trees of one node, the root, and its ancestors."""
    return DraftTree(token, torch.full_like(token, -1)), token.new_ones(1, 1, 1, dtype=torch.bool)
