"""Progress on stderr: on a terminal a bar with the remaining time, elsewhere a line every half minute.

Only the main process prints. Bars nest, and a line describes the innermost bar. No thread keeps time: each update
checks the clock, and `update_bar` does so within one long item, such as a step of decoding.
"""

import atexit
import time
from collections.abc import Iterable, Iterator, Sized
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heads.common.errors import is_reporting_rank
from heads.common.untrusted import visible

T = TypeVar("T")
PAUSE = 30.0  # seconds between two lines
CONSOLE = Console(stderr=True)
BARS = Progress(
    TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
    TimeRemainingColumn(), console=CONSOLE, transient=True, refresh_per_second=2,
)  # fmt: skip
OPEN: list["Bar"] = []  # the bars that are shown, the innermost last
atexit.register(BARS.live.stop)  # restores the cursor; `BARS.stop` would add a blank line to a log


def print_above_bars(text: str) -> None:
    """Print a line above the bars, on the main process."""
    if is_reporting_rank():
        CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line on stdout, whole and without control characters."""
    Console().print(visible(text), highlight=False, markup=False, soft_wrap=True)


def update_bar(note: str = "") -> None:
    """Print the innermost bar's line if PAUSE has passed, with a new note if given."""
    if OPEN:
        OPEN[-1].show(OPEN[-1].done, note or OPEN[-1].note)


class Bar:
    """A context that shows progress out of `total` items (None: unknown), of which `first` were done earlier."""

    last = -PAUSE  # time of the last printed line of any bar, or of the first bar's start

    def __init__(self, total: int | None, label: str, first: int = 0) -> None:
        self.total, self.label, self.first = total, label, first
        self.done, self.note = first, ""
        self.begun, self.on_terminal = time.monotonic(), False

    def __enter__(self) -> "Bar":
        self.begun = time.monotonic()
        if self.begun - Bar.last > PAUSE and not OPEN:
            Bar.last = self.begun
        self.on_terminal = CONSOLE.is_terminal and not CONSOLE.is_dumb_terminal and is_reporting_rank()
        if self.on_terminal:
            self.task = BARS.add_task(self.label, total=self.total, completed=self.first, note="")
            BARS.start()
        OPEN.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.remove(self)
        if self.on_terminal:
            BARS.remove_task(self.task)
            if not BARS.task_ids:
                BARS.stop()

    def show(self, done: int, note: str = "") -> None:
        """Show how much is done, with more numbers in a note; without a terminal a line if PAUSE has passed."""
        self.done, self.note = done, note
        if self.on_terminal:
            BARS.update(self.task, completed=done, note=note)
        if time.monotonic() - Bar.last < PAUSE:
            return
        Bar.last = time.monotonic()
        if self.on_terminal:
            return
        count, seconds = done - self.first, Bar.last - self.begun
        parts = [f"{done} of {self.total}" if self.total is not None else f"{done}" * bool(count), note]
        if count <= 0:
            parts.append(f"{timedelta(seconds=round(seconds))} so far")
        else:
            rate = count / seconds
            parts.append(f"{rate:,.1f}/s" if rate >= 1 else f"{60 * rate:.1f}/min")
            if self.total is not None:
                parts.append(f"{timedelta(seconds=round((self.total - done) / rate))} left")
        print_above_bars(f"{self.label}: " + ", ".join(filter(None, parts)))


def progress(work: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items of `work` and show a bar; `total` is their number if `work` has no length."""
    with Bar(len(work) if isinstance(work, Sized) else total, label) as bar:
        for done, item in enumerate(work):
            bar.show(done, bar.note)
            yield item
