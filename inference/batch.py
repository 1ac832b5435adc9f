"""Continuous batching: sequences join and leave one by one, and a step is one target pass over the current ones."""

import logging
from collections import Counter
from collections.abc import Sequence
from threading import Lock

import torch

from heads.base import Tokens
from heads.common.errors import one_line
from heads.common.progress import update_bar
from heads.common.target_config import UNFIT
from inference.protocol import DraftBatch, Drafter
from inference.request import Generation, Request, RequestParams, clock
from inference.step import DeviceStep
from inference.target.cache import round_up_kv_length
from inference.target.target import Target, check_memory, check_size, free_memory
from inference.verification.rules import AUTO, COUPLED, is_lossy
from inference.verification.sample import GREEDY

log = logging.getLogger(__name__)


class SwappableDrafter:
    """A drafter that can be swapped while requests run; `speculate` and `generate` accept it as a drafter.

    `swap` may be called at any time, also from `on_tokens` or another thread: decoding uses the new drafter from its
    next pass on, for running requests too. The text does not change: the target decides every token.

    Attributes:
        drafter: the drafter that every batch uses from its next step on.
        last_good: the last drafter that a batch has swapped in without an error.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = self.last_good = drafter
        self.lock = Lock()

    def swap(self, drafter: Drafter) -> None:
        """Replace the drafter by another one for the same target."""
        with self.lock:
            self.drafter = drafter


DrafterLike = Drafter | SwappableDrafter
TREE_ENTRIES = 64  # least cache entries after a text for a tree; drafters on the host do not state their trees' sizes
MAX_IDLE_BATCHES = 8  # idle batches kept for reuse with their graphs and caches, one for each drafter
TRIAL = RequestParams(3, GREEDY, min_new_tokens=3)  # decoded by a drafter before it is swapped in


class Batch:
    """A continuous batch: the sequences being decoded, by slot.

    Attributes:
        drafter: the drafter that made `draft_batch`; `swappable` may replace it.
        swappable: the source of its drafter; None if the drafter is fixed.
    """

    swappable: SwappableDrafter | None = None

    def __init__(self, target: Target, drafter: Drafter, size: int, capacity: int = 0) -> None:
        if size > 1:
            target.check_masks("so sequences of different lengths cannot share a pass: give batch_size=1")
        self.draft_batch = drafter.batch(size)
        size = 1 if self.draft_batch.traits.single else size
        self.target, self.drafter, self.size, self.capacity = target, drafter, size, 0
        self.cache = target.batch_cache(size)
        self.device_step = DeviceStep(target, self.cache, self.draft_batch, drafter.name)
        self.slots: list[Request | None] = []
        self.reserve(capacity)
        if not self.cache.storage.blocks:
            check_memory(self.nbytes, target.name, size)

    @property
    def nbytes(self) -> Counter[torch.device]:
        """Bytes by device of the target's and the head's KV caches, allocated or not."""
        total = self.cache.storage.nbytes
        if (rows := self.draft_batch.traits.head_batch) is not None:
            total[self.target.device] += rows.nbytes
        return total

    @property
    def running(self) -> list[Request]:
        """The running sequences, by slot."""
        return [request for request in self.slots if request is not None]

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self.size - len(self.running)

    def admit(self, request_index: int, prompt: Tokens, params: RequestParams) -> Generation:
        """Prefill a request's prompt; return its generation, which later steps extend."""
        if self.swappable is not None and params.rule not in (AUTO, COUPLED) and not is_lossy(params.rule):
            raise ValueError(
                f"rule={params.rule} is not for every tree, and a SwappableDrafter may change the drafter: choose "
                f"rule={AUTO} or rule={COUPLED}"
            )
        self.take_new_drafter()
        self.reserve(needed_entries(self.target, prompt, params))
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        request = Request(self.target, prompt, params, self.cache.allocate(slot), request_index)
        self.draft_batch.start_sequence(
            slot, request.token_ids, request.prefill(self.draft_batch.traits.feature_layers)
        )
        request.generation.prefill_s = clock(self.target.device) - request.start_s
        self.slots[slot : slot + 1] = [request]
        return request.generation

    def reserve(self, capacity: int) -> None:
        """Allocate caches for texts of `capacity` tokens and a tree after each, so that decoding never reallocates."""
        self.capacity = max(self.capacity, capacity)
        traits = self.draft_batch.traits
        self.cache.storage.reserve(self.capacity + max(TREE_ENTRIES, traits.max_nodes) if self.capacity else 0)
        if traits.head_batch is not None:
            traits.head_batch.reserve(round_up_kv_length(self.cache.storage.capacity))

    def release(self) -> None:
        """Free the slots of finished sequences."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.generation.finish_reason:
                request.generation.latency_s = clock(self.target.device) - request.start_s
                self.slots[slot] = None

    def compact_slots(self) -> None:
        """Move the last sequences into free slots, so that running sequences have the first slots."""
        active = self.cache.active
        while None in self.slots:
            if (last := self.slots.pop()) is not None:
                from_slot, slot = len(self.slots), self.slots.index(None)
                self.slots[slot] = last
                active[from_slot].move(slot)
                active[slot] = active[from_slot]
                self.draft_batch.move(from_slot, slot, active[slot].length)
        del active[len(self.slots) :]

    def take_new_drafter(self) -> None:
        """Swap in the drafter of `swappable` if it has changed; if that fails, keep the current one and put it back."""
        swappable = self.swappable
        if swappable is None or (drafter := swappable.drafter) is self.drafter:
            return
        try:
            self.swap(drafter)
        except UNFIT as error:
            with swappable.lock:  # unless another thread has swapped again
                if swappable.drafter is drafter:
                    swappable.drafter = swappable.last_good = self.drafter
            log.warning("%s is put back: %s fails (%s)", self.drafter.name, drafter.name, one_line(error))
        else:
            swappable.last_good = drafter

    @torch.inference_mode()
    def swap(self, drafter: Drafter) -> None:
        """Use another drafter from the next step on: it prefills every running text.

        It first decodes a few tokens in a separate batch. If that or a prefill fails, this batch is unchanged.

        Raises:
            ValueError: its tree is larger than the target's context, or it drafts for one sequence only.
        """
        self.release()
        self.compact_slots()
        trial = Batch(self.target, drafter.clone(), 1)
        trial.admit(0, [0], TRIAL)
        trial.step()
        draft_batch = drafter.batch(self.size)
        check_size(self.target, draft_batch.traits.max_nodes, drafter.name)
        if draft_batch.traits.single and self.size > 1:
            raise ValueError(f"{drafter.name} drafts for one sequence at a time: give batch_size=1")
        if draft_batch.traits.head_batch is not None:
            draft_batch.traits.head_batch.reserve(
                round_up_kv_length(self.cache.storage.capacity + draft_batch.traits.max_nodes)
            )
        self.start(draft_batch)
        self.drafter, self.draft_batch = drafter, draft_batch
        self.device_step = DeviceStep(self.target, self.cache, draft_batch, drafter.name)
        self.reserve(self.capacity)

    def start(self, draft_batch: DraftBatch) -> None:
        """Prefill every running text into a draft batch."""
        for slot, request in enumerate(self.running):
            token = torch.tensor(request.token_ids[:-1], device=self.target.device)
            out = self.target.prefill(token, self.target.cache(len(token)), draft_batch.traits.feature_layers)
            draft_batch.start_sequence(slot, request.token_ids, out)

    def step(self) -> None:
        """Decode one step of all sequences."""
        update_bar()
        self.take_new_drafter()
        self.compact_slots()
        if self.draft_batch.needs_prefill(len(self.running)):
            self.start(self.draft_batch)
        self.device_step.step(self.running)


def batch_of(
    target: Target, drafter: DrafterLike, size: int, requests: Sequence[tuple[Tokens, RequestParams]] = ()
) -> Batch:
    """Return a batch of `size` slots with caches for the longest of the requests."""
    swappable, current = (drafter, drafter.last_good) if isinstance(drafter, SwappableDrafter) else (None, drafter)
    batch = Batch(target, current, size, max((needed_entries(target, *request) for request in requests), default=0))
    batch.swappable = swappable
    return batch


def acquire(target: Target, drafter: DrafterLike, size: int, requests: Sequence[tuple[Tokens, RequestParams]]) -> Batch:
    """Return a batch for requests: the idle one of this drafter if its size matches, else a new one."""
    idle: Batch | None = target.idle.pop(drafter, None)
    if idle is not None and idle.cache.storage.size == size:
        return idle
    del idle
    try:
        return batch_of(target, drafter, size, requests)
    except ValueError:
        if not target.idle:
            raise
        target.idle.clear()  # idle batches may hold the memory that is missing
        return batch_of(target, drafter, size, requests)


def release(target: Target, drafter: DrafterLike, batch: Batch) -> None:
    """Keep a finished batch for reuse if it has captured graphs.

    Idle batches are dropped, oldest first, while they take more memory than is free.
    """
    if batch.device_step.graphs is None or not batch.device_step.graphs.captured:
        return
    target.idle[drafter] = batch
    while target.idle:
        taken = sum((idle.nbytes for idle in target.idle.values()), Counter[torch.device]())
        exceeded = any(nbytes > free_memory(device) for device, nbytes in taken.items())
        if not exceeded and len(target.idle) <= MAX_IDLE_BATCHES:
            break
        del target.idle[next(iter(target.idle))]


def needed_entries(target: Target, prompt: Tokens, params: RequestParams) -> int:
    """Return the number of cache entries that a request's text needs."""
    return min(len(prompt) + params.max_new_tokens, target.max_model_len)
