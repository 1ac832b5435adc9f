"""No drafting: the tree is its root, and the engine is a plain autoregressive decoder."""

import torch

from inference.drafters import Commit, Context
from inference.tree import DraftTree, root


class Plain:
    """The baseline."""

    name, rule, tree = "plain", "none", "root"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self, prompt: list[int]) -> None:
        """Nothing to forget."""

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def propose(self, context: Context) -> tuple[DraftTree, None]:
        """Return the root alone."""
        return root(context.token[-1], self.device), None
