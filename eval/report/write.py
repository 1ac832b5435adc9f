"""The report: results, settings and losslessness checks, written as JSON, Markdown and HTML.

A report.json is read back, checked against the schema.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from eval.measures.losslessness import WITHHELD, FailedChecks, Gate, SampledGate
from eval.measures.results import LIVE, ResultRow, finite
from eval.report.render import RenderError, markdown, page
from eval.report.view import with_breakdowns
from heads import HEADS
from heads.common.files import atomic_write
from heads.common.typed import Json, typed
from heads.common.untrusted import parsed_file
from heads.common.untrusted import shown as quoted
from heads.formats.published.export import FORMATS

SCHEMA = 1
SERVING = "speculative_config.json"  # keys of vLLM's --speculative-config, except method and model
READ = ("report.md", "report.html")  # readable reports
ENOUGH = 8  # prompts; with fewer a bootstrap interval is too narrow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """All rows, the losslessness checks of each drafter, and the extras of eval/extras.py."""

    target: Json
    device: Json
    settings: Json
    gates: dict[str, Gate]
    rows: list[ResultRow]
    sampled: list[SampledGate] = field(default_factory=list)
    extras: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Assert that no drafter that changed the output has a speedup."""
        failed = FailedChecks.of(self.checks())
        for row in self.rows:
            speedups = {row.speedup, row.speedup_ci, row.speedup_hf, row.whole_speedup, row.whole_speedup_ci}
            assert speedups == {None} or not failed.result(vars(row)), f"{row.drafter} has a speedup and failed"

    @property
    def passed(self) -> bool:
        """Return whether every drafter is lossless; commands exit with status 1 otherwise."""
        return not self.failures()

    def failures(self) -> list[str]:
        """Return a line for each drafter that failed a losslessness check."""
        lines = []
        for name, gate in self.gates.items():
            if not gate.checked:
                lines.append(f"{name}: no prompt was compared; speedup {WITHHELD}")
            elif not gate.passed:
                why = "its rule is lossy by choice; " if gate.lossy else ""
                first = f"; {gate.first}" if gate.first else ""
                counts = f"{gate.failed} of {gate.checked} prompts differ from the reference"
                lines.append(f"{name}: {why}{counts}; speedup {WITHHELD}{first}")
        return lines + [f"{check}; speedup {WITHHELD}" for check in self.sampled if not check.passed]

    def warnings(self) -> list[str]:
        """Return the report's warnings: the evaluation's, and those of few prompts."""
        overall = [row for row in self.rows if not row.category]
        measured = [row for row in overall if row.tau is not None or row.speedup is not None]
        few = [row for row in measured if 0 < row.prompts < ENOUGH]  # earlier versions did not count prompts
        noted = [
            f"{row.prompts} prompts of {row.workload} are few for a bootstrap interval: give prompts={ENOUGH} or more"
            for row in few
        ]
        for row in overall:
            rate, latency, queued = row.request_rate, row.by_request.get("latency_s"), row.by_request.get("queue_s")
            if rate and latency and queued and rate * (latency["p50"] - queued["p50"]) > row.batch_size:
                noted.append(
                    f"{row.drafter} at {rate:g} req/s: requests come faster than they are answered, so the "
                    "queue grows while they come: give a lower request_rate or a larger batch_size"
                )
        return list(dict.fromkeys([*self.extras.get("warnings", []), *noted]))

    def checks(self) -> Json:
        """Return the losslessness checks for the settings."""
        gates = {name: gate.as_dict() for name, gate in self.gates.items()}
        return {"gate": gates} | ({"sampled_gate": [c.as_dict() for c in self.sampled]} if self.sampled else {})

    def as_dict(self) -> Json:
        """Return the report as JSON values; numbers that are not finite become null."""
        content: Json = finite(
            {
                "schema": SCHEMA,
                "target": self.target,
                "device": self.device,
                "settings": self.settings | self.checks(),
                "rows": self.rows,
                **self.extras,
                **({"warnings": warnings} if (warnings := self.warnings()) else {}),
            }
        )
        return content | {"rows": with_breakdowns(content["rows"])}

    def write(self, folder: Path) -> None:
        """Write report.json, engines' files, report.md and report.html, each atomically.

        An earlier report's files are removed first, so that none is left if a write fails. A page that cannot be
        rendered is only a warning; refuse, naming the file, where the disk is full or the folder cannot be written.
        """
        content = self.as_dict()
        _write(folder / "report.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        for name in (*READ, SERVING):
            (folder / name).unlink(missing_ok=True)
        if schedule := serving_schedule(self.rows):
            _write(folder / SERVING, json.dumps(schedule, indent=2) + "\n")
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


def is_served(drafter: str) -> bool:
    """Return whether vLLM can serve a drafter."""
    kind = drafter.partition(" ")[0]
    return kind not in HEADS or kind in FORMATS["vllm"]


def serving_config(best: Mapping[int, int]) -> Json:
    """Return vLLM's config of draft tokens by batch size; each measured size applies up to the next.

    Its ranges are inclusive, and the last is unbounded. If no size drafts, it names one token that is never drafted.
    """
    groups = [(tokens, list(sizes)) for tokens, sizes in groupby(sorted(best), key=lambda size: best[size])]
    starts = [1, *(sizes[0] for _, sizes in groups[1:])]
    ends = [*(start - 1 for start in starts[1:]), max(best)]
    ranges = [[start, end, tokens] for start, end, (tokens, _) in zip(starts, ends, groups, strict=True)]
    return {"num_speculative_tokens": max(1, *best.values()), "num_speculative_tokens_per_batch_size": ranges}


def serving_schedule(rows: Sequence[ResultRow]) -> Json | None:
    """Return vLLM's config for a report with one lossless greedy chain at several batch sizes; otherwise None."""
    chains = [
        row
        for row in rows
        if row.tree.startswith(("chain", "served")) and row.accepted_by_depth and not row.lossless.get("failed")
        if (row.temperature, row.category, row.request_rate, row.tier) == (0, "", None, LIVE)
    ]
    if len({(row.drafter, row.tree, row.workload) for row in chains}) != 1 or not is_served(chains[0].drafter):
        return None
    limits = [int(limit) for limit in re.findall(r"(?:chain-|depth )(\d+)", chains[0].tree)]
    depth = min(limits, default=len(chains[0].accepted_by_depth))
    best = {row.batch_size: depth if row.speedup > 1 else 0 for row in chains if row.speedup}
    return serving_config(best) if len(best) > 1 else None


UNREAD = ("ladder",)  # keys of a row that are computed again on reading


def read_report(file: Path) -> Json:
    """Return the content of a report.json; refuse a missing or damaged file, and another schema."""
    try:
        content = parsed_file(file, "evaluate again")
    except OSError as error:
        raise ValueError(f"report {file} cannot be read ({error.strerror}): give a report.json") from None
    if not isinstance(content, dict) or "schema" not in content or not isinstance(content.get("rows"), list):
        raise ValueError(f"{file} is no report: give a report.json, as eval/run.py writes it")
    if content["schema"] != SCHEMA:
        raise ValueError(
            f"report {file} has schema {quoted(content['schema'])}, this version reads {SCHEMA}: evaluate again with "
            "this version, or read it with the one that wrote it"
        )
    section = ""
    try:
        for section in ("target", "device", "settings"):
            if not isinstance(content[section], dict):
                raise ValueError("it is no mapping")
        for index, row in enumerate(content["rows"]):
            section = f"row {index}"
            row_of(row)
        section = "gates"
        for gate in content["settings"].get("gate", {}).values():
            Gate.read(gate)
        for check in content["settings"].get("sampled_gate", []):
            SampledGate.read(check)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"report {file} is damaged in its {section} ({error}): evaluate again") from None
    return content


def row_of(record: Any) -> ResultRow:
    """Return a row of report.json; refuse unknown and missing keys, and wrong types."""
    if not isinstance(record, dict):
        raise ValueError(f"{quoted(record)} is no row")
    return typed(ResultRow, {key: value for key, value in record.items() if key not in UNREAD})
