"""Rendering report.json as one HTML page: sections with plots and tables, filled into the template beside this file.

It loads nothing from anywhere: styles, scripts and the plotting library (Vega-Lite, from the vl-convert-python package)
are inlined, and its content security policy forbids the rest. Untrusted names and texts are escaped by the template.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval.measures.losslessness import WITHHELD
from eval.measures.results import LIVE
from eval.report import prose
from eval.report.breakdown import PLAIN
from eval.report.columns import flattened
from eval.report.sections import OVER, firsts, notes_of, over_hf, sections, sentence
from eval.report.text import title
from eval.report.view import PAGE, Record, Result, shown, words

HERE = Path(__file__).parent
BUNDLE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"


class RenderError(Exception):
    """The page cannot be made here."""


def page(report: Record, failures: Sequence[str]) -> str:
    """Return the page of a report.json, with a line for each failed losslessness check; raises what `library` does."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and its keys in their order
    filled = sections(report, PAGE)
    settings = {key: value for key, value in report["settings"].items() if key != "gate"}  # it has a table of its own
    facts = {"target": report["target"], "device": report["device"], "settings": settings}
    return environment.get_template("page.html.j2").render(
        title=page_title(report),
        sentence=sentence(report),
        tau=prose.TAU.format(report["target"].get("name") or "the target"),
        date=dates(report),
        warnings={"Not lossless.": failures, "Compare with care:": report.get("warnings", [])},
        notes=notes_of(report),
        headlines=headlines(report),
        unfailed=unfailed(report),
        sections=filled,
        answers=report.get("answers", []),
        facts={name: {words(key): value for key, value in flattened(values)} for name, values in facts.items()},
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=library(),
        report=report,
        specs={f"{section.id}-{i}": plot.spec for section in filled for i, plot in enumerate(section.plots)},
    )


def dates(report: Record) -> str:
    """Return the days on which a report's numbers were measured: of reports side by side that of each."""
    sources = report.get("reports") or [report]
    moments = (source["settings"].get("provenance", {}).get("date") for source in sources)
    return ", ".join(dict.fromkeys(str(date)[:10] for date in moments if date))


def page_title(report: Record) -> str:
    """Return the heads or other draft sources of a report, with its title."""
    drafters = dict.fromkeys(result.row["drafter"] for result in firsts(report) if result.row["drafter"] != PLAIN)
    return f"{', '.join(drafters)} for {title(report)}" if drafters else title(report)


def headlines(report: Record) -> list[dict[str, Any]]:
    """Return the first numbers of every drafter; failed if it failed in any session."""
    return [_headline(result) for result in firsts(report)]


def _headline(result: Result) -> dict[str, Any]:
    row, failed = result.row, result.failed
    # Under a rate of requests its speedup is no ratio of speeds; without a clock it has no speed.
    unit = f"times {OVER}" if row.get("request_rate") is None else "the baseline's mean latency over its own"
    speed = "" if row["tokens_per_second"] is None else f"{shown(row['tokens_per_second'], 1)} tok/s "
    return {
        "name": result.name,
        "speedup": WITHHELD if failed else shown(row["speedup"]),
        "unit": "" if failed or row["speedup"] is None else unit + _interval(row["speedup_ci"]) + over_hf(row),
        "tau": shown(row["tau"]),
        "interval": _interval(row["tau_ci"]),
        "detail": f"{row['tree']}, {speed}on {row['workload']}",
        "failed": failed,
    }


def _interval(interval: Sequence[float | None] | None) -> str:
    """Return an interval for reading, behind what it belongs to; nothing where it has no width."""
    low, high = interval or (None, None)
    return "" if low is None or high is None or low == high else f", {low:.2f} to {high:.2f}"


def unfailed(report: Record) -> str:
    """Return the status of a drafter that failed no check."""
    if report["settings"].get("gate"):
        return "lossless, by the check below"
    decoded = any(row["tier"] == LIVE for row in report["rows"])
    return "not checked" if decoded else "nothing was decoded: nothing was checked"


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
