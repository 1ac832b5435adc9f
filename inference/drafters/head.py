"""Draft heads as drafters: trained ones, and the target's own module for multi-token prediction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from heads.base import DraftHead, Features, NewRows, Tokens
from heads.common.errors import one_line
from heads.common.typed import typed
from heads.formats.checkpoint import module_files, read_module
from heads.formats.hub import load_found, sibling_spec
from heads.formats.mtp_layouts import BLOCK, REMEDY, promise
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config
from heads.modules.kv_cache import KVCache
from heads.modules.layers import Attention
from heads.mtp import TARGET, Mtp
from heads.shapes import PerSequence
from inference.drafters.plain import root_trees
from inference.drafters.policy import (
    Schedule,
    ScheduleLine,
    TreeConfig,
    check_tree,
    expanded,
    grow_batch,
    most_nodes,
    sampled_shape,
    verifiable,
)
from inference.protocol import Contexts, DraftBatch, Drafted, Drafter, DraftInputs, DraftPlan, DraftTraits
from inference.target.model import TargetOutput
from inference.target.packed import prepack_weights
from inference.target.target import Target

Given = Mapping[str, Any]  # a user's values of a tree; None keeps the saved one


class HeadDrafter(Drafter):
    """A head with its tree policy, or with a schedule of policies by the number of sequences.

    Attributes:
        policy: the tree that the head was saved with, also if there is a schedule.
    """

    head: DraftHead
    policy: TreeConfig

    def __init__(self, head: DraftHead, policy: TreeConfig, name: str, schedule: Schedule | None = None) -> None:
        self.head, self.policy, self.name = head, policy, name
        self.schedule = schedule or Schedule([ScheduleLine(1, policy)])
        self.tree = self.schedule.label

    def batch(self, size: int) -> "HeadBatch":
        """Return the draft batch for up to `size` sequences, whose rows share one KV cache."""
        return HeadBatch(self.head, self.schedule, size)


class HeadBatch(DraftBatch):
    """Drafts by a head for several sequences: one KV cache over all slots, and the head's output at each root.

    Both are buffers over all slots, written in place. In a step without a `policy` nothing is drafted and no rows are
    appended, so before the next draft the sequences are prefilled again (`needs_prefill`).
    """

    def __init__(self, head: Any, schedule: Schedule, size: int) -> None:
        self.head, self.schedule, self.size = head, schedule, size
        self.feature_layers = head.feature_layers
        self.traits = DraftTraits(max_nodes=max(map(most_nodes, schedule.trees), default=1), head_batch=self)
        self.capacity = 0
        self.paused = False  # whether rows are missing since the last prefill
        self.cache: KVCache | None = None
        self.buffers: Any = None
        self.attentions = [module for module in self.head.modules() if isinstance(module, Attention)]
        self.select_tree(1)

    def select_tree(self, running: int) -> None:
        """Choose the tree for a number of running sequences."""
        self.policy = policy = None if self.paused else self.schedule.at(running)
        self.plan = DraftPlan(max_nodes=self.traits.max_nodes, tree_id=id(policy))
        if policy is not None:
            tree_depth = min(policy.tree_depth, self.head.max_depth)
            sampled = sampled_shape(policy, self.head.max_depth)
            self.plan = self.plan._replace(tree_depth=tree_depth, chain=policy.kind == "chain", sampled=sampled)

    def needs_prefill(self, running: int) -> bool:
        """Return whether a step of `running` sequences is the first one with a draft after steps without.

        All sequences are then prefilled again, so one request must not cause it: after a pause a quarter more sequences
        must have drafts too.
        """
        pauses = None in map(self.schedule.at, (running, running + self.paused * (running // 4)))
        needs_prefill, self.paused = self.paused and not pauses, pauses
        return needs_prefill

    def begin(self, contexts: Contexts, longest: int) -> DraftPlan:
        """Choose a step's tree."""
        self.select_tree(len(contexts))
        self.set_longest(longest)  # a hybrid may commit rows to a head that did not draft
        return self.plan

    @torch.inference_mode()
    def start_sequence(self, slot: int, token: Tokens, features: TargetOutput) -> None:
        """Prefill a prompt's rows in a slot."""
        following = torch.tensor([token[1:]], device=features.hidden.device)
        if self.cache is None and self.head.has_kv_cache:
            self.cache = self.new_cache(following.device)
        rows = Features(following, *features[:2], torch.zeros_like(following))
        cache = None if self.cache is None else self.cache.for_new_sequence(slot)
        _, level = self.head.extend(cache, NewRows(rows, following))
        if self.buffers is None:
            with torch.inference_mode(False):  # compiled stages cannot write to inference tensors
                self.buffers = level.map(lambda row: row.new_zeros(self.size, *row.shape[1:]))
        self.buffers.map(lambda buffer, row: buffer[slot : slot + 1].copy_(row), level)

    def new_cache(self, device: torch.device) -> KVCache:
        """Return an empty cache for the rows of the texts and of a tree."""
        return KVCache(self.size, getattr(self.head.config, "length", None), device, self.capacity, self.spare)

    @property
    def nbytes(self) -> int:
        """Bytes of the head's KV cache on the target's device, allocated or not."""
        return self.new_cache(torch.device("meta")).nbytes(self.head) if self.head.has_kv_cache else 0

    @property
    def spare(self) -> int:
        """Rows of the cache after a text: those of a tree or of a block, and those appended but not accepted."""
        trees = self.schedule.trees
        committed = [min(tree.tree_depth, self.head.max_depth) + 1 for tree in trees]
        return max([self.head.max_depth + 1, *map(expanded, trees)]) + max(committed, default=0)

    @torch.inference_mode()
    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, with `length` rows, to a free slot."""
        if self.cache is not None:  # every row is moved
            self.set_longest(max(self.cache.longest, length))
            self.cache.move(from_slot, slot)
        self.buffers.map(lambda buffer: buffer[slot : slot + 1].copy_(buffer[from_slot : from_slot + 1]))

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: PerSequence, longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Grow a tree for each sequence by rank, or by sampling if the roots have samples."""
        if self.policy is None:
            return root_trees(roots.token)
        self.set_longest(longest)
        level = self.buffers.map(lambda buffer: buffer[: len(max_draft_depth)])
        return Drafted(
            *grow_batch(
                self.head, self.cache, level, self.policy, roots, max_draft_depth, allow_host_sync=allow_host_sync
            )
        )

    def reserve(self, capacity: int) -> None:
        """Set the number of rows that a sequence may have, before one starts."""
        self.capacity = max(self.capacity, capacity)

    def tensors(self) -> list[Tensor]:
        """Return the buffers of the KV cache and of the outputs at the roots, and the rotary tables."""
        tables = [attention.rotary.table for attention in self.attentions]
        return [*self.buffers[:2], *self.buffers.root, *tables, *([] if self.cache is None else self.cache.tensors())]

    def set_longest(self, longest: int) -> None:
        """Set the length of the longest sequence in the KV cache."""
        if self.cache is not None:
            self.cache.longest = longest

    def commit(self, features: Features, count: PerSequence) -> None:
        """Append the first `count` of T verified rows of each sequence, except in a step without a draft."""
        if self.plan.tree_depth:
            self.extend(features, count)

    def extend(self, features: Features, count: PerSequence) -> None:
        """Append rows of all sequences; a sequence without rows keeps the outputs at its root."""
        _, level = self.head.extend(self.cache, NewRows(features, features.token, count))

        def write(buffer: Tensor, new: Tensor) -> Tensor:
            old = buffer[: len(new)]
            return old.copy_(torch.where(count.view(-1, *[1] * (new.ndim - 1)) > 0, new, old))

        self.buffers.map(write, level)


def saved_trees(folder: Path, given: Given) -> tuple[TreeConfig, Schedule | None]:
    """Return the tree that a head was saved with, overridden by the given values that are not None, and its schedule.

    There is no schedule if the head was saved without one, or if a value of the tree is given.

    Raises:
        ValueError: a published head has no tree, and none is given; or a tree or schedule is invalid.
    """
    chosen = {key: value for key, value in given.items() if value is not None}
    published = is_published(folder)
    if published and "kind" not in chosen:
        raise ValueError(
            f"{folder}: a head in an engine's format brings no tree: give tree=chain, tree=dynamic or another"
        )
    saved = {"tree": {}} if published else read_config(folder)
    lines = None if chosen else saved.get(SCHEDULE)
    try:
        tree = typed(TreeConfig, saved["tree"] | chosen, "tree")
        return tree, None if lines is None else typed(Schedule, {"lines": lines}, "schedule")
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def load_for(folder: Path, target: Target) -> Any:
    """Return a folder's head on a target's device and in its dtype; refuse one that must not draft for it."""
    spec = sibling_spec(folder, target.spec, "drafts for") if target.sibling else target.spec
    return load_found(folder, target.embeddings, spec).to(device=target.device, dtype=target.dtype).eval()


def load_drafter(folder: Path, given: Given, target: Target, name: str) -> HeadDrafter:
    """Return the head of a folder as a drafter for a target, on its device and in its dtype.

    Args:
        given: values of its tree in place of the saved ones.
        target: the target that it was trained for, or with `target.sibling` another checkpoint of the same shape.
        name: its name in reports and errors.

    Raises:
        ValueError: it is damaged or was trained for another target, or its tree is larger than the target's context.
    """
    head = load_for(folder, target)
    prepack_weights(head)
    tree, schedule = saved_trees(folder, given)
    for policy in [tree] if schedule is None else schedule.trees:
        check_tree(target, policy, name)
    if schedule is not None:
        lines = [replace(line, tree=line.tree and verifiable(target, line.tree)) for line in schedule.lines]
        schedule = Schedule(lines)
    return HeadDrafter(head, verifiable(target, tree), name, schedule)


class MtpDrafter(HeadDrafter):
    """The multi-token-prediction module of the target's own checkpoint, which transformers leaves out.

    heads/formats/mtp_layouts.py names the layouts that are read; recurrent targets verify only chains. The module's
    decoder layer is one of the target's architecture: rotary attention over the whole prefix, and no recurrent state.
    If there are several modules, only the first is used, at every depth.
    """

    @dataclass(frozen=True)
    class Config:
        """The checkpoint with the module (None: the target's own), and the tree policy."""

        checkpoint: str | None
        tree: TreeConfig

    def __init__(self, config: Config, target: Target, name: str) -> None:
        super().__init__(load_mtp(target, config.checkpoint or target.name), verifiable(target, config.tree), name)


def load_mtp(target: Target, checkpoint: str) -> Mtp:
    """Return the module in a target's checkpoint, a folder or Hub name, on the target's device and in its dtype.

    It uses the target's embedding and lm_head. Refuse a checkpoint without one, or with one unlike the target's layer.
    """
    layers = target.spec.num_layers
    try:
        module = read_module(module_files(checkpoint, layers), layers)
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"drafter.mtp: {checkpoint} holds no readable model.safetensors, or is damaged ({one_line(error)}); give "
            "the folder or Hub name of the target's own checkpoint, or download it again"
        ) from error
    if module is None:
        key = promise(target.config.to_dict())
        remedy = "choose another drafter" if key is None else f"its {key} promises one; {REMEDY}"
        raise ValueError(f"drafter.mtp: {checkpoint} carries no module for multi-token prediction; {remedy}")
    layout, tensors = module
    try:
        if target.recurrence is not None and layers - 1 in target.recurrence.mixers:
            raise ValueError("the target's last layer cannot run by itself (it keeps a recurrent state)")
        # The layer's sizes are the target's.
        sizes = None, None, None, None, None, 10000.0, None, 0.0
        config = Mtp.Config("mtp", *sizes, "shared", None, None, 1, TARGET, layout.raw_state, False, None)
        with torch.device("meta"):
            head = Mtp(config, target.embeddings)
        last = target.decoder_layers[-1].state_dict().items()
        wide = {BLOCK + name for name, tensor in last if tensor.dtype == torch.float32}  # such as a router's
        moved = {
            name: tensor.to(target.device, torch.float32 if name in wide else target.dtype)
            for name, tensor in tensors.items()
        }
        try:
            head.load_state_dict(moved, assign=True)
        except RuntimeError as error:
            why = "is not built like the target's last layer, or is quantised"
            raise ValueError(f"the module in {checkpoint} {why} ({one_line(error)})") from error
        head.check()
    except ValueError as error:
        raise ValueError(f"drafter.mtp: {error}; choose another drafter") from error
    return head.eval().requires_grad_(False)
