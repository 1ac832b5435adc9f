"""The page's tables: each cell has its text for the eye, and its values in full for sorting and for CSV."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.losslessness import labelled
from eval.measures.results import LIVE, TEACHER_FORCED
from eval.report.breakdown import COSTS, PLAIN, REMEDIES, RUNGS, advice
from eval.report.page.names import Told, clocked, red, row_names, shown, spread
from eval.report.sections import told_of


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the values behind it."""

    text: str
    values: tuple[Any, ...]

    @property
    def data(self) -> str:
        """The values as JSON."""
        return json.dumps(self.values, allow_nan=False)


@dataclass(frozen=True)
class Head:
    """A column: its title, and what CSV calls its values."""

    title: str
    names: tuple[str, ...]

    @property
    def data(self) -> str:
        """The names as JSON."""
        return json.dumps(self.names)


@dataclass(frozen=True)
class Table:
    """A table; `red` says of each line whether its drafter failed the gate."""

    id: str
    heads: list[Head]
    lines: list[list[Cell]]
    red: list[bool]


Column = tuple[Head, Callable[[Told], Cell]]


def column(title: str, key: str, digits: int = 2, scale: float = 1.0, per: str | None = None) -> Column:
    """Return a column of one number or text: `key` with dots, times `scale`, shown with `digits`, over `per` of it."""

    def cell(row: Told) -> Cell:
        value = at(row, key)
        if per is not None and value is not None:
            value = value / row[per] if row[per] else None
        value = value * scale if isinstance(value, float) else value
        return Cell(shown(value, digits), (value,))

    return Head(title, (key + (f" per {per}" if per else ""),)), cell


def with_interval(title: str, key: str) -> Column:
    """Return a column of a number with its interval, which stands in `key`_ci."""

    def cell(row: Told) -> Cell:
        interval = row[f"{key}_ci"] or (None, None)
        return Cell(spread(row[key], interval), (row[key], *interval))

    return Head(title, (key, f"{key} low", f"{key} high")), cell


def at(row: Told, key: str) -> Any:
    """Return what stands under a key, a dot leading inwards; None where there is nothing."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def of_rows(name: str, told: Told, columns: Sequence[Column], kept: Callable[[Told], bool] = bool) -> Table:
    """Return a table with a line for each row of the report that is kept, its name first."""
    rows = told["rows"]
    lines, failed = [], []
    for called, row in zip(row_names(rows), rows, strict=True):
        if kept(row):
            lines.append([Cell(called, (called,)), *(make(row) for _, make in columns)])
            failed.append(red(row, told["settings"]))
    return Table(name, [Head("drafter", ("name",)), *(head for head, _ in columns)], lines, failed)


def reports(told: Told) -> Table:
    """Return, of reports side by side, what each was measured on and under."""
    found = {each["name"]: told_of(each) | {"file": each["file"]} for each in told.get("reports", [])}
    keys = list(dict.fromkeys(key for each in found.values() for key in each))
    lines = [
        [Cell(name, (name,)), *(Cell(str(each[key]), (each[key],)) for key in keys)] for name, each in found.items()
    ]
    return Table(
        "reports", [Head("report", ("name",)), *(Head(key, (key,)) for key in keys)], lines, [False] * len(lines)
    )


def results(told: Told) -> Table:
    """Return what each row is worth."""
    columns = [
        (Head("T", ("temperature",)), lambda row: Cell(f"{row['temperature']:g}", (row["temperature"],))),
        column("batch", "batch_size"),
        column("tree", "tree"),
        column("rule", "rule"),
        with_interval("τ [95%]", "tau"),
        column("tok/s", "tokens_per_second", 1),
        speedup_column("speedup [95%]", told),
        column("vs HF", "speedup_hf"),
        (Head("lossless", ("identical", "near tie", "failed", "checked")), _lossless),
    ]
    return of_rows("results", told, columns)


def speedup_column(title: str, told: Told) -> Column:
    """Return the column of the speedup, which is withheld behind a red gate."""
    return with_interval(title, "speedup")[0], lambda row: _speedup(row, told)


def _speedup(row: Told, told: Told) -> Cell:
    """Return the speedup, or that it is withheld."""
    if red(row, told["settings"]):
        return Cell("withheld", (None, None, None))
    cell = with_interval("", "speedup")[1](row)
    return Cell(f"{cell.text} slower", cell.values) if (row["speedup"] or 1) < 1 else cell


def _lossless(row: Told) -> Cell:
    counts = row["lossless"]
    values = counts["identical"], counts["near_tie"], counts["failed"], counts["checked"]
    told = f", {values[1]} near tie" if values[1] else ""
    told += f", {values[2]} FAILED" if values[2] else ""
    return Cell(f"{values[0]}/{values[3]}{told}" if values[3] else "-", values)


def why(told: Told) -> Table:
    """Return the ladder of each row, and what each cost, halved, would give."""
    titles = {"ideal": "τ (ideal)", "overhead": "speedup"}
    columns = [column(titles.get(rung, f"after {rung}"), f"ladder.rungs.{rung}") for rung in RUNGS]
    columns.append(column("oracle", "ladder.oracle"))
    columns += [column(f"-10% {key}", f"ladder.less.{key}", 3) for key in COSTS]
    columns.append(column("-10% rejections", "ladder.less.acceptance", 3))
    most = Head("would help most", ("most",))
    columns.append((most, lambda row: Cell(advice(row["ladder"]), (REMEDIES[row["ladder"]["most"]],))))
    return of_rows("why", told, columns, lambda row: row.get("ladder") is not None)


def times(told: Told) -> Table:
    """Return where a step's time goes, in milliseconds."""
    columns = [column(f"{part} ms", f"seconds.{part}", 2, 1000.0, "steps") for part in ("draft", "verify", "other")]
    columns += [
        column("steps", "steps"),
        column("drafted", "draft_tokens", 1, per="steps"),
        column("accepted / drafted", "accepted_per_draft_token"),
        column("overlap headroom", "overlap_headroom"),
        column("latency s", "latency_s", 3),
    ]
    return of_rows("times", told, columns, lambda row: row["tier"] == LIVE)


def depths(told: Told) -> Table:
    """Return the share of passes that accepted each depth."""
    deepest = max((len(row["accepted_by_depth"]) for row in told["rows"]), default=0)

    def share(index: int) -> Column:
        def cell(row: Told) -> Cell:
            value = dict(enumerate(row["accepted_by_depth"])).get(index)
            return Cell(shown(value), (value,))

        return Head(f"P(a≥{index + 1})", (f"accepted_by_depth {index + 1}",)), cell

    shown_rows = clocked(told)
    return of_rows(
        "depths",
        told,
        [share(i) for i in range(deepest)],
        lambda row: bool(row["accepted_by_depth"]) and any(row is each for each in shown_rows),
    )


def tiers(told: Told) -> Table:
    """Return what each tier found, where there are several."""
    ms = column("ms to draft", "seconds.draft", 3, 1000.0, "steps")
    columns = [
        column("tier", "tier"),
        column("workload", "workload"),
        (Head("T", ("temperature",)), lambda row: Cell(f"{row['temperature']:g}", (row["temperature"],))),
        column("passes", "steps"),
        with_interval("τ [95%]", "tau"),
        column("drafted a pass", "draft_tokens", 1, per="steps"),
        (ms[0], lambda row: Cell("-", (None,)) if row["tier"] == TEACHER_FORCED else ms[1](row)),
    ]
    several = len({row["tier"] for row in told["rows"]}) > 1
    return of_rows("tiers", told, columns, lambda row: several and row["drafter"] != PLAIN and row["batch_size"] == 1)


def nodes(told: Told) -> Table:
    """Return the trees' nodes with the shares of the target passes that accepted them."""
    columns = [Head(name, (name,)) for name in ("drafter", "ranks from the root", "depth", "accepted", "passes")]
    rows = (row for row in told["rows"] if red(row, told["settings"]))
    failed = {labelled(row["drafter"], 1, row.get("report", "")) for row in rows}
    lines, faded = [], []
    for name, tree in told.get("trees", {}).items():
        for path, share in zip(tree["paths"], tree["accepted"], strict=True):
            ranks = " ".join(str(rank + 1) for rank in path)
            values = name, ranks, len(path), share, tree["steps"]
            lines.append([Cell(shown(value, 3), (value,)) for value in values])
            faded.append(name in failed)
    return Table("nodes", columns, lines, faded)


def gates(told: Told) -> Table:
    """Return the gate's verdicts, with all that the report says of them."""
    found = told["settings"].get("gate", {})
    flat = {name: dict(flattened(gate)) for name, gate in found.items() if isinstance(gate, Mapping)}
    keys = list(dict.fromkeys(key for gate in flat.values() for key in gate))
    lines = [
        [Cell(name, (name,)), *(Cell(shown(gate.get(key), 4), (gate.get(key),)) for key in keys)]
        for name, gate in flat.items()
    ]
    failed = [not found[name].get("passed", True) for name in flat]
    return Table("gates", [Head("drafter", ("drafter",)), *(Head(key, (key,)) for key in keys)], lines, failed)


def everything(told: Told) -> Table:
    """Return every number of every row under its key, those too that no other table knows."""
    flat = [dict(flattened(row)) for row in told["rows"]]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    columns = [(Head(key, (key,)), _full(key)) for key in keys]
    joined = {**told, "rows": [{**row, **each} for row, each in zip(told["rows"], flat, strict=True)]}
    return of_rows("everything", joined, columns)


def _full(key: str) -> Callable[[Told], Cell]:
    def cell(row: Told) -> Cell:
        value = row.get(key)
        value = None if isinstance(value, dict | list) else value
        return Cell(f"{value:.6g}" if isinstance(value, float) else shown(value), (value,))

    return cell


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what stands in nested dicts and lists under flat names; places count from 1, as depths do.

    Lists of records, such as one a request, are left to report.json.
    """
    if isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        return
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
        for key, each in items:
            yield from flattened(each, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
