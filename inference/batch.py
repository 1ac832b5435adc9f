"""A continuous batch: sequences that enter and leave one by one, and one target pass over all that are in it."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from inference.protocol import Drafter
from inference.session import Generation, Session, Settings
from inference.target.target import Target


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
                f"{target.name}: {target.objection}, so sequences of different lengths cannot share a pass: give "
                "batch_size=1"
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
        """Let every drafter propose, run one target pass over all, and commit each."""
        sessions = [row.session for row in self.rows]
        proposals = [session.draft() for session in sessions]
        # A draft whose nodes have entered already, or whose look-ahead tokens run through other layers, shares no pass.
        unshared = any(each.entered is not None or (each.look_ahead and each.look_ahead.stack) for each in proposals)
        switch = self.target.switch
        apart = switch is not None and not switch.shared([session.prefix for session in sessions])
        if unshared or apart or len(sessions) == 1:
            for session, proposal in zip(sessions, proposals, strict=True):
                session.verify(proposal)
            return
        begin = sessions[0].clock()
        outs = self.target.score_all(
            [(each.tree, each.look_ahead) for each in proposals], self.cache, sessions[0].layers
        )
        share = (sessions[0].clock() - begin) / len(sessions)
        for session, proposal, out in zip(sessions, proposals, outs, strict=True):
            session.commit(proposal, out, share)


def batch_of(target: Target, drafter: Drafter, size: int) -> Batch:
    """Return a batch for so many sequences, each drafted for with a memory of its own."""
    return Batch(target, [drafter, *(drafter.clone() for _ in range(size - 1))])
