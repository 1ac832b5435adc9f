"""Progress on stderr: a bar with the time that is left on a terminal, elsewhere a line every half minute."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType
from typing import TypeVar

from huggingface_hub import constants
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
PAUSE = 30.0  # seconds between two lines


class Pace:
    """The pace of a piece of work: when its next line is due, and how long the rest takes."""

    def __init__(self, total: int, first: int = 0) -> None:
        self.total, self.first = total, first
        self.begun = self.last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for a line; the next one then waits again."""
        now = time.monotonic()
        if now - self.last < PAUSE:
            return False
        self.last = now
        return True

    def left(self, done: int) -> str:
        """Return the time that is left, at the pace so far."""
        if done <= self.first:
            return "time left unknown"
        seconds = (time.monotonic() - self.begun) / (done - self.first) * (self.total - done)
        return f"{timedelta(seconds=round(seconds))} left"


class Bar:
    """A context that shows how much of a piece of work is done."""

    def __init__(self, total: int, label: str) -> None:
        self.console, self.label, self.pace = Console(stderr=True), label, Pace(total)
        self.bar = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task(label, total=total)

    def __enter__(self) -> "Bar":
        """Begin to show it."""
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Take the bar away."""
        self.bar.stop()

    def show(self, done: int) -> None:
        """Show that so much is done."""
        self.bar.update(self.task, completed=done)
        if not self.console.is_terminal and self.pace.due():
            line = f"{self.label}: {done} of {self.pace.total}, {self.pace.left(done)}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(work: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items of a piece of work, and show how far it is."""
    with Bar(len(work), label) as bar:
        for done, item in enumerate(work):
            bar.show(done)
            yield item


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Without a terminal say every half minute that the block still runs: it shows bars of a library's own on one.

    Whoever has said by HF_HUB_DISABLE_PROGRESS_BARS whether there are bars is left alone, or the library would warn.
    """
    console, ended, begun = Console(stderr=True), Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(PAUSE):
            elapsed = timedelta(seconds=round(time.monotonic() - begun))
            console.print(f"{label}: {elapsed} so far", highlight=False, markup=False, soft_wrap=True)

    if console.is_terminal:
        yield
        return
    if ours := constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()  # of huggingface_hub: some are written into a log too
    reporter = Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
        if ours:
            enable_progress_bars()
