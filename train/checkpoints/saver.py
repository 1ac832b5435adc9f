"""Saves a run beside its training: what is to be kept is copied at once, and a thread writes the copy.

The threads of the processes speak through files alone. Collectives belong to the main thread: two threads that call
them would meet in another order on every process.
"""

import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from heads.common.errors import one_line
from heads.formats.store import flush
from train.checkpoints import format
from train.checkpoints.state import TrainState
from train.distributed.control import ProcessControl

POLL = 0.05  # seconds between looks at what the other processes have written


class Task(NamedTuple):
    """One checkpoint to be written: where, this process's tensors, all names in order, state.json, the best step."""

    partial: Path
    final: Path
    share: dict[str, Tensor]
    names: list[str]
    content: dict[str, Any]
    best: int


class Saver:
    """Writes and finds the checkpoints of a run, on every process alike.

    Attributes:
        seconds: how long training has waited for saves.
        saved: the step that was saved last, or loaded.
    """

    def __init__(self, out: Path, control: ProcessControl, keep: int) -> None:
        self.folder, self.metrics, self.control, self.keep = out / "checkpoints", out / "metrics.jsonl", control, keep
        self.seconds, self.saved = 0.0, -1
        self._name = control.share(f"{time.time_ns():x}")  # no folder of an earlier attempt passes for one of this run
        self._count = 0
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._given_up = threading.Event()

    def save(self, state: TrainState, step: int, content: dict[str, Any], best: int) -> None:
        """Copy the state, and let it be written while training goes on; the save before it is waited for.

        If that one failed, this one is waited for as well.

        Args:
            state: the run's tensors; all processes read them together.
            step: after which step.
            content: what state.json says beside the step.
            best: the step that measured best, whose checkpoint is kept for good.

        Raises:
            ValueError: the disk has refused twice in a row; what was saved before still loads.
        """
        begin = time.perf_counter()
        failed = self._settle()
        share, names = dealt(state, self.control.rank, self.control.world)
        self._count += 1
        partial = self.folder / f"{format.PARTIAL}{step:08d}-{self._name}-{self._count}"
        final = format.folder_of(self.folder, step)
        task = Task(partial, final, share, names, {"step": step, **content}, best)
        self._pending = self._thread.submit(self._write, task)
        self.saved = step
        if failed:
            self.control.warn(f"{failed}; trying again")
            self.finish()
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            ValueError: it could not be written.
        """
        begin = time.perf_counter()
        failed = self._settle()
        self.seconds += time.perf_counter() - begin
        if failed:
            self.saved = -1
            self.control.refuse(f"{failed}; free space and resume=true")

    def close(self) -> None:
        """End the thread. What all processes have written becomes a checkpoint, what one of them lacks does not."""
        self._given_up.set()
        self._thread.shutdown()

    def newest(self) -> Path | None:
        """Return the newest checkpoint that is good, None if there is none at all; say what was wrong with newer ones.

        Raises:
            ValueError: there are checkpoints and none of them is good.
        """
        control = self.control
        paths = [Path(path) for path in control.share([str(path) for path in format.found(self.folder)])]
        wrong: list[str] = []
        for path in reversed(paths):
            complaints = self.complaints(path)
            if not complaints:
                if wrong:
                    control.warn(f"{'; '.join(wrong)}; going on from {path.name}")
                    if control.rank == 0:
                        format.set_aside(self.folder, format.step_of(path))
                self.saved = format.step_of(path)
                return path
            wrong += complaints
        if paths:
            control.refuse(f"no checkpoint loads ({wrong[0]}); start again with overwrite=true")
        return None

    def complaints(self, path: Path) -> list[str]:
        """Return what is wrong with a checkpoint, nothing if it is good; all processes look together."""
        control = self.control
        return [each for each in control.gather(format.complaint(path, control.rank, control.world)) if each]

    def _settle(self) -> str:
        """Wait for the pending save of all processes; return what went wrong, if anything did."""
        if self._pending is None:
            return ""
        pending, self._pending, failed = self._pending, None, ""
        try:
            pending.result()
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            failed = one_line(error)
        return next((each for each in self.control.gather(failed) if each), "")

    def _write(self, task: Task) -> None:
        """Write this process's part; on the main process wait for the others', and make a checkpoint of it all."""
        control = self.control
        try:
            format.write_share(task.partial, control.rank, control.world, task.share)
            if control.rank == 0:
                self._await_others(task)
                if self.metrics.exists():
                    flush(self.metrics)
                format.commit(task.partial, task.final, control.world, task.names, task.content)
                format.tidy(self.folder, self.keep, task.best)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:
            reason = one_line(error)
            if control.rank == 0:
                shutil.rmtree(task.partial, ignore_errors=True)
            else:
                format.write_failure(task.partial, control.rank, reason)
            raise ValueError(f"{task.final}: the checkpoint could not be written ({reason})") from error

    def _await_others(self, task: Task) -> None:
        """Wait for the notes of all processes.

        Raises:
            ValueError: one did not come, or its writer failed.
        """
        end = time.monotonic() + self.control.timeout / 2  # sooner than the others tire of waiting for this process
        missing = list(range(self.control.world))
        while missing := [rank for rank in missing if not format.note_of(task.partial, rank).exists()]:
            for rank in missing:
                if failed := format.failure(task.partial, rank):
                    raise ValueError(f"rank {rank}: {failed}")
            if self._given_up.is_set() or time.monotonic() > end:
                raise ValueError(f"rank {', '.join(map(str, missing))} did not write its part")
            time.sleep(POLL)


def dealt(state: TrainState, rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return copies of the tensors that a process writes, and the names of all.

    Each tensor goes to the process with the fewest bytes so far. Every process reads every tensor, since what is cut
    up between them is made whole by all together.
    """
    share: dict[str, Tensor] = {}
    bytes_of, names = [0] * world, state.names()
    for name in names:
        value = state.read(name)
        owner = bytes_of.index(min(bytes_of))
        bytes_of[owner] += max(1, value.nbytes)
        if owner == rank:
            share[name] = value
    return share, names
