"""Speedup breakdown: from τ down to the measured speedup, and which cost would give most of it back.

A forward pass commits τ tokens; were it as cheap as a step of the baseline (autoregressive decoding), the speedup would
be τ. The time of a step beyond the baseline's is attributed to verification, then to drafting, then to the rest; after
the last the measured speedup is left. All from the row's own seconds and from the baseline's in the same session.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from eval.report.view import PLAIN, SESSION, Record

COSTS = ("verification", "draft", "overhead")
STAGES = ("ideal", *COSTS)
REMEDIES = {
    "acceptance": "more acceptance",
    "verification": "a smaller tree",
    "draft": "a cheaper draft",
    "overhead": "less overhead a step",
}
TENTH = 0.1  # the step by which improvements are compared


def with_breakdowns(rows: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows, each with its breakdown under `ladder`; None without a speedup or a baseline."""

    def session(row: Record) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in SESSION)

    baseline = {session(row): row for row in rows if row["drafter"] == PLAIN}
    return [{**row, "ladder": speedup_breakdown(row, baseline.get(session(row)))} for row in rows]


def speedup_breakdown(row: Record, baseline: Record | None) -> dict[str, Any] | None:
    """Return a row's breakdown from τ to its speedup, given the baseline's row of the same session.

    Returns:
        `rungs`: τ, and the speedup that is left after each cost, the last being the measured one. `oracle`: the speedup
        if the same tokens were accepted of drafts for nothing, in passes as cheap as baseline steps. `less`: the
        speedup if each cost beyond the baseline's, or the share rejected at every depth, were a tenth smaller. `most`:
        the key of the greatest of these.
    """
    if row.get("request_rate") is not None:  # under a rate a speedup is of latencies
        return None
    if not row["seconds"]["verify"]:  # an endpoint does not say where a step's time goes
        return None
    if baseline is None or row["drafter"] == PLAIN or row["speedup"] is None:
        return None
    if not all(record[key] for record in (row, baseline) for key in ("tau", "tokens_per_second", "steps")):
        return None
    tau, base = row["tau"], 1 / baseline["tokens_per_second"]
    step = tau / row["tokens_per_second"]
    beyond = {"verification": _beyond(row, baseline, "verify"), "draft": _beyond(row, baseline, "draft")}
    beyond["overhead"] = step - base - sum(beyond.values())
    times = accumulate((beyond[cost] for cost in COSTS), initial=base)
    less = {cost: tau * base / (step - max(beyond[cost], 0.0) * TENTH) for cost in COSTS}
    less["acceptance"] = row["speedup"] * closer(row["conditional_by_depth"])
    return {
        "rungs": dict(zip(STAGES, (tau * base / time for time in times), strict=True)),
        "oracle": tau * base / (base + beyond["overhead"]),
        "less": less,
        "most": max(less, key=lambda key: less[key]),
    }


def _beyond(row: Record, baseline: Record, name: str) -> float:
    return float(row["seconds"][name] / row["steps"] - baseline["seconds"][name] / baseline["steps"])


def closer(conditional: Sequence[float]) -> float:
    """Return the factor by which τ grows if a tenth of the rejections at each depth were accepted."""
    return _tau([fraction + (1 - fraction) * TENTH for fraction in conditional]) / _tau(conditional)


def _tau(conditional: Sequence[float]) -> float:
    """Return τ: 1 for the bonus token, plus P(a >= d) of each depth."""
    return 1.0 + sum(accumulate(conditional, mul))


def advice(breakdown: Record) -> str:
    """Return the most useful improvement, in words."""
    return f"{REMEDIES[breakdown['most']]} ({breakdown['less'][breakdown['most']]:.3f} with a tenth less loss)"


def sentence(name: str, breakdown: Record) -> str:
    """Return the speedup breakdown of a result in words."""
    stages, gain = breakdown["rungs"], breakdown["less"][breakdown["most"]]
    before = dict(zip(COSTS, stages.values(), strict=False))

    def left(cost: str) -> str:
        return f"{stages[cost]:.2f}" + " (cheaper than the baseline's)" * (stages[cost] > before[cost])

    return (
        f"{name} commits {stages['ideal']:.2f} tokens per pass, the speedup if a pass cost a step of the baseline. The "
        f"dearer passes leave {left('verification')}; drafting leaves {left('draft')}; the rest of the step leaves the "
        f"measured {left('overhead')}. The greatest gain would come from {REMEDIES[breakdown['most']]}: {gain:.2f} if "
        f"that loss were a tenth smaller. An oracle that drafts only accepted tokens, at no cost, would reach "
        f"{breakdown['oracle']:.2f}."
    )
