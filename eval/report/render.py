"""The renderers of a report's sections: a table for the terminal; Markdown and one HTML page from templates.

The page loads nothing: styles, scripts and the plotting library (Vega-Lite, from the package vl-convert-python) are
inlined, and its content security policy forbids everything else. Its template escapes names and texts.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from eval.report.sections import facts_of, headlines_of, notes_of, results_table, sections, sentence
from eval.report.view import Record
from heads.common.untrusted import visible

Texts = Sequence[str]
HERE = Path(__file__).parent
BUNDLE = "import sys, vl_convert; sys.stdout.buffer.write(vl_convert.javascript_bundle().encode())"
# Left-aligned columns of the terminal.
WORDS = ("drafter", "head", "rule", "lossless", "family", "tree", "sequences")


class RenderError(Exception):
    """The page cannot be rendered on this machine."""


def title(report: Record) -> str:
    """Return the report's title: target, device, dtype and quantisation."""
    target, device = report["target"], report["device"]
    how = f", weights quantised ({quantized})" if (quantized := target.get("quantized")) else ""
    adapted = f" with adapter {adapter}" if (adapter := target.get("adapter")) else ""
    dtype = f", {device['dtype']}" if device.get("dtype") else ""  # empty: no model ran
    return " ".join(f"{target.get('name')}{adapted} on {device.get('name')}{dtype}{how}".split())


def terminal(report: Record) -> Table:
    """Return the table of results for the terminal."""
    table = results_table(report)
    return rich_table(title(report), table.titles, table.lines)


def rich_table(caption: str, header: Texts, body: Sequence[Texts]) -> Table:
    """Return a table for the terminal, with markup in cells disabled."""
    table = Table(title=Text(visible(caption)))
    for name in header:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for line in body:
        table.add_row(*(Text(visible(cell)) for cell in line))
    return table


def rendered(template: str, report: Record, failures: Texts, **more: Any) -> str:
    """Return a report.json by a template, with a line for each failed losslessness check."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=select_autoescape(["html.j2"]), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and keeps the order of keys
    environment.filters["line"] = lambda text: " ".join(text.split())  # so that a name cannot start a line
    warned = [("Compare with care:", line) for line in report.get("warnings", [])]
    return environment.get_template(template).render(
        report=report,
        sentence=sentence(report),
        warnings=[*(("Not lossless.", line) for line in failures), *warned],
        facts=facts_of(report),
        notes=list(notes_of(report)),
        **more,
    )


def markdown(report: Record, failures: Texts) -> str:
    """Return a report.json as Markdown."""
    text = rendered("report.md.j2", report, failures, title=title(report), grid=grid, sections=sections(report))
    # Names from outside must be no HTML, links or images, and must not move the cursor.
    return visible(text).replace("<", "&lt;").replace("](", "]\\(")


def grid(header: Texts, body: Sequence[Texts]) -> str:
    """Return a Markdown table; names are escaped, since they could end a cell or a line."""
    lines = ([" ".join(text.split("\n")).replace("|", "\\|") for text in line] for line in (header, *body))
    first, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, f"|{' --- |' * len(header)}", *rest])


def page(report: Record, failures: Texts) -> str:
    """Return the page of a report.json; raises what `library` raises."""
    headlines, filled = headlines_of(report), sections(report)
    drafters = dict.fromkeys(result.row["drafter"] for result in headlines if result.speculative)
    return rendered(
        "page.html.j2",
        report,
        failures,
        title=f"{', '.join(drafters)} for {title(report)}" if drafters else title(report),
        headlines=headlines,
        gate_status="lossless, by the check below" if report["settings"].get("gate") else "not checked",
        sections=filled,
        answers=report.get("answers", []),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        library=library(),
        specs={section.id: section.plot for section in filled if section.plot},
    )


@lru_cache
def library() -> Markup:
    """Return Vega, Vega-Lite and Vega-Embed as one script, bundled in a child process; refuse where that fails.

    vl-convert bundles with V8, which ends its process without tens of gigabytes of address space.
    """
    process = subprocess.run([sys.executable, "-c", BUNDLE], cwd=HERE.anchor, capture_output=True, check=False)
    if process.returncode:
        raise RenderError(
            f"the plotting library cannot be bundled, V8 ended with status {process.returncode}; where ulimit -v "
            "bounds the address space, raise it"
        )
    script = process.stdout.decode()
    assert "</script" not in script.lower(), "the plotting library would end its own script element"
    return Markup(script)
