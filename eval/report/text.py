"""The report as text: Markdown, and a table for the terminal."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from eval.report import columns
from eval.report.sections import Section, notes_of, sections, sentence
from eval.report.view import TEXT, Record, results_of
from heads.common.untrusted import visible

# Columns of the terminal that begin at the left.
WORDS = ("drafter", "head", "rule", "lossless", "family", "tree", "sequences and context")


def title(report: Record) -> str:
    """Return one line: target, device, dtype and quantisation."""
    target, device = report["target"], report["device"]
    how = f", weights quantised ({quantized})" if (quantized := target.get("quantized")) else ""
    adapted = f" with adapter {adapter}" if (adapter := target.get("adapter")) else ""
    dtype = f", {device['dtype']}" if device.get("dtype") else ""  # none: no model computed
    return " ".join(f"{target.get('name')}{adapted} on {device.get('name')}{dtype}{how}".split())


def markdown(report: Record, failures: Sequence[str]) -> str:
    """Return a report.json for reading, with a line for each failed losslessness check."""
    settings = report["settings"].items()
    plain = {key: value for key, value in settings if key != "sampled_gate" and not isinstance(value, dict)}
    groups = {"Settings": plain, "Device": report["device"], "Provenance": report["settings"].get("provenance", {})}
    listed = {name: ", ".join(f"{key} {value}" for key, value in values.items()) for name, values in groups.items()}
    peak = max((row["memory_bytes"] for row in report["rows"]), default=0)
    listed |= {"Peak memory": f"{peak / 2**20:.0f} MiB"} if peak else {}
    warned = {"Not lossless.": failures, "Compare with care:": report.get("warnings", [])}
    text = [
        f"# {title(report)}",
        *([_line(headline)] if (headline := sentence(report)) else []),
        *(_line(f"**{what}** {line}.") for what, lines in warned.items() for line in lines),
        *(block for section in sections(report, TEXT) for block in _set(section)),
        "## How it was measured",
        _line(" ".join(f"{name}: {values}." for name, values in listed.items())),
        "\n".join(f"- {note}" for note in notes_of(report)),
    ]
    return _inert("\n\n".join(text)) + "\n"


def _set(section: Section) -> list[str]:
    """Return a section's title, text and tables; a name in a line of it begins no other line."""
    tables = [grid(table.titles(), table.texts()) for table in section.tables if table.lines]
    bullets = ["\n".join(f"- {_line(bullet)}" for bullet in section.bullets)] if section.bullets else []
    return [f"## {section.title}", *map(_line, section.text), *tables, *bullets]


def _line(text: str) -> str:
    return " ".join(text.split())


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a name may hold what would end its cell or its line."""
    lines = ([" ".join(text.split("\n")).replace("|", "\\|") for text in line] for line in (header, *body))
    first, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, f"|{' --- |' * len(header)}", *rest])


def _inert(text: str) -> str:
    """Return Markdown whose untrusted names are no HTML, no link and no picture, and move no cursor."""
    return visible(text).replace("<", "&lt;").replace("](", "]\\(")


def terminal(report: Record) -> Table:
    """Return the results for the terminal."""
    overall = [result for result in results_of(report) if result.overall]
    table = columns.results(overall, TEXT)
    return rich_table(title(report), table.titles(), table.texts())


def rich_table(caption: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """Return a table for the terminal, in whose cells rich looks for no markup."""
    table = Table(title=Text(visible(caption)))
    for name in header:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for line in body:
        table.add_row(*(Text(visible(cell)) for cell in line))
    return table
