"""Control messages between processes: stop requests, failures, lost processes.

They use a gloo group of their own, on the CPU: nothing here waits for an accelerator, or disturbs the order of its
collectives.
"""

import logging
import os
import signal
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
from train.distributed.heartbeat import Heartbeat

log = logging.getLogger(__name__)

RANKS = ".ranks"  # in the output folder, while several processes run
STOPPED = 128 + signal.SIGTERM  # the exit status of a run that was stopped
REPEATED = 2.0  # seconds; a launcher forwards a signal that its processes have received already


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Run an action on the main process alone; if it fails with a user's error, every process exits.

    Raises:
        ValueError: the action's error, on the main process.
        SystemExit: on the others.
    """
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


class ProcessControl:
    """Control of the processes of a run: stop requests, gathered values, and detection of lost ones.

    Attributes:
        rank, world: this process's rank and the number of processes.
        timeout: seconds that one process waits for another.
    """

    def __init__(self, accelerator: Accelerator, out: Path, timeout: int) -> None:
        self.rank, self.world, self.timeout = accelerator.process_index, accelerator.num_processes, timeout
        self.heart = Heartbeat(out / RANKS, self.rank, self.world)
        self._group: Any = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._signalled: float | None = None  # when a SIGTERM came
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
        """Exit on every process with a one-line error.

        Raises:
            ValueError: on the main process.
            SystemExit: on the others.
        """
        raise ValueError(text) if self.rank == 0 else SystemExit(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record a SIGTERM for `halted`, and die of a second one."""

        def on_signal(*_: object) -> None:
            if self._signalled is not None and time.monotonic() > self._signalled + REPEATED:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            self._signalled = self._signalled or time.monotonic()

        previous = signal.signal(signal.SIGTERM, on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Write heartbeats, and turn the loss of a process into a one-line error that names it.

        Raises:
            ValueError: a process has died, ended or hung; on the first of the remaining ones.
            SystemExit: on the others.
        """
        self.heart.start()
        try:
            yield
        except RuntimeError as error:  # gloo's and NCCL's errors all are RuntimeErrors
            if not (missing := self.heart.missing(self.timeout)):
                self.heart.end(one_line(error))
                raise
            self.heart.end("", lost=True)
            if self.heart.speaks():
                text = f"{missing}; the others have stopped, and resume=true goes on from the last checkpoint"
                raise ValueError(text) from error
            raise SystemExit(2) from error
        except Exception as error:
            self.heart.end(one_line(error))
            raise
        except BaseException:
            self.heart.end()
            raise
        self.heart.end()

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
        self._vote_result()
        votes = torch.tensor([float(self._signalled is not None), float(over)])
        dist.all_reduce(votes, group=self._group)
        return bool(votes[0] > 0), bool(votes[1] > 0)
