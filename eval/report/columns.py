"""The tables of a report: the columns of each, and the results in it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measures.losslessness import in_words, labelled
from eval.measures.metrics import DEFINITIONS, QUANTILES
from eval.measures.results import LIVE, TEACHER_FORCED, TIERS
from eval.report.breakdown import COSTS, PLAIN, REMEDIES, STAGES, advice
from eval.report.view import (
    INTERVAL,
    PAGE,
    TEXT,
    Cell,
    Column,
    Head,
    Record,
    Result,
    Table,
    column,
    computed,
    plain_table,
    shown,
    shown_interval,
    speedup,
    table,
    with_interval,
    withheld,
)  # fmt: skip

CARD, SWEEP = "card", "sweep"  # renderers of the results alone
DEPTHS = 8  # of P(a >= d), where there is little room
PERCENTILES = ("p50", "p95")
WAITS = {"queue s": "queue_s", "TTFT s": "ttft_s", "latency s": "latency_s"}  # from the arrival on
PARTS = ("draft", "verify", "other")  # of a step's time
MOST = 8  # trees of each head, where there is little room


def drafter_of(result: Result) -> str:
    """Return a result's drafter, with its report where there are several."""
    return labelled(result.row["drafter"], 1, result.row.get("report", ""))


NAME = computed("drafter", "name", lambda result: result.name)
LABEL = computed("drafter", "drafter", lambda result: result.label)
DRAFTER = computed("drafter", "drafter", drafter_of)
WORKLOAD = column("workload", "workload")
T = column("T", "temperature", None)
TAU = with_interval(f"τ {INTERVAL}", "tau")
SPEED = column("tok/s", "tokens_per_second", 1)
PREDICTED = ("own", "best")  # trees, by who has them


def _by_depth(most: int | None) -> Column:
    def text(result: Result) -> str:
        fractions = result.row.get("accepted_by_depth") or []
        more = " …" if most is not None and len(fractions) > most else ""
        return (" ".join(f"{fraction:.2f}" for fraction in fractions[:most]) or "-") + more

    return computed("P(a≥1) P(a≥2) …", "accepted by depth", text)


def _lossless() -> Column:
    def cell(result: Result) -> Cell:
        counts = result.row.get("lossless") or {}
        return Cell(in_words(counts), tuple(counts.get(key) for key in ("identical", "near_tie", "failed", "checked")))

    return Column(Head("lossless", ("identical", "near tie", "failed", "checked")), cell)


def _batch(result: Result) -> str:
    rate = result.row.get("request_rate")
    return str(result.row["batch_size"]) + (f" at {rate:g} req/s" if rate is not None else "")


RESULTS = {
    "name": NAME,
    "label": LABEL,
    "drafter": column("drafter", "drafter"),
    "workload": computed("workload", "workload", lambda result: Path(str(result.row["workload"])).stem),
    "T": T,
    "batch": column("batch", "batch_size"),
    "batch and rate": computed("batch", "batch", _batch),
    "tree": column("tree", "tree"),
    "rule": column("rule", "rule"),
    "tau": TAU,
    "first depths": _by_depth(DEPTHS),
    "depths": _by_depth(None),
    "tok/s": SPEED,
    "speedup": speedup(f"speedup {INTERVAL}"),
    "hf": withheld(column("vs HF", "speedup_hf")),
    "lossless": _lossless(),
}
SHOWN = {  # of these, by renderer
    PAGE: ("name", "T", "batch", "tree", "rule", "tau", "tok/s", "speedup", "hf", "lossless"),
    TEXT: ("label", "T", "rule", "tau", "first depths", "tok/s", "speedup", "hf", "lossless"),
    CARD: ("drafter", "tree", "workload", "T", "batch and rate", "tau", "depths", "tok/s", "speedup", "lossless"),
    SWEEP: ("T", "tau", "depths", "speedup", "lossless"),
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


def why(measured: Sequence[Result], name: Column) -> Table:
    """Return the speedup breakdown, and the speedup with a tenth less of each cost."""
    titles = {"ideal": "τ (ideal)", "overhead": "speedup"}
    columns = [name, T, *(column(titles.get(stage, f"after {stage}"), f"ladder.rungs.{stage}") for stage in STAGES)]
    columns.append(column("oracle", "ladder.oracle"))
    columns += [column(f"-10% {key}", f"ladder.less.{key}", 3) for key in COSTS]
    columns.append(column("-10% rejections", "ladder.less.acceptance", 3))

    def most(result: Result) -> Cell:
        breakdown = result.row["ladder"]
        return Cell(advice(breakdown), (REMEDIES[breakdown["most"]],))

    columns.append(Column(Head("would help most", ("most",)), most))
    return table("why", columns, (result for result in measured if result.row.get("ladder") is not None))


def times(measured: Sequence[Result], name: Column) -> Table:
    """Return where a step's time goes, in milliseconds."""
    columns = [
        *(name, T, column("tree", "tree"), column("steps", "steps")),
        *(column(f"{key} ms", f"seconds.{key}", 2, 1000.0, "steps") for key in PARTS),
        column("drafted", "draft_tokens", 1, per="steps"),
        column("accepted / drafted", "accepted_per_draft_token"),
        column("overlap headroom", "overlap_headroom"),
        column("latency s", "latency_s", 3),
    ]
    return table("times", columns, (result for result in measured if result.row["tier"] == LIVE))


def depths(measured: Sequence[Result]) -> Table:
    """Return the share of passes that accepted each depth."""
    deepest = max((len(result.row["accepted_by_depth"]) for result in measured), default=0)
    columns = [NAME, *(_nth(f"P(a≥{d + 1})", "accepted_by_depth", d) for d in range(deepest))]
    return table(
        "depths", columns, (result for result in measured if result.row["accepted_by_depth"] and result.clocked)
    )


def within(measured: Sequence[Result]) -> Table:
    """Return τ with drafts cut off at each depth."""
    deepest = max((len(result.row["tau_within_depth"]) for result in measured), default=0)
    columns = [LABEL, WORKLOAD, T, *(_nth(f"depth {d + 1}", "tau_within_depth", d) for d in range(deepest))]
    return table("within", columns, (result for result in measured if result.row["tau_within_depth"]))


def _nth(title: str, key: str, index: int) -> Column:
    return computed(title, f"{key} {index + 1}", lambda result: dict(enumerate(result.row[key])).get(index))


def load(measured: Sequence[Result], name: Column) -> Table:
    """Return the waiting times of requests that came at a rate."""
    columns = [name, WORKLOAD, T, column("req/s", "request_rate", None), column("capacity", "batch_size")]
    columns += [
        column(f"{title} {percentile}", f"by_request.{key}.{percentile}", 3)
        for title, key in WAITS.items()
        for percentile in PERCENTILES
    ]
    columns += [SPEED, speedup(f"latency ratio {INTERVAL}")]
    return table("load", columns, (result for result in measured if result.row.get("request_rate") is not None))


def categories(measured: Sequence[Result]) -> Table:
    """Return the results of single categories."""
    columns = [LABEL, column("workload/category", "workload"), T, column("prompts", "prompts"), TAU]
    columns.append(speedup(f"speedup {INTERVAL}"))
    return table("categories", columns, (result for result in measured if result.clocked and result.row["category"]))


def definitions(measured: Sequence[Result]) -> Table:
    """Return the published definitions of acceptance side by side."""
    columns = [LABEL, WORKLOAD, T, *(column(name, f"definitions.{name}", 3) for name in DEFINITIONS)]
    return table("definitions", columns, (result for result in measured if result.row["definitions"]))


def end_to_end(measured: Sequence[Result]) -> Table:
    """Return the speeds with the prefill."""
    columns = [LABEL, WORKLOAD, T, column("memory", "state"), column("prefill s", "prefill_s")]
    columns.append(column("tok/s, end to end", "whole_tokens_per_second", 1))
    columns.append(speedup(f"speedup, end to end {INTERVAL}", "whole_speedup"))
    return table(
        "end_to_end", columns, (result for result in measured if result.row["whole_tokens_per_second"] is not None)
    )


def requests(measured: Sequence[Result]) -> Table:
    """Return the quantiles over the requests; report.json has more of them."""
    percentiles = [f"p{quantile * 100:g}" for quantile in QUANTILES]
    body = [
        [
            result.label,
            result.row["workload"],
            shown(result.row["temperature"], None),
            what,
            *(of[percentile] for percentile in percentiles),
        ]
        for result in measured
        for what, of in result.row["by_request"].items()
        if what in ("tau", "speedup")
    ]
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
    titles = ("drafter", "workload", "T", *(f"τ, {tier}" for tier in TIERS), "intervals meet")
    ms = column("ms to draft", "seconds.draft", 3, 1000.0, "steps")
    none = Cell("-", (None,))
    columns = [NAME, column("tier", "tier"), WORKLOAD, T, column("passes", "steps"), TAU]
    columns.append(column("drafted a pass", "draft_tokens", 1, per="steps"))
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
    other = any(row["agreement"].get("identical", row["prompts"]) < row["prompts"] for row in rows)
    return "NO, but the texts differ" if other else "NO"


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


def checks(report: Record) -> Table:
    """Return the greedy losslessness checks, with every number that the report has of them."""
    records = {name: dict(flattened(gate)) for name, gate in report["settings"].get("gate", {}).items()}
    keys = list(dict.fromkeys(key for gate in records.values() for key in gate))
    body = [[name, *(gate.get(key) for key in keys)] for name, gate in records.items()]
    return plain_table(
        "gates", ("drafter", *keys), body, 4, [not gate.get("passed", True) for gate in records.values()]
    )


def reports(report: Record) -> Table:
    """Return the target, device, settings and workloads of reports side by side."""
    records = {record["name"]: brief(record) | {"file": record["file"]} for record in report.get("reports", [])}
    keys = list(dict.fromkeys(key for record in records.values() for key in record))
    body = [[name, *(str(record[key]) for key in keys)] for name, record in records.items()]
    return plain_table("reports", ("name", *keys), body)


def brief(report: Record) -> dict[str, Any]:
    """Return the summary of a report beside others: its target, device, settings and code."""
    target, device, settings, work = (report[name] for name in ("target", "device", "settings", "work"))
    code = settings.get("provenance", {})
    facts = {"target": target.get("name"), "device": device.get("name"), "dtype": device.get("dtype")}
    facts |= {key: settings.get(key) for key in ("max_new_tokens", "prompts", "engine")} | dict(work)
    facts |= {"revision": (code.get("revision") or "-")[:12], "date": code.get("date")}
    return {key: "-" if value is None else value for key, value in facts.items()}


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
        [name, prediction["batch_size"], prediction["own"], prediction["best"], prediction["tree"]]
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


def everything(measured: Sequence[Result]) -> Table:
    """Return every number of every row under its key, including those in no other table."""
    flat = [dict(flattened(result.row)) for result in measured]
    keys = list(dict.fromkeys(key for row in flat for key in row))
    lines = [
        [Cell(result.name, (result.name,)), *(_full(row.get(key)) for key in keys)]
        for result, row in zip(measured, flat, strict=True)
    ]
    heads = [NAME.head, *(Head(key, (key,)) for key in keys)]
    return Table("everything", heads, lines, [result.failed for result in measured])


def _full(value: Any) -> Cell:
    return Cell(f"{value:.6g}" if isinstance(value, float) else shown(value), (value,))


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts and lists under flat names; indices count from 1, as depths do.

    Lists of records, such as one a request, are left to report.json.
    """
    if isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        return
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value, 1)
        for key, inner in items:
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
