"""Reports read back: a report.json of this schema as it was written, or one line that says why not."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from eval.measures import metrics
from eval.measures.losslessness import Gate
from eval.measures.results import Row
from eval.report.breakdown import laddered
from eval.report.forms import RECORDS, damage, damage_of_settings
from eval.report.recorded import greedy_check, sampled_check
from eval.report.write import SCHEMA, Report
from heads.common.typed import typed
from heads.common.untrusted import names_code, parse_json, regular, shown

OWN = ("schema", "target", "device", "settings", "rows")  # what else stands in a report are its extras
EXTRAS = {  # by eval/live/extras.py and the tiers, and where reports stand side by side
    "training": dict, "trees": dict, "teacher_forced": dict, "other_trees": dict, "answers": list, "reports": list,
    "warnings": list,
}  # fmt: skip
GATES = ("gate", "sampled_gate")  # of its settings
TEXTS = [each.name for each in fields(Row) if each.type is str]  # which `typed` makes of numbers too
# Beyond these a report is none of ours, and its page would take gigabytes.
MOST_BYTES, MOST_ROWS = 32 << 20, 2_000
LONGEST = 4_000  # text, list or mapping in a row
GREATEST = 1e20  # number; seeds have 64 bits
SPEEDUPS = ("speedup", "speedup_ci", "speedup_hf", "whole_speedup", "whole_speedup_ci")


def read_report(file: Path) -> dict[str, Any]:
    """Return what a report.json holds, every row of it as `Row` has it.

    Raises:
        ValueError: there is no such file, it is damaged, no report, or one of another schema; the file is named.
    """
    try:
        with regular(file).open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        told = parse_json(content)
    except OSError as error:
        raise ValueError(f"report {file} cannot be read ({error.strerror}): give a report.json") from None
    except ValueError as error:
        raise ValueError(f"report {file} is damaged ({error}): evaluate again to write it anew") from None
    if not isinstance(told, dict) or "schema" not in told or not isinstance(told.get("rows"), list):
        raise ValueError(f"{file} is no report: give a report.json, as eval/run.py writes it")
    if told["schema"] != SCHEMA:
        raise ValueError(
            f"report {file} has schema {shown(told['schema'])}, this version reads {SCHEMA}: evaluate again with this "
            "version, or read it with the one that wrote it"
        )
    for key in ("target", "device", "settings"):
        if not isinstance(told.get(key), dict):
            raise ValueError(f"report {file} has no {key}: evaluate again to write it anew")
    if len(told["rows"]) > MOST_ROWS:
        raise ValueError(
            f"report {file} has {len(told['rows'])} rows, {MOST_ROWS} are read: evaluate fewer drafters, workloads or "
            "settings at once"
        )
    if odd := next(((key, value) for key, value in _held(told) if _is_odd(value)), None):
        raise ValueError(
            f"report {file}: {shown(odd[0])} is {shown(odd[1])}, no number that is measured: evaluate again"
        )
    _check_extras(told, file)
    for number, row in enumerate(told["rows"]):
        try:
            row_of(row)
        except ValueError as error:
            raise ValueError(f"report {file}, row {number}: {error}; evaluate again to write it anew") from None
    _check_ladders(told["rows"], file)
    return told


def report_of(told: Mapping[str, Any], file: str) -> Report:
    """Return the report that `read_report` has read.

    Raises:
        ValueError: its gates are damaged, or a row has a speedup though it failed a losslessness check.
    """
    try:
        gates = {name: greedy_check(each) for name, each in told["settings"].get("gate", {}).items()}
        sampled = [sampled_check(each) for each in told["settings"].get("sampled_gate", [])]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"report {file} has damaged gates ({error}): evaluate again to write it anew") from None
    settings = {key: value for key, value in told["settings"].items() if key not in GATES}
    extras = {key: value for key, value in told.items() if key not in OWN}
    report = Report(told["target"], told["device"], settings, gates, [], sampled, extras)
    rows = [row_of(row) for row in told["rows"]]
    for row in rows:
        if report.failed(row) and any(getattr(row, key) is not None for key in SPEEDUPS):
            raise ValueError(f"report {file}: {row.drafter} has a speedup and failed its check: evaluate again")
    return replace(report, rows=rows)


def _held(told: Any, key: str = "it") -> Iterator[tuple[str, Any]]:
    """Yield a value and all that it holds, each with the key that it stands under."""
    yield key, told
    if isinstance(told, dict):
        for inner, value in told.items():
            yield from _held(value, inner)
    elif isinstance(told, list):
        for value in told:
            yield from _held(value, key)


def _is_odd(value: Any) -> bool:
    """Whether this is a number that nobody measures, such as one that is not finite."""
    return isinstance(value, int | float) and not abs(value) <= GREATEST


def _check_ladders(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Check that the numbers of rows that are compared with each other go together.

    Raises:
        ValueError: they lead to no finite ladder; the file is named.
    """
    try:
        right = not any(_is_odd(value) for row in laddered(rows) for _, value in _held(row["ladder"]))
    except ArithmeticError:
        right = False
    if not right:
        raise ValueError(f"report {file}: seconds, steps and tokens of its rows contradict each other: evaluate again")


def _check_extras(told: dict[str, Any], file: Path) -> None:
    """Check what a report holds besides its rows: what is known, of its kind, and naming no code.

    Raises:
        ValueError: the file and the key are named.
    """
    if code := names_code(told):
        raise ValueError(f"report {file} names code to run by the key {code}, which is refused: evaluate again")
    for key in told.keys() - {*OWN}:
        if key not in EXTRAS or not isinstance(told[key], EXTRAS[key]):
            known = ", ".join((*OWN, *EXTRAS))
            raise ValueError(f"report {file}: {shown(key)} is not a known key, or not of its kind; valid keys: {known}")
    for key in ("answers", "reports"):
        name = "drafter" if key == "answers" else "name"
        if not all(isinstance(each, dict) and isinstance(each.get(name), str) for each in told.get(key, [])):
            raise ValueError(f"report {file} has damaged {key}: evaluate again to write it anew")
    if what := damage_of_settings(told["settings"]):
        raise ValueError(f"report {file} has damaged {what}: evaluate again to write it anew")
    for part in RECORDS.keys() & told.keys():
        records = told[part].items() if isinstance(told[part], dict) else enumerate(told[part])
        for of, record in records:
            if wrong := damage(part, record):
                raise ValueError(
                    f"report {file} has damaged {part}, that of {shown(of)}: {wrong}; evaluate again to write it anew"
                )


def row_of(told: Any) -> Row:
    """Return a row of report.json.

    Raises:
        ValueError: a key is unknown or missing, or its value of another type.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{shown(told)} is no row")
    for key, value in _held(told):
        if isinstance(value, str | list | dict) and len(value) > LONGEST:
            raise ValueError(f"{shown(key)} has a length of {len(value)}, at most {LONGEST} is read")
    row = typed(Row, {key: value for key, value in told.items() if key != "ladder"})
    typed(Gate, {**row.lossless})
    if odd := [key for key, value in told.items() if key in TEXTS and not isinstance(value, str)]:
        raise ValueError(f"{odd[0]} is {shown(told[odd[0]])}, expected a text")
    if len(row.accepted_by_depth) != len(row.conditional_by_depth):
        raise ValueError("accepted_by_depth and conditional_by_depth differ in length")
    if missing := [part for part in metrics.seconds([]) if part not in row.seconds]:
        raise ValueError(f"seconds.{missing[0]} is missing")
    gaps = row.agreement.get("gaps", [])  # null stands for a gap that is not finite
    if not isinstance(gaps, list) or not all(gap is None or isinstance(gap, int | float) for gap in gaps):
        raise ValueError(f"agreement.gaps is {shown(gaps)}, expected a list of numbers")
    known = {"gaps": [math.inf if gap is None else gap for gap in gaps]} if gaps else {}
    return replace(row, agreement=row.agreement | known)
