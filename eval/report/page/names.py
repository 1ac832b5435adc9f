"""What the page calls a row, and how it writes a number."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.measures.losslessness import labelled
from eval.measures.results import LIVE

Told = Mapping[str, Any]  # a row, or all of report.json

TELLING = ("report", "workload", "category", "tier")  # in a row's name where rows differ in it; of what there is


def row_names(rows: Sequence[Told]) -> list[str]:
    """Return a name for each row: the drafter, its batch size and rate, and what else tells it from others."""
    keys = [key for key in TELLING if len({str(row.get(key)) for row in rows}) > 1]
    warm = len({row["temperature"] for row in rows}) > 1
    names = []
    for row in rows:
        parts = [labelled(row["drafter"], row["batch_size"], request_rate=row.get("request_rate"))]
        parts += [f"T={row['temperature']:g}"] if warm else []
        names.append(", ".join([*parts, *(str(row[key]) for key in keys if row.get(key) not in (None, "", LIVE))]))
    return names


def clocked(told: Told) -> list[Told]:
    """Return the rows of the live tier; where it was not asked for, all."""
    rows: Sequence[Told] = told["rows"]
    return [row for row in rows if row.get("tier", LIVE) == LIVE] or list(rows)


def red(row: Told, settings: Told) -> bool:
    """Whether the row's drafter failed a gate: the greedy one at its batch size, or that of its temperature."""
    report = row.get("report", "")
    gate = settings.get("gate", {}).get(labelled(row["drafter"], row["batch_size"], report), {})
    drawn = (labelled(row["drafter"], 1, report), row["temperature"])
    failed = {(each["drafter"], each["temperature"]) for each in settings.get("sampled_gate", []) if not each["passed"]}
    return bool(row["lossless"]["failed"]) or not gate.get("passed", True) or drawn in failed


def shown(value: Any, digits: int = 2) -> str:
    """Return a value for reading, a dash for None."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def spread(value: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a number with its interval, if that has a width."""
    if value is None or interval is None or None in interval or interval[0] == interval[1]:
        return shown(value)
    return f"{shown(value)} [{shown(interval[0])}, {shown(interval[1])}]"
