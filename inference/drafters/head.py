"""A trained draft head as a drafter."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heads.base import DraftHead, Features, LevelOutput, NewRows
from heads.common.typed import typed
from heads.formats.hub import load_found, schedule_of, sibling_spec, tree_of
from heads.modules.kv_cache import SPARE, KVCache
from heads.modules.layers import Attention
from inference.drafters.deferred import DeferredRows
from inference.drafters.plain import root_trees
from inference.drafters.policy import (
    TreeConfig,
    check_tree,
    expanded,
    grow,
    grow_batch,
    most_nodes,
    sampled_shape,
    verifiable,
)
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal, Roots, vacant
from inference.target.target import Target
from inference.tree_config import Schedule, always
from inference.verification.tree import DraftTree, root


class HeadDrafter(Drafter):
    """A head, and the policy by which its trees grow; with a schedule, one for each number of sequences.

    Attributes:
        policy: with a schedule, that of a sequence that is decoded outside a batch.
        batch: which drafts for its sequences; None where each is drafted for by itself.
    """

    can_redraft = True
    head: DraftHead
    policy: TreeConfig
    batch: "HeadBatch | None" = None

    def __init__(self, head: DraftHead, policy: TreeConfig, name: str, schedule: Schedule | None = None) -> None:
        self.head, self.policy, self.name = head, policy, name
        self.schedule = always(policy) if schedule is None else schedule
        self.tree = self.schedule.label
        self.feature_layers = head.feature_layers

    def start(self, prompt: list[int]) -> "HeadState | BatchedState":
        """Begin a sequence; its first commit brings the prompt's features."""
        return HeadState(self.head, self.policy) if self.batch is None else BatchedState(self.batch)

    def clones(self, size: int) -> tuple[Sequence[Drafter], "HeadBatch"]:
        """Return a drafter whose sequences share one KV cache, and what drafts for all of them at once."""
        clone = copy.copy(self)
        clone.batch = HeadBatch(self.head, self.schedule, size)
        return [clone] * size, clone.batch


class HeadState(DrafterState):
    """A head's KV cache for one sequence, and its scores under the next root."""

    def __init__(self, head: DraftHead, policy: TreeConfig) -> None:
        self.head, self.policy = head, policy
        self.state: Any = None
        self.level: LevelOutput | None = None

    @torch.inference_mode()
    def update(self, commit: Commit) -> None:
        """Commit rows: the features are those of the verification pass, never the drafted ones."""
        token = commit.token[None]
        features = Features(token, commit.features.hidden, commit.features.last_hidden, torch.zeros_like(token))
        self.state, self.level = self.head.extend(self.state, NewRows(features, token))

    def propose(self, context: Context) -> Proposal:
        """Grow the policy's tree."""
        return self.grow(self.policy, context)

    @torch.inference_mode()
    def grow(self, policy: TreeConfig, context: Context) -> Proposal:
        """Grow a tree of any policy; the state stays what it is."""
        assert self.level is not None, "grow before update"
        return grow(self.head, self.state, self.level, policy, [context])[0]


class BatchedState(DrafterState):
    """One sequence of a batch: what was committed since the last draft."""

    def __init__(self, batch: "HeadBatch") -> None:
        self.batch = batch
        self.commit: Commit | None = None

    def update(self, commit: Commit) -> None:
        """Enter the batch with a prompt's rows, or keep other rows for the next draft."""
        if commit.verified is None:
            self.batch.start_sequence(self, commit)
        else:
            self.commit = commit

    def leave(self) -> None:
        """Leave the slot to another sequence."""
        self.batch.leave(self)

    def propose(self, context: Context) -> Proposal:
        """Draft for this sequence alone, which it must be."""
        [proposal] = self.batch.propose_all([context])
        return proposal


class HeadBatch:
    """A head drafting for several sequences: the first slots of one KV cache, and the level under each one's root.

    Both are buffers of all slots, written in place. Where the step at hand has no `policy`, nothing is drafted, and its
    rows are deferred.
    """

    def __init__(self, head: DraftHead, schedule: Schedule, size: int) -> None:
        self.head, self.schedule, self.size = head, schedule, size
        self.feature_layers = head.feature_layers
        self.max_nodes = max(map(most_nodes, schedule.trees), default=1)
        self.capacity = 0
        self.states: list[BatchedState | None] = []  # by slot
        self.cache: KVCache | None = None
        self.buffers: LevelOutput | None = None
        self.deferred: DeferredRows | None = None
        modules: Any = head
        self.attentions = [module for module in modules.modules() if isinstance(module, Attention)]
        self.choose(1)

    def choose(self, running: int) -> None:
        """Choose the tree for so many sequences."""
        self.policy = self.schedule.at(running)
        self.deepest = 0 if self.policy is None else min(self.policy.deepest, self.head.max_depth)
        self.chain, self.tree_key = self.policy is None or self.policy.kind == "chain", id(self.policy)
        self.sampled = None if self.policy is None else sampled_shape(self.policy, self.head.max_depth)

    def begin(self, running: int, longest: int) -> None:
        """Choose a step's tree; commit what was deferred before it is needed, or before it is too much."""
        self.choose(running)
        if self.deferred is not None:
            if self.policy is not None or self.deferred.waiting == self.deferred.max_rows:
                self.commit_deferred(longest)
            self.deferred.waiting += self.policy is None

    def commit_deferred(self, longest: int) -> None:
        """Commit the rows that were deferred, if there are any."""
        for rows in self.deferred.take(len(self.states)) if self.deferred is not None else ():
            self.hold(longest)
            self.extend(*rows)

    def level(self, count: int) -> LevelOutput:
        """Return the roots' level of the first sequences."""
        assert self.buffers is not None, "draft before a prompt"
        return self.buffers.each(lambda buffer: buffer[:count])

    @torch.inference_mode()
    def start_sequence(self, state: BatchedState, commit: Commit) -> None:
        """Take a sequence into the first vacant slot."""
        token, slot = commit.token[None], vacant(self.states)
        if self.cache is None and self.head.has_kv_cache:
            self.cache = self.new_cache(token.device)
        if self.deferred is None and self.schedule.pauses:
            self.deferred = DeferredRows(self.size, token, commit.features, self.capacity)
        features = Features(token, *commit.features[:2], torch.zeros_like(token))
        cache = None if self.cache is None else self.cache.for_new_sequence(slot)
        _, level = self.head.extend(cache, NewRows(features, token))
        if self.buffers is None:
            with torch.inference_mode(False):  # compiled stages write to no inference tensor
                self.buffers = level.each(lambda row: row.new_zeros(self.size, *row.shape[1:]))
        self.buffers.each(lambda buffer, row: buffer[slot : slot + 1].copy_(row), level)
        if self.deferred is not None:
            self.deferred.clear(slot)
        self.states[slot : slot + 1] = [state]

    def new_cache(self, device: torch.device) -> KVCache:
        """Return an empty cache with room for the texts' rows and a tree's."""
        return KVCache(self.size, getattr(self.head.config, "length", None), device, self.capacity, self.spare)

    @property
    def nbytes(self) -> int:
        """Bytes of the head's keys and values, whether they are allocated yet or not."""
        head: Any = self.head
        return self.new_cache(torch.device("meta")).nbytes(head) if self.head.has_kv_cache else 0

    @property
    def spare(self) -> int:
        """How many rows a tree, or a block's slots, take behind committed ones of which not all are accepted."""
        trees = self.schedule.trees
        drafted = max([self.head.max_depth + 1, *map(expanded, trees)])
        committed = [min(tree.deepest, self.head.max_depth) + 1 for tree in trees]
        return drafted + max([*committed, SPARE] if self.schedule.pauses else committed)

    def leave(self, state: BatchedState) -> None:
        """Let a sequence go."""
        self.vacate(self.states.index(state))

    def vacate(self, slot: int) -> None:
        """Leave a slot without a sequence; behind the last sequence there are none."""
        self.states[slot] = None
        while self.states and self.states[-1] is None:
            self.states.pop()

    @torch.inference_mode()
    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, which has so many rows, to a vacant slot."""
        assert self.buffers is not None
        self.states[slot] = self.states[from_slot]
        self.vacate(from_slot)
        if self.cache is not None:  # what moves are all rows that there are
            self.hold(max(self.cache.longest, length))
            self.cache.move(from_slot, slot)
        if self.deferred is not None:
            self.deferred.move(from_slot, slot)
        self.buffers.each(lambda buffer: buffer[slot : slot + 1].copy_(buffer[from_slot : from_slot + 1]))

    @torch.inference_mode()
    def propose_all(self, contexts: Sequence[Context]) -> list[Proposal]:
        """Commit what was accepted since the last draft, and grow a tree for each sequence."""
        lengths = [len(context.token) - 1 for context in contexts]
        self.choose(len(contexts))
        self.commit_deferred(max(lengths))
        self.catch_up(lengths)
        if self.policy is None:
            return [Proposal(root(context.token[-1], self.level(1).logits.device)) for context in contexts]
        self.hold(max(lengths))
        return grow(self.head, self.cache, self.level(len(contexts)), self.policy, contexts)

    def draft_trees(
        self, roots: Roots, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> tuple[DraftTree, Bool[Tensor, "#B N N"], Float[Tensor, "B M V"] | None]:
        """Grow a tree for each sequence by rank, or by sampling where the roots say so."""
        if self.policy is None:
            return *root_trees(roots.token), None
        self.hold(longest)
        return grow_batch(
            self.head,
            self.cache,
            self.level(len(max_draft_depth)),
            self.policy,
            roots,
            max_draft_depth,
            allow_host_sync=allow_host_sync,
        )

    def catch_up(self, lengths: Sequence[int]) -> None:
        """Commit each sequence's rows since the last draft in one call; one that has just entered has none."""
        states = [state for state in self.states if state is not None]
        counts = [0 if state.commit is None else len(state.commit.token) for state in states]
        if any(counts):
            self.hold(max(length - count for length, count in zip(lengths, counts, strict=True)))
            self.extend(*_joined([state.commit for state in states], counts))
        for state in states:
            state.commit = None

    def reserve(self, capacity: int) -> None:
        """Take note of how many rows any sequence may have, before one enters."""
        self.capacity = max(self.capacity, capacity)

    def tensors(self) -> list[Tensor]:
        """Return the KV cache's buffers, the roots' level, and the rotary tables."""
        assert self.buffers is not None
        tables = [attention.rotary.table for attention in self.attentions]
        level = [self.buffers.logits, self.buffers.hidden, *self.buffers.root]
        caches = [] if self.cache is None else self.cache.tensors()
        return [*level, *tables, *caches, *([] if self.deferred is None else self.deferred.tensors())]

    def hold(self, longest: int) -> None:
        """Tell the KV cache how long the longest sequence is."""
        if self.cache is not None:
            self.cache.longest = longest

    def commit(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Take in verified rows, now or, in a step without a draft, later; `begin` has counted these."""
        if self.deepest:
            self.extend(features, count)
        else:
            assert self.deferred is not None
            self.deferred.add(features, count)

    def extend(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Commit rows of all sequences; the level of one that has none stays."""
        _, level = self.head.extend(self.cache, NewRows(features, features.token, count))

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            old = buffer[: len(new)]
            return old.copy_(torch.where(count.view(-1, *[1] * (new.ndim - 1)) > 0, new, old))

        assert self.buffers is not None
        self.buffers.each(write, level)


def _joined(commits: list[Commit | None], counts: list[int]) -> tuple[Features, Tensor]:
    """Return each sequence's committed rows, padded, with how many each has."""
    some = next(commit for commit in commits if commit is not None)
    whole = [commit or Commit(some.token[:0], some.features, None) for commit in commits]
    rows = [(c.token, c.features.hidden[0, : len(c.token)], c.features.last_hidden[0, : len(c.token)]) for c in whole]
    token, hidden, last = (pad_sequence(list(tensors), batch_first=True) for tensors in zip(*rows, strict=True))
    return Features(token, hidden, last, torch.zeros_like(token)), torch.tensor(counts, device=token.device)


def saved_tree(folder: Path, given: Mapping[str, Any]) -> TreeConfig:
    """Return the tree that a head was saved with, but for what is given; a None gives nothing."""
    return saved_trees(folder, given)[0]


def saved_trees(folder: Path, given: Mapping[str, Any]) -> tuple[TreeConfig, Schedule | None]:
    """Return the tree of `saved_tree`, and the schedule that a head was saved with, which a given tree replaces.

    Raises:
        ValueError: a published head, which brings no tree, and none is given; or one of them is none.
    """
    values, lines = tree_of(folder, given), schedule_of(folder, given)
    try:
        tree = typed(TreeConfig, values, "tree")
        return tree, None if lines is None else typed(Schedule, {"lines": lines}, "schedule")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def load_for(folder: Path, target: Target) -> Any:
    """Return a folder's head on a target's device and in its dtype; refuse one that may not draft for it."""
    spec = sibling_spec(folder, target.spec, "drafts for") if target.sibling else target.spec
    return load_found(folder, target.embeddings, spec).to(device=target.device, dtype=target.dtype).eval()


def load_drafter(folder: Path, given: Mapping[str, Any], target: Target, name: str) -> HeadDrafter:
    """Return the head of a folder as a drafter for a target, on its device and in its dtype.

    Args:
        given: of its tree, as `saved_tree`.
        target: which it was trained for; where `target.sibling` says so, another checkpoint of the same shape.
        name: what reports and errors call it.

    Raises:
        ValueError: it is damaged or of another target, or its tree is larger than the target's context.
    """
    head = load_for(folder, target)
    tree, schedule = saved_trees(folder, given)
    for one in [tree] if schedule is None else schedule.trees:
        check_tree(target, one, name)
    if schedule is not None:
        lines = [replace(line, tree=line.tree and verifiable(target, line.tree)) for line in schedule.lines]
        schedule = Schedule(lines)
    return HeadDrafter(head, verifiable(target, tree), name, schedule)
