"""Numbers and tables in Markdown."""

import math
from collections.abc import Sequence

from eval.measures.metrics import Interval


def number(value: float | None, digits: int) -> str:
    """Return a number for reading, or a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def spread(value: float | None, interval: Interval | None) -> str:
    """Return a number with its interval."""
    if interval is None or interval[0] == interval[1]:  # plain decoding against itself
        return number(value, 2)
    return f"{number(value, 2)} [{number(interval[0], 2)}, {number(interval[1], 2)}]"


def grid(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a name may hold what would end its cell or its line."""
    lines = ([_cell(text) for text in line] for line in (header, ["---"] * len(header), *body))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split("\n")).replace("|", "\\|")
