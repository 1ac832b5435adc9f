"""The processes of a run, checked: those that were asked for, on a machine that can run them, under no other hand."""

import ctypes
import os
import sys
from datetime import timedelta
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs

from inference.target.config import ModelConfig, device_named, fast_dtype
from train.config import LauncherConfig, TrainerConfig

LARGE = 2**25  # from here on glibc maps a block by itself, and gives it back to the system when it is freed
ELSEWHERE = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP"}  # set by accelerate's own options

KEPT = 2**28  # bytes
TRIM, MMAP = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, mallopt(3)


def keep_freed() -> None:
    """Let glibc keep KEPT bytes that this process frees, and take all but what is large from them.

    The loss frees and takes tensors of one size over and over. By itself the allocator gives them back to the system in
    between, and the fresh pages that follow are a twentieth of a step. Other systems' allocators are left as they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(MMAP, LARGE)
        libc.mallopt(TRIM, KEPT)


def accelerator_for(launcher: LauncherConfig, trainer: TrainerConfig, model: ModelConfig) -> Accelerator:
    """Return accelerate's handle on the processes, checked against what the launcher asks for.

    Its precision is what the trainer asks for, or what the device is fast in.

    Raises:
        ValueError: there are other processes than asked for or fewer than the strategy needs, or accelerate was told of
            a strategy of its own.
    """
    check_machine(launcher, model)
    place = device_named(model.device)
    for key, name in ELSEWHERE.items():
        if os.environ.get(key, "false").lower() == "true":
            raise ValueError(
                f"accelerate was told to use {name}, which launcher.strategy does here: start without that option (or "
                "accelerate's configuration that has it) and give launcher.strategy=fsdp2, zero2 or zero3"
            )
    if place.type == "cpu":
        keep_freed()
    wanted = trainer.precision
    if wanted == "auto":
        wanted = "bf16" if fast_dtype(place) == torch.bfloat16 else "fp32"
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=trainer.timeout))
    precision = "bf16" if wanted == "bf16" else "no"
    # The runs of a multirun share this process, and accelerate keeps the first one's precision and device for all.
    AcceleratorState._reset_state(reset_partial_state=os.environ.get("WORLD_SIZE", "1") == "1")
    accelerator = Accelerator(mixed_precision=precision, cpu=place.type == "cpu", kwargs_handlers=[group])
    check_world(launcher, accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1")))
    return accelerator


def check_world(launcher: LauncherConfig, here: int, started: int) -> None:
    """Check that the processes that work together are those that were asked for.

    Args:
        launcher: what is asked for; of one process, whatever number the user's own command has started.
        here: how many work together.
        started: how many there are, as the environment says.

    Raises:
        ValueError: they are more or fewer, or fewer than the strategy needs.
    """
    asked = launcher.num_processes * launcher.num_nodes
    if here != started or asked not in (1, started):
        raise ValueError(
            f"launcher.num_processes x launcher.num_nodes is {asked}, {started} processes were started and {here} work "
            "together: start as many as the launcher asks for, or leave launcher= out under accelerate launch"
        )
    if here == 1 and launcher.strategy != "ddp":
        raise ValueError(
            f"launcher.strategy={launcher.strategy} cuts the head up between processes, and there is one: give "
            "launcher.num_processes=2 or more, or launcher.strategy=ddp"
        )


def check_machine(launcher: LauncherConfig, model: ModelConfig) -> None:
    """Check that this machine can run what the launcher asks of it, before anything is started or written.

    Raises:
        ValueError: it has too few devices, or lacks a library.
    """
    place = device_named(model.device)
    wanted = max(launcher.num_processes, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if place.type == "cuda" and wanted > torch.cuda.device_count():
        raise ValueError(
            f"launcher.num_processes is {wanted} and this machine has {torch.cuda.device_count()} accelerators: give "
            "launcher.num_processes= that many"
        )
    if launcher.strategy.startswith("zero") and find_spec("deepspeed") is None:
        raise ValueError(
            f"launcher.strategy={launcher.strategy} needs DeepSpeed: pip install 'headstart[cluster]', or "
            "launcher.strategy=fsdp2"
        )
