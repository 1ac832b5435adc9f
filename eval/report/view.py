"""The view of a report that all renderers share: results with their names, and tables of cells with text and values."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.losslessness import WITHHELD, FailedChecks, labelled
from eval.measures.metrics import LEVEL
from eval.measures.results import LIVE

Record = Mapping[str, Any]  # a row, or all of report.json

PAGE, TEXT = "page", "text"  # who renders: report.html; report.md and the terminal
INTERVAL = f"[{LEVEL:.0%}]"
DISTINGUISHING = ("report", "workload", "category", "tier")  # in a result's name where results differ in it


@dataclass(frozen=True)
class Result:
    """A row of the report with its name and its status among all rows.

    Attributes:
        name: unique among all results.
        label: its drafter, batch size, rate and report, for tables that have a column for the rest.
        overall: whether it is of a whole workload, and by decoding where anything was decoded.
        clocked: whether it is by decoding, or nothing was decoded.
        failed: whether it failed a losslessness check.
    """

    row: Record
    name: str
    label: str
    overall: bool
    clocked: bool
    failed: bool


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


def names(rows: Sequence[Record]) -> list[str]:
    """Return a name for each row: the drafter, its batch size and rate, and the values that distinguish it."""
    keys = [key for key in DISTINGUISHING if len({str(row.get(key)) for row in rows}) > 1]
    several = len({row["temperature"] for row in rows}) > 1
    named = []
    for row in rows:
        parts = [labelled(row["drafter"], row["batch_size"], request_rate=row.get("request_rate"))]
        parts += [f"T={row['temperature']:g}"] if several else []
        named.append(", ".join([*parts, *(str(row[key]) for key in keys if row.get(key) not in (None, "", LIVE))]))
    return named


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


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and the values behind it."""

    text: str
    values: tuple[Any, ...]

    @property
    def data(self) -> str:
        """The values as JSON."""
        return json.dumps(self.values, allow_nan=False)


@dataclass(frozen=True)
class Head:
    """A column's title, and the names of its values in CSV."""

    title: str
    names: tuple[str, ...]

    @property
    def data(self) -> str:
        """The names as JSON."""
        return json.dumps(self.names)


@dataclass(frozen=True)
class Table:
    """A table; `failed` says of each line whether its drafter failed a losslessness check."""

    id: str
    heads: list[Head]
    lines: list[list[Cell]]
    failed: list[bool]

    def titles(self) -> list[str]:
        """Return the titles of the columns."""
        return [head.title for head in self.heads]

    def texts(self) -> list[list[str]]:
        """Return the texts of the cells."""
        return [[cell.text for cell in line] for line in self.lines]


@dataclass(frozen=True)
class Column:
    """A column of a table of results."""

    head: Head
    cell: Callable[[Result], Cell]


def table(id_: str, columns: Sequence[Column], results: Iterable[Result]) -> Table:
    """Return a table with a line for each result."""
    listed = list(results)
    lines = [[column.cell(result) for column in columns] for result in listed]
    return Table(id_, [column.head for column in columns], lines, [result.failed for result in listed])


def plain_table(
    id_: str, titles: Sequence[str], body: Sequence[Sequence[Any]], digits: int = 2, failed: Sequence[bool] = ()
) -> Table:
    """Return a table of values that belong to no single result; none of its lines failed unless `failed` says so."""
    lines = [[Cell(shown(value, digits), (value,)) for value in line] for line in body]
    return Table(id_, [Head(title, (title,)) for title in titles], lines, list(failed) or [False] * len(lines))


def column(title: str, key: str, digits: int | None = 2, scale: float = 1.0, per: str | None = None) -> Column:
    """Return a column of one number or text.

    Args:
        title: what it shows.
        key: of the row, a dot leading inwards.
        digits: shown behind the point; None: as many as the number has.
        scale: what numbers are multiplied by.
        per: a key of the row to divide them by.
    """

    def cell(result: Result) -> Cell:
        value = at(result.row, key)
        if per is not None and value is not None:
            value = value / result.row[per] if result.row[per] else None
        value = value * scale if isinstance(value, float) else value
        return Cell(shown(value, digits), (value,))

    return Column(Head(title, (key + (f" per {per}" if per else ""),)), cell)


def computed(title: str, name: str, value: Callable[[Result], Any], digits: int | None = 2) -> Column:
    """Return a column of a function of each result."""

    def cell(result: Result) -> Cell:
        content = value(result)
        return Cell(shown(content, digits), (content,))

    return Column(Head(title, (name,)), cell)


def with_interval(title: str, key: str) -> Column:
    """Return a column of a number with its interval, which stands in `key`_ci."""

    def cell(result: Result) -> Cell:
        interval = result.row.get(f"{key}_ci") or (None, None)
        return Cell(shown_interval(result.row.get(key), interval), (result.row.get(key), *interval))

    return Column(Head(title, (key, f"{key} low", f"{key} high")), cell)


def speedup(title: str, key: str = "speedup") -> Column:
    """Return a column of a speedup, which is withheld from a failed result; a slowdown is labelled."""
    interval = with_interval(title, key)

    def cell(result: Result) -> Cell:
        interval_cell = interval.cell(result)
        return (
            Cell(f"{interval_cell.text} slower", interval_cell.values)
            if (interval_cell.values[0] or 1) < 1
            else interval_cell
        )

    return withheld(Column(interval.head, cell))


def withheld(shown_column: Column) -> Column:
    """Return a column that shows nothing of a failed result."""
    nothing = Cell(WITHHELD, (None,) * len(shown_column.head.names))
    return Column(shown_column.head, lambda result: nothing if result.failed else shown_column.cell(result))


def at(row: Record, key: str) -> Any:
    """Return the value of a key, a dot leading inwards; None where it is missing or no finite number."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if isinstance(value, float) and not math.isfinite(value) else value
