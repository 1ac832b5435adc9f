"""A trained draft head as a draft source."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from heads.base import DraftHead, Features, Level
from heads.common.typed import typed
from heads.formats.hub import load_found, tree_of
from heads.modules.kv_cache import KVCache
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

    def clones(self, size: int) -> tuple[Sequence[Drafter], "HeadBatch"]:
        """Return sources whose sequences lie side by side in one KV cache, and are drafted for by one head at once."""
        batch = HeadBatch(self.head, self.policy, size)
        return [BatchedHead(self, batch) for _ in range(size)], batch


class HeadState(DrafterState):
    """A head's KV cache for one sequence, and its scores under the next root."""

    def __init__(self, head: DraftHead, policy: TreeConfig) -> None:
        self.head, self.policy = head, policy
        self.state: Any = None
        self.level: Level | None = None

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Commit rows: the features are those of the verification pass, never the drafted ones."""
        token = commit.token[None]
        features = Features(token, commit.features.hidden, commit.features.last, torch.zeros_like(token))
        self.state, self.level = self.head.extend(self.state, features, token)

    def propose(self, context: Context) -> Proposal:
        """Grow the policy's tree."""
        return self.grow(self.policy, context)

    @torch.inference_mode()
    def grow(self, policy: TreeConfig, context: Context) -> Proposal:
        """Grow a tree of any policy; the state stays what it is."""
        assert self.level is not None, "grow before update"
        return grow(self.head, self.state, self.level, policy, [context])[0]


class BatchedHead(Drafter):
    """A head that drafts for one sequence together with others."""

    def __init__(self, drafter: HeadDrafter, batch: "HeadBatch") -> None:
        self.name, self.tree, self.feature_layers = drafter.name, drafter.tree, drafter.feature_layers
        self.batch = batch

    def start(self, prompt: list[int]) -> "BatchedState":
        """Begin a sequence in the batch's next slot."""
        return BatchedState(self.batch)


class BatchedState(DrafterState):
    """One sequence of a batch: what was committed since the last draft."""

    def __init__(self, batch: "HeadBatch") -> None:
        self.batch = batch
        self.commit: Commit | None = None

    def update(self, commit: Commit) -> None:
        """Enter the batch with a prompt's rows, or keep other rows for the next draft."""
        if commit.verified is None:
            self.batch.enter(self, commit)
        else:
            self.commit = commit

    def leave(self) -> None:
        """Hand the slot to the last sequence."""
        self.batch.leave(self)

    def propose(self, context: Context) -> Proposal:
        """Draft for this sequence alone, which it must be."""
        [proposal] = self.batch.propose([context])
        return proposal


class HeadBatch:
    """A head drafting for several sequences: the first slots of one KV cache, and the level under each one's root."""

    def __init__(self, head: DraftHead, policy: TreeConfig, size: int) -> None:
        self.head, self.policy, self.size = head, policy, size
        self.states: list[BatchedState] = []  # by slot
        self.cache: KVCache | None = None
        self.level: Level | None = None

    @torch.inference_mode()
    def enter(self, state: BatchedState, commit: Commit) -> None:
        """Take a sequence into the next slot."""
        token = commit.token[None]
        cache, level = self.head.extend(None, Features(token, *commit.features[:2], torch.zeros_like(token)), token)
        self.states.append(state)
        if cache is not None:
            if self.cache is None:
                self.cache = KVCache(self.size, cache.window, cache.length.device)
            self.cache.put(len(self.states) - 1, cache)
        if self.level is not None:
            level = self.level.each(lambda *pair: torch.cat(pair), level)
        self.level = level

    @torch.inference_mode()
    def leave(self, state: BatchedState) -> None:
        """Let a sequence go; the last one takes its slot."""
        slot, last = self.states.index(state), self.states.pop()
        slots = list(range(len(self.states)))
        if last is not state:
            self.states[slot] = last
            slots[slot] = len(self.states)
            if self.cache is not None:
                self.cache.move(len(self.states), slot)
        assert self.level is not None
        self.level = self.level.each(lambda rows: rows[slots]) if slots else None

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Proposal]:
        """Commit what was accepted since the last draft, and grow a tree for each sequence."""
        counts = [0 if state.commit is None else len(state.commit.token) for state in self.states]
        lengths = [len(context.token) - 1 for context in contexts]
        if any(counts):
            self.hold(max(length - count for length, count in zip(lengths, counts, strict=True)))
            self.commit(counts)
        self.hold(max(lengths))
        assert self.level is not None
        return grow(self.head, self.cache, self.level, self.policy, contexts)

    def hold(self, longest: int) -> None:
        """Tell the KV cache how long the longest sequence is."""
        if self.cache is not None:
            self.cache.longest = longest

    def commit(self, counts: list[int]) -> None:
        """Commit each sequence's rows in one call; one that has just entered has none."""
        some = next(state.commit for state in self.states if state.commit is not None)
        commits = [state.commit or Commit(some.token[:0], some.features, None) for state in self.states]
        rows = [(c.token, c.features.hidden[0, : len(c.token)], c.features.last[0, : len(c.token)]) for c in commits]
        token, hidden, last = (pad_sequence(list(tensors), batch_first=True) for tensors in zip(*rows, strict=True))
        count = torch.tensor(counts, device=token.device)
        features = Features(token, hidden, last, torch.zeros_like(token))
        self.cache, level = self.head.extend(self.cache, features, token, count)
        assert self.level is not None
        if 0 in counts:
            entered = (count == 0).nonzero()[:, 0]
            level = level.each(lambda new, old: new.index_copy(0, entered, old[entered]), self.level)
        self.level = level
        for state in self.states:
            state.commit = None


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
