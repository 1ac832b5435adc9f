"""Heads that draft for another checkpoint than the one that they were made for: whose they are, what τ they keep."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.measures.results import LIVE, Row
from eval.report.reading import read_report, row_of
from heads.formats.hub import made_for
from heads.formats.store import TargetSpec

SAME = ("workload", "temperature", "batch_size", "tree")


def saved_rows(folders: Mapping[str, Path], spec: TargetSpec) -> dict[str, tuple[TargetSpec, list[Row]]]:
    """Return each head that was made for another target, with that target and the rows that its report has on it."""
    saved = {name: made_for(folder) for name, folder in folders.items()}
    return {
        name: (trained_for, list(_rows(folders[name], trained_for)))
        for name, trained_for in saved.items()
        if trained_for is not None and trained_for.fingerprint != spec.fingerprint
    }


def notes(saved: Mapping[str, tuple[TargetSpec, list[Row]]], spec: TargetSpec, rows: Sequence[Row]) -> list[str]:
    """Return a line for each such head: made for, measured on, and its τ there and here where both are measured."""
    lines = []
    for name, (trained_for, before) in saved.items():
        pairs = [(row, old) for row in rows if row.drafter == name for old in before if _matches(row, old)]
        changes = [f"τ {row.tau:.2f} of {old.tau:.2f} ({row.workload}, temperature {row.temperature:g})"
                   for row, old in pairs if row.tau is not None and old.tau is not None]  # fmt: skip
        remainder = f"; of its own target's it keeps {', '.join(changes)}" if changes else ""
        lines.append(f"{name} was made for {trained_for} and is measured on {spec}{remainder}")
    return lines


def _rows(folder: Path, trained_for: TargetSpec) -> Iterator[Row]:
    """Yield the live rows of the report that a run has on its own target."""
    file = folder.parent / "report.json"
    if folder.name != "head" or not file.is_file():
        return
    report: dict[str, Any] = read_report(file)
    if report["target"].get("fingerprint") == trained_for.fingerprint:
        rows = map(row_of, report["rows"])
        yield from (row for row in rows if row.tier == LIVE and (row.request_rate, row.category) == (None, ""))


def _matches(row: Row, old: Row) -> bool:
    """Whether two rows measure one head in the same way; a head is called by its kind, and by its run if need be."""
    same = all(getattr(row, key) == getattr(old, key) for key in SAME)
    return same and row.tier == LIVE and row.category == "" and row.drafter.split(" ")[0] == old.drafter.split(" ")[0]
