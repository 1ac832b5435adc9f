"""The view of a report that all renderers share: results with their names and status, and numbers for reading."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.losslessness import FailedChecks, labelled
from eval.measures.results import LIVE

Record = Mapping[str, Any]  # a row, or all of report.json

PAGE, TEXT = "page", "text"  # who renders: report.html; report.md and the terminal
DISTINGUISHING = ("report", "workload", "category", "tier")  # in a result's name where results differ in it


@dataclass(frozen=True)
class Result:
    """A row of the report with its name and its status among all rows."""

    row: Record
    name: str  # unique among all results
    label: str  # its drafter, batch size, rate and report, for tables that have a column for the rest
    overall: bool  # whether it is of a whole workload, and by decoding where anything was decoded
    clocked: bool  # whether it is by decoding, or nothing was decoded
    failed: bool  # whether it failed a losslessness check


def results_of(report: Record) -> list[Result]:
    """Return the results of a report.json, in its order."""
    rows, failed = report.get("rows", []), FailedChecks.recorded(report.get("settings", {}))
    live = any(row.get("tier", LIVE) == LIVE for row in rows)
    results = []
    for row, name in zip(rows, names(rows), strict=True):
        label = labelled(row["drafter"], row["batch_size"], row.get("report", ""), row.get("request_rate"))
        clocked = row.get("tier", LIVE) == LIVE or not live
        results.append(Result(row, name, label, clocked and not row.get("category"), clocked, failed.result(row)))
    return results


def origin(report: Record, row: Record) -> Record:
    """Return what holds a row's own target, device and settings: of reports side by side the one that it is from."""
    return next((one for one in report.get("reports", []) if one["name"] == row.get("report")), report)


def names(rows: Sequence[Record]) -> list[str]:
    """Return a name for each row: the drafter, its batch size and rate, and the values that distinguish it."""
    keys = [key for key in DISTINGUISHING if len({str(row.get(key)) for row in rows}) > 1]
    several = len({row["temperature"] for row in rows}) > 1
    named = []
    for row in rows:
        parts = [labelled(row["drafter"], row["batch_size"], request_rate=row.get("request_rate"))]
        parts += [f"T={row['temperature']:g}"] if several else []
        named.append(", ".join([*parts, *(_value(key, row) for key in keys if row.get(key) not in (None, "", LIVE))]))
    return named


def _value(key: str, row: Record) -> str:
    return words(row[key]) if key == "tier" else str(row[key])


def words(key: str) -> str:
    """Return the name of a number for reading, from its key in report.json."""
    return key.replace("_", " ").replace(".", " ")


def shown(value: Any, digits: int | None = 2) -> str:
    """Return a value for reading: a number with so many digits behind its point, a dash where there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if not math.isfinite(value) else f"{value:g}" if digits is None else f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def shown_interval(value: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a number with its interval, if that has a width."""
    if value is None or interval is None or None in interval or interval[0] == interval[1]:
        return shown(value)
    return f"{shown(value)} [{shown(interval[0])}, {shown(interval[1])}]"
