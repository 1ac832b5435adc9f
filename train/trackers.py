"""A run's records: metrics.jsonl always, other trackers if configured, a progress bar on the terminal.

A failing tracker is reported in one line and dropped; training continues. A record is a dict with a `step`.
metrics.jsonl has it unchanged; wandb and TensorBoard have its numbers, with those of nested lists and dicts by name and
index: `accuracy/1` is the accuracy at depth 1.
"""

import json
import logging
import math
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from eval.measures.results import finite
from heads.common.errors import one_line
from heads.common.files import atomic_write
from heads.common.progress import Bar, print_above_bars
from heads.common.typed import Json
from heads.common.untrusted import parse_json

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
REPORT = ("report.json", "report.md", "report.html")
WAIT = 10.0  # maximum seconds to wait for wandb's server before training begins


def numbers(record: Json) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a record under flat names; list indices count from 1, like depths."""
    for name, value in record.items():
        if isinstance(value, dict | list | tuple):
            inner = value if isinstance(value, dict) else {str(i): item for i, item in enumerate(value, 1)}
            yield from ((f"{name}/{key}", number) for key, number in numbers(inner))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


def grouped(record: Json) -> dict[str, float]:
    """Return the finite numbers of a record by group: train/ for a step, eval/ for an evaluation."""
    group = "train" if "loss" in record else "eval"
    return {f"{group}/{name}": value for name, value in numbers(record) if name != "step"}


class Jsonl:
    """One JSON object per line, in full precision.

    A resumed run drops the lines after the step from which it resumes, and unfinished lines of a killed run.
    """

    def __init__(self, out: Path, start: int, config: Json) -> None:
        path, earlier = out / METRICS, b""
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(ValueError, TypeError, KeyError):
                earlier += line + b"\n" if int(parse_json(line)["step"]) <= start else b""
        atomic_write(path, earlier)
        self.file = path.open("ab", buffering=0)  # unbuffered, so that a killed run loses no line

    def log(self, record: Json) -> None:
        """Write a line."""
        self.file.write(json.dumps(finite(record)).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Wandb:
    """Weights & Biases; offline, it writes a folder for `wandb sync`. A resumed run keeps its id."""

    def __init__(self, out: Path, start: int, config: Json, *, offline: bool) -> None:
        import wandb

        id_file = out / "wandb-id.txt"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        # Without metadata, which contain the command with its secrets; provenance.json has the command redacted.
        settings = wandb.Settings(init_timeout=WAIT, x_disable_meta=True)
        self.run: Any = wandb.init(
            project="headstart", dir=str(out), config=config, name=out.name, id=id_file.read_text().strip(),
            resume="allow", settings=settings, mode="offline" if offline else "online",
        )  # fmt: skip

    def log(self, record: Json) -> None:
        """Log at the record's step."""
        self.run.log(grouped(record), step=record["step"])

    def conclude(self, record: Json, report: list[Path]) -> None:
        """Put the final numbers into the run's summary, and the report's files into an artifact."""
        import wandb

        self.run.summary.update(grouped(record))
        artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
        for file in report:
            artifact.add_file(str(file))
        self.run.log_artifact(artifact)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class TensorBoard:
    """Event files in `tensorboard/`; on resume, entries after the resumed step are purged."""

    def __init__(self, out: Path, start: int, config: Json) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(log_dir=str(out / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, record: Json) -> None:
        """Add the numbers at the record's step."""
        for name, value in grouped(record).items():
            self.writer.add_scalar(name, value, record["step"])

    def conclude(self, record: Json, report: list[Path]) -> None:
        """Add the final numbers, and the Markdown report."""
        self.log(record)
        for file in (file for file in report if file.suffix == ".md"):
            self.writer.add_text("report", file.read_text(encoding="utf-8"), record["step"])

    def close(self) -> None:
        """Flush and close the writer."""
        self.writer.close()


Sink = Jsonl | Wandb | TensorBoard  # a tracker; its methods may fail

# Arguments: the run's folder, the number of finished steps, the configuration.
TRACKERS: dict[str, Callable[..., Sink]] = {
    "jsonl": Jsonl,
    "tensorboard": TensorBoard,
    "wandb": partial(Wandb, offline=False),
    "wandb_offline": partial(Wandb, offline=True),
}


@contextmanager
def dropping(sinks: dict[str, Sink], name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Within the block, an error drops this tracker with a message and does not propagate."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):  # signals and SystemExit propagate
            raise
        sinks.pop(name, None)
        say(f"tracker {name} failed and is left out from here on: {one_line(error)}")


def conclude(out: Path, trackers: list[str], config: Json, record: Json) -> None:
    """Pass the final numbers and the report to a finished run's trackers; failing trackers are named and dropped."""
    report = [file for name in REPORT if (file := out / name).exists()]
    for name in {*trackers} - {"jsonl"}:  # metrics.jsonl records only steps
        with dropping({}, name, log.warning):
            sink: Any = TRACKERS[name](out, record["step"], config)
            sink.conclude(record, report)
            sink.close()


class Tracker:
    """Log every record to all trackers and the progress bar, on the main process only."""

    def __init__(self, out: Path, *, active: bool, steps: int, start: int, trackers: list[str], config: Json) -> None:
        self.sinks: dict[str, Sink] = {}
        self.bar, self.tau = Bar(steps, "step", start), ""
        for name in dict.fromkeys(["jsonl", *trackers]) if active else ():
            with dropping(self.sinks, name, print_above_bars):
                self.sinks[name] = TRACKERS[name](out, start, config)

    def log(self, record: Json) -> None:
        """Log a record, which has at least `step`."""
        self._each(lambda sink: sink.log(record))
        if "tau" in record:
            self.tau = f"  τ {record['tau']:.2f}"
        else:
            accuracy = " ".join(f"{a:.2f}" for a in record["accuracy"])
            speed = f"{record['tokens_per_second']:.0f} tok/s"
            self.bar.show(record["step"], f"loss {record['loss']:.4f}  accuracy {accuracy}{self.tau}  {speed}")

    def close(self) -> None:
        """Close the trackers."""
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name, sink in list(self.sinks.items()):
            with dropping(self.sinks, name, print_above_bars):
                act(sink)
