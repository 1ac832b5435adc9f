"""The view of a result that all renderers share: a row of report.json as text, and its speedup breakdown."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from data.text.files import kind_of
from eval.measures.losslessness import WITHHELD, FailedChecks, drafter_label
from eval.measures.results import BASELINE, LIVE
from heads.common.typed import Json

Record = Mapping[str, Any]  # a row, or all of report.json
# Rows with equal values of these keys were measured in one session, interleaved.
SESSION = ("workload", "category", "temperature", "batch_size", "request_rate")
DEPTHS = 8  # depths of P(a >= d) in a table


@dataclass(frozen=True)
class Result:
    """A row of report.json as text; `row` has the numbers."""

    row: Record
    label: str  # drafter, batch size and request rate; workload and tier if the results differ in them
    name: str  # the label, with the temperature if the results differ in it
    overall: bool  # whether it covers a whole workload, live if any result is live
    clocked: bool  # whether it is live, or no result is
    failed: bool  # whether it failed a losslessness check

    @property
    def tau(self) -> str:
        """Return τ with its interval."""
        return with_interval(self.row["tau"], self.row["tau_ci"])

    @property
    def accepted(self) -> str:
        """Return P(a >= d) for the first depths."""
        fractions = self.row["accepted_by_depth"]
        more = " …" * (len(fractions) > DEPTHS)
        return (" ".join(f"{fraction:.2f}" for fraction in fractions[:DEPTHS]) or "-") + more

    @property
    def speed(self) -> str:
        """Return the tokens per second as text."""
        return shown(self.row["tokens_per_second"], 1)

    @property
    def speedup(self) -> str:
        """Return the speedup with its interval; under a request rate, the ratio of mean latencies."""
        return self.ratio("speedup")

    @property
    def over(self) -> str:
        """Return the name of the speedup's denominator."""
        return "the baseline's mean latency over its own" if self.rated else "times the same engine without drafts"

    @property
    def rated(self) -> bool:
        """Return whether requests arrived at a rate."""
        return self.row.get("request_rate") is not None

    @property
    def speculative(self) -> bool:
        """Return whether it is a drafter's and not the baseline's."""
        return self.row["drafter"] != BASELINE

    def ratio(self, key: str) -> str:
        """Return a ratio over the baseline with its interval; a slowdown is labelled as such."""
        ratio = self.row.get(key)
        text = with_interval(ratio, self.row.get(f"{key}_ci"))
        return self.hide_if_gate_failed(f"{text}, slower" if ratio is not None and ratio < 1 else text)

    def hide_if_gate_failed(self, text: str) -> str:
        """Return the text, or WITHHELD if the check failed."""
        return WITHHELD if self.failed else text


def results_of(report: Record) -> list[Result]:
    """Return the results of a report.json, in order."""
    rows, failed = report.get("rows", []), FailedChecks.of(report.get("settings", {}))
    live = any(row.get("tier", LIVE) == LIVE for row in rows)
    workloads = len({row["workload"] for row in rows if not row.get("category")}) > 1
    several = len({row["temperature"] for row in rows}) > 1
    results = []
    for row in rows:
        tier, category = row.get("tier", LIVE), row.get("category")
        label = drafter_label(row["drafter"], row["batch_size"], row.get("request_rate"))
        label += f", {row['workload']}" if workloads or category else ""
        label += f", {words(tier)}" if tier != LIVE else ""
        name = f"{label}, T={row['temperature']:g}" if several else label
        clocked = tier == LIVE or not live
        results.append(Result(row, label, name, clocked and not category, clocked, failed.result(row)))
    return results


def sweeps(results: Sequence[Result], key: str) -> dict[str, list[Result]]:
    """Return the lossless results over several batch sizes, or several request rates, in order.

    The keys name the draft setting: the drafter and the other conditions in which the results differ.
    """
    rated = key == "request_rate"
    swept = [
        result
        for result in results
        if result.overall and not result.failed and result.row["speedup"] is not None
        if result.speculative and result.rated == rated
    ]
    others = [other for other in SESSION if other != key and len({result.row.get(other) for result in swept}) > 1]
    curves: dict[str, list[Result]] = {}
    for result in swept:
        conditions = [f"{words(other)} {shown(result.row[other], None)}" for other in others]
        curves.setdefault(", ".join([result.row["drafter"], *conditions]), []).append(result)
    return {name: sorted(curve, key=lambda result: result.row[key]) for name, curve in curves.items() if len(curve) > 1}


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts and lists under flat names, indices from 1; lists of records are left out."""
    if isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        return
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
        for key, inner in items:
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def without_ending(workload: str) -> str:
    """Return a workload's name without the file name's extension."""
    kind = kind_of(Path(workload))
    return workload[: workload.rindex(kind)] if kind else workload


def words(key: str) -> str:
    """Return the readable name of a key of report.json."""
    return key.replace("_", " ").replace(".", " ")


def shown(value: Any, digits: int | None = 2) -> str:
    """Return a value as text: a number with `digits` decimals (None: all), a dash for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if not math.isfinite(value) else f"{value:g}" if digits is None else f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def with_interval(value: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a number with its interval, if the interval has a width."""
    if value is None or interval is None or None in interval or interval[0] == interval[1]:
        return shown(value)
    return f"{shown(value)} [{shown(interval[0])}, {shown(interval[1])}]"


COSTS = ("verification", "draft", "overhead")
STAGES = ("ideal", *COSTS)
REMEDIES = {
    "acceptance": "more acceptance",
    "verification": "a smaller tree",
    "draft": "a cheaper draft",
    "overhead": "less overhead a step",
}
TENTH = 0.1  # improvement that a breakdown evaluates, as a share


def with_breakdowns(rows: Sequence[Record]) -> list[Json]:
    """Return the rows, each with its breakdown under `ladder`; None without a speedup or a baseline."""

    def session(row: Record) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in SESSION)

    baselines = {session(row): row for row in rows if row["drafter"] == BASELINE}
    return [{**row, "ladder": speedup_breakdown(row, baselines.get(session(row)))} for row in rows]


def speedup_breakdown(row: Record, baseline: Record | None) -> Json | None:
    """Return a row's breakdown from τ to its speedup, given the baseline's row from the same session.

    A pass commits τ tokens; if it were as cheap as a baseline step, the speedup would be τ. A step's time beyond the
    baseline's is attributed to verification, then to drafting, then to the rest. None under a request rate, where a
    speedup is one of latencies, and for a server, which does not report how a step's time is spent.

    Returns:
        `rungs`: τ, then the speedup that remains after each cost; the last is the measured one. `oracle`: the speedup
        if the same tokens were accepted from free drafts, in passes as cheap as baseline steps. `less`: the speedup if
        each cost beyond the baseline's, or the share rejected at every depth, were a tenth less. `most`: the best key.
    """
    if row.get("request_rate") is not None or not row["seconds"]["verify"] or row["speedup"] is None:
        return None
    if baseline is None or row["drafter"] == BASELINE:
        return None
    if not all(record[key] for record in (row, baseline) for key in ("tau", "tokens_per_second", "steps")):
        return None
    tau, base = row["tau"], 1 / baseline["tokens_per_second"]
    step = tau / row["tokens_per_second"]
    beyond = {
        cost: row["seconds"][key] / row["steps"] - baseline["seconds"][key] / baseline["steps"]
        for cost, key in (("verification", "verify"), ("draft", "draft"))
    }
    beyond["overhead"] = step - base - sum(beyond.values())
    times = accumulate((beyond[cost] for cost in COSTS), initial=base)
    less = {cost: tau * base / (step - max(beyond[cost], 0.0) * TENTH) for cost in COSTS}
    less["acceptance"] = row["speedup"] * acceptance_gain(row["conditional_by_depth"])
    return {
        "rungs": dict(zip(STAGES, (tau * base / time for time in times), strict=True)),
        "oracle": tau * base / (base + beyond["overhead"]),
        "less": less,
        "most": max(less, key=lambda key: less[key]),
    }


def acceptance_gain(conditional: Sequence[float]) -> float:
    """Return the factor by which τ grows if a tenth of the rejections at each depth were accepted."""
    better = [fraction + (1 - fraction) * TENTH for fraction in conditional]
    ours, theirs = (1.0 + sum(accumulate(fractions, mul)) for fractions in (better, conditional))
    return ours / theirs
