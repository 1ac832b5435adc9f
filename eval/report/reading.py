"""Reading a report.json back: checked against this schema, or refused with one line that says why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eval.measures.losslessness import FailedChecks, Gate, SampledGate
from eval.measures.metrics import PARTS
from eval.measures.results import Row
from eval.report.breakdown import with_breakdowns
from eval.report.write import SCHEMA, Report
from heads.common.typed import fits, typed
from heads.common.untrusted import entries, names_code, parse_json, regular, shown

REPORT_KEYS = ("schema", "target", "device", "settings", "rows")  # all other keys are extras
NAMED = {"answers": "drafter", "paired": "drafter", "reports": "name"}  # extras that are lists, of records with a name
TEXTS = [column.name for column in fields(Row) if column.type is str]  # `typed` would accept numbers in them
# A report beyond these limits was not written by this project, and its page would take gigabytes.
MOST_BYTES, MOST_ROWS = 32 << 20, 2_000
LONGEST = 4_000  # length of a text, list or mapping in a row
GREATEST = 1e20  # magnitude of a number; seeds have 64 bits

NUMBER = float | None  # null: not finite, or not measured
TREE = {"family": str, "tree": str, "tau": float, "nodes": float, "speedup": NUMBER}
PRICED = TREE | {"speedup": float}
SETTINGS: dict[str, tuple[str, Any]] = {  # that reading depends on, by what they are called
    "gate": ("gates", dict[str, dict[str, Any]]),
    "sampled_gate": ("gates of sampling", [{"drafter": str, "temperature": float, "passed": bool}]),
    "provenance": ("provenance", dict),
}
DIFFERENCE = {"difference": float, "low": float, "high": float}
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
    "paired": {
        "drafter": str, "base": str, "workload": str, "temperature": float, "batch_size": int, "prompts": int,
        "tau": DIFFERENCE, "tokens_per_second": DIFFERENCE,
    },
}  # fmt: skip
# By eval/live/extras.py, the tiers and side_by_side.py.
EXTRAS = dict.fromkeys(RECORDS, dict) | dict.fromkeys((*NAMED, "warnings"), list)


def read_report(file: Path) -> dict[str, Any]:
    """Return the content of a report.json; refuse a file that is missing, damaged, no report, or of another schema."""
    try:
        with regular(file).open("rb") as opened:
            raw = opened.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        content = parse_json(raw)
    except OSError as error:
        raise ValueError(f"report {file} cannot be read ({error.strerror}): give a report.json") from None
    except ValueError as error:
        raise ValueError(f"report {file} is damaged ({error}): evaluate again to write it anew") from None
    if not isinstance(content, dict) or "schema" not in content or not isinstance(content.get("rows"), list):
        raise ValueError(f"{file} is no report: give a report.json, as eval/run.py writes it")
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"report {file} has schema {shown(content['schema'])}, this version reads {SCHEMA}: evaluate again with "
            "this version, or read it with the one that wrote it"
        )
    for key in ("target", "device", "settings"):
        if not isinstance(content.get(key), dict):
            raise ValueError(f"report {file} has no {key}: evaluate again to write it anew")
    if len(content["rows"]) > MOST_ROWS:
        raise ValueError(
            f"report {file} has {len(content['rows'])} rows, {MOST_ROWS} are read: evaluate fewer drafters, "
            "workloads or settings at once"
        )
    if odd := next(((key, value) for key, value in entries(content) if _is_odd(value)), None):
        name = odd[0].rpartition(".")[2]
        raise ValueError(f"report {file}: {shown(name)} is {shown(odd[1])}, no number that is measured: evaluate again")
    _check_extras(content, file)
    for number, row in enumerate(content["rows"]):
        try:
            row_of(row)
        except ValueError as error:
            raise ValueError(f"report {file}, row {number}: {error}; evaluate again to write it anew") from None
    _check_facts(content, file)
    _check_breakdowns(content["rows"], file)
    return content


def report_of(content: Mapping[str, Any], file: str) -> Report:
    """Return the report of a content that was read; refuse damaged checks, and a speedup of a row that failed one."""
    try:
        gates = {name: Gate.read(check) for name, check in content["settings"].get("gate", {}).items()}
        sampled = [SampledGate.read(check) for check in content["settings"].get("sampled_gate", [])]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"report {file} has damaged gates ({error}): evaluate again to write it anew") from None
    rows, failed = [row_of(row) for row in content["rows"]], FailedChecks.of(gates, sampled)
    for row in rows:
        if failed.result(vars(row)) and row.has_speedup:
            raise ValueError(f"report {file}: {row.drafter} has a speedup and failed its check: evaluate again")
    settings = {key: value for key, value in content["settings"].items() if key not in ("gate", "sampled_gate")}
    extras = {key: value for key, value in content.items() if key not in REPORT_KEYS}
    return Report(content["target"], content["device"], settings, gates, rows, sampled, extras)


def _is_odd(value: Any) -> bool:
    """Whether a number cannot have been measured, such as one that is not finite."""
    return isinstance(value, int | float) and not abs(value) <= GREATEST


def _check_facts(content: Mapping[str, Any], file: Path) -> None:
    """Refuse counts of devices and experts that are no counts; those of several reports are joined to a text."""
    if any(row.get("report") for row in content["rows"]):
        return
    count, experts = content["device"].get("count", 1), content["target"].get("experts")
    if type(count) is not int or count < 1:
        raise ValueError(f"report {file}: device.count is {shown(count)}, no number of devices: evaluate again")
    counted = fits(list[int] | None, experts) and (not experts or (len(experts) == 2 and 0 < experts[1] <= experts[0]))
    if not counted:
        raise ValueError(
            f"report {file}: target.experts is {shown(experts)}, not how many a layer has and a token passes through: "
            "evaluate again"
        )


def _check_breakdowns(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Refuse rows whose numbers contradict each other, so that they give no finite speedup breakdown."""
    try:
        right = not any(_is_odd(value) for row in with_breakdowns(rows) for _, value in entries(row["ladder"]))
    except ArithmeticError:
        right = False
    if not right:
        raise ValueError(f"report {file}: seconds, steps and tokens of its rows contradict each other: evaluate again")


def _check_extras(content: dict[str, Any], file: Path) -> None:
    """Refuse extras of a report under unknown keys, of another type, and those that name code."""
    if code := names_code(content):
        raise ValueError(f"report {file} names code to run by the key {code}, which is refused: evaluate again")
    for key in content.keys() - {*REPORT_KEYS}:
        if key not in EXTRAS or not isinstance(content[key], EXTRAS[key]):
            valid = ", ".join((*REPORT_KEYS, *EXTRAS))
            raise ValueError(f"report {file}: {shown(key)} is not a known key, or not of its kind; valid keys: {valid}")
    wrong = [key for key, name in NAMED.items() if not _like([{name: str}], content.get(key, []))]
    settings = content["settings"]
    wrong += [what for key, (what, form) in SETTINGS.items() if key in settings and not _like(form, settings[key])]
    if wrong:
        raise ValueError(f"report {file} has damaged {wrong[0]}: evaluate again to write it anew")
    for name in RECORDS.keys() & content.keys():
        records = content[name].items() if isinstance(content[name], dict) else enumerate(content[name])
        for label, record in records:
            if why := damage(name, record):
                raise ValueError(
                    f"report {file} has damaged {name}, that of {shown(label)}: {why}; evaluate again to write it anew"
                )


def row_of(record: Any) -> Row:
    """Return a row of report.json; refuse unknown and missing keys, and values of other types."""
    if not isinstance(record, dict):
        raise ValueError(f"{shown(record)} is no row")
    for key, value in entries(record):
        if isinstance(value, str | list | dict) and len(value) > LONGEST:
            raise ValueError(f"{shown(key)} has a length of {len(value)}, at most {LONGEST} is read")
    row = typed(Row, {key: value for key, value in record.items() if key != "ladder"})
    typed(Gate, {**row.lossless})
    if odd := [key for key, value in record.items() if key in TEXTS and not isinstance(value, str)]:
        raise ValueError(f"{odd[0]} is {shown(record[odd[0]])}, expected a text")
    if len(row.accepted_by_depth) != len(row.conditional_by_depth):
        raise ValueError("accepted_by_depth and conditional_by_depth differ in length")
    if missing := [name for name in PARTS if name not in row.seconds]:
        raise ValueError(f"seconds.{missing[0]} is missing")
    gaps = row.agreement.get("gaps", [])  # null stands for a gap that is not finite
    if not isinstance(gaps, list) or not all(gap is None or isinstance(gap, int | float) for gap in gaps):
        raise ValueError(f"agreement.gaps is {shown(gaps)}, expected a list of numbers")
    read_gaps = {"gaps": [math.inf if gap is None else gap for gap in gaps]} if gaps else {}
    return replace(row, agreement=row.agreement | read_gaps)


def damage(name: str, record: Any) -> str | None:
    """Return the damage of one record of an extra, None where it is sound."""
    if not isinstance(record, dict):
        return f"{shown(record)}, expected a mapping"
    for key, form in RECORDS[name].items():
        if key in record and not (key == "own" and record[key] is None) and not _like(form, record[key]):
            return f"{key} is {shown(record[key])}"
    return WHOLE[name](record) if name in WHOLE else None


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
