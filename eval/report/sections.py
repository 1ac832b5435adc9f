"""The sections of a report in their order, each with its text, tables and plots; renderers only format them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.measures.metrics import DEFINITIONS
from eval.report import advice, breakdown, columns
from eval.report.breakdown import PLAIN
from eval.report.plots import results as plots
from eval.report.plots import simulated, tree
from eval.report.plots.results import Plot
from eval.report.recorded import greedy_check, sampled_check
from eval.report.view import PAGE, TEXT, Record, Result, Table, results_of

MOST = 5  # near ties shown of each drafter
SAMPLED_CHAINS = (
    "teacher_forced counts a chain that is sampled token by token: block verification, the rule of decoding unless "
    "asked otherwise, accepts as much or more."
)
NODES = (
    "Each node with the share of the target passes that accepted it: the fuller the node and the thicker its line, "
    "the greater the share. Siblings stand in the order in which they were drafted."
)
TIERS = (
    "One τ, measured up to three times: live by decoding; teacher_forced by one pass of target and head over the text; "
    "replay by drafting along the text, without the target. What they count differs only where the text does, or the "
    "rule. The intervals resample the prompts. " + SAMPLED_CHAINS
)
CHECKED = "Greedy output against the baseline's, token for token, in the gate's dtype."
SAMPLED = (
    "Under coupled noise every drafter must emit the baseline's tokens. The chi-square test draws next tokens "
    "after fixed texts with the rule in use, as often as it takes to reject a distribution that is off by the total "
    "variation TV with the power that is named. The control, a rule known to be broken, must be rejected each time."
)
TIES = (
    "The gap is the baseline's between its two best tokens where the other first differs. What is timed is not "
    "checked: rounding decides there, and from there on two texts differ."
)
LOAD = (
    "Requests come at random, so many a second on average, and wait in a queue while as many are being answered as "
    "the capacity says. TTFT and latency count from the arrival to the first and to the last token. The latency "
    "ratio is the baseline's mean over the drafter's: above 1 the drafter's requests end sooner."
)
END_TO_END = (
    "End to end counts all tokens over prefill and decoding together. A source whose memory is warm drafts from "
    "the requests before, in their order, and begins every round of measurement with nothing; cold, it forgets "
    "before every request; none, nothing outlives a request."
)
WITHIN = (
    "τ, had every draft ended at that depth: the sum of P(a≥d) up to it and the bonus token, from the passes that "
    "were made. `budget=K` measures it: then no source drafts deeper than K."
)
AGAINST = {"batch_size": "batch size", "temperature": "temperature", "request_rate": "requests a second"}


@dataclass(frozen=True)
class Section:
    """A part of a report; `folded` is shown on demand, where that can be."""

    id: str
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    folded: bool = False
    bullets: Sequence[str] = ()


def sections(report: Record, medium: str) -> list[Section]:
    """Return the sections that have a table, a plot or a list, for one of the renderers."""
    measured = results_of(report)
    overall = [result for result in measured if result.overall]
    candidates = on_page(report, measured) if medium == PAGE else in_text(report, overall)
    return [
        section
        for section in candidates
        if section.plots or section.bullets or any(table.lines for table in section.tables)
    ]


def in_text(report: Record, overall: Sequence[Result]) -> Iterator[Section]:
    """Yield the sections of Markdown: those of whole workloads, with tables in place of plots."""
    measured, name = results_of(report), columns.on_workload(overall)
    yield Section("reports", "The reports", tables=[columns.reports(report)])
    yield Section("results", "Results", tables=[columns.results(overall, TEXT)])
    yield Section("times", "Where the time goes", tables=[columns.times(overall, name)])
    yield why(report, columns.why(overall, columns.LABEL))
    yield other(report, columns.MOST)
    yield along(report)
    yield Section("tiers", "With and without a clock", [TIERS], columns.tiers(measured)[:1])
    yield Section("categories", "By category", tables=[columns.categories(measured)])
    meanings = [f"`{name}`: {meaning}" for name, meaning in DEFINITIONS.items()]
    listed = columns.definitions(overall)
    yield Section("definitions", "What others call acceptance", [], [listed], bullets=meanings if listed.lines else [])
    yield Section("end_to_end", "End to end", [END_TO_END], [columns.end_to_end(overall)])
    yield Section("load", "Under load", [LOAD], [columns.load(overall, columns.DRAFTER)])
    yield Section("requests", "Over the requests", tables=[columns.requests(overall)])
    yield Section("within", "At an equal depth of draft", [WITHIN], [columns.within(overall)])
    yield checks(report, overall, [])


def on_page(report: Record, measured: Sequence[Result]) -> Iterator[Section]:
    """Yield the sections of the page: those of all results, with plots, and every number under its key."""
    tree_plots = [tree.tree(name, record) for name, record in report.get("trees", {}).items() if record["paths"]]
    both = [plots.with_intervals(report, "speedup", "speedup"), plots.with_intervals(report, "tau", "τ")]
    loads = [*(plots.against(report, key, name) for key, name in AGAINST.items()), plots.latencies(report)]
    trees = other(report, None, simulated.loads(report) + simulated.trees(report))
    yield Section("reports", "The reports", tables=[columns.reports(report)])
    yield Section("results", "Results", [], [columns.results(measured, PAGE)], there(both))
    yield why(report, columns.why(measured, columns.NAME), there([plots.breakdown(report)]))
    yield checks(report, measured, [columns.checks(report)])
    yield Section("depths", "Acceptance by depth", [], [columns.depths(measured)], there([plots.acceptance(report)]))
    yield Section("load", "Under load and temperature", [], [columns.load(measured, columns.NAME)], there(loads))
    yield trees
    yield Section(
        "times", "Where the time goes", [], [columns.times(measured, columns.NAME)], there([plots.time_split(report)])
    )
    yield Section(
        "tree", "The tree", [NODES] if tree_plots else [], [columns.nodes(report, measured)], tree_plots, folded=True
    )
    yield along(report, simulated.along(report))
    yield Section("tiers", "With and without a clock", [TIERS], columns.tiers(measured))
    yield Section("training", "Training of the head", plots=plots.training(report))
    everything = columns.everything(measured)
    yield Section("everything", "Every number", ["As report.json has them."], [everything], folded=True)


def there(plots_or_none: Sequence[Plot | None]) -> list[Plot]:
    """Return the plots that are not None."""
    return [plot for plot in plots_or_none if plot is not None]


def why(report: Record, table: Table, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the speedup breakdown: in words for each drafter's first result, in numbers for all."""
    explained = [result for result in firsts(report) if result.row.get("ladder")]
    sentences = [breakdown.sentence(result.name, result.row["ladder"]) for result in explained]
    return Section("why", "Why not more?", [*sentences, *recommended(report), breakdown.NOTE], [table], plots_shown)


def firsts(report: Record) -> list[Result]:
    """Return each drafter's first result: of the first session asked for, not of the most flattering one."""
    first: dict[str, Result] = {}
    for result in results_of(report):
        first.setdefault(columns.drafter_of(result), result)
    return [result for result in first.values() if result.row["drafter"] != PLAIN] or list(first.values())


def recommended(report: Record) -> list[str]:
    """Return which tree to take and at which load to stop, in words."""
    return [line for name, record in report.get("other_trees", {}).items() for line in advice.lines(name, record)]


def other(report: Record, most: int | None, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the predictions for other trees and loads."""
    lines = recommended(report)
    tables = [columns.other_trees(report, most), columns.other_loads(report)]
    return Section("other", "Other trees and loads", [*lines, advice.NOTE] if lines else [], tables, plots_shown)


def along(report: Record, plots_shown: Sequence[Plot] = ()) -> Section:
    """Return the acceptance that one forward pass of target and head over the text measures."""
    return Section("forced", "The head along the text", [advice.FORCED], [columns.ranks(report)], plots_shown)


def checks(report: Record, measured: Sequence[Result], tables: Sequence[Table]) -> Section:
    """Return the losslessness checks: above temperature 0 in words, with the near ties."""
    settings = report["settings"]
    sampled = [sampled_check(check) for check in settings.get("sampled_gate", [])]
    lines = [f"{'' if check.passed else 'FAILED: '}{check}." for check in sampled]
    near = [
        f"near tie of {name}: {tie}"
        for name, gate in settings.get("gate", {}).items()
        for tie in greedy_check(gate).ties[:MOST]
    ]
    near += [_timed(result) for result in measured if _parted(result.row)]
    text = [CHECKED, *[SAMPLED] * bool(sampled), *[TIES] * bool(near)]
    return Section("gate", "Is it lossless?", text, tables, bullets=[*lines, *near])


def _parted(row: Mapping[str, Any]) -> bool:
    """Whether timed tokens differ from the baseline's."""
    return bool(row["agreement"].get("identical", row["prompts"]) < row["prompts"])


def _timed(result: Result) -> str:
    """Return how many timed prompts equal the baseline's, with the logit gaps where they first differ."""
    counts = result.row["agreement"]
    gaps = ", ".join("inf" if gap is None else f"{gap:.3g}" for gap in counts["gaps"][:MOST])
    return (
        f"timed in {counts['dtype']}, {result.label} on {result.row['workload']}: {counts['identical']} of "
        f"{counts['checked']} prompts identical, {counts['near_tie']} near ties, {counts['beyond']} beyond; top-2 "
        f"logit gaps {gaps}"
    )
