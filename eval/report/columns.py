"""The tables of a report: the columns of each, and the results in it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.text.files import kind_of
from eval.measures.losslessness import WITHHELD, in_words, labelled
from eval.measures.metrics import DEFINITIONS, LEVEL, PARTS, QUANTILES
from eval.measures.results import LIVE, TEACHER_FORCED, TIERS
from eval.report.breakdown import COSTS, PLAIN, REMEDIES, advice
from eval.report.view import PAGE, TEXT, Record, Result, shown, shown_interval, words

CARD, SWEEP = "card", "sweep"  # renderers of the results alone
INTERVAL = f"[{LEVEL:.0%}]"
DEPTHS = 8  # of P(a >= d), where there is little room
PERCENTILES = ("p50", "p95")
WAITS = {"queue s": "queue_s", "TTFT s": "ttft_s", "latency s": "latency_s"}  # from the arrival on
MOST = 8  # trees of each head, where there is little room


class Cell(NamedTuple):
    """A cell: its text, and the values behind it."""

    text: str
    values: tuple[Any, ...]


class Head(NamedTuple):
    """A column's title, and the names of its values in CSV."""

    title: str
    names: tuple[str, ...]


class Column(NamedTuple):
    """A column of a table of results."""

    head: Head
    cell: Callable[[Result], Cell]


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


def table(id_: str, columns: Sequence[Column], results: Iterable[Result]) -> Table:
    """Return a table with a line for each result."""
    listed = list(results)
    lines = [[column.cell(result) for column in columns] for result in listed]
    return Table(id_, [column.head for column in columns], lines, [result.failed for result in listed])


def plain_table(
    id_: str, heads: Sequence[str | Head], body: Sequence[Sequence[Any]], digits: int | None = 2,
    failed: Sequence[bool] = (),
) -> Table:  # fmt: skip
    """Return a table of values that belong to no single result; none of its lines failed unless `failed` says so."""
    lines = [[Cell(shown(value, digits), (value,)) for value in line] for line in body]
    full = [head if isinstance(head, Head) else Head(head, (head,)) for head in heads]
    return Table(id_, full, lines, list(failed) or [False] * len(lines))


def computed(title: str, name: str, value: Callable[[Result], Any], digits: int | None = 2) -> Column:
    """Return a column of a function of each result, `name` in CSV; digits None: as many as the number has."""

    def cell(result: Result) -> Cell:
        content = value(result)
        return Cell(shown(content, digits), (content,))

    return Column(Head(title, (name,)), cell)


def column(title: str, key: str, digits: int | None = 2) -> Column:
    """Return a column of a number or text of the row, a dot in its key leading inwards."""
    return computed(title, key, lambda result: at(result.row, key), digits)


def per_step(title: str, key: str, digits: int, scale: float = 1.0) -> Column:
    """Return a column of a number of the row divided by its steps, times `scale`."""

    def value(result: Result) -> float | None:
        total, steps = at(result.row, key), result.row["steps"]
        return total / steps * scale if steps and total is not None else None

    return computed(title, f"{key} per steps", value, digits)


def at(row: Record, key: str) -> Any:
    """Return the value of a key, a dot leading inwards; None where it is missing or no finite number."""
    value: Any = row
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
        text, values = interval.cell(result)
        number, blank, bounds = text.partition(" ")
        return Cell(f"{number}x{blank}{bounds}, slower" if (values[0] or 1) < 1 else text, values)

    return withheld(Column(interval.head, cell))


def withheld(shown_column: Column) -> Column:
    """Return a column that shows nothing of a failed result."""
    nothing = Cell(WITHHELD, (None,) * len(shown_column.head.names))
    return Column(shown_column.head, lambda result: nothing if result.failed else shown_column.cell(result))


def drafter_of(result: Result) -> str:
    """Return a result's drafter, with its report where there are several."""
    return labelled(result.row["drafter"], 1, result.row.get("report", ""))


def _first_depths(most: int | None) -> Column:
    """Return the column of P(a >= d), of at most so many depths."""

    def text(result: Result) -> str:
        fractions = result.row.get("accepted_by_depth") or []
        more = " …" if most is not None and len(fractions) > most else ""
        return (" ".join(f"{fraction:.2f}" for fraction in fractions[:most]) or "-") + more

    return computed("P(a≥1) P(a≥2) …", "accepted by depth", text)


def _lossless(result: Result) -> Cell:
    counts = result.row.get("lossless") or {}
    return Cell(in_words(counts), tuple(counts.get(key) for key in ("identical", "near_tie", "failed", "checked")))


def _batch(result: Result) -> str:
    rate = result.row.get("request_rate")
    return str(result.row["batch_size"]) + (f" at {rate:g} req/s" if rate is not None else "")


def _would_help(result: Result) -> Cell:
    breakdown = result.row["ladder"]
    return Cell(advice(breakdown), (REMEDIES[breakdown["most"]],))


def without_ending(workload: str) -> str:
    """Return a workload's name without the ending of a file of prompts."""
    kind = kind_of(Path(workload))
    return workload[: workload.rindex(kind)] if kind else workload


NAME = computed("drafter", "name", lambda result: result.name)
LABEL = computed("drafter", "drafter", lambda result: result.label)
DRAFTER = computed("drafter", "drafter", drafter_of)
WORKLOAD = column("workload", "workload")
T = column("T", "temperature", None)
TAU = with_interval(f"τ {INTERVAL}", "tau")
SPEED = column("tok/s", "tokens_per_second", 1)
SPEEDUP = speedup(f"speedup {INTERVAL}")

RESULTS = {
    "name": NAME,
    "label": LABEL,
    "drafter": column("drafter", "drafter"),
    "workload": computed("workload", "workload", lambda result: without_ending(str(result.row["workload"]))),
    "T": T,
    "batch": column("batch", "batch_size"),
    "batch and rate": computed("batch", "batch", _batch),
    "tree": column("tree", "tree"),
    "rule": column("rule", "rule"),
    "tau": TAU,
    "first depths": _first_depths(DEPTHS),
    "depths": _first_depths(None),
    "tok/s": SPEED,
    "speedup": SPEEDUP,
    "hf": withheld(column("vs HF", "speedup_hf")),
    "lossless": Column(Head("lossless", ("identical", "near tie", "failed", "checked")), _lossless),
}
SHOWN = {  # of these, by renderer
    PAGE: ("name", "T", "batch", "tree", "rule", "tau", "tok/s", "speedup", "hf", "lossless"),
    TEXT: ("label", "T", "rule", "tau", "first depths", "tok/s", "speedup", "hf", "lossless"),
    CARD: ("drafter", "tree", "workload", "T", "batch and rate", "tau", "depths", "tok/s", "speedup", "lossless"),
    SWEEP: ("T", "tau", "depths", "speedup", "lossless"),
}
# Columns after the name, and which rows have numbers for them.
TOPICS: dict[str, tuple[list[Column], Callable[[Record], Any]]] = {
    "why": (  # the speedup breakdown, and the speedup with a tenth less of each cost
        [
            T,
            column("τ (ideal)", "ladder.rungs.ideal"),
            *(column(f"after {cost}", f"ladder.rungs.{cost}") for cost in COSTS[:-1]),
            column("speedup", f"ladder.rungs.{COSTS[-1]}"),
            column("oracle", "ladder.oracle"),
            *(column(f"-10% {cost}", f"ladder.less.{cost}", 3) for cost in COSTS),
            column("-10% rejections", "ladder.less.acceptance", 3),
            Column(Head("would help most", ("most",)), _would_help),
        ],
        lambda row: row.get("ladder") is not None,
    ),
    "times": (  # of a step, in milliseconds
        [
            *(T, column("tree", "tree"), column("steps", "steps")),
            *(per_step(f"{key} ms", f"seconds.{key}", 2, 1000.0) for key in PARTS),
            per_step("drafted", "draft_tokens", 1),
            column("accepted / drafted", "accepted_per_draft_token"),
            column("overlap headroom", "overlap_headroom"),
            column("latency s", "latency_s", 3),
        ],
        lambda row: row["tier"] == LIVE,
    ),
    "load": (  # the waiting times of requests that came at a rate
        [
            *(WORKLOAD, T, column("req/s", "request_rate", None), column("capacity", "batch_size")),
            *(
                column(f"{title} {percentile}", f"by_request.{key}.{percentile}", 3)
                for title, key in WAITS.items()
                for percentile in PERCENTILES
            ),
            *(SPEED, speedup(f"latency ratio {INTERVAL}")),
        ],
        lambda row: row.get("request_rate") is not None,
    ),
    "categories": (
        [column("workload/category", "workload"), T, column("prompts", "prompts"), TAU, SPEEDUP],
        lambda row: row["category"],
    ),
    "definitions": (  # the published definitions of acceptance side by side
        [WORKLOAD, T, *(column(name, f"definitions.{name}", 3) for name in DEFINITIONS)],
        lambda row: row["definitions"],
    ),
    "end_to_end": (  # speeds with the prefill
        [
            *(WORKLOAD, T, column("memory", "state"), column("prefill s", "prefill_s")),
            column("tok/s, end to end", "whole_tokens_per_second", 1),
            speedup(f"speedup, end to end {INTERVAL}", "whole_speedup"),
        ],
        lambda row: row["whole_tokens_per_second"] is not None,
    ),
}


def on_workload(results: Sequence[Result]) -> Column:
    """Return the column of names where workloads have no column of their own."""
    several = len({result.row["workload"] for result in results if result.overall}) > 1
    return computed(
        "drafter", "drafter", lambda result: result.label + (f" on {result.row['workload']}" if several else "")
    )


def results(measured: Sequence[Result], medium: str) -> Table:
    """Return the table of results: τ, speed, speedup, losslessness."""
    columns = RESULTS | {"label": on_workload(measured)}
    return table("results", [columns[key] for key in SHOWN[medium]], measured)


def topic(id_: str, measured: Iterable[Result], name: Column = LABEL) -> Table:
    """Return the table of one of the TOPICS: the results that have numbers for it."""
    columns, has_numbers = TOPICS[id_]
    return table(id_, [name, *columns], (result for result in measured if has_numbers(result.row)))


def by_depth(id_: str, measured: Sequence[Result], columns: Sequence[Column], title: str, key: str) -> Table:
    """Return a table with a column for each depth of a list in the rows, `title` with the depth in its braces."""

    def at_depth(d: int) -> Column:
        return computed(title.format(d), f"{key} {d}", lambda result: dict(enumerate(result.row[key], 1)).get(d))

    deepest = max((len(result.row[key]) for result in measured), default=0)
    depths = [at_depth(d) for d in range(1, deepest + 1)]
    return table(id_, [*columns, *depths], (result for result in measured if result.row[key] and result.clocked))


def requests(measured: Sequence[Result]) -> Table:
    """Return the quantiles over the requests; report.json has more of them."""
    percentiles = [f"p{quantile * 100:g}" for quantile in QUANTILES]
    body = []
    for result in measured:
        settings = (result.label, result.row["workload"], shown(result.row["temperature"], None))
        for what, cuts in result.row["by_request"].items():
            if what in ("tau", "speedup"):
                body.append([*settings, what, *(cuts[percentile] for percentile in percentiles)])
    return plain_table("requests", ("drafter", "workload", "T", "of each request", *percentiles), body)


def tiers(measured: Sequence[Result]) -> list[Table]:
    """Return τ by tier with whether the intervals meet, and the time that each tier took; where several ran."""
    alone = [result for result in measured if result.row["drafter"] != PLAIN and result.row["batch_size"] == 1]
    if len({result.row["tier"] for result in alone}) < 2:
        return []
    grouped: dict[tuple[str, str, float], dict[str, Record]] = {}
    for result in alone:
        if not result.row["category"]:
            key = (drafter_of(result), result.row["workload"], result.row["temperature"])
            grouped.setdefault(key, {}).setdefault(result.row["tier"], result.row)
    body = [
        [name, workload, f"{temperature:g}", *(_tau(rows.get(tier)) for tier in TIERS), _meet(list(rows.values()))]
        for (name, workload, temperature), rows in grouped.items()
    ]
    titles = ("drafter", "workload", "T", *(f"τ, {words(tier)}" for tier in TIERS), "intervals meet")
    ms = per_step("ms to draft", "seconds.draft", 3, 1000.0)
    none = Cell("-", (None,))
    columns = [NAME, computed("tier", "tier", lambda result: words(result.row["tier"]))]
    columns += [WORKLOAD, T, column("passes", "steps"), TAU]
    columns.append(per_step("drafted a pass", "draft_tokens", 1))
    columns.append(Column(ms.head, lambda result: none if result.row["tier"] == TEACHER_FORCED else ms.cell(result)))
    return [plain_table("tiers_beside", titles, body), table("tiers", columns, alone)]


def _tau(row: Record | None) -> str:
    return "-" if row is None else shown_interval(row["tau"], row["tau_ci"])


def _meet(rows: Sequence[Record]) -> str:
    """Return whether the intervals meet; if not, whether the sources' texts are other ones, which near ties make."""
    intervals = [row["tau_ci"] for row in rows if row["tau_ci"] is not None]
    if len(intervals) < 2:
        return "-"
    if max(low for low, _ in intervals) <= min(high for _, high in intervals):
        return "yes"
    return "NO, but the texts differ" if any(map(texts_differ, rows)) else "NO"


def texts_differ(row: Record) -> bool:
    """Whether timed tokens differ from the baseline's."""
    return bool(row["agreement"].get("identical", row["prompts"]) < row["prompts"])


def nodes(report: Record, measured: Sequence[Result]) -> Table:
    """Return the trees' nodes with the shares of the target passes that accepted them."""
    body = [
        [name, " ".join(str(rank + 1) for rank in path), len(path), fraction, tree["steps"]]
        for name, tree in report.get("trees", {}).items()
        for path, fraction in zip(tree["paths"], tree["accepted"], strict=True)
    ]
    failed = {drafter_of(result) for result in measured if result.failed}
    titles = ("drafter", "ranks from the root", "depth", "accepted", "passes")
    return plain_table("nodes", titles, body, 3, [line[0] in failed for line in body])


def other_trees(report: Record, most: int | None) -> Table:
    """Return the trees that promise most, or accept most where nothing was priced; `most` of each head, or all."""
    body = []
    for name, record in report.get("other_trees", {}).items():
        ranked = sorted(record["trees"], key=lambda tree: tree["speedup"] or tree["tau"], reverse=True)
        keys = ("family", "tree", "nodes", "tau", "speedup")
        body += [[name, *(tree[key] for key in keys)] for tree in ranked[:most]]
    return plain_table("other_trees", ("drafter", "family", "tree", "nodes a step", "τ", "predicted speedup"), body)


def other_loads(report: Record) -> Table:
    """Return the predicted speedups by batch size."""
    body = [
        [name, *(prediction[key] for key in ("batch_size", "own", "best", "tree"))]
        for name, record in report.get("other_trees", {}).items()
        for prediction in record.get("loads", [])
    ]
    titles = ("drafter", "batch size", "predicted speedup of the own tree", "of the best", "which is")
    return plain_table("other_loads", titles, body)


def ranks(report: Record) -> Table:
    """Return acceptance along the text by depth and rank of the guess."""
    records = report.get("teacher_forced", {})
    widest = max((len(record["rank"][0]) for record in records.values()), default=0)
    body = []
    for name, record in records.items():
        parts = zip(record["n_alpha"], record["at_every_token"], record["rank"], strict=True)
        for depth, (alpha, reached, row) in enumerate(parts, 1):
            body.append([name, depth, alpha, reached, *row, *[None] * (widest - len(row))])
    ranked = [f"rank {rank + 1}" for rank in range(widest)]
    return plain_table("ranks", ("drafter", "depth", "n-alpha", "P(a≥k)", *ranked), body, 3)


def checks(report: Record) -> Table:
    """Return the greedy losslessness checks, with every number that the report has of them."""
    gates = report["settings"].get("gate", {})
    failed = [not gate.get("passed", True) for gate in gates.values()]
    return of_records("gates", "drafter", list(gates.items()), 4, failed)


def reports(report: Record) -> Table:
    """Return the target, device, settings and workloads of reports side by side."""
    records = [(record["name"], brief(record) | {"file": record["file"]}) for record in report.get("reports", [])]
    return of_records("reports", "name", records)


def brief(report: Record) -> dict[str, str]:
    """Return the summary of a report beside others: its target, device, settings and code."""
    target, device, settings, work = (report[name] for name in ("target", "device", "settings", "work"))
    code = settings.get("provenance", {})
    facts = {"target": target.get("name"), "device": device.get("name"), "dtype": device.get("dtype")}
    facts |= {key: settings.get(key) for key in ("max_new_tokens", "prompts", "engine")} | dict(work)
    facts |= {"revision": (code.get("revision") or "-")[:12], "date": code.get("date")}
    return {key: "-" if value is None else str(value) for key, value in facts.items()}


def everything(measured: Sequence[Result]) -> Table:
    """Return every number of every row under its key, including those in no other table."""
    rows = [(result.name, result.row) for result in measured]
    return of_records("everything", NAME.head, rows, failed=[result.failed for result in measured])


def of_records(
    id_: str, head: str | Head, records: Sequence[tuple[str, Record]], digits: int | None = None,
    failed: Sequence[bool] = (),
) -> Table:  # fmt: skip
    """Return a table of named records, with a column for every key of any of them, nested ones included."""
    flat = [(name, dict(flattened(record))) for name, record in records]
    keys = list(dict.fromkeys(key for _, record in flat for key in record))
    heads = [head, *(Head(words(key), (key,)) for key in keys)]
    return plain_table(id_, heads, [[name, *map(record.get, keys)] for name, record in flat], digits, failed)


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
