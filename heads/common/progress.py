"""Progress on stderr: a bar with the time that is left on a terminal, elsewhere a line every half minute.

Of several processes the first one speaks. Bars nest, and a line is of the innermost. There is no clock in a thread:
what counts the work looks at the time, and `tick` does where one item takes long, such as each step of decoding.
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
atexit.register(BARS.live.stop)  # which shows the cursor again; of a log, `BARS.stop` would end with a blank line


def say(text: str) -> None:
    """Print a line on the first process, above the bars."""
    if is_reporting_rank():
        CONSOLE.print(text, highlight=False, markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """Print a line on stdout, whole and without control characters."""
    Console().print(visible(text), highlight=False, markup=False, soft_wrap=True)


def tick(note: str = "") -> None:
    """Print the line of the innermost bar, if there is one and it is time, with a new note if one is given."""
    if OPEN:
        OPEN[-1].show(OPEN[-1].done, note or OPEN[-1].note)


class Bar:
    """A context that shows how much of `total` is done, `first` of which was done before; None: nobody knows it."""

    last = -PAUSE  # when the last line of any bar was printed, or the first of several bars began

    def __init__(self, total: int | None, label: str, first: int = 0) -> None:
        self.total, self.label, self.first = total, label, first
        self.done, self.note = first, ""
        self.begun, self.on_terminal = time.monotonic(), False

    def __enter__(self) -> "Bar":
        """Begin to show it."""
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
        """Take the bar away."""
        OPEN.remove(self)
        if self.on_terminal:
            BARS.remove_task(self.task)
            if not BARS.task_ids:
                BARS.stop()

    def show(self, done: int, note: str = "") -> None:
        """Show how much is done, with further numbers in a note: without a terminal as a line, if it is time."""
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
        say(f"{self.label}: " + ", ".join(filter(None, parts)))


def progress(work: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield the items of a piece of work, and show how far it is; `total` is the number of items without a length."""
    with Bar(len(work) if isinstance(work, Sized) else total, label) as bar:
        for done, item in enumerate(work):
            bar.show(done, bar.note)
            yield item
