"""Rendering report.json as one HTML page: sections with plots and tables, filled into the template beside this file.

It loads nothing from anywhere: styles, scripts and the plotting library (Vega-Lite, from the vl-convert-python package)
are inlined, and its content security policy forbids the rest. Untrusted names and texts are escaped by the
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

from eval.measures.losslessness import WITHHELD
from eval.measures.results import LIVE
from eval.report.columns import drafter_of, flattened
from eval.report.sections import firsts, notes_of, sections
from eval.report.text import title
from eval.report.view import PAGE, Record, Result, results_of, shown, shown_interval

HERE = Path(__file__).parent
BUNDLE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
SOURCES = {"draft": "drafted and accepted", "bonus": "the target's own", "prefill": "from the prefill"}


class RenderError(Exception):
    """The page cannot be made here."""


@dataclass(frozen=True)
class Headline:
    """The headline of a row on the page."""

    name: str
    speedup: str
    unit: str  # of the speedup
    tau: str
    detail: str
    failed: bool


def page(report: Record, failures: Sequence[str]) -> str:
    """Return the page.

    Args:
        report: what report.json holds.
        failures: a line for each failed losslessness check.

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
    filled = sections(report, PAGE)
    specs = {f"{section.id}-{i}": plot.spec for section in filled for i, plot in enumerate(section.plots)}
    settings = {key: value for key, value in report["settings"].items() if key != "gate"}  # it has a table of its own
    facts = {"target": report["target"], "device": report["device"], "settings": settings}
    return environment.get_template("page.html.j2").render(
        title=title(report),
        warnings={"Not lossless.": failures, "Compare with care:": report.get("warnings", [])},
        notes=notes_of(report),
        headlines=headlines(report),
        unfailed=unfailed(report),
        sections=filled,
        answers=report.get("answers", []),
        sources=SOURCES,
        facts={name: dict(flattened(values)) for name, values in facts.items()},
        style=page_file("page.css"),
        script=page_file("page.js"),
        library=library(),
        report=inert(report),
        specs=inert(specs),
    )


def headlines(report: Record) -> list[Headline]:
    """Return the first numbers of every drafter; failed if it failed in any session."""
    failed = {drafter_of(result) for result in results_of(report) if result.failed}
    return [_headline(result, drafter_of(result) in failed) for result in firsts(report)]


def _headline(result: Result, failed: bool) -> Headline:
    row = result.row
    return Headline(
        name=result.name,
        speedup=WITHHELD if failed else shown_interval(row["speedup"], row["speedup_ci"]),
        unit="" if failed or row["speedup"] is None else unit(row),
        tau=shown_interval(row["tau"], row["tau_ci"]),
        detail=f"{row['tree']}, {speed(row)}on {row['workload']}",
        failed=failed,
    )


def unit(row: Record) -> str:
    """Return the unit of a row's speedup: under a rate of requests it is no ratio of speeds."""
    return "times the baseline" if row.get("request_rate") is None else "the baseline's mean latency over its own"


def speed(row: Record) -> str:
    """Return a row's tokens per second for a sentence, nothing where no clock ran."""
    return "" if row["tokens_per_second"] is None else f"{shown(row['tokens_per_second'], 1)} tok/s "


def unfailed(report: Record) -> str:
    """Return the status of a drafter that failed no check."""
    if report["settings"].get("gate"):
        return "lossless, by the check below"
    decoded = any(row["tier"] == LIVE for row in report["rows"])
    return "not checked" if decoded else "nothing was decoded: nothing was checked"


def inert(value: Any) -> Markup:
    """Return JSON that can stand in a script element whatever its strings hold."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def page_file(name: str) -> Markup:
    """Return a file that is put into the page as it is."""
    return Markup((HERE / name).read_text(encoding="utf-8"))


@lru_cache
def library() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed as one script, bundled in a child process.

    vl-convert bundles with V8, which ends its process without tens of gigabytes of address space.

    Raises:
        RenderError: the child process failed.
    """
    process = subprocess.run([sys.executable, "-c", BUNDLE], cwd=HERE.anchor, capture_output=True, check=False)
    if process.returncode:
        raise RenderError(
            f"the plotting library cannot be bundled, V8 ended with status {process.returncode}; where ulimit -v "
            "bounds the address space, raise it"
        )
    script = process.stdout.decode()
    assert "</script" not in script.lower(), "the plotting library would end the element that it stands in"
    return Markup(script)
