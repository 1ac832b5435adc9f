"""Broken inputs made of whole ones: bytes changed, values put in the place of others, and JSON of any kind."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

NASTY = [
    "", "../../../etc/passwd", "/etc/passwd", "a/../b.safetensors", "${oc.env:HOME}", "???", "a\nb", "\x1b[2J", "\x00",
    "\ud800", "!!python/object/apply:os.mkdir [ran]", "_target_", "auto_map", 0, -1, 1, 2**31, 2**63, 10**30, -(10**12),
    0.5, 1e308, float("nan"), float("inf"), True, False, None, [], {}, [[]], {"_target_": "os.system"},
    {"auto_map": {"a": "b"}}, {"": {}}, "x" * 300, "[" * 1200 + "]" * 1200, "9" * 5000, [0] * 2000, [10**6] * 3,
]  # fmt: skip
LEAVES = st.sampled_from(NASTY) | st.integers() | st.floats() | st.text(max_size=8) | st.booleans() | st.none()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers(0, 2**20)
EDITS = st.lists(st.tuples(st.sampled_from(["put", "drop", "add", "rename"]), NUMBERS, VALUES), min_size=1, max_size=3)
CUTS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "end"]), NUMBERS, st.binary(max_size=6)), max_size=3
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        held = waiting.pop()
        keys = list(held) if isinstance(held, dict) else range(len(held)) if isinstance(held, list) else []
        found += [(held, key) for key in keys]
        waiting += [held[key] for key in keys]
    return found


def edited(value: Any, edits: list[tuple[str, int, Any]]) -> Any:
    """Return a value with some of its parts replaced, taken out, added or called otherwise."""
    value = copy.deepcopy(value)
    for what, number, drawn in edits:
        new = copy.deepcopy(drawn)  # one drawn twice would otherwise hold itself
        known = places(value)
        if not known:
            return new
        held, key = known[number % len(known)]
        if what == "put":
            held[key] = new
        elif what == "drop":
            held.pop(key)
        elif isinstance(held, dict):
            held[str(new)[:40]] = held.pop(key) if what == "rename" else new
        else:
            held.append(new)
    return value


def cut(content: bytes, cuts: list[tuple[str, int, bytes]]) -> bytes:
    """Return bytes with some of them flipped, taken out, put in, or missing at the end."""
    for what, number, new in cuts:
        at = number % (len(content) + 1)
        if what == "flip" and at < len(content):
            content = content[:at] + bytes([content[at] ^ (1 << number % 8)]) + content[at + 1 :]
        elif what == "insert":
            content = content[:at] + new + content[at:]
        elif what == "cut":
            content = content[:at] + content[at + 1 + number % 5 :]
        elif what == "end":
            content = content[:at]
    return content


def encoded(value: Any) -> bytes:
    """Return JSON as Python writes it, which has more numbers than the standard."""
    return json.dumps(value).encode()


def broken(whole: Any) -> st.SearchStrategy[Any]:
    """Return values near a whole one, and some that have nothing of it."""
    return st.builds(edited, st.just(whole), EDITS) | VALUES
