"""A trained draft head as a draft source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHead, Features, Level
from heads.common.typed import typed
from heads.formats.hub import load_found, tree_of
from inference.drafters.policy import CONFIDENT, TreeConfig, check_masks, check_tree, grow
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal
from inference.target.target import Target


class HeadDrafter(Drafter):
    """A head, and the policy by which its trees grow."""

    redraws = True
    head: DraftHead
    policy: TreeConfig

    def __init__(self, head: DraftHead, policy: TreeConfig, name: str) -> None:
        self.head, self.policy, self.name = head, policy, name
        self.tree = policy.label
        self.feature_layers = head.feature_layers
        self.shape = None if policy.kind in CONFIDENT else policy.shape()

    def start(self, prompt: list[int]) -> "HeadState":
        """Begin a sequence; its first commit brings the prompt's features."""
        return HeadState(self.head, self.policy)


class HeadState(DrafterState):
    """A head's KV cache for one sequence, and its scores under the next root."""

    def __init__(self, head: DraftHead, policy: TreeConfig) -> None:
        self.head, self.policy = head, policy
        self.state: Any = None
        self.level: Level | None = None

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Commit rows: the features are those of the verification pass, never the drafted ones."""
        document = torch.zeros_like(commit.token)[None]
        features = Features(commit.token[None], commit.features.hidden, commit.features.last, document)
        self.state, self.level = self.head.extend(self.state, features, commit.token)

    def propose(self, context: Context) -> Proposal:
        """Grow the policy's tree."""
        return self.grow(self.policy, context)

    @torch.inference_mode()
    def grow(self, policy: TreeConfig, context: Context) -> Proposal:
        """Grow a tree of any policy; the state stays what it is."""
        assert self.level is not None, "grow before update"
        return grow(self.head, self.state, self.level, policy, context)


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
