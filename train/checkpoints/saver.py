"""Asynchronous checkpoints: the state is copied at once, and a thread writes the copy while training continues.

The state is weights, optimiser state and EMA as named whole tensors: `weight/…`, `state/…/KEY` and
`average/…`, with the head's own parameter names. A tensor is gathered whole from its shards, so checkpoints depend
neither on the strategy nor on the number of processes. The threads of the processes communicate through files alone.
Collectives belong to the main thread: called from two threads, they would run in a different order on every process.
"""

import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from heads.common.errors import one_line
from heads.common.files import flush
from train.checkpoints import format
from train.distributed.control import ProcessControl
from train.distributed.strategy import counts_on, held, master_state, put, put_master, whole, zero_stage
from train.optim import Ema, trained_state


class TrainState:
    """The state of a head, its optimiser and the average of its weights, under any strategy."""

    def __init__(self, head: nn.Module, optimizer: Any, average: Ema) -> None:
        self.head, self.optimizer, self.average = head, optimizer, average

    def names(self) -> list[str]:
        """Return the names of all tensors, in the same order on every process."""
        parameters = trained_state(self.head)
        names = [f"weight/{name}" for name in self.head.state_dict()]
        names += [f"state/{name}/{key}" for name, p in parameters.items() for key in sorted(self._of(p))]
        return names + [f"average/{name}" for name in self.average.weights]

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU; a collective call with the same name."""
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        if kind == "weight":
            value = whole(p, held(p))
        elif kind == "average":
            value = whole(p, self.average.weights[rest])
        elif zero_stage(p) and key != "step":
            value = master_state(p, key)
        else:
            value = whole(p, self._of(p)[key])
        copy: Tensor = value.detach().to("cpu", copy=True).contiguous()
        return copy

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Load one tensor; a collective call with the same name and value.

        Raises:
            KeyError: the head or its optimiser has no such tensor.
            RuntimeError: it has another shape.
        """
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        shape = vars(p).get("ds_shape", p.shape)
        if value.ndim and value.shape != shape:
            raise RuntimeError(f"{name} is {tuple(value.shape)}, and its parameter {tuple(shape)}")
        if kind == "weight":
            put(p, held(p), value)
            if zero_stage(p) and p.requires_grad:
                put_master(p, value)
        elif kind == "average":
            put(p, self.average.weights[rest], value)
        elif not value.ndim:
            for state in self._states(p):
                state[key] = value.to(counts_on(self._optimizer(p), p), copy=True)
        elif zero_stage(p):
            put_master(p, value, key)
        else:
            state = self._of(p)
            state[key] = torch.empty_like(p)
            put(p, state[key], value)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights to evaluate and to save, on the CPU: the average's if there is one."""
        averaged = self.average.weights
        kinds = {name: "average" if name in averaged else "weight" for name in self.head.state_dict()}
        return {name: self.read(f"{kind}/{name}") for name, kind in kinds.items()}

    def _of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimiser's state of one parameter, empty before its first step."""
        return self._states(parameter)[0]

    def _states(self, parameter: Tensor) -> list[dict[str, Any]]:
        """Return the optimiser's state dicts that hold one parameter: under ZeRO those of all flat partitions.

        They step together, so each of them has the count of steps.
        """
        optimizer = self._optimizer(parameter)
        return list(optimizer.state.values()) if zero_stage(parameter) else [optimizer.state[parameter]]

    def _optimizer(self, parameter: Tensor) -> Any:
        """Return the optimiser of one parameter."""
        plain: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # DeepSpeed wraps it
        for optimizer in getattr(plain, "optimizers", [plain]):
            if zero_stage(parameter) or any(
                parameter is p for group in optimizer.param_groups for p in group["params"]
            ):
                return optimizer
        raise KeyError("no optimiser has this parameter")


def split(name: str) -> tuple[str, str, str]:
    """Parse a tensor's name into its kind, the parameter, and the key of the optimiser's state, else empty."""
    kind, rest = name.split("/", 1)
    parameter, _, key = rest.rpartition("/") if kind == "state" else (rest, "", "")
    return kind, parameter, key


POLL = 0.05  # seconds between checks for the other processes' notes
REFUSED = OSError, SafetensorError, RuntimeError, ValueError  # by the disk


class Saver:
    """Write and find the checkpoints of a run; all processes make the same calls."""

    def __init__(self, out: Path, control: ProcessControl, keep: int) -> None:
        self.folder, self.metrics, self.control, self.keep = out / "checkpoints", out / "metrics.jsonl", control, keep
        self.seconds = 0.0  # that training has waited for saves
        self.saved = -1  # the step that was saved last, or loaded
        self._name = control.broadcast(
            f"{time.time_ns():x}"
        )  # distinguishes this run's folders from an earlier attempt's
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
            self.control.abort(f"{failed}; free space and resume=true")

    def close(self) -> None:
        """End the thread; a pending checkpoint is committed only if all processes have written their shards."""
        self._given_up.set()
        self._thread.shutdown()

    def newest(self) -> Path | None:
        """Return the newest good checkpoint, None without any; warn of newer damaged ones, and refuse if all are."""
        control = self.control
        paths: list[Path] = control.broadcast(format.checkpoints(self.folder))
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
            control.abort(f"no checkpoint loads ({wrong[0]}); start again with overwrite=true")
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
