"""What was measured of a head, as a table and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.measures.results import LIVE
from eval.report.page.names import spread
from eval.report.tables import grid, number
from train.release.card.text import escaped

HEADER = (
    "drafter", "tree", "workload", "T", "batch", "τ [95 %]", "P(a≥1), P(a≥2) …", "tok/s", "speedup [95 %]", "lossless",
)  # fmt: skip
LEGEND = (
    "τ: tokens committed per target pass, the bonus token included. speedup: against plain decoding in the same "
    "engine; at a rate of requests, of mean latencies. lossless: prompts with the same greedy output as plain "
    "decoding. Intervals resample the prompts."
)
NONE = "Not measured: the run has no report."


def section(report: dict[str, Any], plots: Mapping[str, str]) -> str:
    """Return the table of the report's rows by decoding, and its plots; a row whose gate failed has no speedup.

    Args:
        report: report.json, empty where there is none.
        plots: captions by file.
    """
    rows = clocked(report)
    shown = "\n\n".join(f"![{escaped(caption)}]({name})" for name, caption in plots.items())
    if not rows:
        return f"{NONE}\n\n{shown}".strip()
    return "\n\n".join(
        part for part in (grid(HEADER, [_cells(row) for row in rows]), LEGEND, how(report), shown) if part
    )


def clocked(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the live tier."""
    return [row for row in report.get("rows", []) if row.get("tier", LIVE) == LIVE]


def how(report: dict[str, Any]) -> str:
    """Return on what and how it was measured."""
    device, settings = report.get("device", {}), report.get("settings", {})
    where = [str(device[key]) for key in ("name", "dtype", "torch", "transformers") if device.get(key) is not None]
    said = [f"Device, dtype, versions of torch and transformers: {escaped(', '.join(where))}."] if where else []
    if settings.get("prompts") is not None:
        said.append(
            escaped(f"{settings['prompts']} prompts a workload, {settings.get('max_new_tokens')} new tokens at most.")
        )
    if date := (settings.get("provenance") or {}).get("date"):
        said.append(f"Measured on {escaped(str(date)[:10])}.")
    return " ".join(said)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    gate = row.get("lossless") or {}
    failed, rate = gate.get("failed", 0), row.get("request_rate")
    verdict = f"{gate.get('identical', 0)}/{gate['checked']} identical" if gate.get("checked") else "-"
    if gate.get("near_tie"):
        verdict += f", {gate['near_tie']} near tie"
    return (
        _name(row["drafter"]),
        _name(row["tree"]),
        _name(Path(str(row["workload"])).stem),
        f"{row['temperature']:g}",
        str(row["batch_size"]) + (f" at {rate:g} req/s" if rate is not None else ""),
        spread(row.get("tau"), row.get("tau_ci")),
        " ".join(f"{share:.2f}" for share in row.get("accepted_by_depth") or []) or "-",
        number(row.get("tokens_per_second"), 1),
        "withheld" if failed else spread(row.get("speedup"), row.get("speedup_ci")),
        f"{verdict}, {failed} FAILED" if failed else verdict,
    )


def _name(text: object) -> str:
    """Return a name for a cell; what would end the cell, the table escapes itself."""
    return "|".join(escaped(part) for part in str(text).split("|"))
