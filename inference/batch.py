"""A continuous batch: sequences that enter and leave one by one, and one target pass over all that are in it."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from inference.limits import check_size
from inference.protocol import DraftBatch, Drafter, Proposal
from inference.session import Generation, Session, Settings
from inference.target.target import Target


class Running(NamedTuple):
    """A sequence in the batch: its request's number, its session, and when it came."""

    number: int
    session: Session
    began: float


class Batch:
    """The sequences being decoded, in the order of their cache slots."""

    def __init__(self, target: Target, drafters: Sequence[Drafter], drafts: DraftBatch | None = None) -> None:
        if len(drafters) > 1 and not target.takes_trees:
            raise ValueError(
                f"{target.name}: {target.objection}, so sequences of different lengths cannot share a pass: give "
                "batch_size=1"
            )
        self.target, self.free, self.drafts = target, list(drafters), drafts
        self.cache = target.batch_cache(len(drafters))
        self.running: list[Running] = []

    def admit(self, number: int, prompt: list[int], settings: Settings) -> Generation:
        """Prefill a request's prompt beside the others; return what will hold its answer."""
        began = time.perf_counter()
        session = Session(self.target, self.free.pop(), prompt, settings, self.cache.enter())
        session.prefill()
        self.running.append(Running(number, session, began))
        return session.generation

    def release(self) -> None:
        """Let finished sequences go; the last one takes a free slot, here and in the cache."""
        for sequence in [sequence for sequence in self.running if sequence.session.generation.finish]:
            sequence.session.generation.latency_s = sequence.session.clock() - sequence.began
            self.free.append(sequence.session.drafter)
            sequence.session.state.leave()
            self.cache.leave(sequence.session.cache)
            last = self.running.pop()
            if last is not sequence:
                self.running[self.running.index(sequence)] = last

    def step(self) -> None:
        """Let every drafter propose, run one target pass over all, and commit each."""
        sessions = [sequence.session for sequence in self.running]
        proposals = self.propose(sessions)
        # A draft whose nodes have entered already, or whose look-ahead tokens run through other layers, shares no pass.
        unshared = any(
            draft.entered is not None or (draft.look_ahead and draft.look_ahead.stack) for draft in proposals
        )
        switch = self.target.switch
        divided = switch is not None and not switch.shared([session.prefix for session in sessions])
        if unshared or divided or len(sessions) == 1:
            for session, proposal in zip(sessions, proposals, strict=True):
                session.verify(proposal)
            return
        begin = sessions[0].clock()
        outs = self.target.score_all(
            [(proposal.tree, proposal.look_ahead) for proposal in proposals], self.cache, sessions[0].layers
        )
        seconds = (sessions[0].clock() - begin) / len(sessions)
        for session, proposal, out in zip(sessions, proposals, outs, strict=True):
            session.commit(proposal, out, seconds)

    def propose(self, sessions: list[Session]) -> list[Proposal]:
        """Let every drafter propose, in one go where they can."""
        if self.drafts is None:
            return [session.draft() for session in sessions]
        begin = sessions[0].clock()
        proposals = self.drafts.propose([session.begin() for session in sessions])
        seconds = (sessions[0].clock() - begin) / len(sessions)
        for session, proposal in zip(sessions, proposals, strict=True):
            check_size(self.target, len(proposal.tree.token), session.drafter.name)
            session.draft_s = seconds
        return proposals


def batch_of(target: Target, drafter: Drafter, size: int) -> Batch:
    """Return a batch of `size` slots, each with a clone of the drafter."""
    return Batch(target, *drafter.clones(size))
