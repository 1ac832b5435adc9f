"""Asynchronous checkpoints: the state is copied at once, and a thread writes the copy while training continues.

The threads of the processes communicate through files alone. Collectives belong to the main thread: called from two
threads, they would run in a different order on every process.
"""

import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from heads.common.errors import one_line
from heads.common.files import flush
from train.checkpoints import format
from train.checkpoints.state import TrainState
from train.distributed.control import ProcessControl

POLL = 0.05  # seconds between checks for the other processes' notes
REFUSED = OSError, SafetensorError, RuntimeError, ValueError  # by the disk


class Saver:
    """Write and find the checkpoints of a run; all processes make the same calls."""

    def __init__(self, out: Path, control: ProcessControl, keep: int) -> None:
        self.folder, self.metrics, self.control, self.keep = out / "checkpoints", out / "metrics.jsonl", control, keep
        self.seconds = 0.0  # that training has waited for saves
        self.saved = -1  # the step that was saved last, or loaded
        self._name = control.share(f"{time.time_ns():x}")  # distinguishes this run's folders from an earlier attempt's
        self._count = 0
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._given_up = threading.Event()

    def save(self, state: TrainState, step: int, content: dict[str, Any], best: int) -> None:
        """Wait for the save before, copy the state, and start writing it; wait for this one too if that before failed.

        `content` goes to state.json beside the step; the checkpoint of step `best`, with the best τ, is never deleted.

        Raises:
            ValueError: the disk has refused twice in a row; earlier checkpoints still load.
        """
        begin = time.perf_counter()
        failed = self._wait()
        tensors, names = partition(state, self.control.rank, self.control.world)
        self._count += 1
        partial = self.folder / f"{format.PARTIAL}{step:08d}-{self._name}-{self._count}"
        self._pending = self._thread.submit(self._write, partial, tensors, names, {"step": step, **content}, best)
        self.saved = step
        if failed:
            self.control.warn(f"{failed}; trying again")
            self.finish()
        self.seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait until the pending checkpoint is written; refuse to go on if it could not be."""
        begin = time.perf_counter()
        failed = self._wait()
        self.seconds += time.perf_counter() - begin
        if failed:
            self.saved = -1
            self.control.refuse(f"{failed}; free space and resume=true")

    def close(self) -> None:
        """End the thread; a pending checkpoint is committed only if all processes have written their shards."""
        self._given_up.set()
        self._thread.shutdown()

    def newest(self) -> Path | None:
        """Return the newest good checkpoint, None without any; warn of newer damaged ones, and refuse if all are."""
        control = self.control
        paths: list[Path] = control.share(format.checkpoints(self.folder))
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
        """Return what is wrong with a checkpoint, empty if it is good; a collective call."""
        control = self.control
        return [text for text in control.gather(format.complaint(path, control.rank, control.world)) if text]

    def _wait(self) -> str:
        """Wait for the pending save of all processes; return its first error, empty if it succeeded."""
        if self._pending is None:
            return ""
        pending, self._pending, failed = self._pending, None, ""
        try:
            pending.result()
        except REFUSED as error:
            failed = one_line(error)
        return next((text for text in self.control.gather(failed) if text), "")

    def _write(
        self, partial: Path, tensors: dict[str, Tensor], names: list[str], content: dict[str, Any], best: int
    ) -> None:
        """Write this process's tensors; on the main process wait for the others' and commit the checkpoint of all."""
        control, final = self.control, format.folder_of(self.folder, content["step"])
        try:
            format.write_shard(partial, control.rank, control.world, tensors)
            if control.rank == 0:
                self._await_others(partial)
                if self.metrics.exists():
                    flush(self.metrics)
                format.commit(partial, final, control.world, names, content)
                format.tidy(self.folder, self.keep, best)
        except REFUSED as error:
            reason = one_line(error)
            if control.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                format.write_failure(partial, control.rank, reason)
            raise ValueError(f"{final}: the checkpoint could not be written ({reason})") from error

    def _await_others(self, partial: Path) -> None:
        """Wait for the notes of all processes; fail if one is missing after the time-out, or its writer failed."""
        end = time.monotonic() + self.control.timeout / 2  # before the others time out waiting for this process
        missing = list(range(self.control.world))
        while missing := [rank for rank in missing if not format.note_of(partial, rank).exists()]:
            for rank in missing:
                failed = format.note_of(partial, rank).with_suffix(format.FAILED)
                if failed.exists():
                    raise ValueError(f"rank {rank}: {failed.read_text()}")
            if self._given_up.is_set() or time.monotonic() > end:
                raise ValueError(f"rank {', '.join(map(str, missing))} did not write its part")
            time.sleep(POLL)


def partition(state: TrainState, rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that a process writes, copied, and the names of all.

    Each tensor goes to the process with the fewest bytes so far. Every process reads every tensor, since gathering a
    sharded one is a collective call.
    """
    tensors: dict[str, Tensor] = {}
    bytes_of, names = [0] * world, state.names()
    for name in names:
        value = state.read(name)
        owner = bytes_of.index(min(bytes_of))
        bytes_of[owner] += value.nbytes
        if owner == rank:
            tensors[name] = value
    return tensors, names
