"""A continuous batch: sequences that enter and leave one by one, and one target pass over all that are in it."""

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from inference import tree
from inference.cache import BatchCache
from inference.drafters import Drafter, Proposal
from inference.session import Generation, Session, Settings
from inference.target import Pass, Target

AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


class Row(NamedTuple):
    """A sequence in the batch: its request's number, and when it came."""

    number: int
    session: Session
    began: float


class Batch:
    """The sequences being decoded, in the order of their cache slots."""

    def __init__(self, target: Target, drafters: Sequence[Drafter]) -> None:
        if len(drafters) > 1 and not target.takes_trees:
            raise ValueError(
                f"{target.name}: its attention takes no mask of ours, so sequences of different lengths cannot share a "
                "pass: give batch_size=1"
            )
        self.target, self.free = target, list(drafters)
        self.cache = target.batch_cache(len(drafters))
        self.rows: list[Row] = []

    def admit(self, number: int, prompt: list[int], settings: Settings) -> Generation:
        """Prefill a request's prompt beside the others; return what will hold its answer."""
        began = time.perf_counter()
        session = Session(self.target, self.free.pop(), prompt, settings, self.cache.enter())
        session.prefill()
        self.rows.append(Row(number, session, began))
        return session.made

    def release(self) -> None:
        """Let finished sequences go; the last one takes a free slot, here and in the cache."""
        for row in [row for row in self.rows if row.session.made.finish]:
            row.session.made.latency_s = row.session.clock() - row.began
            self.free.append(row.session.drafter)
            self.cache.leave(row.session.cache)
            last = self.rows.pop()
            if last is not row:
                self.rows[self.rows.index(row)] = last

    def step(self) -> None:
        """Let every drafter propose, run one target pass over all, and settle each."""
        sessions = [row.session for row in self.rows]
        proposals = [session.draft() for session in sessions]
        # A draft that has a pass of its own (some layers already run, other layers for its riders) shares none.
        own = any(each.entered is not None or (each.riders and each.riders.stack) for each in proposals)
        if own or len(sessions) == 1:
            for session, proposal in zip(sessions, proposals, strict=True):
                session.verify(proposal)
            return
        begin = sessions[0].clock()
        outs = score(self.target, proposals, self.cache)
        share = (sessions[0].clock() - begin) / len(sessions)
        for session, proposal, out in zip(sessions, proposals, outs, strict=True):
            session.settle(proposal, out, share)


def batch_of(target: Target, drafter: Drafter, prompt: list[int], size: int) -> Batch:
    """Return a batch for so many sequences, each with a twin of the drafter; the prompt is the first that will come."""
    drafter.reset(prompt)  # ends what the last request may have left at work
    return Batch(target, [drafter, *(twin(drafter) for _ in range(size - 1))])


def score(target: Target, proposals: Sequence[Proposal], cache: BatchCache) -> list[Pass]:
    """Run the target over the active sequences' proposals in one pass; the caller compacts each cache afterwards.

    A sequence's nodes and riders stand behind its own prefix, padded behind to the widest proposal. Padding is seen by
    nobody, but sees the prefix: a row that saw nothing would be NaN, and NaN comes through a mask.
    """
    device, prefixes = target.device, [each.length for each in cache.active]
    tokens = [
        each.tree.token if each.riders is None else torch.cat([each.tree.token, each.riders.token])
        for each in proposals
    ]
    counts = [len(token) for token in tokens]
    width, end = max(counts), max(prefixes) + max(counts)
    rows = len(proposals)
    token = torch.zeros(rows, width, dtype=torch.long, device=device)
    position = torch.zeros(rows, width, dtype=torch.long, device=device)
    seen = torch.zeros(rows, width, end, dtype=torch.bool, device=device)
    column = torch.arange(end, device=device).repeat(rows, 1)
    for row, (proposal, prefix, count) in enumerate(zip(proposals, prefixes, counts, strict=True)):
        place, visible = tree.layout(proposal.tree, prefix, proposal.riders)
        token[row, :count] = tokens[row]
        position[row, :count] = place
        seen[row, :count, : prefix + count] = visible
        seen[row, count:, :prefix] = True
        column[row, prefix : prefix + count] = place
    written = torch.tensor(prefixes, device=device)[:, None] + torch.arange(width, device=device)
    out = target.run(token, position, seen, cache.over(written, end), column)
    for each, count in zip(cache.active, counts, strict=True):
        each.append(count)
    logits = target.ends.logits(out.last)
    return [
        Pass(out.hidden[row : row + 1, :count], out.last[row : row + 1, :count], logits[row : row + 1, :count])
        for row, count in enumerate(counts)
    ]


def twin(drafter: AnyDrafter) -> AnyDrafter:
    """Return a drafter with a state of its own and the same models, for one more sequence at the same time.

    Tensors are shared too: those that are written to belong to a sequence, and `reset` begins them anew.
    """
    shared: dict[int, object] = {}
    open_: list[object] = [drafter]
    reached: set[int] = set()
    while open_:
        one = open_.pop()
        if id(one) in reached:
            continue
        reached.add(id(one))
        if isinstance(one, nn.Module | Target | Tensor):
            shared[id(one)] = one
        elif isinstance(one, dict):
            open_ += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            open_ += one
        elif hasattr(one, "__dict__"):
            open_ += vars(one).values()
    return copy.deepcopy(drafter, shared)
