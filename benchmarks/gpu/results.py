"""What was measured, kept in OUT/gpu.json after every piece, and shown as OUT/gpu.md beside what was estimated."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import ITEMS, named

FAR = 0.25  # of an estimate: what differs by more calls for a reason
Entry = dict[str, Any]


def read(out: Path) -> dict[str, Entry]:
    """Return the pieces that are there, by name."""
    file = out / "gpu.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def keep(out: Path, name: str, entry: Entry) -> None:
    """Add a piece, and write both files, each whole or not at all."""
    entries = read(out) | {name: entry}
    write(out / "gpu.json", json.dumps(entries, indent=1) + "\n")
    write(out / "gpu.md", page(entries))


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = file.with_name(f".{file.name}.new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)


def is_done(entry: Entry | None, facts: Entry) -> bool:
    """Return whether a piece was measured, or failed, by this code on such a device: then it is not done again."""
    return entry is not None and all(entry.get(key) == facts[key] for key in ("revision", "device", "toy"))


def page(entries: dict[str, Entry]) -> str:
    """Return the page."""
    lines = ["# Measured on a device", ""]
    keys = ("device", "driver", "torch", "transformers", "revision", "toy")
    for facts in sorted({tuple(str(entry.get(key, "-")) for key in keys) for entry in entries.values()}):
        lines.append("- " + ", ".join(f"{key} {value}" for key, value in zip(keys, facts, strict=True)))
    for number, item in enumerate(ITEMS, 1):
        lines += ["", f"## {number}. {item.title}", ""]
        lines += ["| what | measured | estimate | measured / estimate |", "| --- | ---: | ---: | ---: |"]
        lines += [line for name, (of, _) in named().items() if of == number for line in table(name, entries.get(name))]
    return "\n".join(lines) + "\n"


def table(name: str, entry: Entry | None) -> list[str]:
    """Return the lines of a piece."""
    if entry is None:
        return [f"| **{name}** | waits | | |"]
    if "failed" in entry:
        return [f"| **{name}** | failed: {entry['failed'].replace('|', '/')} | | |"]
    return [f"| **{name}** | in {entry['seconds']:.1f} s | | |", *(row(*cells) for cells in entry["rows"])]


def row(what: str, measured: Any, estimate: Any) -> str:
    """Return a line; what is far from its estimate stands out."""
    ratio = ""
    if isinstance(measured, int | float) and isinstance(estimate, int | float) and estimate:
        over = measured / estimate
        ratio = f"**{over:.2f}**" if abs(over - 1) > FAR else f"{over:.2f}"
    return f"| {what.replace('|', '/')} | {shown(measured)} | {shown(estimate)} | {ratio} |"


def shown(value: Any) -> str:
    """Return a figure as text."""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value).replace("|", "/")
