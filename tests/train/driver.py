"""Training jobs as processes of their own that start at once: forked from a server that has imported everything.

A job may be told to misbehave by hooks, which replace parts of the program in its process alone.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.common.errors import user_errors
from tests.train import jobs
from train import checkpoint
from train import step as steps
from train.objective import row_keys
from train.run import train
from train.step import Stepper

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")
STEPS: dict[int, int] = {}  # of every key that a process has made
PRELOADED = ["tests.train.driver", "tests.train.strategy_job", "transformers.models.llama.modeling_llama", "datasets"]
CONTEXT.set_forkserver_preload(PRELOADED)


class Job:
    """One process of a job."""

    def __init__(self, process: BaseProcess, log: Path) -> None:
        self.process, self.log = process, log

    def printed(self) -> str:
        """Return what it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""

    def end(self, within: float = 120) -> int:
        """Wait for its end; return its exit status."""
        self.process.join(within)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running: {self.printed()}")
        return self.process.exitcode

    def finish(self) -> str:
        """Wait for a job that must succeed; return what it printed."""
        status = self.end()
        assert status == 0, self.printed()
        return self.printed()

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def until(self, path: Path, lines: int = 0, within: float = 120) -> None:
        """Wait until a file is there and has as many lines."""
        end = time.monotonic() + within
        while not path.exists() or path.read_text().count("\n") < lines:
            assert self.process.exitcode is None, self.printed()
            assert time.monotonic() < end, self.printed()
            time.sleep(0.005)


def start(folder: Path, overrides: list[str], *hooks: str, world: int = 1) -> list[Job]:
    """Start a training of `world` processes, which find their hooks' files in `folder`."""
    return spawn(folder, world, training, folder, overrides, hooks)


def spawn(folder: Path, world: int, work: Callable[..., None], *args: Any) -> list[Job]:
    """Start `world` processes of a group; each prints to a file in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = []
    for rank in range(world):
        log = folder / f"log-{time.monotonic_ns()}-{rank}.txt"
        process = CONTEXT.Process(target=child, args=(log, (rank, world, port), work, args))
        process.start()
        jobs.append(Job(process, log))
    return jobs


def child(log: Path, place: tuple[int, int, int], work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Be one process of a group."""
    import torch

    torch.set_num_threads(1)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    rank, world, port = place
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["HF_HUB_OFFLINE"] = "1"
    work(*args)


def training(folder: Path, overrides: list[str], hooks: tuple[str, ...]) -> None:
    """Train as one process of a job."""
    steps.row_keys, rank = keys_with_steps, int(os.environ.get("RANK", "0"))
    for hook in hooks:
        name, _, only = hook.partition("@")
        if not only or int(only) == rank:
            HOOKS[name](folder, rank)
    with user_errors():
        train(jobs.resolved(overrides))


def keys_with_steps(seed: int, step: int, index: Tensor) -> Tensor:
    """Return the keys of a step's rows, and keep their step."""
    keys = row_keys(seed, step, index)
    STEPS.update(dict.fromkeys(keys.tolist(), step))
    return keys


def note(folder: Path, name: str, line: str = "") -> None:
    """Add a line to a file that a test waits for."""
    with (folder / name).open("a") as file:
        file.write(line + "\n")


def before_backward(do: Callable[[Any, int], None]) -> None:
    """Have every micro-batch begin with a call that is given it and its step."""
    before = Stepper.backward

    def backward(self: Stepper, given: Any, keys: Any, *words: Any, **named: Any) -> Any:
        do(given, STEPS[int(keys[0])])
        return before(self, given, keys, *words, **named)

    Stepper.backward = backward


def slow(folder: Path, rank: int) -> None:
    """Every micro-batch takes a while, and is noted."""

    def wait(given: Any, step: int) -> None:
        note(folder, "batches")
        time.sleep(0.06)

    before_backward(wait)


def told(folder: Path, rank: int) -> None:
    """The first micro-batch of the sixth step brings a SIGTERM: the step is left after the second."""

    def end(given: Any, step: int) -> None:
        if step == 5 and not (folder / "told").exists():
            note(folder, "told")
            os.kill(os.getpid(), signal.SIGTERM)

    before_backward(end)


def poisoned(folder: Path, rank: int) -> None:
    """What the target gives for the sixth step is not finite."""

    def spoil(given: Any, step: int) -> None:
        if step == 5:
            given.features.last_hidden.fill_(float("nan"))

    before_backward(spoil)


def slow_disk(folder: Path, rank: int) -> None:
    """A checkpoint's shard is on the disk, and then for long nothing more."""
    before = checkpoint.save_file

    def save_file(tensors: Any, path: Path) -> None:
        before(tensors, path)
        note(folder, "writing")
        if "-00000008-" in str(path):
            time.sleep(60)

    checkpoint.save_file = save_file


HOOKS = {hook.__name__: hook for hook in (slow, slow_disk, told, poisoned)}
