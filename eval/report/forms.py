"""Checking the extras of a report: the page plots them only in the form that eval/ writes."""

from typing import Any

from heads.common.typed import fits
from heads.common.untrusted import shown

NUMBER = float | None  # null: not finite, or not measured
TREE = {"family": str, "tree": str, "tau": float, "nodes": float, "speedup": NUMBER}
PRICED = TREE | {"speedup": float}
SAMPLED = {"drafter": str, "temperature": float, "passed": bool}
PIECE = {"text": str, "source": str, "step": int}
# A record's form by key; an earlier version may lack some. Deeper mappings need every key, lists have one form.
RECORDS: dict[str, dict[str, Any]] = {
    "training": {
        "steps": [{"step": int, "loss": NUMBER, "accuracy": list[NUMBER]}],
        "tau": [{"step": int, "tau": NUMBER, "low": NUMBER, "high": NUMBER}],
    },
    "trees": {"label": str, "note": str, "steps": int, "paths": list[list[int]], "accepted": list[float]},
    "teacher_forced": {"rank": list[list[float]], "n_alpha": list[float], "at_every_token": list[float]},
    "other_trees": {
        "trees": [TREE],
        "own": PRICED,
        "best": PRICED,
        "loads": [{"batch_size": int, "own": NUMBER, "best": float, "tree": str}],
        "stops_paying": dict[str, int | None],
    },
    "answers": {
        "drafter": str, "prompt": str, "question": str, "temperature": float, "pieces": list,
        "steps": list[list[int]],
    },
}  # fmt: skip


def damage(name: str, record: Any) -> str | None:
    """Return the damage of one record of an extra, None where it is sound."""
    if not isinstance(record, dict):
        return f"{shown(record)}, expected a mapping"
    for key, form in RECORDS[name].items():
        if key in record and not (key == "own" and record[key] is None) and not _like(form, record[key]):
            return f"{key} is {shown(record[key])}"
    return WHOLE[name](record) if name in WHOLE else None


def damage_of_settings(settings: dict[str, Any]) -> str | None:
    """Return the name of a damaged setting that reading depends on, None where all are sound."""
    gates = settings.get("gate", {})
    if not isinstance(gates, dict) or not all(isinstance(check, dict) for check in gates.values()):
        return "gates"
    if not _like([SAMPLED], settings.get("sampled_gate", [])):
        return "gates of sampling"
    return None if isinstance(settings.get("provenance", {}), dict) else "provenance"


def _like(form: Any, value: Any) -> bool:
    """Whether a value has a form: a type, a list of one form, or a mapping with at least these keys."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(key in value and _like(item, value[key]) for key, item in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(_like(form[0], item) for item in value)
    return fits(form, value)


def _tree(record: dict[str, Any]) -> str | None:
    """Return why the nodes are not a tree, None where they are."""
    paths = [tuple(path) for path in record.get("paths", [])]
    nodes = {(), *paths}
    if () in paths or len(nodes) <= len(paths) or any(path[:-1] not in nodes for path in paths):
        return "paths are no tree"
    if "accepted" in record and len(record["accepted"]) != len(paths):
        return f"{len(record['accepted'])} shares for {len(paths)} paths"
    return None


def _forced(record: dict[str, Any]) -> str | None:
    counts = {len(record[key]) for key in RECORDS["teacher_forced"] if key in record}
    return "another number of depths in each of its lists, or none" if len(counts) > 1 or 0 in counts else None


def _priced(record: dict[str, Any]) -> str | None:
    """Return the damage of other trees with predicted speedups; either all have one or none."""
    if "loads" not in record:
        return None
    if lacking := [key for key in ("own", "best", "stops_paying") if key not in record]:
        return f"{lacking[0]} is missing"
    if not record["loads"]:
        return "loads are empty"
    last = record["loads"][-1]
    wrong = [tree for tree in record["stops_paying"] if last.get(tree) is None]
    return f"stops_paying has {shown(wrong[0])}, which loads have not" if wrong else None


def _answer(record: dict[str, Any]) -> str | None:
    """Return the first damaged piece: neither in today's form nor a list, as earlier versions wrote them."""
    pieces = record.get("pieces", [])
    wrong = [piece for piece in pieces if not isinstance(piece, list) and not _like(PIECE, piece)]
    return f"a piece is {shown(wrong[0])}" if wrong else None


WHOLE = {"answers": _answer, "trees": _tree, "teacher_forced": _forced, "other_trees": _priced}
