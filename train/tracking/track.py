"""Dispatch of a run's records: metrics.jsonl always, other trackers if configured, a progress bar on the terminal.

A tracker that fails is reported in one line and dropped; training never stops for it.
"""

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from heads.common.errors import one_line
from train.tracking.trackers import TRACKERS, Sink, Start

REFRESH = 2  # redraws of the bar a second: its thread takes time from the step's own


class Tracker:
    """Pass each record to every tracker; active on the main process alone."""

    def __init__(
        self, out: Path, *, active: bool, steps: int, start: int, trackers: list[str], config: dict[str, Any]
    ) -> None:
        self.active = active
        self.sinks: dict[str, Sink] = {}
        if not active:
            return
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=REFRESH,
        )
        self.progress.start()
        self.task = self.progress.add_task("train", total=steps, completed=start, numbers="")
        for name in dict.fromkeys(["jsonl", *trackers]):
            with Dropping(self, name):
                self.sinks[name] = TRACKERS[name](Start(out, start, config))

    def log(self, record: dict[str, Any]) -> None:
        """Pass on one record, which has at least `step`."""
        if not self.active:
            return
        for name, sink in list(self.sinks.items()):
            with Dropping(self, name):
                sink.log(record)
        if "loss" in record:
            accuracy = " ".join(f"{a:.2f}" for a in record["accuracy"])
            numbers = f"loss {record['loss']:.4f}  accuracy {accuracy}  {record['tokens_per_second']:.0f} tok/s"
            self.progress.update(self.task, completed=record["step"], numbers=numbers)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.active:
            self.progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Close the trackers and the bar."""
        if not self.active:
            return
        for name, sink in list(self.sinks.items()):
            with Dropping(self, name):
                sink.close()
        self.progress.stop()


class Dropping:
    """A context around a call of one tracker: an error drops the tracker with a message and does not propagate."""

    def __init__(self, tracker: Tracker, name: str) -> None:
        self.tracker, self.name = tracker, name

    def __enter__(self) -> None:
        """Enter; nothing is needed."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Drop the tracker for any error that is not a signal's, or a request to exit."""
        if not isinstance(error, Exception):
            return False
        self.tracker.sinks.pop(self.name, None)
        self.tracker.say(f"tracker {self.name} failed and is left out from here on: {one_line(error)}")
        return True
