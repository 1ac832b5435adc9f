"""The page of all records: benchmarks/gpu.md gets the tables of OUT/*.json and the figures as PNG beside it.

    python benchmarks/gpu/report.py --out OUT [--page benchmarks/gpu.md]

What stands on the page above the line that says so stays as it is. Records of toy size go to other pages alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import vl_convert

from eval.report.text import grid

PAGE = ROOT / "benchmarks" / "gpu.md"
LINE = "<!-- What follows is written by benchmarks/gpu/report.py. -->"
TITLES = {
    "smoke": "Tests and the losslessness gate",
    "target": "A target worth measuring",
    "embedded": "The embedded target anew",
    "heads": "Every head on it",
    "decoding": "Decoding at the shape of an 8B",
    "training": "Training at the shape of an 8B",
    "profiles": "Profiles",
}
SCALE = 1.5


def records(out: Path, *, toy: bool) -> list[dict[str, Any]]:
    """Return the records of a folder in the page's order.

    Raises:
        ValueError: there is none, or one is of toy size and that is not wanted.
    """
    found = [json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in TITLES if _there(out, name)]
    if not found:
        raise ValueError(f"{out}: holds no record; run benchmarks/gpu/run.py out of it first")
    small = [each["name"] for each in found if each["toy"]]
    if small and not toy:
        raise ValueError(f"{out}: {', '.join(small)} is of toy size, and {PAGE.name} shows real ones; give --page FILE")
    return found


def _there(out: Path, name: str) -> bool:
    return (out / f"{name}.json").is_file()


def page(found: Sequence[dict[str, Any]], drawn: Path) -> str:
    """Return the part of the page that shows the records, their figures drawn into a folder."""
    parts = []
    for each in found:
        device, source = each["device"], each["provenance"]
        cuda = f", CUDA {device['cuda']}" if device["cuda"] else ""
        where = f"{device['name']}, torch {device['torch']}{cuda}, transformers {device['transformers']}"
        commit = f"{(source['revision'] or 'no commit')[:8]}{' with changes' if source['dirty'] else ''}"
        size = " Toy size: no figure means anything." if each["toy"] else ""
        parts.append(f"## {TITLES[each['name']]}\n\n{source['date'][:10]}, commit {commit}, {where}.{size}")
        parts.append(f"`{source['command']}`")
        parts += [f"{table['caption']}:\n\n{grid(table['header'], table['rows'])}" for table in each["tables"]]
        for figure in each["figures"]:
            file = f"gpu_{figure['name']}.png"
            (drawn / file).write_bytes(vl_convert.vegalite_to_png(json.dumps(figure["spec"]), scale=SCALE))
            parts.append(f"![{figure['caption']}]({file})")
    return "\n\n".join(parts)


def write(out: Path, to: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        ValueError: as `records`.
    """
    found = records(out, toy=to.resolve() != PAGE)
    above = to.read_text(encoding="utf-8").partition(LINE)[0].rstrip() if to.is_file() else "# On an accelerator"
    draft = to.with_name(f".{to.name}.new")
    draft.write_text(f"{above}\n\n{LINE}\n\n{page(found, to.parent)}\n", encoding="utf-8")
    os.replace(draft, to)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The page of all records.")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the records")
    parser.add_argument("--page", type=Path, default=PAGE)
    said = parser.parse_args()
    try:
        write(said.out, said.page)
    except ValueError as error:
        sys.exit(f"error: {error}")
