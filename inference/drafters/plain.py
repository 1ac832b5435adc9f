"""No drafting: the tree is its root, and the engine decodes autoregressively."""

import torch

from inference.protocol import Context, Drafter, DrafterState, Proposal
from inference.verification.tree import root


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
