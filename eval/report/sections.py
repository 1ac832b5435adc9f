"""The sections of a report in their order, each with its text, tables and plots; renderers only format them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from eval.measures.losslessness import Gate, SampledGate
from eval.measures.metrics import DEFINITIONS
from eval.measures.results import ENDPOINT
from eval.report import breakdown, columns, operating, plots, prose
from eval.report.breakdown import PLAIN
from eval.report.columns import Table, topic
from eval.report.plots import Plot
from eval.report.tree_plot import tree
from eval.report.view import PAGE, TEXT, Record, Result, origin, results_of
from inference.verification.verify import emits_samples

LITTLE = 0.02  # of the speedup: costs are not known closer
OVER = "the same engine without drafts"  # what a speedup is over
MOST = 5  # near ties shown of each drafter
AGAINST = {"batch_size": "batch size", "temperature": "temperature", "request_rate": "requests a second"}


class Section(NamedTuple):
    """A part of a report; a page shows one that is `folded` on demand."""

    id: str
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    folded: bool = False
    bullets: Sequence[str] = ()


def sections(report: Record, medium: str) -> list[Section]:
    """Return the sections that have a table, a plot or a list, for one of the renderers."""
    candidates = (on_page if medium == PAGE else in_text)(report, results_of(report))
    return [one for one in candidates if one.plots or one.bullets or any(table.lines for table in one.tables)]


def in_text(report: Record, measured: Sequence[Result]) -> Iterator[Section]:
    """Yield the sections of Markdown: those of whole workloads, with tables in place of plots."""
    overall = [result for result in measured if result.overall]
    clocked = [result for result in measured if result.clocked]
    settings, name = [columns.LABEL, columns.WORKLOAD, columns.T], columns.on_workload(overall)
    yield Section("reports", "The reports", tables=[columns.reports(report)])
    yield Section("results", "Results", tables=[columns.results(overall, TEXT)], bullets=compared(report))
    yield Section("times", "Where the time goes", tables=[topic("times", overall, name)])
    yield why(report, topic("why", overall))
    yield other(report, columns.MOST)
    yield along(report)
    yield Section("tiers", "With and without a clock", [prose.TIERS], columns.tiers(measured)[:1])
    yield Section("categories", "By category", tables=[topic("categories", clocked)])
    listed = topic("definitions", overall)
    meanings = [f"`{name}`: {meaning}" for name, meaning in DEFINITIONS.items()] if listed.lines else []
    yield Section("definitions", "What others call acceptance", tables=[listed], bullets=meanings)
    yield Section("end_to_end", "End to end", [prose.END_TO_END], [topic("end_to_end", overall)])
    yield users(report)
    yield Section("load", "Under load", [prose.LOAD], [topic("load", overall, columns.DRAFTER)])
    yield Section("requests", "Over the requests", tables=[columns.requests(overall)])
    within = columns.by_depth("within", overall, settings, "depth {}", "tau_within_depth")
    yield Section("within", "At an equal depth of draft", [prose.WITHIN], [within])
    yield checks(report, overall, [])


def on_page(report: Record, measured: Sequence[Result]) -> Iterator[Section]:
    """Yield the sections of the page: those of all results, with plots, and every number under its key."""
    trees = [plot for name, record in report.get("trees", {}).items() if record["paths"] for plot in tree(name, record)]
    both = plots.with_intervals(report, "speedup", "speedup") + plots.with_intervals(report, "tau", "τ")
    loads = [plot for key, name in AGAINST.items() for plot in plots.against(report, key, name)]
    why_not, timed, times = (topic(id_, measured, columns.NAME) for id_ in ("why", "load", "times"))
    depths = columns.by_depth("depths", measured, [columns.NAME], "P(a≥{})", "accepted_by_depth")
    nodes, everything = columns.nodes(report, measured), columns.everything(measured)
    yield Section("reports", "The reports", tables=[columns.reports(report)])
    yield Section("results", "Results", [], [columns.results(measured, PAGE)], both, bullets=compared(report))
    yield why(report, why_not, plots.breakdown(report))
    yield checks(report, measured, [columns.checks(report)])
    yield Section("depths", "Acceptance by depth", [], [depths], plots.acceptance(report))
    yield users(report, operating.plots(report))
    yield Section("load", "Under load and temperature", [], [timed], loads + plots.latencies(report))
    yield other(report, None, plots.loads(report) + plots.trees(report))
    yield Section("times", "Where the time goes", [], [times], plots.time_split(report))
    yield Section("tree", "The tree", [prose.NODES] * bool(trees), [nodes], trees, folded=True)
    yield along(report, plots.along(report))
    yield Section("tiers", "With and without a clock", [prose.TIERS], columns.tiers(measured), folded=True)
    yield Section("training", "Training of the head", plots=plots.training(report), folded=True)
    yield Section("everything", "Every number", ["Those of report.json."], [everything], folded=True)


def sentence(report: Record) -> str:
    """Return the result in a sentence for everybody: that of the fastest lossless draft source; none without one."""
    timed = [result for result in firsts(report) if result.row["speedup"] and not result.failed]
    timed = [result for result in timed if result.row["drafter"] != PLAIN and result.row.get("request_rate") is None]
    if not timed:
        return ""
    row = max(timed, key=lambda result: result.row["speedup"]).row
    session, counts = origin(report, row), row.get("lossless") or {}
    name = session["target"].get("name") or "the target"
    low, high = row.get("speedup_ci") or (None, None)
    between = "" if low is None else f" ({low:.2f} to {high:.2f})"
    source = "speculation" if row["drafter"] == ENDPOINT else row["drafter"]  # whatever a server drafts with
    # Above 0 the counts are those under coupled noise, and the text timed is the baseline's by some rules alone.
    is_same = row["temperature"] == 0 or all(emits_samples(rule) for rule in row["rule"].split(" + "))
    what = " the same text" if is_same else " text of the same distribution"
    text = f"With {source}, {name} writes{what} {row['speedup']:.2f} times as fast{between} as {OVER}"
    if low is not None and low <= 1 < row["speedup"]:
        text += " (not shown to be faster; more prompts narrow the interval)"
    text += over_hf(row)
    if not counts.get("checked"):
        return f"{text.replace(what, '', 1)}; whether the text is the same was not checked."
    ties = f", {counts['near_tie']} the same but for rounding" if counts.get("near_tie") else ""
    there, dtype = row.get("agreement") or {}, session["settings"].get("gate_dtype")
    if dtype and there.get("identical", counts["checked"]) < there.get("checked", 0):
        ties += f" (in {dtype}; {there['identical']} in {there['dtype']}, as timed)"
    noise = "" if is_same else " under coupled noise"
    return f"{text}; {counts['identical']} of {counts['checked']} answers identical{noise}{ties}."


def over_hf(row: Record) -> str:
    """Return a speedup over `generate` of transformers in words; nothing where that was not timed."""
    return f", {row['speedup_hf']:.2f} times HF generate" if row.get("speedup_hf") else ""


def compared(report: Record) -> list[str]:
    """Return a line for each drafter that was measured on the prompts of another."""
    return [
        f"{pair['drafter']} against {pair['base']}, the same {pair['prompts']} prompts of {pair['workload']}, "
        f"T={pair['temperature']:g}, batch size {pair['batch_size']}: τ {_change(pair['tau'], 2)}, tokens a second "
        f"{_change(pair['tokens_per_second'], 1)} (paired bootstrap)"
        for pair in report.get("paired", [])
    ]


def _change(change: Record, digits: int) -> str:
    value, low, high = (f"{change[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    clear = "" if change["low"] > 0 or change["high"] < 0 else "not "
    return f"{value} [{low}, {high}], {clear}clear of zero"


def why(report: Record, table: Table, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the speedup breakdown: in words for each drafter's first result, in numbers for all."""
    explained = [result for result in firsts(report) if result.row.get("ladder")]
    sentences = [breakdown.sentence(result.name, result.row["ladder"]) for result in explained]
    for result in explained:
        if counts := origin(report, result.row)["target"].get("experts"):
            sentences.append(breakdown.experts(result.name, result.row, *counts))
    return Section("why", "Why not more?", [*sentences, *recommended(report), prose.BREAKDOWN], [table], plots_shown)


def firsts(report: Record) -> list[Result]:
    """Return each drafter's first result: of the first session asked for, not of the most flattering one.

    It has failed if any of the drafter's has.
    """
    first: dict[str, Result] = {}
    for result in results_of(report):
        one = first.setdefault(columns.drafter_of(result), result)
        first[columns.drafter_of(result)] = replace(one, failed=one.failed or result.failed)
    return [result for result in first.values() if result.row["drafter"] != PLAIN] or list(first.values())


def recommended(report: Record) -> list[str]:
    """Return which tree to take and at which load to stop, in words, for each head with priced trees."""
    sentences = []
    for name, record in report.get("other_trees", {}).items():
        if "loads" not in record:
            continue
        current, best = record["own"], record["best"]
        if current is None or best["tree"] == current["tree"]:
            advice = f"no tree tried promises more than its own, {_tree(best)}."
        elif best["speedup"] <= current["speedup"] * (1 + LITTLE):
            advice = f"its own tree, {_tree(current)}, is as good as any that was tried; next is {_tree(best)}."
        else:
            advice = f"of the trees tried, {_tree(best)} promises most; its own is {_tree(current)}."
        sentences.append(f"{name}: {advice}")
        if len(record["loads"]) > 1:
            stops = _stops(record, "own", "its own tree"), _stops(record, "best", "the best for each size")
            sentences.append(f"{name}: {'; '.join(stops)}.")
    return sentences


def _tree(tree: Record) -> str:
    return f"{tree['tree']} (τ {tree['tau']:.2f}, {tree['nodes']:.1f} nodes a step, speedup {tree['speedup']:.2f})"


def _stops(record: Record, who: str, name: str) -> str:
    """Return at which batch size a tree stops paying, in words."""
    if who not in record["stops_paying"]:
        return f"{name} has no prediction"
    size, largest = record["stops_paying"][who], record["loads"][-1]
    if size is None:
        return f"{name} still pays at batch size {largest['batch_size']} ({largest[who]:.2f})"
    return f"{name} no longer pays from batch size {size} on"


def users(report: Record, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the tokens a second of all users against those of one, where drafts lose, and how sure that is."""
    text = [f"{line}." for line in operating.crossings(report)]
    table, checked = operating.table(report), operating.checks(report)
    return Section(
        "users", "Throughput against the speed of one user", [*text, prose.USERS], [table], plots_shown, bullets=checked
    )


def other(report: Record, most: int | None, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the predictions for other trees and loads."""
    tables = [columns.other_trees(report, most), columns.other_loads(report)]
    text = [prose.SIMULATED] if recommended(report) else []  # what they say stands under "Why not more?"
    return Section("other", "Other trees and loads", text, tables, plots_shown, folded=True)


def along(report: Record, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the acceptance that one forward pass of target and head over the text measures."""
    return Section("forced", "The head along the text", [prose.FORCED], [columns.ranks(report)], plots_shown, True)


def checks(report: Record, measured: Sequence[Result], tables: Sequence[Table]) -> Section:
    """Return the losslessness checks: above temperature 0 in words, with the near ties."""
    settings = report["settings"]
    sampled = [SampledGate.read(check) for check in settings.get("sampled_gate", [])]
    lines = [f"{'' if check.passed else 'FAILED: '}{check}." for check in sampled]
    near = [
        f"near tie of {name}: {tie}"
        for name, gate in settings.get("gate", {}).items()
        for tie in Gate.read(gate).ties[:MOST]
    ]
    near += [_timed(result) for result in measured if columns.texts_differ(result.row)]
    text = [prose.CHECKED, *[prose.SAMPLED] * bool(sampled), *[prose.TIES] * bool(near)]
    return Section("gate", "Is it lossless?", text, tables, bullets=[*lines, *near])


def _timed(result: Result) -> str:
    """Return how many timed prompts equal the baseline's, with the logit gaps where they first differ."""
    counts = result.row["agreement"]
    gaps = ", ".join("inf" if gap is None else f"{gap:.3g}" for gap in counts["gaps"][:MOST])
    return (
        f"timed in {counts['dtype']}, {result.label} on {result.row['workload']}: {counts['identical']} of "
        f"{counts['checked']} prompts identical, {counts['near_tie']} near ties, {counts['beyond']} beyond; top-2 "
        f"logit gaps {gaps}"
    )


def notes_of(report: Record) -> tuple[str, ...]:
    """Return the notes that a report.json needs."""
    rows = report["rows"]
    if report["device"].get("type") == ENDPOINT:
        return (prose.NOTES[0], prose.NOTES[2], prose.SERVED)
    loaded = any(row["request_rate"] is not None for row in rows)
    return prose.NOTES + (prose.ABOVE_0,) * any(row["temperature"] > 0 for row in rows) + (prose.AT_A_RATE,) * loaded
