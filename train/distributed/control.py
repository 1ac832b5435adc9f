"""What processes tell each other beside gradients: that one was told to stop, what failed, who is missing.

They speak over gloo in a group of their own, on the CPU: nothing here waits for an accelerator, or disturbs the order
of its collectives.
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
STOPPED = 128 + signal.SIGTERM  # the status of a run that was told to stop
REPEATED = 2.0  # seconds; launchers pass a signal on that their processes have had already


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Do something on the main process alone; where that fails for a user's mistake, every process ends.

    Raises:
        ValueError: what the action raised, on the main process.
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
    """One process among those of a run.

    Attributes:
        rank, world: which it is, of how many.
        timeout: seconds that one process waits for another.
    """

    def __init__(self, accelerator: Accelerator, out: Path, timeout: int) -> None:
        self.rank, self.world, self.timeout = accelerator.process_index, accelerator.num_processes, timeout
        self.heart = Heartbeat(out / RANKS, self.rank, self.world)
        self._group: Any = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._told: float | None = None
        self._vote: tuple[torch.Tensor, Any] | None = None

    def halted(self) -> bool:
        """Return whether a process was told to stop: on all the same, asked as often on all, and soon enough.

        The answer is that of the last time: the question travels while the accelerator works.
        """
        self.heart.move()
        if self._group is None:
            return self._told is not None
        stopping = self._counted()
        votes = torch.tensor([float(self._told is not None)])
        self._vote = votes, dist.all_reduce(votes, group=self._group, async_op=True)
        return stopping

    def measuring(self, *, over: bool) -> bool:
        """Where a measurement is made: tell the others whether it is over; return whether to leave it.

        A call of every process: of those that measure nothing by `attend`.
        """
        return self._exchange(over)[0]

    def attend(self) -> None:
        """On the other processes: wait for the end of the main one's measurement, or until one is told to stop."""
        while not any(self._exchange(over=False)):
            pass

    def gather(self, item: Any) -> list[Any]:
        """Return every process's item, on every process."""
        if self._group is None:
            return [item]
        self._counted()
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self._group)
        return items

    def share(self, item: Any) -> Any:
        """Return the main process's item, on every process."""
        return self.gather(item if self.rank == 0 else None)[0]

    def warn(self, text: str) -> None:
        """Say a line, once."""
        if self.rank == 0:
            log.warning(text)

    def refuse(self, text: str) -> None:
        """End every process with one line.

        Raises:
            ValueError: on the main process.
            SystemExit: on the others.
        """
        raise ValueError(text) if self.rank == 0 else SystemExit(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note a SIGTERM for `halted`, and die of a second one."""

        def told(*_: object) -> None:
            if self._told is not None and time.monotonic() > self._told + REPEATED:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            self._told = self._told or time.monotonic()

        previous = signal.signal(signal.SIGTERM, told)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Show signs of life, and turn the loss of a process into one line that names it.

        Raises:
            ValueError: a process has died, ended or hung; on the first of those that are left.
            SystemExit: on the others.
        """
        self.heart.start()
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise, whichever of their errors it is
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

    def _counted(self) -> bool:
        """Return what the question that is on its way came to."""
        if self._vote is None:
            return False
        votes, work = self._vote
        self._vote = None
        work.wait()
        return bool(votes[0] > 0)

    def _exchange(self, over: bool) -> tuple[bool, bool]:
        """Return whether a process was told to stop, and whether the main one's measurement is over."""
        if self._group is None:
            return self._told is not None, over
        self._counted()
        votes = torch.tensor([float(self._told is not None), float(over)])
        dist.all_reduce(votes, group=self._group)
        return bool(votes[0] > 0), bool(votes[1] > 0)
