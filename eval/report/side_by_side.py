"""Combining the reports of earlier evaluations: nothing is measured, and every row is copied whole.

Each row names its report. Numbers of two sessions were not measured beside each other, so the page begins with each
report's target, device and settings, and with the differences that forbid a comparison.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from eval.measures.losslessness import labelled
from eval.report.columns import flattened
from eval.report.reading import RECORDS, read_report, report_of
from eval.report.view import results_of, shown
from eval.report.write import Report

T = TypeVar("T")

# Settings that do not decide whether numbers compare.
HARMLESS = ("path", "load", "clock_mhz", "python", "gate_dtype", "gate_tv", "repeats", "warmup", "warmup_prompts")
WARNINGS = "warnings"  # an extra of texts, unlike the others
NEVER_BESIDE = (
    "these reports were measured in sessions of their own: speedups are each over the baseline of their own session"
)
# The keys that a record of each extra needs to be shown.
NEEDED: dict[str, set[str]] = {name: {*form} for name, form in RECORDS.items()} | {"other_trees": {"trees"}}
WORK = ("workload", "temperature", "batch_size", "tier", "request_rate")
HASH_CHARS = 12  # characters of a hash that tell it from others
HASHES = ("revision", "fingerprint")


def side_by_side(files: Sequence[str]) -> Report:
    """Return one report of several, rows in the order of the files.

    Its target, device and settings hold the values in common; where they differ, all values.

    Raises:
        ValueError: a file is missing, damaged, no report, of another schema, or itself one of several.
    """
    reports = {}
    for name, file in zip(names(files), files, strict=True):
        reports[name] = report_of(read_report(Path(file).expanduser()), file)
        if any(row.report for row in reports[name].rows):
            raise ValueError(f"report {file} has several side by side already: name the reports it was made of")
    warnings = [f"{name}: {warning}" for name, report in reports.items() for warning in report.extras.get(WARNINGS, [])]
    return Report(
        target=shared([report.target for report in reports.values()]),
        device=shared([report.device for report in reports.values()]),
        settings=shared([report.settings for report in reports.values()]),
        gates=dict(pair for name, report in reports.items() for pair in _labelled(report.gates, name).items()),
        rows=[replace(row, report=name) for name, report in reports.items() for row in report.rows],
        sampled=[
            replace(check, drafter=labelled(check.drafter, 1, name))
            for name, report in reports.items()
            for check in report.sampled
        ],
        extras={
            "reports": [
                {"name": name, "file": file, "work": conditions(report)["work"]}
                | {key: getattr(report, key) for key in ("target", "device", "settings")}
                for file, (name, report) in zip(files, reports.items(), strict=True)
            ],
            WARNINGS: [NEVER_BESIDE, *differences(reports), *left_out(reports), *warnings],
            **_extras(reports),
        },
    )


def names(files: Sequence[str]) -> list[str]:
    """Return a name for each report: the folder of a run's report.json, another file's name, else the path."""
    paths = [Path(file).expanduser().resolve() for file in files]
    short = [path.parent.name if path.name == "report.json" else path.stem for path in paths]
    return [name if short.count(name) == 1 else file for name, file in zip(short, files, strict=True)]


def folder_of(files: Sequence[str]) -> Path:
    """Return the default output folder of a combined report."""
    return Path("outputs") / "-".join(["compare", *(name.replace("/", "-") for name in names(files))])


def shared(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values that all mappings have in common; where they differ, all of them in one text."""
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for mapping in mappings for key in mapping):
        values = [mapping.get(key) for mapping in mappings]
        if any(isinstance(value, Mapping) for value in values):
            common[key] = shared([value for value in values if isinstance(value, Mapping)])
        elif all(value == values[0] for value in values):
            common[key] = values[0]
        else:
            common[key] = " / ".join(dict.fromkeys("-" if value is None else str(value) for value in values))
    return common


def differences(reports: Mapping[str, Report]) -> list[str]:
    """Return a line for each group of conditions that differ between reports, with the values of all."""
    conditions_of = {name: conditions(report) for name, report in reports.items()}
    lines = []
    for part_name in next(iter(conditions_of.values())):
        flat = {name: dict(flattened(parts[part_name])) for name, parts in conditions_of.items()}
        differing = []
        for key in dict.fromkeys(key for values in flat.values() for key in values):
            names_by_value: dict[str, list[str]] = {}
            for name, values in flat.items():
                names_by_value.setdefault(_brief(key, values.get(key)), []).append(name)
            if len(names_by_value) > 1 and not {*key.split(".")} & {*HARMLESS}:
                values_of = (f"{value} in {_listed(names)}" for value, names in names_by_value.items())
                differing.append(f"{key} ({'; '.join(values_of)})")
        if differing:
            lines.append(f"they differ in the {part_name}: {', '.join(differing)}")
    return lines


def conditions(report: Report) -> dict[str, dict[str, Any]]:
    """Return the conditions that a report's numbers depend on, in groups; of its provenance the code alone."""
    provenance = report.settings.get("provenance", {})
    rows = [result.row for result in results_of({"rows": [vars(row) for row in report.rows]}) if result.overall]
    return {
        "target": report.target,
        "device": report.device,
        "settings": {key: value for key, value in report.settings.items() if key != "provenance"},
        "code": {key: provenance.get(key) for key in ("revision", "dirty")},
        "work": {key: _listed(shown(row[key], None) for row in rows) for key in WORK},
    }


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))


def _brief(key: str, value: Any) -> str:
    return "unknown" if value is None else str(value)[: HASH_CHARS if key in HASHES else None]


def _labelled(by_drafter: Mapping[str, T], report: str) -> dict[str, T]:
    """Return values by the names by which rows with a report look for them."""
    return {labelled(drafter, 1, report): value for drafter, value in by_drafter.items()}


def left_out(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield a line for each report with extras in the form of another version."""
    for name, report in reports.items():
        extras = {key: extra for key, extra in report.extras.items() if key != WARNINGS}
        if wrong := [key for key, extra in extras.items() if not _readable(key, extra)]:
            yield f"{', '.join(wrong)} of {name} are in the form of another version, and left out here"


def _readable(key: str, extra: Any) -> bool:
    """Whether an extra has the keys that the page shows."""
    records = list(extra.values()) if isinstance(extra, Mapping) else extra
    shown_here = key in NEEDED and isinstance(records, list)
    return shown_here and all(
        set(record) >= NEEDED[key] and not any(isinstance(piece, list) for piece in record.get("pieces", []))
        for record in records
    )


def _extras(reports: Mapping[str, Report]) -> dict[str, Any]:
    """Return the reports' extras, with each drafter's name followed by its report's."""
    extras: dict[str, Any] = {}
    for name, report in reports.items():
        for key, extra in report.extras.items():
            if not _readable(key, extra):
                continue
            if isinstance(extra, Mapping):
                extras.setdefault(key, {}).update(_labelled(extra, name))
            else:
                records = ({**record, "drafter": labelled(record["drafter"], 1, name)} for record in extra)
                extras.setdefault(key, []).extend(records)
    return extras
