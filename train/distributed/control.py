"""Control messages between processes: stop requests, failures, gathered values.

Messages use a gloo group of their own, on the CPU: nothing here waits for an accelerator, or disturbs the order of its
collectives. A process that is lost is found by the collectives' time-out and by torch's launcher, which stops the rest.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from heads.common.errors import one_line
from train.distributed.launch import REPORTED

log = logging.getLogger(__name__)

STOPPING = signal.SIGTERM, signal.SIGINT  # signals that stop a run; SIGINT is Ctrl-C's
STOPPED = 128 + signal.SIGTERM  # the exit status of a run that was stopped, by either
REPEATED = 2.0  # seconds; a launcher forwards a signal that its processes have received already


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Run an action on the main process only; a user's error is a ValueError there, and the other processes exit."""
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
    """Control messages between a run's processes: stop requests and gathered values.

    `timeout` is how many seconds one process waits for another.
    """

    def __init__(self, accelerator: Accelerator, timeout: int) -> None:
        self.rank, self.world, self.timeout = accelerator.process_index, accelerator.num_processes, timeout
        self._group: Any = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._signalled: float | None = None  # time of the signal that stops the run
        self.signal = "SIGTERM"  # its name; another process's signal counts as SIGTERM
        self._vote: tuple[torch.Tensor, Any] | None = None

    def halted(self) -> bool:
        """Return whether a process received a SIGTERM: a collective call with the same result on all processes.

        The result is the previous call's, whose reduction ran while the accelerator worked.
        """
        if self._group is None:
            return self._signalled is not None
        stopping = self._vote_result()
        votes = torch.tensor([float(self._signalled is not None)])
        self._vote = votes, dist.all_reduce(votes, group=self._group, async_op=True)
        return stopping

    def measuring(self, *, over: bool) -> bool:
        """On the measuring process: tell the others whether the measurement is over; return whether to stop it.

        A collective call: the processes that do not measure are in `wait_for_main`.
        """
        return self._exchange(over)[0]

    def wait_for_main(self) -> None:
        """On the other processes: wait for the end of the main process's measurement, or for a stop request."""
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

    def broadcast(self, item: Any) -> Any:
        """Return the main process's item, on every process."""
        return self.gather(item if self.rank == 0 else None)[0]

    def warn(self, text: str) -> None:
        """Log a warning on the main process."""
        if self.rank == 0:
            log.warning(text)

    def abort(self, text: str) -> None:
        """Exit on every process with a one-line error: ValueError on the main process, status 2 on the others."""
        raise ValueError(text) if self.rank == 0 else SystemExit(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record a SIGTERM or Ctrl-C for `halted`; a second one kills the process."""

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
        """Turn the failure or time-out of a collective into a one-line error.

        Raises:
            ValueError: on the main process.
            SystemExit: on the others; if the main one is lost, torch's launcher names it.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            if self.rank:
                raise SystemExit(REPORTED) from error
            raise ValueError(
                f"another process has ended, or did not answer within trainer.timeout={self.timeout} s "
                f"({one_line(error)}); resume=true goes on from the last checkpoint"
            ) from error

    def _vote_result(self) -> bool:
        """Wait for the pending vote and return whether any process wants to stop; false without one."""
        if self._vote is None:
            return False
        votes, work = self._vote
        self._vote = None
        work.wait()
        return bool(votes[0] > 0)

    def _exchange(self, over: bool) -> tuple[bool, bool]:
        """Return whether any process received a SIGTERM, and whether the main process's measurement is over."""
        if self._group is None:
            return self._signalled is not None, over
        self._vote_result()
        votes = torch.tensor([float(self._signalled is not None), float(over)])
        dist.all_reduce(votes, group=self._group)
        return bool(votes[0] > 0), bool(votes[1] > 0)
