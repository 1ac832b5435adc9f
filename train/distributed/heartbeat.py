"""Signs of life: each process of a run writes one file every second, by which the others can name who is missing.

Files and not messages, since what a process has to say of another one's death must not hang on a connection to it.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

BEAT = 1.0  # seconds between signs
GRACE = 4.0  # seconds without one that mean death
SLOW = 5.0  # seconds of waiting for another process that are worth a line


class Heartbeat:
    """The signs of life of one process, and what those of the others say. Alone, it does nothing.

    Attributes:
        mark: how far this process has come, in micro-batches since the start.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world, self.mark = folder, rank, world, 0
        self._beat, self._moved = 0, time.monotonic()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._lost: list[int] = []
        self._waiting: tuple[str, float] | None = None

    def start(self) -> None:
        """Begin."""
        if self.world > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("")
            self._thread.start()

    def move(self) -> None:
        """Note that this process has come a micro-batch further."""
        self.mark, self._moved = self.mark + 1, time.monotonic()

    def end(self, reason: str | None = None, *, lost: bool = False) -> None:
        """End: cleanly, for a reason, or because another process was lost."""
        if not self._thread.is_alive():
            return
        self._end.set()
        self._thread.join()
        if reason is None:
            with contextlib.suppress(OSError):
                self._path(self.rank).unlink()
                self.folder.rmdir()  # the last one to leave
        else:
            self._write(reason, lost=lost)

    def missing(self, timeout: int) -> str:
        """Return who has died, has ended for a reason, or has not come within the time-out; look for some seconds."""
        if self.world == 1:
            return ""
        tired = time.monotonic() - self._moved > timeout / 2  # else what failed here was no wait for another process
        before = self._read()
        time.sleep(GRACE)
        after = self._read()
        others = [rank for rank in after if rank != self.rank and not after[rank]["lost"]]
        gone = [
            rank for rank in others if before.get(rank, {}).get("beat") == after[rank]["beat"] or after[rank]["reason"]
        ]
        behind = [rank for rank in others if tired and after[rank]["mark"] < self.mark]
        self._lost = gone or behind
        words = "has ended or does not answer" if gone else f"did not get as far as the others in {timeout} s"
        return ", ".join(
            f"{who(after[rank])} {'ended: ' + after[rank]['reason'] if after[rank]['reason'] else words}"
            for rank in self._lost
        )

    def speaks(self) -> bool:
        """Whether it is this process that says who is missing: the first one that is not."""
        return self.rank == min(set(range(self.world)) - set(self._lost))

    def _run(self) -> None:
        while not self._end.wait(BEAT):
            self._write("")
            if self.rank < 2:  # the first process watches all others, and the second watches the first
                self._watch()
        if self._waiting is not None and self._moved > self._waiting[1]:  # it went on, and ended before the next look
            self._tell(self._moved)

    def _watch(self) -> None:
        """Say for whom this process has waited long, once it goes on."""
        since = self._moved
        if time.monotonic() - since > SLOW:
            seen = self._read()
            wanted = range(1, self.world) if self.rank == 0 else [0]
            slow = [rank for rank in wanted if rank in seen and seen[rank]["mark"] < self.mark]
            if slow and self._waiting is None:
                self._waiting = ", ".join(who(seen[rank]) for rank in slow), since
        else:
            self._tell(since)

    def _tell(self, since: float) -> None:
        if self._waiting is not None:
            name, began = self._waiting
            self._waiting = None
            log.warning("waited %.1f s for %s", since - began, name)

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _write(self, reason: str, *, lost: bool = False) -> None:
        self._beat += 1
        content = {
            "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "beat": self._beat,
            "mark": self.mark, "reason": reason, "lost": lost,
        }  # fmt: skip
        partial = self._path(self.rank).with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk ends a run where something is lost by it, and not here
            partial.write_text(json.dumps(content))
            os.replace(partial, self._path(self.rank))

    def _read(self) -> dict[int, dict[str, Any]]:
        """Return the last sign of every process that has not ended cleanly."""
        signs = {}
        for rank in range(self.world):
            with contextlib.suppress(OSError, ValueError):
                signs[rank] = json.loads(self._path(rank).read_text())
        return signs


def who(sign: dict[str, Any]) -> str:
    """Return how a process is named to users."""
    return f"rank {sign['rank']} ({sign['host']}, process {sign['pid']})"
