"""The sections of a report in order, each with sentences, a table or a plot; renderers only format them.

A plot is None if the report has no numbers for it. Plots leave out results that failed a losslessness check.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eval.measures.losslessness import COUNTS, Gate, SampledGate, in_words
from eval.measures.metrics import LEVEL, PARTS
from eval.measures.results import ENDPOINT, LIVE
from eval.report.view import (
    COSTS,
    REMEDIES,
    Record,
    Result,
    flattened,
    results_of,
    shown,
    sweeps,
    with_interval,
    without_ending,
    words,
)
from heads.common.typed import Json
from inference.verification.rules import equals_baseline

TIES = 5  # near ties shown per drafter
NODES = 16  # nodes shown per drafter's tree
INTERVAL = f"[{LEVEL:.0%}]"

Spec = Json  # a plot: its caption and its records, or one record
DIGITS = 4  # decimals of a plot's data, which tooltips show
Column = tuple[str, Callable[[Result], str]]  # a column's title, and its cell for a result


class Table(NamedTuple):
    """A table; `failed` says of each line whether its drafter failed a losslessness check."""

    titles: list[str]
    lines: list[list[str]]
    failed: list[bool]


class Section(NamedTuple):
    """A section of a report; the page folds sections that are rarely read."""

    id: str
    title: str
    text: Sequence[str] = ()
    table: Table | None = None
    plot: Spec | None = None
    bullets: Sequence[str] = ()
    folded: bool = False


def number(title: str, key: str, digits: int | None = 2, per: str | None = None, scale: float = 1.0) -> Column:
    """Return a column for a value of the row, by its dotted key; `per` is the key of a divisor."""

    def cell(result: Result) -> str:
        value: Any = result.row
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if per is not None:
            value = value / result.row[per] * scale if value is not None and result.row[per] else None
        return shown(value, digits)

    return title, cell


LABEL: Column = ("drafter", lambda result: result.label)
T = number("T", "temperature", None)
TREE = number("tree", "tree")
TAU: Column = (f"τ {INTERVAL}", lambda result: result.tau)
DEPTHS: Column = ("P(a≥1) P(a≥2) …", lambda result: result.accepted)
SPEED: Column = ("tok/s", lambda result: result.speed)
SPEEDUP: Column = (f"speedup {INTERVAL}", lambda result: result.speedup)
LOSSLESS: Column = ("lossless", lambda result: in_words(result.row.get("lossless")))
HF: Column = ("vs HF", lambda result: result.hide_if_gate_failed(shown(result.row["speedup_hf"])))
RESULTS = [LABEL, T, TREE, number("rule", "rule"), TAU, DEPTHS, SPEED, SPEEDUP, HF, LOSSLESS]
SWEEP = [T, TAU, DEPTHS, SPEEDUP, LOSSLESS]  # columns for the runs of a multirun


def _batch(result: Result) -> str:
    rate = result.row.get("request_rate")
    return str(result.row["batch_size"]) + (f" at {rate:g} req/s" if rate is not None else "")


def advice(most: str, less: Mapping[str, float], **_: Any) -> str:
    """Describe the most useful improvement of a speedup breakdown."""
    return f"{REMEDIES[most]} ({less[most]:.3f} with a tenth less loss)"


WORKLOAD: Column = ("workload", lambda result: without_ending(str(result.row["workload"])))
CARD = [number("drafter", "drafter"), TREE, WORKLOAD, T, ("batch", _batch), TAU, DEPTHS, SPEED, SPEEDUP, LOSSLESS]
WHY = [
    LABEL, T, number("τ (ideal)", "ladder.rungs.ideal"),
    *(number(f"after {cost}", f"ladder.rungs.{cost}") for cost in COSTS[:-1]),
    number("speedup", f"ladder.rungs.{COSTS[-1]}"), number("oracle", "ladder.oracle"),
    ("would help most", lambda result: advice(**result.row["ladder"])),
]  # fmt: skip
TIMES = [
    LABEL, T, TREE, number("steps", "steps"),
    *(number(f"{key} ms", f"seconds.{key}", 2, "steps", 1000.0) for key in PARTS),
    number("drafted", "draft_tokens", 1, "steps"), number("accepted / drafted", "accepted_per_draft_token"),
    number("latency s", "latency_s", 3),
    ("speedup, end to end", lambda result: result.ratio("whole_speedup")),
]  # fmt: skip
LOAD = [
    LABEL, T,
    *(
        number(f"{title} {mark}", f"by_request.{key}.{mark}", 3)
        for title, key in (("queue s", "queue_s"), ("TTFT s", "ttft_s"), ("latency s", "latency_s"))
        for mark in ("p50", "p95")
    ),
    SPEED, number("tok/s of one user", "by_request.user_tokens_per_second.p50", 1),
    (f"latency ratio {INTERVAL}", lambda result: result.speedup),
]  # fmt: skip
CATEGORIES = [LABEL, T, number("prompts", "prompts"), TAU, SPEEDUP]


def table(columns: Sequence[Column], results: Iterable[Result]) -> Table:
    """Return a table with a line for each result."""
    listed = list(results)
    lines = [[cell(result) for _, cell in columns] for result in listed]
    return Table([title for title, _ in columns], lines, [result.failed for result in listed])


def values_table(titles: Sequence[str], body: Sequence[Sequence[Any]]) -> Table:
    """Return a table of values that belong to no single result."""
    return Table(list(titles), [[shown(value, 3) for value in line] for line in body], [False] * len(body))


def results_table(report: Record) -> Table:
    """Return the results of whole workloads: τ, speed, speedup, losslessness."""
    return table(RESULTS, (result for result in results_of(report) if not result.row.get("category")))


def sections(report: Record) -> list[Section]:
    """Return the sections that have a table, a plot or a list."""
    results = results_of(report)
    overall = [result for result in results if result.overall]
    rated = [result for result in overall if result.rated]
    parts = [result for result in results if result.clocked and result.row.get("category")]
    explained = [result for result in results if result.row.get("ladder") is not None]
    timed = [result for result in overall if result.row["tier"] == LIVE]
    load_note = [LOAD_NOTE] if rated else ()
    training = learning_curve(report.get("training", {}))
    candidates = [
        Section("results", "Results", (), results_table(report), speedup_plot(results), compared(report)),
        Section("why", "Why not more?", why(report), table(WHY, explained)),
        gate_section(report),
        Section("depths", "Acceptance by depth", (), None, acceptance_plot(results)),
        Section("load", "Under load", load_note, table(LOAD, rated), batch_plot(results), paying(results)),
        Section("times", "Where the time goes", (), table(TIMES, timed), time_plot(results)),
        Section("tree", "The tree", [NODES_NOTE], nodes(report), folded=True),
        Section("categories", "By category", (), table(CATEGORIES, parts), folded=True),
        Section("training", "Training of the head", (), None, training, folded=True),
    ]
    return [one for one in candidates if one.plot or one.bullets or (one.table and one.table.lines)]


def headlines_of(report: Record) -> list[Result]:
    """Return each drafter's first result, not its best; it counts as failed if any result of the drafter failed."""
    first: dict[str, Result] = {}
    for result in results_of(report):
        one = first.setdefault(result.row["drafter"], result)
        first[result.row["drafter"]] = replace(one, failed=one.failed or result.failed)
    return [result for result in first.values() if result.speculative] or list(first.values())


def sentence(report: Record) -> str:
    """Return a sentence about the fastest lossless drafter; empty without one."""
    timed = [
        result
        for result in headlines_of(report)
        if result.row["speedup"] and not result.failed and result.speculative and not result.rated
    ]
    if not timed:
        return ""
    row = max(timed, key=lambda result: result.row["speedup"]).row
    target, counts = report["target"], row.get("lossless") or {}
    low, high = row.get("speedup_ci") or (None, None)
    between = "" if low is None else f" ({low:.2f} to {high:.2f})"
    source = "speculation" if row["drafter"] == ENDPOINT else row["drafter"]  # the drafter of a server is unknown
    # Above 0 the counts are those under coupled noise; only some rules emit the baseline's text when timed.
    is_same = row["temperature"] == 0 or all(equals_baseline(rule) for rule in row["rule"].split(" + "))
    what = " the same text" if is_same else " text of the same distribution"
    what = what if counts.get("checked") else ""
    text = f"With {source}, {target.get('name') or 'the target'} writes{what} {row['speedup']:.2f} times"
    text += f" as fast{between} as the same engine without drafts"
    if low is not None and low <= 1 < row["speedup"]:
        text += " (not shown to be faster; more prompts narrow the interval)"
    text += f", {row['speedup_hf']:.2f} times HF generate" if row.get("speedup_hf") else ""
    if not counts.get("checked"):
        return f"{text}; whether the text is the same was not checked."
    ties = f", {counts['near_tie']} the same but for rounding" if counts.get("near_tie") else ""
    noise = "" if is_same else " under coupled noise"
    return f"{text}; {counts['identical']} of {counts['checked']} answers identical{noise}{ties}."


def compared(report: Record) -> list[str]:
    """Return a line for each drafter that was compared with another on the same prompts."""

    def change(difference: Record, digits: int) -> str:
        value, low, high = (f"{difference[key]:+.{digits}f}" for key in ("difference", "low", "high"))
        clear = "" if difference["low"] > 0 or difference["high"] < 0 else "not "
        return f"{value} [{low}, {high}], {clear}clear of zero"

    return [
        f"{pair['drafter']} against {pair['base']}, the same {pair['prompts']} prompts of {pair['workload']}, "
        f"T={pair['temperature']:g}, batch size {pair['batch_size']}: τ {change(pair['tau'], 2)}, tokens per second "
        f"{change(pair['tokens_per_second'], 1)} (paired bootstrap)"
        for pair in report.get("paired", [])
    ]


def why(report: Record) -> list[str]:
    """Describe the speedup breakdown of each drafter's first result."""
    lines = []
    for result in headlines_of(report):
        if breakdown := result.row.get("ladder"):
            stages, gain = breakdown["rungs"], breakdown["less"][breakdown["most"]]
            before = dict(zip(COSTS, stages.values(), strict=False))
            left = {
                cost: f"{stages[cost]:.2f}" + " (cheaper than the baseline's)" * (stages[cost] > before[cost])
                for cost in COSTS
            }
            lines.append(
                f"{result.name} commits {stages['ideal']:.2f} tokens per pass, the speedup if a pass cost a step of "
                f"the baseline. The dearer passes leave {left['verification']}; drafting leaves {left['draft']}; the "
                f"rest of the step leaves the measured {left['overhead']}. The greatest gain would come from "
                f"{REMEDIES[breakdown['most']]}: {gain:.2f} if that loss were a tenth smaller. An oracle that "
                f"drafts only accepted tokens, at no cost, would reach {breakdown['oracle']:.2f}."
            )
    return [*lines, BREAKDOWN_NOTE]


def paying(results: Sequence[Result]) -> list[str]:
    """Describe the batch sizes and request rates at which each draft setting is faster than the baseline."""
    lines = []
    for key, unit in (("batch_size", "batch size"), ("request_rate", "requests per second")):
        for name, curve in sweeps(results, key).items():
            by_verdict: dict[str, list[str]] = {}
            for result in curve:
                verdict = "pays" if result.row["speedup"] > 1 else "loses"
                speedup = with_interval(result.row["speedup"], result.row["speedup_ci"])
                by_verdict.setdefault(verdict, []).append(f"{result.row[key]:g} ({speedup})")
            at = "; ".join(f"{verdict} at {unit} {', '.join(loads)}" for verdict, loads in by_verdict.items())
            lines.append(f"{name}: {at}")
    return lines


def gate_section(report: Record) -> Section:
    """Return the losslessness checks: counts by drafter; as sentences, checks above temperature 0 and near ties."""
    settings = report["settings"]
    gates = settings.get("gate", {})
    sampled = [SampledGate.read(check) for check in settings.get("sampled_gate", [])]
    lines = [f"{'' if check.passed else 'FAILED: '}{check}." for check in sampled]
    near = [f"near tie of {name}: {tie}" for name, gate in gates.items() for tie in Gate.read(gate).ties[:TIES]]
    counts = values_table(
        ("drafter", *map(words, COUNTS)),
        [(name, *(gate.get(key) for key in COUNTS)) for name, gate in gates.items()],
    )
    counts = counts._replace(failed=[not gate.get("passed", True) for gate in gates.values()])
    served = report["device"].get("type") == ENDPOINT
    text = [CHECKED_NOTE] * (not served) + [SAMPLED_NOTE] * bool(sampled) + [TIES_NOTE] * bool(near)
    return Section("gate", "Is it lossless?", text, counts, bullets=lines + near)


def nodes(report: Record) -> Table:
    """Return the most often accepted nodes of each drafter's tree, with their share of the target passes."""
    body = []
    for name, record in report.get("trees", {}).items():
        ranked = sorted(zip(record["paths"], record["accepted"], strict=True), key=lambda node: -node[1])
        for path, fraction in ranked[:NODES]:
            body.append([name, record["label"], " ".join(str(rank + 1) for rank in path), len(path), fraction])
    return values_table(("drafter", "tree", "ranks from the root", "depth", "accepted"), body)


def facts_of(report: Record) -> dict[str, Json]:
    """Return the target, device and settings of the measurement, by name."""
    settings = {key: value for key, value in report["settings"].items() if key not in ("gate", "sampled_gate")}
    facts = {"target": report["target"], "device": report["device"], "settings": settings}
    return {name: {words(key): value for key, value in flattened(values)} for name, values in facts.items()}


def notes_of(report: Record) -> Iterator[str]:
    """Yield the notes on how to read the numbers of a report.json."""
    rows = report["rows"]
    yield NOTES[0]
    if report["device"].get("type") == ENDPOINT:
        yield SERVED_NOTE
        return
    yield from NOTES[1:]
    if peak := max((row["memory_bytes"] for row in rows), default=0):
        yield f"Peak memory: {peak / 2**20:.0f} MiB of the accelerator, else of the process, all drafters together."


def plotted(caption: str, data: Sequence[Spec]) -> Spec | None:
    """Return a plot, described by its caption, whose layers page.js adds; None without records."""
    rounded = [{k: round(v, DIGITS) if isinstance(v, float) else v for k, v in record.items()} for record in data]
    return {"description": caption, "data": {"values": rounded}} if data else None


def acceptance_plot(results: Sequence[Result]) -> Spec | None:
    """Return the plot of P(a >= d) by depth."""
    data = [
        {"name": result.name, "depth": depth, "accepted": fraction, "of those that reach it": conditional}
        for result in results
        if result.overall and not result.failed
        for depth, (fraction, conditional) in enumerate(
            zip(result.row["accepted_by_depth"], result.row["conditional_by_depth"], strict=True), 1
        )
    ]
    return plotted("Acceptance by depth: the share of target passes that accepted d drafted tokens or more", data)


def speedup_plot(results: Sequence[Result]) -> Spec | None:
    """Return the plot of each drafter's speedup with its interval."""
    shown_ones = (result for result in results if result.overall and not result.failed and result.speculative)
    data = [_speedup(result.name, result) for result in shown_ones if result.row["speedup"] is not None]
    return plotted("Speedup by drafter with its 95% interval; the dashed line is the baseline", data)


def batch_plot(results: Sequence[Result]) -> Spec | None:
    """Return the plot of the speedup over the batch size, if several were measured."""
    data = [
        _speedup(name, result) | {"batch size": result.row["batch_size"]}
        for name, curve in sweeps(results, "batch_size").items()
        for result in curve
    ]
    return plotted("Speedup over the batch size with its 95% interval; the dashed line is the baseline", data)


def _speedup(name: str, result: Result) -> Spec:
    """Return a speedup with the ends of its interval; without an interval both ends are the speedup."""
    speedup = result.row["speedup"]
    low, high = result.row["speedup_ci"] or (speedup, speedup)
    return {"name": name, "drafter": result.row["drafter"], "speedup": speedup, "low": low, "high": high}


def time_plot(results: Sequence[Result]) -> Spec | None:
    """Return the plot of a pass's milliseconds, including its draft, by activity."""
    data = [
        {"name": result.name, "activity": key, "order": order, "ms": 1000 * result.row["seconds"][key] / steps}
        for result in results
        if result.overall and (steps := result.row["steps"]) and result.row["tier"] == LIVE
        for order, key in enumerate(("verify", "draft", "other"))
    ]
    return plotted("Where the time of a target pass with its draft goes", data)


def learning_curve(curves: Mapping[str, Record]) -> Spec | None:
    """Return the plot of the training loss, and of τ by the verifier with its interval, over the steps."""
    losses = [
        {"name": f"{name}, loss", "step": step["step"], "loss": step["loss"]}
        for name, curve in curves.items()
        for step in curve["steps"]
    ]
    taus = [{**record, "name": f"{name}, τ"} for name, curve in curves.items() for record in curve["tau"]]
    return plotted("Learning curve: the training loss, and τ by the verifier with its 95% interval", losses + taus)


CHECKED_NOTE = (
    "lossless counts the prompts whose greedy output is that of transformers' generate, in gate_dtype. A near "
    "tie first differs where rounding decides between the two best tokens. A drafter that fails, or whose rule is "
    "lossy, is given no speedup."
)
SAMPLED_NOTE = (
    "Above temperature 0, lossless counts the prompts whose tokens are the baseline's under coupled noise, at every "
    "batch size. The chi-square test samples next tokens after fixed texts with the rule in use, often enough to "
    "reject, with the power that is named, a distribution that is off by the total variation TV. The control, a rule "
    "known to be broken, must be rejected each time."
)
TIES_NOTE = (
    "The gap is between the reference's two best tokens at the first difference. Timed text is not checked: "
    "rounding decides there, and from there on two texts differ."
)
LOAD_NOTE = (
    "2 req/s after a name: requests came at random (Poisson) at that mean rate, at the same moments for the baseline "
    "and every drafter, and waited in a queue while the batch was full. TTFT and latency count from the arrival. "
    "Arrivals bound tokens per second, so the speedup there is the baseline's mean latency over the drafter's."
)
BREAKDOWN_NOTE = (
    "The breakdown leads from τ to the speedup: the speedup left after the dearer pass, after the draft too, and after "
    "all costs. The oracle accepts the same tokens, with drafts and wider passes for nothing. What would help most is "
    "the cost, or the share rejected at each depth, that gives back most if it were a tenth smaller. A smaller tree "
    "accepts less too: tune=true weighs one against the other."
)
NODES_NOTE = f"The {NODES} most accepted nodes, with their share of the target passes; ranks are in drafted order."
NOTES = (
    "τ is the number of tokens that a target pass commits on average, the bonus token included: tokens after the "
    "prefill over passes, pooled over all prompts. Intervals resample the prompts, all turns of a conversation and all "
    "copies of a prompt at once.",
    "Speed is that of decoding without the prefill; end to end counts both. Each prompt counts with its median repeat. "
    "The baseline, every drafter and HF generate take turns on each prompt in random order.",
    "P(a≥d) is the share of target passes in which d drafted tokens or more were accepted.",
    "speedup is over the baseline, autoregressive decoding in the same engine, dtype and session at the same batch "
    "size; vs HF is over `generate` of transformers, at batch size 1.",
    "Times and drafted tokens are per step: one target pass with the draft before it. A verify time far above the "
    "baseline's means that the tree is wide for this device; a long draft time, that the head is slow.",
    "x4 after a name is a batch of 4 sequences that share target passes. A pass counts as a step of each of them, "
    "with an even share of its time; tok/s is that of all sequences together.",
)
SERVED_NOTE = (
    "Served endpoints: seconds are by this side's clock, from the request to the first token (prefill) and from there "
    "to the last; all of a step's are under other. x4 is four requests in flight. τ is one and the accepted tokens "
    "over the passes, by the server's counts. lossless compares greedy texts with the baseline's; a difference is a "
    "near tie only from where the baseline's own repeats differ."
)
