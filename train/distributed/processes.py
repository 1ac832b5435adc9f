"""The processes of a run: the Accelerator, the output folder's lock, and control messages between processes.

Messages use their own gloo group on the CPU, so nothing here waits for an accelerator or changes the order of its
collectives. A lost process is detected by the collectives' time-out and by torch's launcher, which stops the others.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from heads.common.errors import one_line
from heads.common.files import claim, write_json
from inference.target.config import ModelConfig, device_named, fast_dtype, use_device
from train.config import LauncherConfig, TrainerConfig
from train.distributed.launch import REPORTED, world

LARGE = 2**25  # bytes; glibc maps larger blocks separately and returns them to the system when freed
ELSEWHERE = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}  # set by accelerate's options

TRIMMED = 2**28  # bytes; free memory beyond this is returned to the system
TRIM, MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, mallopt(3)
RELEASE_EVERY = 8  # steps; fresh pages then cost 1/50 of a step
# oneDNN caches the code of this many bf16 products, each 256 KiB or more; each size of packed documents and of trained
# rows needs its own. Evicted code leaves holes between live blocks: 256 products took 850 MiB in 40 steps of the
# bundled target, 32 take 180 in equally short steps; without a cache a step takes an eighth longer.
PRODUCTS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32"

LOCK, OWNER = ".lock", ".owner.json"


def keep_freed() -> None:
    """Make glibc keep up to TRIMMED freed bytes and reuse them for blocks below LARGE.

    The loss frees and allocates tensors of one size again and again. By default glibc returns them to the system in
    between, and fresh pages take a twentieth of a step. Allocators of other systems keep their defaults.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP, LARGE)
        libc.mallopt(TRIM, TRIMMED)


def release_freed() -> None:
    """Return the free memory between live blocks to the system (malloc_trim).

    A freed tensor's block is too small for the next tensor of its size, which is aligned within a larger block, so
    every step leaves holes. Without the release a process takes half as much memory again after about fifty steps.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def accelerator_for(launcher: LauncherConfig, trainer: TrainerConfig, model: ModelConfig) -> Accelerator:
    """Return the Accelerator of `trainer.precision`, "auto" being bf16 where the device is fast in it.

    Refuse another number of processes than the launcher's, too few for the strategy, and accelerate's own strategy.
    """
    check_machine(launcher, model)
    device = use_device(model.device)
    for key, name in ELSEWHERE.items():
        if os.environ.get(key, "false").lower() == "true":
            raise ValueError(
                f"accelerate was told to use {name}, which launcher.strategy does here: start without that option (or "
                "accelerate's configuration that has it) and give launcher.strategy=fsdp2, zero2 or zero3"
            )
    if device.type == "cpu":
        keep_freed()
        os.environ.setdefault(*PRODUCTS)
    precision = trainer.precision
    if precision == "auto":
        precision = "bf16" if fast_dtype(device) == torch.bfloat16 else "fp32"
    follow_nccl()
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=trainer.timeout))
    mixed = "bf16" if precision == "bf16" else "no"
    # Runs of a multirun share this process; without a reset accelerate keeps the first run's precision and device.
    AcceleratorState._reset_state(reset_partial_state=world() == 1)
    accelerator = Accelerator(mixed_precision=mixed, cpu=device.type == "cpu", kwargs_handlers=[group])
    check_world(launcher, accelerator.num_processes, world())
    return accelerator


def follow_nccl() -> None:
    """Set gloo's network interface, unless given, to the first of NCCL's.

    NCCL's names are prefixes, exact after "=", excluded after "^"; gloo's are exact.
    """
    rule = os.environ.get("NCCL_SOCKET_IFNAME")
    if not rule or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    without, named = rule.startswith("^"), rule.lstrip("^")
    whole, names = named.startswith("="), named.lstrip("=").split(",")
    for _, name in socket.if_nameindex():
        listed = name in names if whole else name.startswith(tuple(names))
        if listed != without and not (without and name == "lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def check_world(launcher: LauncherConfig, here: int, started: int) -> None:
    """Refuse a process group of `here` out of `started` processes if the launcher or strategy needs another size.

    A launcher with one process accepts any number of processes that the user's own command started.
    """
    configured = launcher.world
    if here != started or configured not in (1, started):
        raise ValueError(
            f"launcher.num_processes x launcher.num_nodes is {configured}, {started} processes were started and {here} "
            "work together: start as many as the launcher asks for, or leave launcher= out under accelerate launch"
        )
    if here == 1 and launcher.strategy != "ddp":
        raise ValueError(
            f"launcher.strategy={launcher.strategy} cuts the head up between processes, and there is one: give "
            "launcher.num_processes=2 or more, or launcher.strategy=ddp"
        )


def check_machine(launcher: LauncherConfig, model: ModelConfig) -> None:
    """Refuse settings of the launcher that this machine cannot run, before a process starts or a file is written."""
    processes = max(launcher.local, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if device_named(model.device).type == "cuda" and processes > torch.cuda.device_count():
        raise ValueError(
            f"launcher.num_processes is {processes} and this machine has {torch.cuda.device_count()} accelerators: "
            "give launcher.num_processes= that many; under srun each task must see all of its node's, "
            "--gpus-per-node=N --gpu-bind=none"
        )
    if launcher.strategy.startswith("zero") and find_spec("deepspeed") is None:
        raise ValueError(
            f"launcher.strategy={launcher.strategy} needs DeepSpeed: pip install 'headstart[cluster]', or "
            "launcher.strategy=fsdp2"
        )


class RunLock(ExitStack):
    """The lock of a run's folder, held from `take` to the block's end.

    The kernel releases it when its holder exits, even if killed.
    """

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out, self.held = out, False

    def take(self) -> None:
        """Take the lock unless it is held already or there is no folder; refuse a lock that another process holds."""
        if self.held or not self.out.is_dir():
            return
        if not self.enter_context(claim(self.out / LOCK, wait=False)):
            try:
                owner = json.loads((self.out / OWNER).read_text())
                holder = f"process {owner['process']} on {owner['host']} since {owner['since']}"
            except (OSError, ValueError):  # the holder has just started
                holder = "started this moment"
            raise ValueError(
                f"{self.out}: another run writes to it, {holder}; wait for its end, stop it, or give another name=…"
            )
        self.held = True
        owner = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        write_json(self.out / OWNER, owner)


log = logging.getLogger(__name__)

STOPPING = signal.SIGTERM, signal.SIGINT  # signals that stop a run; SIGINT is Ctrl-C
STOPPED = 128 + signal.SIGTERM  # exit status of a stopped run, after either signal
REPEATED = 2.0  # seconds in which a repeated signal is ignored: a launcher may forward a received one


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Run an action on the main process only; a user's error is raised there, and the other processes exit."""
    error: Exception | None = None
    if accelerator.is_main_process:
        try:
            action()
        except (ValueError, OSError) as raised:
            error = raised
    (failed,) = broadcast_object_list([error is not None])
    if failed:
        raise error or SystemExit(2)


class ProcessControl:
    """Control messages between a run's processes: stop requests and gathered values.

    `timeout` is the time in seconds that a process waits for another.
    """

    def __init__(self, accelerator: Accelerator, timeout: int) -> None:
        self.rank, self.world, self.timeout = accelerator.process_index, accelerator.num_processes, timeout
        self._group: Any = None
        if self.world > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._signalled: float | None = None  # time of the signal that stops the run
        self.signal = "SIGTERM"  # its name; a signal of another process counts as SIGTERM

    def halted(self) -> bool:
        """Return whether a process received a SIGTERM: a collective call with the same result on all processes."""
        return self.exchange(over=False)[0]

    def gather(self, item: Any) -> list[Any]:
        """Return every process's item, on every process."""
        if self._group is None:
            return [item]
        items = [None] * self.world
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
                self._signalled = time.monotonic()
                self.signal = signal.Signals(number).name
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
        """Turn a failed collective into one line: a ValueError on the main process, on the others a SystemExit."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            if self.rank:
                raise SystemExit(REPORTED) from error
            raise ValueError(
                f"another process has ended, or did not answer within trainer.timeout={self.timeout} s "
                f"({one_line(error)}); resume=true continues from the last checkpoint"
            ) from error

    def exchange(self, *, over: bool) -> tuple[bool, bool]:
        """Return whether any process received a SIGTERM, and whether the main process's measurement is `over`.

        A collective call; processes that do not measure make it too.
        """
        if self._group is None:
            return self._signalled is not None, over
        votes = torch.tensor([float(self._signalled is not None), float(over)])
        dist.all_reduce(votes, group=self._group)
        return bool(votes[0] > 0), bool(votes[1] > 0)
