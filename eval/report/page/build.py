"""The page: what report.json says, in sections with their plots and tables, filled into the template beside this file.

It loads nothing from anywhere: styles, scripts and the plotting library (Vega-Lite, from the vl-convert-python package)
stand inside, and its content security policy forbids the rest. Names and texts from outside are escaped by the
template, and in the script's data by `inert`.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.measures.losslessness import labelled
from eval.measures.results import LIVE
from eval.report import advice
from eval.report.breakdown import NOTE, PLAIN, REMEDIES
from eval.report.page import load, more_plots, plots, simulated, tables, tree_plot
from eval.report.page.names import Told, red, row_names, shown, spread
from eval.report.page.plots import Plot
from eval.report.page.tables import Table
from eval.report.sections import DRAWN_CHAINS

HERE = Path(__file__).parent
BUNDLE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
NODES = (
    "Each node with the share of the target passes that accepted it: the fuller the node and the thicker its line, "
    "the greater the share. Siblings stand in the order in which they were drafted."
)
SOURCES = {"draft": "drafted and accepted", "bonus": "the target's own", "prefill": "from the prefill"}


TIERS = (
    "One τ, measured up to three times: live by decoding; teacher_forced by one pass of target and head over the text; "
    "replay by drafting along the text, without the target. The intervals resample the prompts. " + DRAWN_CHAINS
)


class RenderError(Exception):
    """The page cannot be made here."""


@dataclass(frozen=True)
class Section:
    """A part of the page: its plots, its table, and whether that is folded away at first."""

    id: str
    title: str
    text: list[str]
    plots: list[Plot]
    table: Table | None
    folded: bool


@dataclass(frozen=True)
class Headline:
    """What the page says first of a row."""

    name: str
    speedup: str
    unit: str  # of the speedup
    tau: str
    detail: str
    red: bool


def page(told: Told, title: str, failures: Sequence[str], notes: Sequence[str]) -> str:
    """Return the page.

    Args:
        told: what report.json holds.
        title: its heading.
        failures: a line for each red gate.
        notes: how the numbers are to be read.

    Raises:
        RenderError: the plotting library cannot be had.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filled = [section for section in sections(told) if section.plots or (section.table and section.table.lines)]
    specs = {f"{section.id}-{i}": each.spec for section in filled for i, each in enumerate(section.plots)}
    return environment.get_template("page.html.j2").render(
        title=title,
        told=told,
        failures=failures,
        notes=notes,
        headlines=headlines(told),
        gated=gated(told),
        sections=filled,
        answers=told.get("answers", []),
        sources=SOURCES,
        facts={name: dict(tables.flattened(told[name])) for name in ("target", "device")}
        | {"settings": settings(told)},
        style=part("page.css"),
        script=part("page.js"),
        library=library(),
        report=inert(told),
        specs=inert(specs),
    )


def sections(told: Told) -> list[Section]:
    """Return the page's sections in their order; those without content are not shown."""
    drawn = [tree_plot.tree(name, each) for name, each in told.get("trees", {}).items() if each["paths"]]
    both = drawing(plots.with_intervals(told, "speedup", "speedup"), plots.with_intervals(told, "tau", "τ"))
    against = {"batch_size": "batch size", "temperature": "temperature", "request_rate": "requests a second"}
    loads = drawing(*(plots.against(told, key, name) for key, name in against.items()), load.latencies(told))
    other, along = simulated.text(told), [advice.FORCED]
    gated = ["Greedy output against plain decoding's, token for token, in the gate's dtype.", *sampled(told)]
    return [
        Section("reports", "The reports", [], [], tables.reports(told), False),
        Section("results", "Results", [], both, tables.results(told), False),
        Section("why", "Why not more?", why(told), drawing(plots.ladder(told)), tables.why(told), False),
        Section("gate", "Is it lossless?", gated, [], tables.gates(told), False),
        Section("depths", "Acceptance by depth", [], drawing(plots.acceptance(told)), tables.depths(told), False),
        Section("load", "Under load and temperature", [], loads, load.table(told), False),
        Section("other", "Other trees and loads", other, simulated.loads(told) + simulated.trees(told), None, False),
        Section("times", "Where the time goes", [], drawing(plots.time_split(told)), tables.times(told), False),
        Section("tree", "The tree", [NODES] if drawn else [], drawn, tables.nodes(told), True),
        Section("forced", "The head along the text", along, simulated.along(told), None, False),
        Section("tiers", "With and without a clock", [TIERS], [], tables.tiers(told), False),
        Section("training", "Training of the head", [], more_plots.training(told), None, False),
        Section("everything", "Every number", ["As report.json has them."], [], tables.everything(told), True),
    ]


def drawing(*made: Plot | None) -> list[Plot]:
    """Return the plots that there are."""
    return [each for each in made if each is not None]


def why(told: Told) -> list[str]:
    """Return the way from τ to the speedup in words, for each drafter's first row, and how the ladder is to be read."""
    lines = []
    for name, row in firsts(told).values():
        if (found := row.get("ladder")) is not None:
            rungs, gain = found["rungs"], found["less"][found["most"]]
            lines.append(
                f"{name} commits {rungs['ideal']:.2f} tokens a pass. Passes at their own price leave "
                f"{rungs['verification']:.2f} of that; drafting leaves {rungs['draft']:.2f}; the rest of the step "
                f"leaves the measured {rungs['overhead']:.2f}. What would help most is {REMEDIES[found['most']]}: "
                f"a tenth of that loss gone would give {gain:.2f}. An oracle that drafts exactly what is accepted, for "
                f"nothing, would reach {found['oracle']:.2f}."
            )
    return [*lines, *simulated.text(told)[:-1], NOTE]


def sampled(told: Told) -> list[str]:
    """Return a line for each drafter and temperature above 0: its tokens under coupled noise, and its law."""
    lines = []
    for each in told["settings"].get("sampled_gate", []):
        coupled, law = each["coupled"], each["law"]
        line = (
            f"{'' if each['passed'] else 'RED: '}{each['drafter']} at T={each['temperature']:g}: "
            f"{coupled['identical']} of {coupled['checked']} prompts equal under coupled noise; "
        )
        if law is None:
            line += each["why_no_law"]
        else:
            caught = "caught" if law["control_caught"] else "NOT caught"
            line += f"chi-square p {law['p_value']:.2g} of {law['draws']} draws, "
            line += f"of power {law['power']:g} at TV {law['tv']:g}; the broken control was {caught}"
        lines.append(f"{line}.")
    return lines


def firsts(told: Told) -> dict[str, tuple[str, Told]]:
    """Return each drafter's first row with its name: in the first session asked for, not in the most flattering one."""
    found: dict[str, tuple[str, Told]] = {}
    for name, row in zip(row_names(told["rows"]), told["rows"], strict=True):
        found.setdefault(who(row), (name, row))
    drafting = {key: (name, row) for key, (name, row) in found.items() if row["drafter"] != PLAIN}
    return drafting or found


def who(row: Told) -> str:
    """Return what tells a row's drafter from the others: its name, and where there are several, its report."""
    return labelled(row["drafter"], 1, row.get("report", ""))


def headlines(told: Told) -> list[Headline]:
    """Return the first numbers of every drafter; red if it failed in any session."""
    failed = {who(row) for row in told["rows"] if red(row, told["settings"])}
    return [
        Headline(
            name,
            "withheld" if drafter in failed else spread(row["speedup"], row["speedup_ci"]),
            "" if drafter in failed or row["speedup"] is None else unit(row),
            spread(row["tau"], row["tau_ci"]),
            f"{row['tree']}, {speed(row)}on {row['workload']}",
            drafter in failed,
        )
        for drafter, (name, row) in firsts(told).items()
    ]


def unit(row: Told) -> str:
    """Return what a row's speedup counts: under a rate of requests it is no ratio of speeds."""
    return "times plain decoding" if row.get("request_rate") is None else "plain decoding's mean latency over its own"


def speed(row: Told) -> str:
    """Return a row's tokens per second for a sentence, nothing where no clock ran."""
    return "" if row["tokens_per_second"] is None else f"{shown(row['tokens_per_second'], 1)} tok/s "


def gated(told: Told) -> str:
    """Return what a tile says of a drafter that failed no gate."""
    if told["settings"].get("gate"):
        return "lossless, by the gate below"
    return "not gated" if any(row["tier"] == LIVE for row in told["rows"]) else "nothing was decoded: no gate ran"


def settings(told: Told) -> dict[str, Any]:
    """Return what it was measured under, without the gates, which have their own table."""
    return dict(tables.flattened({key: value for key, value in told["settings"].items() if key != "gate"}))


def inert(value: Any) -> Markup:
    """Return JSON that can stand in a script element whatever its strings hold."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def part(name: str) -> Markup:
    """Return a file that is put into the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@lru_cache
def library() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed as one script, which a process of its own bundles.

    V8, by which vl-convert does it, ends its process where it gets no address space, tens of gigabytes of it.

    Raises:
        RenderError: it has ended so.
    """
    made = subprocess.run([sys.executable, "-c", BUNDLE], cwd=HERE.anchor, capture_output=True, check=False)
    if made.returncode:
        raise RenderError(
            f"the plotting library cannot be bundled, V8 ended with status {made.returncode}; where ulimit -v bounds "
            "the address space, raise it"
        )
    script = made.stdout.decode()
    assert "</script" not in script.lower(), "the plotting library would end the element that it stands in"
    return Markup(script)
