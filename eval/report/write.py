"""The report: results, settings and losslessness checks, written as JSON, Markdown and HTML.

A report.json is read back, checked against the schema.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.measures.losslessness import WITHHELD, FailedChecks, Gate, SampledGate
from eval.measures.results import ResultRow, finite
from eval.measures.serving import CONFIG, schedule_of
from eval.report.breakdown import with_breakdowns
from eval.report.render import RenderError, markdown, page
from heads.common.files import atomic_write
from heads.common.typed import typed
from heads.common.untrusted import parse_json, regular
from heads.common.untrusted import shown as quoted

SCHEMA = 1
READ = ("report.md", "report.html")  # by people
ENOUGH = 8  # prompts, below which a bootstrap interval is too narrow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """All rows, the losslessness checks of each drafter, and the extras of eval/live/extras.py."""

    target: dict[str, Any]
    device: dict[str, Any]
    settings: dict[str, Any]
    gates: dict[str, Gate]
    rows: list[ResultRow]
    sampled: list[SampledGate] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Assert that a drafter which changed the output has no speedup."""
        failed = FailedChecks.of(self.gates, self.sampled)
        for row in self.rows:
            assert not (row.has_speedup and failed.result(vars(row))), f"{row.drafter} has a speedup and failed"

    @property
    def passed(self) -> bool:
        """Whether every drafter is lossless; commands exit with a status that says so."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return a line for each drafter that failed a losslessness check."""
        lines = []
        for name, gate in self.gates.items():
            if not gate.checked:
                lines.append(f"{name}: no prompt was compared with the baseline; speedup {WITHHELD}")
            elif not gate.passed:
                why = "its rule is lossy by choice; " if gate.lossy else ""
                first = f"; {gate.first}" if gate.first else ""
                counts = f"{gate.failed} of {gate.checked} prompts differ from the baseline"
                lines.append(f"{name}: {why}{counts}; speedup {WITHHELD}{first}")
        return lines + [f"{check}; speedup {WITHHELD}" for check in self.sampled if not check.passed]

    def warnings(self) -> list[str]:
        """Return the report's warnings: the evaluation's, and those of few prompts."""
        whole = [row for row in self.rows if not row.category]
        measured = [row for row in whole if row.tau is not None or row.speedup is not None]
        few = [row for row in measured if 0 < row.prompts < ENOUGH]  # 0: an earlier version did not count them
        noted = [
            f"{row.prompts} prompts of {row.workload} are few for a bootstrap interval: give prompts={ENOUGH} or more"
            for row in few
        ]
        for row in whole:
            rate, latency, queued = row.request_rate, row.by_request.get("latency_s"), row.by_request.get("queue_s")
            if rate and latency and queued and rate * (latency["p50"] - queued["p50"]) > row.batch_size:
                noted.append(
                    f"{row.drafter} at {rate:g} req/s: requests come faster than they are answered, so the "
                    "queue grows while they come: give a lower request_rate or a larger batch_size"
                )
        return list(dict.fromkeys([*self.extras.get("warnings", []), *noted]))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values for JSON; numbers that are not finite become null."""
        gates = {name: gate.as_dict() for name, gate in self.gates.items()}
        sampled = {"sampled_gate": [check.as_dict() for check in self.sampled]} if self.sampled else {}
        content: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "target": self.target,
                "device": self.device,
                "settings": self.settings | {"gate": gates} | sampled,
                "rows": self.rows,
                **self.extras,
                **({"warnings": warnings} if (warnings := self.warnings()) else {}),
            }
        )
        return content | {"rows": with_breakdowns(content["rows"])}

    def write(self, folder: Path) -> None:
        """Write report.json, engines' files, report.md and report.html, each atomically.

        An earlier report's files are removed first, so none of them is left if a later write fails. A page that cannot
        be rendered is only a warning.

        Raises:
            OSError: the folder cannot be written, or the disk is full; the file is named.
        """
        content = self.as_dict()
        _write(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        for name in (*READ, CONFIG):
            (folder / name).unlink(missing_ok=True)
        if schedule := schedule_of(self.rows):
            _write(folder / CONFIG, json.dumps(schedule, indent=2) + "\n")
        _write(folder / "report.md", markdown(content, self.failures()))
        try:
            _write(folder / "report.html", page(content, self.failures()))
        except RenderError as error:
            log.warning("%s is not written, the other files are: %s", folder / "report.html", error)


def _write(file: Path, text: str) -> None:
    try:
        atomic_write(file, text.encode(errors="replace"))
    except OSError as error:
        raise OSError(
            f"{file} cannot be written ({error.strerror or error}): free space there, or give another out"
        ) from error


# Of a row: computed again, or of earlier versions.
UNREAD = ("ladder", "definitions", "report", "overlap_headroom", "state", "tau_within_depth")
REPORT_KEYS = ("schema", "target", "device", "settings", "rows")  # all other keys are extras


def read_report(file: Path) -> dict[str, Any]:
    """Return the content of a report.json; refuse a missing or damaged file, and another schema."""
    try:
        content = parse_json(regular(file).read_bytes())
    except OSError as error:
        raise ValueError(f"report {file} cannot be read ({error.strerror}): give a report.json") from None
    except ValueError as error:
        raise ValueError(f"report {file} is damaged ({error}): evaluate again") from None
    if not isinstance(content, dict) or "schema" not in content or not isinstance(content.get("rows"), list):
        raise ValueError(f"{file} is no report: give a report.json, as eval/run.py writes it")
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"report {file} has schema {quoted(content['schema'])}, this version reads {SCHEMA}: evaluate again with "
            "this version, or read it with the one that wrote it"
        )
    for key in ("target", "device", "settings"):
        if not isinstance(content.get(key), dict):
            raise ValueError(f"report {file} has no {key}: evaluate again")
    for number, row in enumerate(content["rows"]):
        try:
            row_of(row)
        except ValueError as error:
            raise ValueError(f"report {file}, row {number}: {error}; evaluate again") from None
    return content


def row_of(record: Any) -> ResultRow:
    """Return a row of report.json; refuse unknown and missing keys, and values of other types."""
    if not isinstance(record, dict):
        raise ValueError(f"{quoted(record)} is no row")
    return typed(ResultRow, {key: value for key, value in record.items() if key not in UNREAD})


def report_of(content: Mapping[str, Any], file: str) -> Report:
    """Return the report of a report.json's content; refuse damaged checks."""
    try:
        gates = {name: Gate.read(check) for name, check in content["settings"].get("gate", {}).items()}
        sampled = [SampledGate.read(check) for check in content["settings"].get("sampled_gate", [])]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"report {file} has damaged gates ({error}): evaluate again") from None
    rows = [row_of(row) for row in content["rows"]]
    settings = {key: value for key, value in content["settings"].items() if key not in ("gate", "sampled_gate")}
    extras = {key: value for key, value in content.items() if key not in REPORT_KEYS}
    return Report(content["target"], content["device"], settings, gates, rows, sampled, extras)
