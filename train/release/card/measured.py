"""The results of a head, as a table and plots."""

from collections.abc import Mapping
from typing import Any

from eval.measures.results import LIVE
from eval.report.columns import CARD, Cell, results
from eval.report.text import grid
from eval.report.view import results_of
from train.release.card.text import escaped

LEGEND = (
    "τ: tokens committed per target pass, the bonus token included. speedup: against the baseline in the same "
    "engine; at a rate of requests, of mean latencies. lossless: prompts with the same greedy output as the "
    "baseline, autoregressive decoding. Intervals resample the prompts."
)
NONE = "Not measured: the run has no report."


def section(report: dict[str, Any], plots: Mapping[str, str]) -> str:
    """Return the table of the report's rows by decoding, and its plots; that of a failed result is withheld.

    Args:
        report: report.json, empty where there is none.
        plots: captions by file.
    """
    live = [result for result in results_of(report) if result.row.get("tier", LIVE) == LIVE]
    shown = "\n\n".join(f"![{escaped(caption)}]({name})" for name, caption in plots.items())
    if not live:
        return f"{NONE}\n\n{shown}".strip()
    table = results(live, CARD)
    body = [[_text(cell) for cell in line] for line in table.lines]
    parts = grid(table.titles(), body), LEGEND, how(report), shown
    return "\n\n".join(text for text in parts if text)


def clocked(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the live tier."""
    return [row for row in report.get("rows", []) if row.get("tier", LIVE) == LIVE]


def how(report: dict[str, Any]) -> str:
    """Return the device, settings and date of the measurement."""
    device, settings = report.get("device", {}), report.get("settings", {})
    where = [str(device[key]) for key in ("name", "dtype", "torch", "transformers") if device.get(key) is not None]
    sentences = [f"Device, dtype, versions of torch and transformers: {escaped(', '.join(where))}."] if where else []
    if settings.get("prompts") is not None:
        sentences.append(
            escaped(f"{settings['prompts']} prompts a workload, {settings.get('max_new_tokens')} new tokens at most.")
        )
    if date := (settings.get("provenance") or {}).get("date"):
        sentences.append(f"Measured on {escaped(str(date)[:10])}.")
    return " ".join(sentences)


def _text(cell: Cell) -> str:
    """Return a cell's text, with names escaped; the table itself escapes the signs that end a cell."""
    words = isinstance(cell.values[0], str)
    return "|".join(escaped(text) for text in cell.text.split("|")) if words else cell.text
