"""A continuous batch: sequences that enter and leave one by one, and one target pass over all that are in it."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from heads.common.progress import tick
from inference.limits import check_memory, check_size, free_memory
from inference.protocol import DraftBatch, Drafter, Proposal, vacant
from inference.request import TREE_ENTRIES, Generation, Request, RequestParams
from inference.service import Service
from inference.step import DeviceStep, supports
from inference.target.cache import round_up_kv_length
from inference.target.target import Target
from inference.verification.sample import GREEDY
from inference.verification.verify import AUTO, COUPLED, is_lossy

T = TypeVar("T")
MAX_IDLE_BATCHES = 8  # batches, with their graphs and caches, that wait for more requests: one for each drafter
TRIAL = RequestParams(3, GREEDY, min_new_tokens=3)  # of a drafter that is to take another's place


class Running(NamedTuple):
    """A sequence in the batch: the request, its index, and when it came."""

    request_index: int
    request: Request
    began: float


class Batch:
    """The sequences being decoded, by their slots of the cache.

    Attributes:
        drafter: the drafter whose clones `drafts` and the sequences use; a service may replace it.
        service: the service whose drafter it uses; None for a fixed drafter.
    """

    drafter: Drafter
    service: Service | None = None

    def __init__(
        self, target: Target, drafters: Sequence[Drafter], drafts: DraftBatch | None = None, capacity: int = 0
    ) -> None:
        if len(drafters) > 1:
            target.check_masks("so sequences of different lengths cannot share a pass: give batch_size=1")
        self.target, self.free, self.drafts = target, list(drafters), drafts
        self.drafter, self.capacity = drafters[0], 0
        self.cache = target.batch_cache(len(drafters))
        self.device_step = None if drafts is None else DeviceStep(target, self.cache, drafts)
        self.slots: list[Running | None] = []
        self.reserve(capacity)
        if not self.cache.storage.blocks:
            check_memory(self.nbytes, target.name, len(drafters))

    @property
    def nbytes(self) -> Counter[torch.device]:
        """Bytes by device of the target's and the head's keys and values, whether they are allocated yet or not."""
        total = self.cache.storage.nbytes
        total[self.target.device] += 0 if self.drafts is None else self.drafts.nbytes
        return total

    @property
    def running(self) -> list[Running]:
        """The sequences being decoded, by slot."""
        return [sequence for sequence in self.slots if sequence is not None]

    def admit(self, request_index: int, prompt: list[int], settings: RequestParams) -> Generation:
        """Prefill a request's prompt beside the others; return what will hold its answer."""
        if self.service is not None and settings.rule not in (AUTO, COUPLED) and not is_lossy(settings.rule):
            raise ValueError(
                f"rule={settings.rule} is not for every tree, and a Service may change the drafter: choose rule={AUTO} "
                f"or rule={COUPLED}"
            )
        self.follow()
        began = time.perf_counter()
        self.reserve(needed_entries(self.target, prompt, settings))
        slot = vacant(self.slots)
        request = Request(self.target, self.free.pop(), prompt, settings, self.cache.allocate(slot))
        request.prefill()
        self.slots[slot : slot + 1] = [Running(request_index, request, began)]
        return request.generation

    def reserve(self, capacity: int) -> None:
        """Have room for texts of so many tokens and a tree behind each, so that nothing grows while one is decoded."""
        tree = TREE_ENTRIES if self.drafts is None else max(TREE_ENTRIES, self.drafts.max_nodes)
        self.capacity = max(self.capacity, capacity)
        self.cache.storage.reserve(self.capacity + tree if self.capacity else 0)
        if self.drafts is not None:
            self.drafts.reserve(round_up_kv_length(self.cache.storage.capacity))

    def release(self) -> None:
        """Let finished sequences go; the next ones to be admitted take their slots."""
        for slot, sequence in enumerate(self.slots):
            if sequence is not None and sequence.request.generation.finish:
                sequence.request.generation.latency_s = sequence.request.clock() - sequence.began
                self.free.append(sequence.request.drafter)
                sequence.request.state.leave()
                self.slots[slot] = None

    def fill_vacant(self) -> None:
        """Let the last sequences take the slots that nobody was admitted to."""
        for from_slot, slot in vacancy_moves(self.slots):
            self.cache.move(from_slot, slot)
            if self.drafts is not None:
                self.drafts.move(from_slot, slot, self.cache.active[slot].length)
        del self.cache.active[len(self.slots) :]

    def follow(self) -> None:
        """Go on with the drafter that is in service; with the one at hand if that fails."""
        if self.service is None or (drafter := self.service.drafter) is self.drafter:
            return
        try:
            self.swap(drafter)
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            self.service.refuse(drafter, error, self.drafter)
        else:
            self.service.working = drafter

    @torch.inference_mode()
    def swap(self, drafter: Drafter) -> None:
        """Let another drafter propose from the next step on: it takes in every running text as it would a prompt.

        It decodes a few tokens by itself first. Where it fails, then or on a text, nothing has changed.

        Raises:
            ValueError: its tree is larger than the target's context; or whatever error is its own.
        """
        self.release()
        self.fill_vacant()
        trial = batch_of(self.target, drafter.clone(), 1)
        trial.admit(0, [0], TRIAL)
        trial.step()
        clones, drafts = drafter.clones(self.cache.storage.size)
        if drafts is not None:
            check_size(self.target, drafts.max_nodes, drafter.name)
            drafts.reserve(round_up_kv_length(self.cache.storage.capacity + drafts.max_nodes))
        requests = [sequence.request for sequence in self.running]
        states = [request.state_of(clone) for request, clone in zip(requests, clones, strict=False)]
        for request, clone, state in zip(requests, clones, states, strict=False):
            request.swap(clone, state)
        self.drafter, self.free, self.drafts = drafter, list(clones[len(requests) :]), drafts
        self.device_step = None if drafts is None else DeviceStep(self.target, self.cache, drafts)
        self.reserve(self.capacity)

    def step(self) -> None:
        """Let every drafter propose, run one target pass over all, and commit each."""
        tick()
        self.follow()
        self.fill_vacant()
        requests = [sequence.request for sequence in self.running]
        if self.device_step is not None:
            if supports(self.target, requests):
                self.device_step.step(requests)
                return
            self.device_step.current = []
        proposals = self.propose(requests)
        # A draft that has run through the first layers, or whose look-ahead tokens run through others, shares no pass.
        unshared = any(
            draft.first_layers is not None or (draft.look_ahead and draft.look_ahead.stack) for draft in proposals
        )
        switch = self.target.switch
        divided = switch is not None and not switch.shared([request.prefix for request in requests])
        if unshared or divided or len(requests) == 1:
            for request, proposal in zip(requests, proposals, strict=True):
                request.verify(proposal)
            return
        begin = requests[0].clock()
        outs = self.target.score_all(
            [(proposal.tree, proposal.look_ahead) for proposal in proposals], self.cache, requests[0].layers
        )
        seconds = (requests[0].clock() - begin) / len(requests)
        for request, proposal, out in zip(requests, proposals, outs, strict=True):
            request.commit(proposal, out, seconds)

    def propose(self, requests: list[Request]) -> list[Proposal]:
        """Let every drafter propose, in one go where they can."""
        if self.drafts is None:
            return [request.draft() for request in requests]
        begin = requests[0].clock()
        proposals = self.drafts.propose_all([request.begin() for request in requests])
        seconds = (requests[0].clock() - begin) / len(requests)
        for request, proposal in zip(requests, proposals, strict=True):
            check_size(self.target, len(proposal.tree.token), request.drafter.name)
            request.draft_s = seconds
        return proposals


def vacancy_moves(slots: list[T | None]) -> Iterator[tuple[int, int]]:
    """Fill vacant slots with the last sequences; yield from which slot to which each moves."""
    while None in slots:
        last, slot = slots.pop(), vacant(slots)
        if last is not None:
            slots[slot] = last
            yield len(slots), slot


def batch_of(
    target: Target, drafter: Drafter | Service, size: int, requests: Sequence[tuple[list[int], RequestParams]] = ()
) -> Batch:
    """Return a batch of `size` slots, each with a clone of the drafter, and room for the longest of some requests."""
    service, base = (drafter, drafter.working) if isinstance(drafter, Service) else (None, drafter)
    batch = Batch(
        target, *base.clones(size), max((needed_entries(target, *request) for request in requests), default=0)
    )
    batch.drafter, batch.service = base, service
    return batch


def acquire(
    target: Target, drafter: Drafter | Service, size: int, requests: Sequence[tuple[list[int], RequestParams]]
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
        target.idle.clear()  # beside which it may have found no memory
        return batch_of(target, drafter, size, requests)


def release(target: Target, drafter: Drafter | Service, batch: Batch) -> None:
    """Keep a batch whose requests are done, if it holds graphs, which would have to be captured again.

    Batches wait while at least as much memory is free as they take, the last ones longest.
    """
    if batch.device_step is None or batch.device_step.graphs is None or not batch.device_step.graphs.captured:
        return
    target.idle[drafter] = batch
    while target.idle and (len(target.idle) > MAX_IDLE_BATCHES or crowded(target.idle.values())):
        del target.idle[next(iter(target.idle))]


def crowded(batches: Iterable[Batch]) -> bool:
    """Whether batches take more of a device's memory than is free of it."""
    taken = sum((batch.nbytes for batch in batches), Counter[torch.device]())
    return any(nbytes > free_memory(device) for device, nbytes in taken.items())


def needed_entries(target: Target, prompt: list[int], settings: RequestParams) -> int:
    """Return how many entries of the cache a request's text needs."""
    return min(len(prompt) + settings.max_new_tokens, target.context)
