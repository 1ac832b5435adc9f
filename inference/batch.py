"""A continuous batch: sequences that enter and leave one by one, and one target pass over all that are in it."""

import logging
from collections import Counter
from collections.abc import Sequence
from threading import Lock

import torch

from heads.base import Tokens
from heads.common.errors import one_line
from heads.common.progress import tick
from inference.protocol import DraftBatch, Drafter
from inference.request import Generation, Request, RequestParams
from inference.step import DeviceStep
from inference.target.cache import round_up_kv_length
from inference.target.target import Target, check_memory, check_size, free_memory
from inference.verification.rules import AUTO, COUPLED, is_lossy
from inference.verification.sample import GREEDY

log = logging.getLogger(__name__)


class Service:
    """Holds the drafter in service; `speculate` and `generate` take it in a drafter's place.

    `swap` may be called at any time, from `on_tokens` or from another thread too: decoding continues with the new
    drafter at its next pass, running requests included. No text changes: the target decides every token.

    Attributes:
        drafter: the one in service, for every batch from its next step on.
        working: the last one that a batch took.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = self.working = drafter
        self.lock = Lock()

    def swap(self, drafter: Drafter) -> None:
        """Put another drafter for the same target into service."""
        with self.lock:
            self.drafter = drafter


TREE_ENTRIES = 64  # entries of the cache behind a text, for trees of sources that do not say how many they need
MAX_IDLE_BATCHES = 8  # batches, with their graphs and caches, that wait for more requests: one for each drafter
TRIAL = RequestParams(3, GREEDY, min_new_tokens=3)  # of a drafter that is to take another's place


class Batch:
    """The sequences being decoded, by their slots of the cache.

    Attributes:
        drafter: the draft source that `drafts` is of, where a service may replace it.
        service: which it follows; None: it stays.
    """

    service: Service | None = None

    def __init__(self, target: Target, drafter: Drafter, size: int, capacity: int = 0) -> None:
        if size > 1:
            target.check_masks("so sequences of different lengths cannot share a pass: give batch_size=1")
        self.drafts = drafter.batch(size)
        size = 1 if self.drafts.traits.single else size
        self.target, self.drafter, self.size, self.capacity = target, drafter, size, 0
        self.cache = target.batch_cache(size)
        self.device_step = DeviceStep(target, self.cache, self.drafts, drafter.name)
        self.slots: list[Request | None] = []
        self.reserve(capacity)
        if not self.cache.storage.blocks:
            check_memory(self.nbytes, target.name, size)

    @property
    def nbytes(self) -> Counter[torch.device]:
        """Bytes by device of the target's and the head's keys and values, whether they are allocated yet or not."""
        total = self.cache.storage.nbytes
        if (rows := self.drafts.traits.rows) is not None:
            total[self.target.device] += rows.nbytes
        return total

    @property
    def running(self) -> list[Request]:
        """The sequences being decoded, by slot."""
        return [request for request in self.slots if request is not None]

    @property
    def free(self) -> int:
        """How many more there may be."""
        return self.size - len(self.running)

    def admit(self, request_index: int, prompt: Tokens, settings: RequestParams) -> Generation:
        """Prefill a request's prompt; return what will hold its answer."""
        if self.service is not None and settings.rule not in (AUTO, COUPLED) and not is_lossy(settings.rule):
            raise ValueError(
                f"rule={settings.rule} is not for every tree, and a Service may change the drafter: choose rule={AUTO} "
                f"or rule={COUPLED}"
            )
        self.follow()
        self.reserve(needed_entries(self.target, prompt, settings))
        slot = self.slots.index(None) if None in self.slots else len(self.slots)
        request = Request(self.target, prompt, settings, self.cache.allocate(slot), request_index)
        out = request.prefill(self.drafts.traits.feature_layers)
        self.drafts.start_sequence(slot, request.context, out)
        request.generation.prefill_s = request.clock() - request.began
        self.slots[slot : slot + 1] = [request]
        return request.generation

    def reserve(self, capacity: int) -> None:
        """Have room for texts of `capacity` tokens and a tree behind each, so that decoding grows nothing."""
        self.capacity, traits = max(self.capacity, capacity), self.drafts.traits
        self.cache.storage.reserve(self.capacity + max(TREE_ENTRIES, traits.max_nodes) if self.capacity else 0)
        if traits.rows is not None:
            traits.rows.reserve(round_up_kv_length(self.cache.storage.capacity))

    def release(self) -> None:
        """Let finished sequences go; the next ones to be admitted take their slots."""
        for slot, request in enumerate(self.slots):
            if request is not None and request.generation.finish:
                request.generation.latency_s = request.clock() - request.began
                self.slots[slot] = None

    def fill_vacant(self) -> None:
        """Let the last sequences take the slots that nobody was admitted to."""
        while None in self.slots:
            if (last := self.slots.pop()) is not None:
                from_slot, slot = len(self.slots), self.slots.index(None)
                self.slots[slot] = last
                self.cache.active[from_slot].move(slot)
                self.cache.active[slot] = self.cache.active[from_slot]
                self.drafts.move(from_slot, slot, self.cache.active[slot].length)
        del self.cache.active[len(self.slots) :]

    def follow(self) -> None:
        """Go on with the drafter that is in service; with the one at hand if that fails."""
        if self.service is None or (drafter := self.service.drafter) is self.drafter:
            return
        try:
            self.swap(drafter)
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            with self.service.lock:  # unless a third one is in service by now
                if self.service.drafter is drafter:
                    self.service.drafter = self.service.working = self.drafter
            log.warning("%s is put back: %s fails (%s)", self.drafter.name, drafter.name, one_line(error))
        else:
            self.service.working = drafter

    @torch.inference_mode()
    def swap(self, drafter: Drafter) -> None:
        """Let another drafter propose from the next step on: it takes in every running text as it would a prompt.

        It first decodes a few tokens in a batch of its own. Where it fails, then or on a text, nothing has changed.

        Raises:
            ValueError: its tree is larger than the target's context; or whatever error is its own.
        """
        self.release()
        self.fill_vacant()
        trial = Batch(self.target, drafter.clone(), 1)
        trial.admit(0, [0], TRIAL)
        trial.step()
        drafts = drafter.batch(self.size)
        check_size(self.target, drafts.traits.max_nodes, drafter.name)
        if drafts.traits.single and self.size > 1:
            raise ValueError(f"{drafter.name} drafts for one sequence at a time: give batch_size=1")
        if drafts.traits.rows is not None:
            drafts.traits.rows.reserve(round_up_kv_length(self.cache.storage.capacity + drafts.traits.max_nodes))
        self.start(drafts)
        self.drafter, self.drafts = drafter, drafts
        self.device_step = DeviceStep(self.target, self.cache, drafts, drafter.name)
        self.reserve(self.capacity)

    def start(self, drafts: DraftBatch) -> None:
        """Let drafts take in every running text as they would a prompt."""
        for slot, request in enumerate(self.running):
            token = torch.tensor(request.context[:-1], device=self.target.device)
            out = self.target.prefill(token, self.target.cache(len(token)), drafts.traits.feature_layers)
            drafts.start_sequence(slot, request.context, out)

    def step(self) -> None:
        """Decode one step of all sequences."""
        tick()
        self.follow()
        self.fill_vacant()
        if self.drafts.resumes(len(self.running)):
            self.start(self.drafts)
        self.device_step.step(self.running)


def batch_of(
    target: Target, drafter: Drafter | Service, size: int, requests: Sequence[tuple[Tokens, RequestParams]] = ()
) -> Batch:
    """Return a batch of `size` slots with room for the longest of some requests."""
    service, source = (drafter, drafter.working) if isinstance(drafter, Service) else (None, drafter)
    batch = Batch(target, source, size, max((needed_entries(target, *request) for request in requests), default=0))
    batch.service = service
    return batch


def acquire(
    target: Target, drafter: Drafter | Service, size: int, requests: Sequence[tuple[Tokens, RequestParams]]
) -> Batch:
    """Return a batch for requests: the one that was given back for this drafter, if it has as many slots."""
    idle: Batch | None = target.idle.pop(drafter, None)
    if idle is not None and idle.cache.storage.size == size:
        return idle
    del idle
    try:
        return batch_of(target, drafter, size, requests)
    except ValueError:
        if not target.idle:
            raise
        target.idle.clear()  # they may have left no memory
        return batch_of(target, drafter, size, requests)


def release(target: Target, drafter: Drafter | Service, batch: Batch) -> None:
    """Keep a batch whose requests are done, if it holds graphs, which would have to be captured again.

    Batches wait while at least as much memory is free as they take, the last ones longest.
    """
    if batch.device_step.graphs is None or not batch.device_step.graphs.captured:
        return
    target.idle[drafter] = batch
    while target.idle:
        taken = sum((idle.nbytes for idle in target.idle.values()), Counter[torch.device]())
        crowded = any(nbytes > free_memory(device) for device, nbytes in taken.items())
        if not crowded and len(target.idle) <= MAX_IDLE_BATCHES:
            break
        del target.idle[next(iter(target.idle))]


def needed_entries(target: Target, prompt: list[int], settings: RequestParams) -> int:
    """Return how many entries of the cache a request's text needs."""
    return min(len(prompt) + settings.max_new_tokens, target.context)
