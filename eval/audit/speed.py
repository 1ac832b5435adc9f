"""Speedup by load, throughput against the speed of one user, acceptance by position, from the checks' own answers."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from eval.audit.ask import AUDITED, BASELINE
from eval.audit.compare import NOT_RUN, PASSED, Finding, Timed
from eval.endpoint.counters import Counters, between, restarted
from eval.endpoint.replies import Reply
from eval.measures import metrics
from eval.measures.cost_model import stops_paying

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def share_machine(one: str, other: str) -> bool:
    """Whether two servers are processes of one machine, by their URLs."""
    first, second = urlsplit(one), urlsplit(other)
    hosts = {"localhost" if host in LOOPBACK else host for host in (first.hostname, second.hostname)}
    return len(hosts) == 1 and first.port != second.port


def speed(
    timings: Sequence[Timed], counters: tuple[Counters | None, Counters | None], seed: int, *, shared: bool = False
) -> Finding:
    """Return speedups at each number of requests in flight, and acceptance where the server counts it.

    With `shared`, both servers are on one machine, and the finding says what that may do to the speedup.
    """
    loads = [load for size in sorted({t.in_flight for t in timings}) if (load := _load(timings, size, seed))]
    figures: dict[str, Any] = {"loads": loads, **acceptance(timings, counters)}
    if not loads:
        return Finding("speed", NOT_RUN, "no answers of both servers were timed", [], figures)
    texts = [
        f"{load['speedup']:.2f}x [{load['low']:.2f}, {load['high']:.2f}] with {load['in_flight']} in flight"
        for load in loads
    ]
    losing = stops_paying({load["in_flight"]: load["high"] for load in loads})
    figures["loses_from"] = losing
    if losing is not None:
        texts.append(f"speculation loses from {losing} in flight on")
    if shared:
        texts.append("both servers are on one machine: where they share cores or a device, they slow each other")
    if figures.get("tau"):
        texts.append(f"{figures['tau']:.2f} tokens a pass")
    return Finding("speed", PASSED, "; ".join(texts), [], figures)


def _load(timings: Sequence[Timed], in_flight: int, seed: int) -> dict[str, Any] | None:
    """Return both servers' speeds with so many requests in flight, and the speedup with its bootstrap interval.

    The speedup is that of a user's tokens a second, by pairs of answers to the same question.
    """
    sides: dict[str, list[Reply]] = {BASELINE: [], AUDITED: []}
    walls = {BASELINE: 0.0, AUDITED: 0.0}
    for timed in timings:
        if timed.in_flight == in_flight:
            sides[timed.side] += timed.replies
            walls[timed.side] += timed.wall_s
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(sides[AUDITED], sides[BASELINE], strict=False)
        if (ours.completion_tokens or 0) > 0 and (theirs.completion_tokens or 0) > 0
    ]
    if not pairs:
        return None
    ours, theirs = ([(reply.completion_tokens, reply.latency_s) for reply in side] for side in zip(*pairs, strict=True))
    speedup = metrics.over(ours, theirs)
    low, high = metrics.paired_interval(ours, theirs, seed) or (speedup, speedup)
    totals = {side: sum(r.completion_tokens or 0 for r in sides[side]) / max(walls[side], 1e-9) for side in sides}
    return {
        "in_flight": in_flight,
        "requests": len(pairs),
        "speedup": speedup,
        "low": low,
        "high": high,
        "user": {AUDITED: metrics.speed(ours), BASELINE: metrics.speed(theirs)},
        "throughput": totals,
    }


def drafts_between(before: Counters | None, after: Counters | None) -> int | None:
    """Return how many drafts a server counted between two readings, 0 where it counts none; None if nobody knows."""
    if before is None or after is None or restarted(before, after):
        return None
    first, last = (c.draft_tokens if c.drafts is None else c.drafts for c in (before, after))
    return round((last or 0) - (first or 0))


def acceptance(timings: Sequence[Timed], counters: tuple[Counters | None, Counters | None]) -> dict[str, Any]:
    """Return tokens a pass and acceptance by position between two readings of the audited server's counters."""
    before, after = counters
    if before is None or after is None or after.drafts is None or restarted(before, after):
        return {}
    alone = [timed for timed in timings if timed.side == AUDITED and timed.in_flight == 1]
    decoded = sum(max((reply.completion_tokens or 0) - 1, 0) for timed in alone for reply in timed.replies)
    passes = between(before, after, decoded)
    if not passes.steps:
        return {}
    depths = [count / passes.steps for count in passes.by_depth]
    return {"tau": passes.tokens / passes.steps, "accepted_by_depth": depths}
