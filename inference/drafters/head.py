"""A trained draft head as a drafter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from heads.base import DraftHead, Features, LevelOutput, NewRows
from heads.common.typed import typed
from heads.formats.hub import load_found, schedule_of, sibling_spec, tree_of
from heads.modules.kv_cache import SPARE, KVCache
from heads.modules.layers import Attention
from inference.drafters.plain import root_trees
from inference.drafters.policy import (
    Schedule,
    TreeConfig,
    always,
    check_tree,
    expanded,
    grow_batch,
    most_nodes,
    sampled_shape,
    verifiable,
)
from inference.protocol import Context, DraftBatch, Drafted, Drafter, DraftInputs, DraftPlan, DraftRows, DraftTraits
from inference.target.model import TargetOutput
from inference.target.packed import pack
from inference.target.target import Target

BYTES = 1 << 28  # of all rows that may wait; a sequence may have `SPARE` of them in any case


class DeferredRows:
    """Committed rows of all slots, `max_rows` each, that a head has not taken in yet, while nothing is drafted.

    Many rows in one pass cost less than a pass for each, and those of a sequence that ends before cost nothing. The
    host reads nothing here, and no buffer moves.
    """

    def __init__(self, size: int, token: Int[Tensor, "B T"], features: TargetOutput, capacity: int) -> None:
        like = token, features.hidden, features.last_hidden
        row = size * sum(tensor[0, 0].nbytes for tensor in like)
        self.max_rows = max(SPARE, min(capacity, BYTES // row))
        self.count = torch.zeros(size, dtype=torch.long, device=token.device)
        self.rows = tuple(tensor.new_zeros(size, self.max_rows, *tensor.shape[2:]) for tensor in like)
        self.waiting = 0  # at least the largest count, known without asking the device; who adds rows counts it

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [self.count, *self.rows]

    def add(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Add a row of each of the first sequences that counts one, and none of one that counts 0."""
        slot, waiting = torch.arange(len(count), device=count.device), self.count[: len(count)]
        for buffer, new in zip(self.rows, features[:3], strict=True):
            buffer[slot, waiting] = new[:, 0]
        waiting += count

    def take(self, sequences: int) -> Iterator[tuple[Features, Int[Tensor, "B"]]]:
        """Yield the first sequences' rows, padded, with how many each has, as many as a KV cache's ring takes at once.

        Then none waits any longer.
        """
        for first in range(0, self.waiting, SPARE):
            some = slice(first, min(first + SPARE, self.waiting))
            token, hidden, last = (buffer[:sequences, some] for buffer in self.rows)
            count = (self.count[:sequences] - first).clamp(0, SPARE)
            yield Features(token, hidden, last, torch.zeros_like(token)), count
        self.count.zero_()
        self.waiting = 0

    def clear(self, slot: int) -> None:
        """Drop a slot's rows: another sequence takes it."""
        self.count[slot] = 0

    def move(self, from_slot: int, slot: int) -> None:
        """Move a sequence's rows into another slot."""
        for buffer in (self.count, *self.rows):
            buffer[slot] = buffer[from_slot]


class HeadDrafter(Drafter):
    """A head, and the policy by which its trees grow; with a schedule, one for each number of sequences.

    Attributes:
        policy: with a schedule, the tree that the head was saved with.
    """

    head: DraftHead
    policy: TreeConfig

    def __init__(self, head: DraftHead, policy: TreeConfig, name: str, schedule: Schedule | None = None) -> None:
        self.head, self.policy, self.name = head, policy, name
        self.schedule = always(policy) if schedule is None else schedule
        self.tree = self.schedule.label

    def batch(self, size: int) -> "HeadBatch":
        """Return what drafts for up to `size` sequences, whose rows share one KV cache."""
        return HeadBatch(self.head, self.schedule, size)


class HeadBatch(DraftBatch, DraftRows):
    """A head drafting for several sequences: the first slots of one KV cache, and the level under each one's root.

    Both are buffers of all slots, written in place. Where the step at hand has no `policy`, nothing is drafted, and its
    rows are deferred.
    """

    def __init__(self, head: DraftHead, schedule: Schedule, size: int) -> None:
        self.head, self.schedule, self.size = head, schedule, size
        self.feature_layers = head.feature_layers
        self.traits = DraftTraits(max_nodes=max(map(most_nodes, schedule.trees), default=1), rows=self)
        self.capacity = 0
        self.running = 0  # sequences in the step at hand
        self.cache: KVCache | None = None
        self.buffers: LevelOutput | None = None
        self.deferred: DeferredRows | None = None
        modules: Any = head
        self.attentions = [module for module in modules.modules() if isinstance(module, Attention)]
        self.choose(1)

    def choose(self, running: int) -> None:
        """Choose the tree for a number of running sequences."""
        self.policy = policy = self.schedule.at(running)
        self.plan = DraftPlan(max_nodes=self.traits.max_nodes, key=id(policy))
        if policy is not None:
            deepest, sampled = min(policy.deepest, self.head.max_depth), sampled_shape(policy, self.head.max_depth)
            self.plan = self.plan._replace(deepest=deepest, chain=policy.kind == "chain", sampled=sampled)

    def begin(self, contexts: Sequence[Context | None], longest: int) -> DraftPlan:
        """Choose a step's tree; commit what was deferred before it is needed, or before it is too much."""
        self.running = len(contexts)
        self.choose(self.running)
        if self.deferred is not None:
            if self.policy is not None or self.deferred.waiting == self.deferred.max_rows:
                self.commit_deferred(longest)
            self.deferred.waiting += self.policy is None
        self.hold(longest)  # a hybrid may commit rows to a head that did not draft
        return self.plan

    def commit_deferred(self, longest: int) -> None:
        """Commit the rows that were deferred, if there are any."""
        for rows in self.deferred.take(self.running) if self.deferred is not None else ():
            self.hold(longest)
            self.extend(*rows)

    def level(self, count: int) -> LevelOutput:
        """Return the roots' level of the first sequences."""
        assert self.buffers is not None, "draft before a prompt"
        return self.buffers.each(lambda buffer: buffer[:count])

    @torch.inference_mode()
    def start_sequence(self, slot: int, token: list[int], features: TargetOutput) -> None:
        """Commit a prompt's rows in a slot."""
        following = torch.tensor([token[1:]], device=features.hidden.device)
        if self.cache is None and self.head.has_kv_cache:
            self.cache = self.new_cache(following.device)
        if self.deferred is None and self.schedule.pauses:
            self.deferred = DeferredRows(self.size, following, features, self.capacity)
        rows = Features(following, *features[:2], torch.zeros_like(following))
        cache = None if self.cache is None else self.cache.for_new_sequence(slot)
        _, level = self.head.extend(cache, NewRows(rows, following))
        if self.buffers is None:
            with torch.inference_mode(False):  # compiled stages write to no inference tensor
                self.buffers = level.each(lambda row: row.new_zeros(self.size, *row.shape[1:]))
        self.buffers.each(lambda buffer, row: buffer[slot : slot + 1].copy_(row), level)
        if self.deferred is not None:
            self.deferred.clear(slot)

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

    @torch.inference_mode()
    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, with `length` rows, to a vacant slot."""
        assert self.buffers is not None
        if self.cache is not None:  # what moves are all rows that there are
            self.hold(max(self.cache.longest, length))
            self.cache.move(from_slot, slot)
        if self.deferred is not None:
            self.deferred.move(from_slot, slot)
        self.buffers.each(lambda buffer: buffer[slot : slot + 1].copy_(buffer[from_slot : from_slot + 1]))

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Grow a tree for each sequence by rank, or by sampling where the roots say so."""
        if self.policy is None:
            return root_trees(roots.token)
        self.hold(longest)
        level = self.level(len(max_draft_depth))
        return Drafted(
            *grow_batch(
                self.head, self.cache, level, self.policy, roots, max_draft_depth, allow_host_sync=allow_host_sync
            )
        )

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
        if self.plan.deepest:
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
    pack(head)
    tree, schedule = saved_trees(folder, given)
    for one in [tree] if schedule is None else schedule.trees:
        check_tree(target, one, name)
    if schedule is not None:
        lines = [replace(line, tree=line.tree and verifiable(target, line.tree)) for line in schedule.lines]
        schedule = Schedule(lines)
    return HeadDrafter(head, verifiable(target, tree), name, schedule)
