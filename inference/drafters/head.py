"""A trained draft head as a draft source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHead, Features, Level
from heads.common.typed import typed
from heads.formats.hub import load_found, tree_of
from inference.drafters.policy import TreeConfig, check_masks, check_tree, grow
from inference.protocol import Commit, Context, Proposal
from inference.target.target import Target


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


def saved_tree(folder: Path, given: Mapping[str, Any]) -> TreeConfig:
    """Return the tree that a head was saved with, but for what is given; a None gives nothing.

    Raises:
        ValueError: a published head, which brings no tree, and none is given; or it is none.
    """
    values = tree_of(folder, given)
    try:
        return typed(TreeConfig, values, "tree")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def load_drafter(folder: Path, given: Mapping[str, Any], target: Target, name: str) -> HeadDrafter:
    """Return the head of a folder as a drafter for a target, on its device and in its dtype.

    Args:
        folder: of a head.
        given: of its tree, as `saved_tree`.
        target: which it was trained for.
        name: what reports and errors call it.

    Raises:
        ValueError: it is damaged or of another target, or the target cannot verify its tree.
    """
    head: Any = load_found(folder, target.embeddings, target.spec).to(device=target.device, dtype=target.dtype).eval()
    tree = saved_tree(folder, given)
    check_tree(target, tree, name)
    check_masks(target, tree)
    return HeadDrafter(head, tree, name)
