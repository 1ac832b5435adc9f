"""Control messages between processes: stop requests, failures; and heartbeats, by which errors name a lost process.

Messages use a gloo group of their own, on the CPU: nothing here waits for an accelerator, or disturbs the order of its
collectives. Heartbeats are files, since reporting a dead process must not depend on a connection to it.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from heads.common.errors import one_line
from train.distributed.launch import REPORTED

log = logging.getLogger(__name__)

RANKS = ".ranks"  # in the output folder, while several processes run
STOPPING = signal.SIGTERM, signal.SIGINT  # signals that stop a run; SIGINT is Ctrl-C's
STOPPED = 128 + signal.SIGTERM  # the exit status of a run that was stopped, by either
REPEATED = 2.0  # seconds; a launcher forwards a signal that its processes have received already
BEAT = 1.0  # seconds between heartbeats
GRACE = 4.0  # seconds without one after which a process counts as dead
LOST = 10.0  # seconds that the main thread waits until its process looks for lost ones, and again until it ends
ENDED = "{}; the others have stopped, and resume=true goes on from the last checkpoint"
SLOW = 5.0  # seconds of waiting for another process after which it is logged


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Run an action on the main process alone; a user's error is a ValueError there, and the others exit."""
    failed: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            action()
        except (ValueError, OSError) as error:
            failed = [one_line(error)]
            if accelerator.num_processes == 1:
                raise
    if accelerator.num_processes > 1:
        broadcast_object_list(failed)
    if failed[0] is not None:
        raise ValueError(failed[0]) if accelerator.is_main_process else SystemExit(2)


class Heartbeat:
    """Write the heartbeat of one process and read those of the others; with one process it does nothing.

    With `ends` its thread ends the process, with the line that names a lost one: the main thread may wait for an
    accelerator, which NCCL lets it do until it aborts the process. `timeout` is how many seconds a process that lives
    is waited for.
    """

    def __init__(self, folder: Path, rank: int, world: int, timeout: int, *, ends: bool = False) -> None:
        self.folder, self.rank, self.world, self.timeout, self.ends = folder, rank, world, timeout, ends
        self.progress = 0  # micro-batches of this process since the start
        self._beat, self._moved = 0, time.monotonic()
        self._end, self._thread = threading.Event(), threading.Thread(target=self._run, daemon=True)
        self._lost: list[int] = []
        self._waiting: tuple[str, float] | None = None
        self._heard: dict[int, tuple[int, int]] = {}  # the last beat of each process, and the beat here when it was new

    def start(self) -> None:
        """Start the thread that writes heartbeats."""
        if self.world > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("")
            self._thread.start()

    def move(self) -> None:
        """Record that this process has finished a micro-batch."""
        self.progress += 1
        self.wake()

    def wake(self) -> None:
        """Record that this process waits for nobody."""
        self._moved = time.monotonic()

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

    def missing(self) -> str:
        """Return the processes that died, ended with an error or fell behind, as text; blocks for GRACE seconds."""
        if self.world == 1:
            return ""
        # Sooner, and the error here was no wait for another process.
        timed_out = time.monotonic() - self._moved > self.timeout / 2
        before = self._read()
        time.sleep(GRACE)
        after = self._read()
        gone = {
            rank for rank in after if before.get(rank, {}).get("beat") == after[rank]["beat"] or after[rank]["reason"]
        }
        return self._named(after, gone, timed_out=timed_out)

    def _named(self, signs: dict[int, dict[str, Any]], gone: set[int], *, timed_out: bool) -> str:
        """Return those of the other processes that are gone, or else behind, as text with what became of them."""
        others = [rank for rank in signs if rank != self.rank and not signs[rank]["lost"]]
        behind = [rank for rank in others if timed_out and signs[rank]["mark"] < self.progress]
        self._lost = [rank for rank in others if rank in gone] or behind
        words = f"did not get as far as the others in {self.timeout} s"
        if not gone.isdisjoint(self._lost):
            words = "has ended or does not answer"
        return ", ".join(
            f"{who(signs[rank])} {'ended: ' + signs[rank]['reason'] if signs[rank]['reason'] else words}"
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
            if self.ends:
                self._end_if_waiting_in_vain()
        self._watch()  # it may have continued and then ended

    def _end_if_waiting_in_vain(self) -> None:
        """End this process if the main thread waits and another process is lost; the first one left says so."""
        now = time.monotonic()
        if now - self._moved < LOST:
            self._heard.clear()
            return
        signs = self._read()
        for rank, sign in signs.items():
            if rank not in self._heard or self._heard[rank][0] != sign["beat"]:
                self._heard[rank] = sign["beat"], self._beat
        # By beats here: where the whole machine stalls, all clocks run on and nobody is lost.
        gone = {rank for rank in signs if (self._beat - self._heard[rank][1]) * BEAT > LOST}
        if missing := self._named(signs, gone, timed_out=now - self._moved > self.timeout):
            self._write("", lost=True)
            if self.speaks():
                sys.stderr.write(f"error: {ENDED.format(missing)}\n")
                sys.stderr.flush()
            os._exit(REPORTED)

    def _watch(self) -> None:
        """Log which processes this one has waited for longer than SLOW, once it continues."""
        since = self._moved
        if self._waiting is not None and since > self._waiting[1]:
            (name, began), self._waiting = self._waiting, None
            log.warning("waited %.1f s for %s", since - began, name)
        elif self._waiting is None and time.monotonic() - since > SLOW:
            seen = self._read()
            watched = range(1, self.world) if self.rank == 0 else [0]
            slow = [who(seen[rank]) for rank in watched if rank in seen and seen[rank]["mark"] < self.progress]
            self._waiting = (", ".join(slow), since) if slow else None

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


class ProcessControl:
    """Control of the processes of a run: stop requests, gathered values, and detection of lost ones.

    `timeout` is how many seconds one process waits for another.
    """

    def __init__(self, accelerator: Accelerator, out: Path, timeout: int) -> None:
        self.rank, self.world, self.timeout = accelerator.process_index, accelerator.num_processes, timeout
        self.heart = Heartbeat(out / RANKS, self.rank, self.world, timeout, ends=accelerator.device.type == "cuda")
        self._group: Any = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._signalled: float | None = None  # when a signal came that stops the run
        self.signal = "SIGTERM"  # which; another process's is taken for one
        self._vote: tuple[torch.Tensor, Any] | None = None

    def halted(self) -> bool:
        """Return whether a process received a SIGTERM: a collective call with the same result on all processes.

        The result is that of the call before, whose reduction ran while the accelerator worked.
        """
        self.heart.move()
        if self._group is None:
            return self._signalled is not None
        stopping = self._vote_result()
        votes = torch.tensor([float(self._signalled is not None)])
        self._vote = votes, dist.all_reduce(votes, group=self._group, async_op=True)
        return stopping

    def measuring(self, *, over: bool) -> bool:
        """On a process that measures: tell the others whether it is over; return whether to stop the measurement.

        A collective call: the processes that do not measure are in `attend`.
        """
        return self._exchange(over)[0]

    def attend(self) -> None:
        """On the other processes: wait for the end of the main one's measurement, or for a stop request."""
        while not any(self._exchange(over=False)):
            pass

    def gather(self, item: Any) -> list[Any]:
        """Return every process's item, on every process."""
        if self._group is None:
            return [item]
        self._vote_result()
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self._group)
        return items

    def share(self, item: Any) -> Any:
        """Return the main process's item, on every process."""
        return self.gather(item if self.rank == 0 else None)[0]

    def warn(self, text: str) -> None:
        """Log a warning on the main process."""
        if self.rank == 0:
            log.warning(text)

    def refuse(self, text: str) -> None:
        """Exit on every process with a one-line error: a ValueError on the main one, status 2 on the others."""
        raise ValueError(text) if self.rank == 0 else SystemExit(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record a SIGTERM or Ctrl-C for `halted`, and die of a second one."""

        def on_signal(number: int, _: object) -> None:
            if self._signalled is None:
                self._signalled, self.signal = time.monotonic(), signal.Signals(number).name
            elif time.monotonic() > self._signalled + REPEATED:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        previous = {number: signal.signal(number, on_signal) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Write heartbeats, and turn the loss of a process into a one-line error that names it.

        Raises:
            ValueError: a process has died, ended or hung; on the first of the remaining ones.
            SystemExit: on the others.
        """
        self.heart.start()
        reason = None
        try:
            yield
        except Exception as error:
            reason = one_line(error)
            # gloo's and NCCL's errors all are RuntimeErrors
            if not (isinstance(error, RuntimeError) and (missing := self.heart.missing())):
                raise
            self.heart.end("", lost=True)
            if self.heart.speaks():
                raise ValueError(ENDED.format(missing)) from error
            raise SystemExit(REPORTED) from error
        finally:
            self.heart.end(reason)

    def _vote_result(self) -> bool:
        """Wait for the pending vote and return whether any process wants to stop; false without one."""
        if self._vote is None:
            return False
        votes, work = self._vote
        self._vote = None
        work.wait()
        return bool(votes[0] > 0)

    def _exchange(self, over: bool) -> tuple[bool, bool]:
        """Return whether a process received a SIGTERM, and whether the main one's measurement is over."""
        if self._group is None:
            return self._signalled is not None, over
        self.heart.wake()
        self._vote_result()
        votes = torch.tensor([float(self._signalled is not None), float(over)])
        dist.all_reduce(votes, group=self._group)
        return bool(votes[0] > 0), bool(votes[1] > 0)
