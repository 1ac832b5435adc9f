"""The report: what was measured, under which settings, and was it lossless? As JSON, Markdown, a page and a table."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from data.features.store_files import write_whole
from eval.measures.losslessness import Gate, SampledGate, labelled
from eval.measures.metrics import LEVEL
from eval.measures.results import LIVE, Row
from eval.measures.written import finite
from eval.report import advice, breakdown
from eval.report.page.build import RenderError, page
from eval.report.sections import reports, sections
from eval.report.tables import grid, number, spread
from heads.common.untrusted import visible

SCHEMA = 1
READ = ("report.md", "report.html")  # by people

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """All rows, the greedy gate's verdict on each drafter, and what eval/live/extras.py knows besides."""

    target: dict[str, Any]
    device: dict[str, Any]
    settings: dict[str, Any]
    gates: dict[str, Gate]
    rows: list[Row]
    sampled: list[SampledGate] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Hold the promise that a drafter which changed the output is given no speedup."""
        for row in self.rows:
            told = {row.speedup, row.speedup_ci, row.speedup_hf, row.whole_speedup, row.whole_speedup_ci} != {None}
            assert not (told and self.red(row)), f"{row.drafter} has a speedup and a red gate"

    def red(self, row: Row) -> bool:
        """Whether the row's drafter failed the gate."""
        gate = self.gates.get(labelled(row.drafter, row.batch_size, row.report))
        name = labelled(row.drafter, 1, row.report)
        drawn = (each for each in self.sampled if (each.drafter, each.temperature) == (name, row.temperature))
        wrong = gate is not None and not gate.passed
        return row.lossless["failed"] > 0 or wrong or not all(each.passed for each in drawn)

    @property
    def overall(self) -> list[Row]:
        """The rows of whole workloads by decoding, without those of single categories; all tiers where none decoded."""
        whole = [row for row in self.rows if not row.category]
        return [row for row in whole if row.tier == LIVE] or whole

    def name(self, row: Row) -> str:
        """Return what tables call a row: its drafter, and where there are several, its workload."""
        several = len({row.workload for row in self.overall}) > 1
        name = labelled(row.drafter, row.batch_size, row.report, row.request_rate)
        return name + (f" on {row.workload}" if several else "")

    @property
    def passed(self) -> bool:
        """Whether every drafter is lossless; commands exit with a status that says so."""
        return all(gate.passed for gate in self.gates.values()) and all(each.passed for each in self.sampled)

    def failures(self) -> list[str]:
        """Return a line for each drafter whose gate is red."""
        greedy = [_failure(name, gate) for name, gate in self.gates.items() if not gate.passed]
        return greedy + [f"{each}; speedup withheld" for each in self.sampled if not each.passed]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON; what is not finite becomes null."""
        gates = {
            name: gate.counts()
            | {"passed": gate.passed, "first": gate.first}
            | ({"ties": gate.ties} if gate.ties else {})
            for name, gate in self.gates.items()
        }
        drawn = {"sampled_gate": [each.as_dict() for each in self.sampled]} if self.sampled else {}
        told: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "target": self.target,
                "device": self.device,
                "settings": self.settings | {"gate": gates} | drawn,
                "rows": self.rows,
                **self.extras,
            }
        )
        return told | {"rows": breakdown.laddered(told["rows"])}

    def write(self, folder: Path) -> None:
        """Write report.json, then report.md, then report.html, each whole or not at all.

        With the first, those of an earlier report go: what cannot be written after it is missing, and not an old one.
        A page that cannot be made is told of, and leaves the other two.

        Raises:
            OSError: the folder cannot be written, or the disk is full; the file is named.
        """
        told = self.as_dict()
        _write(folder / "report.json", json.dumps(told, indent=1, allow_nan=False) + "\n")
        for name in READ:
            (folder / name).unlink(missing_ok=True)
        _write(folder / "report.md", markdown(self))
        try:
            _write(folder / "report.html", page(told, title(self), self.failures(), notes_of(self)))
        except RenderError as error:
            log.warning("%s is not written, the other files are: %s", folder / "report.html", error)


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, text.encode(errors="replace"))
    except OSError as error:
        raise OSError(
            f"{file} cannot be written ({error.strerror or error}): free space there, or give another out"
        ) from error


INTERVAL = f"[{LEVEL:.0%}]"
HEADER = (
    "drafter",
    "T",
    "rule",
    f"τ {INTERVAL}",
    "P(a≥1) P(a≥2) …",
    "tok/s",
    f"speedup {INTERVAL}",
    "vs HF",
    "lossless",
)
DEPTHS = 8  # of P(a >= d), in a table
TIMES = ("draft", "verify", "other")
TIME_HEADER = (
    *("drafter", "T", "tree", "steps", *(f"{part} ms" for part in TIMES)),
    *("drafted", "accepted / drafted", "overlap headroom", "latency s"),
)
NOTES = (
    "τ is what a target pass commits on average, its bonus token included: the tokens after the prefill's over the "
    "passes, pooled over all prompts. Intervals come from resampling the prompts, all turns of a "
    "conversation and all copies of a prompt at once; distinct_prompts among the settings counts those that differ.",
    "Speed is that of decoding alone, without the prefill. Each prompt counts with its median repeat. Plain decoding, "
    "every drafter and HF generate take turns on each prompt in random order.",
    "P(a≥d) is the share of target passes in which d drafted tokens or more were accepted.",
    "speedup is over plain decoding in the same engine, dtype and session, and at the same batch size; vs HF is over "
    "`generate` of transformers, at batch size 1.",
    "Times and drafted tokens are per step, a step being one target pass with the draft before it. τ is what a step "
    "gains, its time over that of plain decoding's step is what it costs, and the quotient is the speedup: a verify "
    "time far above plain decoding's says that the tree is wide for this device, a long draft time, a slow head.",
    "x4 behind a name is a batch of 4: sequences that share target passes, and that the next prompts replace "
    "as they end. A pass counts as a step of each sequence in it, with an even share of its time; tok/s is that of all "
    "sequences together, and latency what one request waits, its prefill included.",
    "A drafter that is slower than plain decoding is marked so.",
    "Overlap headroom: how many times faster the steps would be if a second device drafted the next tree while this "
    "one verifies (Mirror-SD, arXiv 2510.13161), all of the shorter of the two times hidden: an upper bound.",
    "rule is how drafts were verified: greedy at temperature 0, where all lossless rules are one. A rule marked lossy "
    "changes the target's law; it fails the gate by choice and is given no speedup.",
    "lossless counts the prompts whose greedy output is plain decoding's token for token, in the gate's dtype. A near "
    "tie first differs where rounding decides between the two best tokens. A drafter that fails is given no speedup.",
    "Memory is the peak of the whole session on an accelerator, else of the whole process, all drafters together.",
)
SAMPLED = (
    "At temperatures above 0 lossless counts the prompts whose tokens are plain decoding's under coupled noise, "
    "at batch size 1 and at every one asked for; the law of tokens drawn with the rule in use is tested too. That "
    "rules keep it, exact enumeration proves in the tests."
)
LOADED = (
    "2 req/s behind a name: requests came at random (Poisson), so many a second on average, at the same moments for "
    "plain decoding and every drafter, and waited where as many were being answered as the batch holds. Arrivals bound "
    "tokens per second, so speedup there is plain decoding's mean latency over the drafter's, both from the arrival."
)
SERVED = (
    "Served endpoints: seconds are those of this side's clock, from the request to the first token (prefill) and from "
    "there to the last, and all of a step's are under other. x4 is four requests in flight, and a request counts with "
    "its share of the time that passed. Passes and tokens are those of all repeats. τ is one and the accepted over the "
    "passes, with a draft or without, by the server's counts, which go on to the end of the last draft. lossless "
    "compares greedy texts with the baseline's, and a difference is a near tie only from where the baseline's own "
    "repeats differ on."
)


def title(report: Report) -> str:
    """Return one line: what, on what, in which arithmetic."""
    how = f", weights quantised ({quantized})" if (quantized := report.target.get("quantized")) else ""
    carried = f" with adapter {adapter}" if (adapter := report.target.get("adapter")) else ""
    dtype = f", {report.device['dtype']}" if report.device.get("dtype") else ""  # none: no model computed
    return " ".join(f"{report.target.get('name')}{carried} on {report.device.get('name')}{dtype}{how}".split())


def table(report: Report) -> Table:
    """Return the table for the terminal."""
    shown = Table(title=_plain(title(report)))
    for name in HEADER:
        shown.add_column(name, justify="left" if name in ("drafter", "rule", "lossless") else "right")
    for row in report.overall:
        shown.add_row(*map(_plain, _cells(report, row)))
    return shown


def _plain(text: str) -> Text:
    """Return a text for the terminal, in which rich looks for no markup."""
    return Text(visible(text))


def markdown(report: Report) -> str:
    """Return the report for reading."""
    settings = ", ".join(f"{key} {value}" for key, value in report.settings.items() if not isinstance(value, dict))
    device = ", ".join(f"{key} {value}" for key, value in report.device.items())
    source = ", ".join(f"{key} {value}" for key, value in report.settings.get("provenance", {}).items())
    peak = max((row.memory_bytes for row in report.rows), default=0)
    memory = f" Peak memory: {peak / 2**20:.0f} MiB." if peak else ""
    parts = [
        f"# {title(report)}",
        *(" ".join(f"**Not lossless.** {failure}.".split()) for failure in report.failures()),
        *reports(report.extras),
        grid(HEADER, [_cells(report, row) for row in report.overall]),
        *_times(report),
        *_why(report),
        *advice.sections(report.extras),
        *sections(report.rows, report.sampled, report.gates, report.red),
        "## How it was measured",
        " ".join(f"Settings: {settings}. Device: {device}.{memory} Provenance: {source}.".split()),
        "\n".join(f"- {note}" for note in notes_of(report)),
    ]
    return _inert("\n\n".join(parts)) + "\n"


def _inert(text: str) -> str:
    """Return Markdown whose names from outside are no HTML, no link and no picture, and move no cursor."""
    return visible(text).replace("<", "&lt;").replace("](", "]\\(")


def _times(report: Report) -> list[str]:
    """Return where the time goes, where a clock ran."""
    body = [_time_cells(report, row) for row in report.overall if row.tier == LIVE]
    return ["## Where the time goes", grid(TIME_HEADER, body)] if body else []


def notes_of(report: Report) -> tuple[str, ...]:
    """Return how the report's numbers are to be read."""
    loaded = any(row.request_rate is not None for row in report.rows)
    if report.device.get("type") == "endpoint":
        return (NOTES[0], NOTES[2], SERVED)
    return NOTES + (SAMPLED,) * any(row.temperature > 0 for row in report.rows) + (LOADED,) * loaded


def _why(report: Report) -> list[str]:
    """Return the ladders, where a row has one."""
    rows = [row for row in report.as_dict()["rows"] if row["ladder"] and not row["category"]]
    body = [breakdown.cells(labelled(row["drafter"], row["batch_size"], row["report"]), row) for row in rows]
    return ["## Why not more?", breakdown.NOTE, grid(breakdown.HEADER, body)] if body else []


def _cells(report: Report, row: Row) -> list[str]:
    """Return a row's cells under `HEADER`."""
    red = report.red(row)
    return [
        report.name(row),
        f"{row.temperature:g}",
        row.rule,
        spread(row.tau, row.tau_ci),
        _by_depth(row.accepted_by_depth),
        number(row.tokens_per_second, 1),
        "withheld" if red else spread(row.speedup, row.speedup_ci) + _slower(row),
        "withheld" if red else number(row.speedup_hf, 2),
        _verdict(row.lossless),
    ]


def _time_cells(report: Report, row: Row) -> list[str]:
    """Return a row's cells under `TIME_HEADER`."""
    steps = row.steps or math.nan
    times = [number(1000 * row.seconds[part] / steps, 2) for part in TIMES]
    drafted, kept = number(row.draft_tokens / steps, 1), number(row.accepted_per_draft_token, 2)
    headroom = number(row.overlap_headroom, 2)
    name, wait = report.name(row), number(row.latency_s, 2)
    return [name, f"{row.temperature:g}", row.tree, str(row.steps), *times, drafted, kept, headroom, wait]


def _by_depth(shares: Sequence[float]) -> str:
    """Return P(a >= d) by depth, so many as fit a table; report.json has them all."""
    told = " ".join(f"{share:.2f}" for share in shares[:DEPTHS]) or "-"
    return told + (" …" if len(shares) > DEPTHS else "")


def _slower(row: Row) -> str:
    return " slower" if row.speedup is not None and row.speedup < 1 else ""


def _verdict(counts: dict[str, int]) -> str:
    """Return the gate's counts in words."""
    if not counts["checked"]:
        return "-"
    ties = f", {counts['near_tie']} near tie" if counts["near_tie"] else ""
    failed = f", {counts['failed']} FAILED" if counts["failed"] else ""
    return f"{counts['identical']}/{counts['checked']}{ties}{failed}"


def _failure(name: str, gate: Gate) -> str:
    """Return one line on a red gate."""
    if not gate.checked:
        return f"{name}: no prompt was compared with plain decoding; speedup withheld"
    told = f"{gate.failed} of {gate.checked} prompts differ from plain decoding; speedup withheld"
    why = "its rule is lossy by choice; " if gate.lossy else ""
    return f"{name}: {why}{told}" + (f"; {gate.first}" if gate.first else "")
