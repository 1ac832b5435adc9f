"""A trained draft head as a draft source."""

from typing import Any

import torch

from heads.base import DraftHead, Features, Level
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import Commit, Context, Proposal


class HeadDrafter:
    """Commits every verified row with the target's true features, and grows a tree by the policy."""

    def __init__(self, head: DraftHead, tree: TreeConfig, name: str) -> None:
        self.head, self.config, self.name = head, tree, name
        self.tree = tree.label
        self.feature_layers = head.feature_layers
        self.state: Any = None
        self.level: Level | None = None

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence."""
        self.state, self.level = None, None

    def forget(self) -> None:
        """Nothing outlives a sequence."""

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Commit rows: the features are those of the verification pass, never the drafted ones."""
        rows = commit.rows
        document = torch.zeros_like(commit.token)[None]
        features = Features(commit.token[None], rows.hidden, rows.last, document)
        self.state, self.level = self.head.extend(self.state, features, commit.token)

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Grow the tree."""
        assert self.level is not None, "propose before observe"
        return grow(self.head, self.state, self.level, self.config, context)
