"""What stands in a report beside its rows, part by part: what a page draws must be what eval/ writes there."""

from typing import Any

from heads.common.typed import fits
from heads.common.untrusted import shown

NUMBER = float | None  # null stands for what is not finite, or was not measured
TREE = {"family": str, "tree": str, "tau": float, "nodes": float, "speedup": NUMBER}
PRICED = TREE | {"speedup": float}
DRAWN = {"drafter": str, "temperature": float, "passed": bool}
PIECE = {"text": str, "source": str, "step": int}
# Of a record by its keys, which an earlier version may lack; of what lies deeper every key. A list has one form.
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


def damage(part: str, record: Any) -> str | None:
    """Return what is wrong with one record of a part of a report, None where nothing is."""
    if not isinstance(record, dict):
        return f"{shown(record)}, expected a mapping"
    for key, form in RECORDS[part].items():
        if key in record and not (key == "own" and record[key] is None) and not _like(form, record[key]):
            return f"{key} is {shown(record[key])}"
    return WHOLE[part](record) if part in WHOLE else None


def damage_of_settings(settings: dict[str, Any]) -> str | None:
    """Return which of the settings that reports are read by is damaged, None where none is."""
    gates = settings.get("gate", {})
    if not isinstance(gates, dict) or not all(isinstance(each, dict) for each in gates.values()):
        return "gates"
    if not _like([DRAWN], settings.get("sampled_gate", [])):
        return "gates of sampling"
    return None if isinstance(settings.get("provenance", {}), dict) else "provenance"


def _like(form: Any, told: Any) -> bool:
    """Whether a value has a form: a type, a list of one form, or a mapping with at least these keys."""
    if isinstance(form, dict):
        return isinstance(told, dict) and all(key in told and _like(each, told[key]) for key, each in form.items())
    if isinstance(form, list):
        return isinstance(told, list) and all(_like(form[0], each) for each in told)
    return fits(form, told)


def _tree(record: dict[str, Any]) -> str | None:
    """Return why the nodes make no tree."""
    paths = [tuple(path) for path in record.get("paths", [])]
    known = {(), *paths}
    if () in paths or len(known) <= len(paths) or any(path[:-1] not in known for path in paths):
        return "paths are no tree"
    if "accepted" in record and len(record["accepted"]) != len(paths):
        return f"{len(record['accepted'])} shares for {len(paths)} paths"
    return None


def _forced(record: dict[str, Any]) -> str | None:
    counts = {len(record[key]) for key in RECORDS["teacher_forced"] if key in record}
    return "another number of depths in each of its lists, or none" if len(counts) > 1 or 0 in counts else None


def _priced(record: dict[str, Any]) -> str | None:
    """Return what is missing of other trees that have prices, as all of them have or none."""
    if "loads" not in record:
        return None
    if lacking := [key for key in ("own", "best", "stops_paying") if key not in record]:
        return f"{lacking[0]} is missing"
    if not record["loads"]:
        return "loads are empty"
    last = record["loads"][-1]
    wrong = [who for who in record["stops_paying"] if last.get(who) is None]
    return f"stops_paying has {shown(wrong[0])}, which loads have not" if wrong else None


def _answer(record: dict[str, Any]) -> str | None:
    """Return the first piece that is none, neither as today nor a list, as earlier versions wrote them."""
    pieces = record.get("pieces", [])
    wrong = [piece for piece in pieces if not isinstance(piece, list) and not _like(PIECE, piece)]
    return f"a piece is {shown(wrong[0])}" if wrong else None


WHOLE = {"answers": _answer, "trees": _tree, "teacher_forced": _forced, "other_trees": _priced}
