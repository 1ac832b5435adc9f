"""Numbers for reading, and tables in Markdown."""

import math
from collections.abc import Sequence
from typing import Any


def shown(value: Any, digits: int | None = 2) -> str:
    """Return a value for reading: a number with so many digits behind its point, a dash where there is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "-" if not math.isfinite(value) else f"{value:g}" if digits is None else f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def shown_interval(value: float | None, interval: Sequence[float | None] | None) -> str:
    """Return a number with its interval, if that has a width."""
    if value is None or interval is None or None in interval or interval[0] == interval[1]:
        return shown(value)
    return f"{shown(value)} [{shown(interval[0])}, {shown(interval[1])}]"


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a name may hold what would end its cell or its line."""
    lines = ([_cell(text) for text in line] for line in (header, ["---"] * len(header), *body))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")
