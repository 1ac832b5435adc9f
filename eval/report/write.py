"""The report: results, settings and losslessness checks, written as JSON, Markdown and HTML."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.measures.losslessness import WITHHELD, FailedChecks, Gate, SampledGate
from eval.measures.results import Row, finite
from eval.measures.serving import CONFIG, schedule_of
from eval.report.breakdown import with_breakdowns
from eval.report.render import RenderError, markdown, page
from heads.common.files import write_whole

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
    rows: list[Row]
    sampled: list[SampledGate] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Assert that a drafter which changed the output has no speedup."""
        for row in self.rows:
            assert not (row.has_speedup and self.failed(row)), f"{row.drafter} has a speedup and failed its check"

    def failed(self, row: Row) -> bool:
        """Whether a row failed a losslessness check."""
        return FailedChecks.of(self.gates, self.sampled).result(vars(row))

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
        """Return what to compare with care: what the evaluation noted, and numbers of few prompts."""
        whole = [row for row in self.rows if not row.category and not row.report]
        measured = [row for row in whole if row.tau is not None or row.speedup is not None]
        few = [row for row in measured if 0 < row.prompts < ENOUGH]  # 0: an earlier version did not count them
        noted = [
            f"1 prompt of {row.workload} is too few for a bootstrap interval: give prompts={ENOUGH} or more"
            if row.prompts == 1  # with nothing to resample there is no interval
            else f"{row.prompts} prompts of {row.workload} are few for a bootstrap interval, which is then too narrow: "
            f"give prompts={ENOUGH} or more"
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
        """Return the report as plain values for JSON; what is not finite becomes null."""
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
        """Write report.json, then what engines read of it, report.md and report.html, each whole or not at all.

        With the first, those of an earlier report go: what cannot be written after it is missing, and not an old one.
        A page that cannot be made is warned of, and leaves the other two.

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
        write_whole(file, text.encode(errors="replace"))
    except OSError as error:
        raise OSError(
            f"{file} cannot be written ({error.strerror or error}): free space there, or give another out"
        ) from error
