"""Served answers as rows of the report, and the gate that compares their texts: pure functions.

Counts of passes and tokens are those of all repeats; times are those of each request's median repeat. Of requests in
flight together each counts with its share of the time that passed, so that the shares add up to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from eval.endpoint.client import Answer, Asked
from eval.endpoint.counters import Verified, together
from eval.live.interleaved import PLAIN
from eval.measures import results
from eval.measures.builder import UNTIMED, Request, Source, result, with_speedups
from eval.measures.losslessness import UNCHECKED, Divergence, Gate, verdict_of
from eval.measures.metrics import Passes
from eval.measures.results import Part, Row

SHOWN = 24  # characters of a text, from where it differs
NOTHING = Verified(0, 0, None, ())


class Timed(NamedTuple):
    """An answer, the share of its seconds that count as its own, and what became of its drafts, None if not known."""

    answer: Answer
    share: float
    verified: Verified | None

    @property
    def seconds(self) -> float:
        """From the request to the last token."""
        return self.answer.latency_s * self.share

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last; None where nothing was streamed."""
        first = self.answer.ttft_s
        return None if first is None else (self.answer.latency_s - first) * self.share


class Runs(NamedTuple):
    """What one server made of a workload: the repeats of each request, and what became of all drafts, in parts."""

    answers: list[list[Timed]]
    verified: list[Verified]

    def texts(self) -> list[list[str]]:
        """Return the texts of every request."""
        return [[each.answer.text for each in repeats] for repeats in self.answers]

    def middle(self, places: Sequence[int]) -> list[Timed]:
        """Return each request's repeat with the median latency, the lower one of two middles."""
        found = [sorted(self.answers[place], key=lambda each: each.seconds) for place in places]
        return [each[(len(each) - 1) // 2] for each in found]

    def requests(self, places: Sequence[int]) -> list[Request]:
        """Return each request as it was measured: the times of its median repeat, the counts of all its repeats."""
        own: list[Verified | None] = [*self.own(places)] or [None] * len(places)
        return [
            Request(
                passes=None if verified is None else _passes(verified),
                decoding=None if each.decode_s is None else (each.answer.decoded, each.decode_s),
                end_to_end=(each.answer.tokens, each.seconds),
                prefill_s=None if each.decode_s is None else each.seconds - each.decode_s,
                seconds=UNTIMED | {"other": sum(repeat.decode_s or 0.0 for repeat in self.answers[place])},
                waits={"latency_s": each.answer.latency_s, "ttft_s": each.answer.ttft_s},
            )
            for place, each, verified in zip(places, self.middle(places), own, strict=True)
        ]

    def own(self, places: Sequence[int]) -> list[Verified]:
        """Return what became of each request's drafts, its repeats together; nothing where that is not known of all."""
        every = [[each.verified for each in self.answers[place]] for place in places]
        if any(verified is None for repeats in every for verified in repeats):
            return []
        return [together(each for each in repeats if each is not None) for repeats in every]


@dataclass(frozen=True)
class Session:
    """What all rows of one interleaved measurement share; `start` is the place of its first request in the gates."""

    workload: str
    temperature: float
    batch_size: int
    seed: int
    start: int
    asked: Sequence[Asked]

    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's requests; nothing where all are of one."""
        places: dict[str, list[int]] = {}
        for place, each in enumerate(self.asked):
            places.setdefault(each.category, []).append(place)
        return {name or "other": each for name, each in places.items()} if len(places) > 1 else {}


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Compare greedy texts, prompt by prompt, each with all its repeats.

    Logits are not to be seen, so a difference is a failure, with one exception: from where the baseline's own repeats
    differ on, rounding decides there, which counts as a near tie.

    Args:
        plain: the baseline's texts, the repeats of each prompt.
        drafted: those of the same prompts with speculation.
        ids: the prompts' names.
    """
    verdicts: list[str] = []
    ties: list[Divergence] = []
    failures: list[Divergence] = []
    for ours, theirs, prompt in zip(plain, drafted, ids, strict=True):
        wavers = min((at for other in ours if (at := differs(ours[0], other)) is not None), default=None)
        found = [(at, other) for other in theirs if (at := differs(ours[0], other)) is not None]
        if not found:
            verdicts.append("identical")
            continue
        at, other = min(found)
        tied = wavers is not None and at >= wavers
        verdicts.append("near_tie" if tied else "failed")
        shown = f"{other[at : at + SHOWN]!r} instead of {ours[0][at : at + SHOWN]!r}"
        (ties if tied else failures).append(Divergence(prompt, at, None, None, None, shown))
    return verdict_of(verdicts, ties, failures)


def differs(one: str, other: str) -> int | None:
    """Return the first character at which two texts differ, the end of the shorter one included; None: nowhere."""
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def row_of(name: str, runs: Runs, base: Runs | None, gate: Gate, session: Session, kind: tuple[str, list[int]]) -> Row:
    """Return a server's row.

    Args:
        name: of the row.
        runs: what the server made of the session.
        base: what the baseline did, for the speedup; None: there is none to tell.
        gate: the verdict on the texts of all prompts at this batch size.
        session: what the rows share.
        kind: a category, empty for the whole workload, and the places of its requests.
    """
    category, places = kind
    part = Part(category, places, [session.asked[place].conversation for place in places])
    own = runs.own(places)
    whole = together(runs.verified) if not category else together(own) if own else NOTHING
    depths = f"served, depth {len(whole.by_depth)}" if whole.by_depth else "served"
    source = Source(
        name,
        "none" if name == PLAIN else "greedy" if session.temperature == 0 else "the server's",
        "none" if name == PLAIN else depths,
    )
    shown = gate.among([session.start + place for place in places]) if session.temperature == 0 else UNCHECKED
    here = results.Session(session.workload, session.temperature, session.batch_size, 0, session.seed)
    requests = runs.requests(places)
    row = replace(
        result(source, here, part, requests, _passes(whole)),
        tokens=sum(each.answer.decoded for place in places for each in runs.answers[place]),
        lossless=shown.counts(),
    )
    return row if base is None else with_speedups(row, requests, base.requests(places), part, session.seed)


def _passes(verified: Verified) -> Passes:
    """Return a server's counts; a pass commits what it accepted and one token of the target's own."""
    committed = verified.accepted + verified.passes
    return Passes(committed, verified.passes, verified.drafted, verified.accepted, verified.by_depth)
