"""No drafting: the tree is its root, and the engine is a plain autoregressive decoder."""

import torch

from inference.protocol import Commit, Context, Proposal
from inference.verification.tree import root


class Plain:
    """The baseline."""

    name, tree = "plain", "root"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self, prompt: list[int]) -> None:
        """Nothing to begin."""

    def forget(self) -> None:
        """Nothing is known."""

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def propose(self, context: Context) -> Proposal:
        """Return the root alone."""
        return Proposal(root(context.token[-1], self.device))
