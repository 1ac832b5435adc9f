"""Heartbeats: each process of a run writes a file every second, by which the others can name a missing one.

Files and not messages, since reporting a dead process must not depend on a connection to it.
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

BEAT = 1.0  # seconds between heartbeats
GRACE = 4.0  # seconds without one after which a process counts as dead
SLOW = 5.0  # seconds of waiting for another process after which it is logged


class Heartbeat:
    """Write the heartbeat of one process and read those of the others; with one process it does nothing.

    Attributes:
        progress: micro-batches of this process since the start.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world, self.progress = folder, rank, world, 0
        self._beat, self._moved = 0, time.monotonic()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._lost: list[int] = []
        self._waiting: tuple[str, float] | None = None

    def start(self) -> None:
        """Start the thread that writes heartbeats."""
        if self.world > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("")
            self._thread.start()

    def move(self) -> None:
        """Record that this process has finished a micro-batch."""
        self.progress, self._moved = self.progress + 1, time.monotonic()

    def end(self, reason: str | None = None, *, lost: bool = False) -> None:
        """Stop: cleanly without a `reason`, with an error as the reason, or because another process was `lost`."""
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
        """Return the processes that died, ended with an error or fell behind, as text; blocks for GRACE seconds."""
        if self.world == 1:
            return ""
        timed_out = time.monotonic() - self._moved > timeout / 2  # else the error here was no wait for another process
        before = self._read()
        time.sleep(GRACE)
        after = self._read()
        others = [rank for rank in after if rank != self.rank and not after[rank]["lost"]]
        gone = [
            rank for rank in others if before.get(rank, {}).get("beat") == after[rank]["beat"] or after[rank]["reason"]
        ]
        behind = [rank for rank in others if timed_out and after[rank]["mark"] < self.progress]
        self._lost = gone or behind
        words = "has ended or does not answer" if gone else f"did not get as far as the others in {timeout} s"
        return ", ".join(
            f"{who(after[rank])} {'ended: ' + after[rank]['reason'] if after[rank]['reason'] else words}"
            for rank in self._lost
        )

    def speaks(self) -> bool:
        """Whether this process reports the missing ones: it is the first that is not missing."""
        return self.rank == min(set(range(self.world)) - set(self._lost))

    def _run(self) -> None:
        while not self._end.wait(BEAT):
            self._write("")
            if self.rank < 2:  # the first process watches all others, and the second watches the first
                self._watch()
        if self._waiting is not None and self._moved > self._waiting[1]:  # it continued and then ended
            self._log_wait(self._moved)

    def _watch(self) -> None:
        """Log which processes this one has waited for longer than SLOW, once it continues."""
        since = self._moved
        if time.monotonic() - since > SLOW:
            seen = self._read()
            watched = range(1, self.world) if self.rank == 0 else [0]
            slow = [rank for rank in watched if rank in seen and seen[rank]["mark"] < self.progress]
            if slow and self._waiting is None:
                self._waiting = ", ".join(who(seen[rank]) for rank in slow), since
        else:
            self._log_wait(since)

    def _log_wait(self, since: float) -> None:
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
            "mark": self.progress, "reason": reason, "lost": lost,
        }  # fmt: skip
        partial = self._path(self.rank).with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk must not stop the run here, where no data is lost
            partial.write_text(json.dumps(content))
            os.replace(partial, self._path(self.rank))

    def _read(self) -> dict[int, dict[str, Any]]:
        """Return the last heartbeat of every process that has not ended cleanly."""
        signs = {}
        for rank in range(self.world):
            with contextlib.suppress(OSError, ValueError):
                signs[rank] = json.loads(self._path(rank).read_text())
        return signs


def who(sign: dict[str, Any]) -> str:
    """Return a process's name for messages."""
    return f"rank {sign['rank']} ({sign['host']}, process {sign['pid']})"
