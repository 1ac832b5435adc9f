"""Why not more? From the tokens of a pass down to the measured speedup, and which cost would give most of it back.

A pass commits τ tokens; were it as cheap as a step of plain decoding, the speedup would be τ. What a step takes beyond
plain decoding's is put on verification, then on drafting, then on the rest, and after the last the measured speedup is
left. All from the row's own seconds and from plain decoding's in the same session.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

Record = Mapping[str, Any]  # a row as report.json has it

COSTS = ("verification", "draft", "overhead")
RUNGS = ("ideal", *COSTS)
REMEDIES = {
    "acceptance": "more acceptance",
    "verification": "a smaller tree",
    "draft": "a cheaper draft",
    "overhead": "less overhead a step",
}
TENTH = 0.1  # the step by which losses are compared: small, for half the rejections gone is another head altogether
# rows that share these ran beside each other
SESSION = ("report", "workload", "category", "temperature", "batch_size", "request_rate")
PLAIN = "plain"


def laddered(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows, each with its `ladder`; None where it has no speedup or nothing to compare with."""
    plain = {session(row): row for row in rows if row["drafter"] == PLAIN}
    return [{**row, "ladder": ladder(row, plain.get(session(row)))} for row in rows]


def session(row: Record) -> tuple[Any, ...]:
    """Return what a row has in common with the plain decoding beside it."""
    return tuple(row.get(key) for key in SESSION)


def ladder(row: Record, plain: Record | None) -> dict[str, Any] | None:
    """Return a row's way from τ to its speedup.

    Args:
        row: a drafter's row.
        plain: plain decoding's of the same session.

    Returns:
        `rungs`: τ, and the speedup that is left after each cost, the last being the measured one. `oracle`: the speedup
        if the same tokens were accepted of drafts for nothing, in passes as cheap as plain steps. `less`: the speedup
        if each cost beyond plain decoding's, or the share rejected at every depth, were a tenth smaller. `most`: the
        key of the greatest of these.
    """
    if row.get("request_rate") is not None:  # there a speedup is one of latencies, which steps do not add up to
        return None
    if not row["seconds"]["verify"]:  # an endpoint does not say where a step's time goes
        return None
    if plain is None or row["drafter"] == PLAIN or row["speedup"] is None:
        return None
    if not all(one[key] for one in (row, plain) for key in ("tau", "tokens_per_second", "steps")):
        return None
    tau, base = row["tau"], plain["tau"] / plain["tokens_per_second"]
    step = tau / row["tokens_per_second"]
    beyond = {"verification": _beyond(row, plain, "verify"), "draft": _beyond(row, plain, "draft")}
    beyond["overhead"] = step - base - sum(beyond.values())
    times = accumulate((beyond[cost] for cost in COSTS), initial=base)
    less = {cost: tau * base / (step - max(beyond[cost], 0.0) * TENTH) for cost in COSTS}
    less["acceptance"] = row["speedup"] * closer(row["conditional_by_depth"])
    return {
        "rungs": {rung: tau * base / time for rung, time in zip(RUNGS, times, strict=True)},
        "oracle": tau * base / (base + beyond["overhead"]),
        "less": less,
        "most": max(less, key=lambda key: less[key]),
    }


def _beyond(row: Record, plain: Record, part: str) -> float:
    """Return the seconds of a part of a step beyond those of plain decoding's."""
    return float(row["seconds"][part] / row["steps"] - plain["seconds"][part] / plain["steps"])


def closer(conditional: Sequence[float]) -> float:
    """Return how many times τ grows if a tenth of what is rejected at each depth were accepted."""
    return _tau([share + (1 - share) * TENTH for share in conditional]) / _tau(conditional)


def _tau(conditional: Sequence[float]) -> float:
    """Return τ of these acceptances: the bonus token, and P(a >= d) of each depth."""
    return 1.0 + sum(accumulate(conditional, mul))


NOTE = (
    "The ladder leads from τ to the speedup: what would be left if only the dearer pass counted, then the draft too, "
    "then all. The oracle has the same acceptance, its drafts and its wider passes for nothing. What would help most "
    "is the loss that gives back most if it were a tenth smaller: the rejected share at each depth (more acceptance), "
    "the draft, what a pass costs beyond a plain step (a smaller tree), or the rest. A smaller tree accepts less too: "
    "tune=true weighs one against the other."
)


def advice(found: Record) -> str:
    """Return what would help most, in words."""
    return f"{REMEDIES[found['most']]} ({found['less'][found['most']]:.3f} with a tenth less loss)"


def sentence(name: str, found: Record) -> str:
    """Return the way from τ to the speedup in words, of a result that has a ladder."""
    rungs, gain = found["rungs"], found["less"][found["most"]]
    return (
        f"{name} commits {rungs['ideal']:.2f} tokens a pass. Passes at their own price leave "
        f"{rungs['verification']:.2f} of that; drafting leaves {rungs['draft']:.2f}; the rest of the step leaves the "
        f"measured {rungs['overhead']:.2f}. What would help most is {REMEDIES[found['most']]}: a tenth of that loss "
        f"gone would give {gain:.2f}. An oracle that drafts exactly what is accepted, for nothing, would reach "
        f"{found['oracle']:.2f}."
    )
