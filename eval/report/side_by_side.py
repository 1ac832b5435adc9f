"""Reports of earlier evaluations in one: nothing is measured, and everything that their rows hold is kept.

Each row says which report it is from. What was measured in two sessions was not measured beside each other, so the page
begins with what each was measured on and under, and with the differences that forbid a comparison.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.measures.losslessness import Gate, labelled
from eval.report.columns import flattened
from eval.report.forms import RECORDS
from eval.report.reading import read_report, report_of
from eval.report.tables import shown
from eval.report.view import results_of
from eval.report.write import Report

# What says nothing about whether numbers compare.
HARMLESS = ("path", "load", "clock_mhz", "python", "gate_dtype", "gate_tv", "repeats", "warmup", "warmup_prompts")
NEVER_BESIDE = (
    "these reports were measured in sessions of their own: speedups are each over plain decoding of their own session"
)
# What a record of each part beside the rows must have to be shown.
NEEDED: dict[str, set[str]] = {part: {*form} for part, form in RECORDS.items()} | {"other_trees": {"trees"}}
KEPT = 12  # characters of a hash that tell it from others
HASHES = ("revision", "fingerprint")


def side_by_side(files: Sequence[str]) -> Report:
    """Return one report of several, rows in the order of the files.

    Its target, device and settings hold what all have in common; where they differ, all that there is.

    Raises:
        ValueError: a file is missing, damaged, no report, of another schema, or itself one of several.
    """
    found = {}
    for name, file in zip(names(files), files, strict=True):
        found[name] = report_of(read_report(Path(file).expanduser()), file)
        if any(row.report for row in found[name].rows):
            raise ValueError(f"report {file} has several side by side already: name the reports it was made of")
    return Report(
        target=shared([report.target for report in found.values()]),
        device=shared([report.device for report in found.values()]),
        settings=shared([report.settings for report in found.values()]),
        gates=dict(_gates(found)),
        rows=[replace(row, report=name) for name, report in found.items() for row in report.rows],
        sampled=[
            replace(each, drafter=labelled(each.drafter, 1, name))
            for name, report in found.items()
            for each in report.sampled
        ],
        extras={
            "reports": [_told(name, file, found[name]) for name, file in zip(found, files, strict=True)],
            "warnings": [NEVER_BESIDE, *differences(found), *left_out(found)],
            **_extras(found),
        },
    )


def names(files: Sequence[str]) -> list[str]:
    """Return what to call each report: a run's report.json by its folder, another file by its name, else all of it."""
    short = [path.parent.name if path.name == "report.json" else path.stem for path in map(_whole, files)]
    return [name if short.count(name) == 1 else file for name, file in zip(short, files, strict=True)]


def folder_of(files: Sequence[str]) -> Path:
    """Return where reports side by side go unless the user says."""
    return Path("outputs") / "-".join(["compare", *(name.replace("/", "-") for name in names(files))])


def _whole(file: str) -> Path:
    return Path(file).expanduser().resolve()


def shared(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that all have in common, and where they differ, all of them in one text."""
    made: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in each for key in one):
        values = [one.get(key) for one in each]
        if any(isinstance(value, Mapping) for value in values):
            made[key] = shared([value for value in values if isinstance(value, Mapping)])
        elif all(value == values[0] for value in values):
            made[key] = values[0]
        else:
            made[key] = " / ".join(dict.fromkeys("-" if value is None else str(value) for value in values))
    return made


def differences(found: Mapping[str, Report]) -> list[str]:
    """Return a line for each part of the conditions in which reports differ, with the values of all."""
    parts = {name: conditions(report) for name, report in found.items()}
    lines = []
    for part in next(iter(parts.values())):
        flat = {name: dict(flattened(each[part])) for name, each in parts.items()}
        told = []
        for key in dict.fromkeys(key for each in flat.values() for key in each):
            of: dict[str, list[str]] = {}
            for name, each in flat.items():
                of.setdefault(_brief(key, each.get(key)), []).append(name)
            if len(of) > 1 and not {*key.split(".")} & {*HARMLESS}:
                told.append(f"{key} ({'; '.join(f'{value} in {_listed(those)}' for value, those in of.items())})")
        if told:
            lines.append(f"they differ in the {part}: {', '.join(told)}")
    return lines


def conditions(report: Report) -> dict[str, dict[str, Any]]:
    """Return what a report's numbers depend on, in parts; of its provenance the code alone."""
    provenance = report.settings.get("provenance", {})
    rows = [each.row for each in results_of({"rows": [vars(row) for row in report.rows]}) if each.overall]
    return {
        "target": report.target,
        "device": report.device,
        "settings": {key: value for key, value in report.settings.items() if key != "provenance"},
        "code": {key: provenance.get(key) for key in ("revision", "dirty")},
        "work": {
            "workload": _listed(row["workload"] for row in rows),
            "temperature": _listed(f"{row['temperature']:g}" for row in rows),
            "batch_size": _listed(row["batch_size"] for row in rows),
            "tier": _listed(row["tier"] for row in rows),
            "request_rate": _listed(shown(row["request_rate"], None) for row in rows),
        },
    }


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _brief(key: str, value: Any) -> str:
    """Return a value for reading."""
    return "unknown" if value is None else str(value)[:KEPT] if key in HASHES else str(value)


def _gates(found: Mapping[str, Report]) -> Iterator[tuple[str, Gate]]:
    """Yield the gates under the names by which rows with a report look for them."""
    for name, report in found.items():
        for of, gate in report.gates.items():
            yield labelled(of, 1, name), gate


def _told(name: str, file: str, report: Report) -> dict[str, Any]:
    """Return what a report says of itself, besides its rows and gates."""
    work = conditions(report)["work"]
    own = {"target": report.target, "device": report.device, "settings": report.settings}
    return {"name": name, "file": file, "work": work, **own}


def left_out(found: Mapping[str, Report]) -> Iterator[str]:
    """Yield a line for each report of which parts beside the rows are in the form of another version."""
    for name, report in found.items():
        if wrong := [key for key, each in report.extras.items() if not _readable(key, each)]:
            yield f"{', '.join(wrong)} of {name} are in the form of another version, and left out here"


def _readable(key: str, each: Any) -> bool:
    """Whether a part of a report beside its rows has what the page shows of it."""
    records = list(each.values()) if isinstance(each, Mapping) else each
    known = key in NEEDED and isinstance(records, list)
    return known and all(
        set(one) >= NEEDED[key] and not any(isinstance(piece, list) for piece in one.get("pieces", []))
        for one in records
    )


def _extras(found: Mapping[str, Report]) -> dict[str, Any]:
    """Return the reports' extras, each with its drafters called by their report too."""
    made: dict[str, Any] = {}
    for name, report in found.items():
        for key, each in report.extras.items():
            if not _readable(key, each):
                continue
            if isinstance(each, Mapping):
                made.setdefault(key, {}).update({labelled(of, 1, name): value for of, value in each.items()})
            else:
                of = [{**one, "drafter": labelled(one["drafter"], 1, name)} for one in each]
                made.setdefault(key, []).extend(of)
    return made
