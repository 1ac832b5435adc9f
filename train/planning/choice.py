"""What a run leaves to the plan: its processes, the target's placement, the head's strategy, the last check's dtype.

Whatever is given stays as it is. Of the rest the first combination is taken that fits SAFE of every device with one row
of a micro-batch, the fastest first; `train.planning.plan.sized` then chooses the micro-batch.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from inference.target.config import DTYPES, default_device, fast_dtype
from inference.target.placement import AUTO, DEVICE_MAP, OFFLOAD, PLACEMENTS, REPLICATE, TENSOR_PARALLEL, TOGETHER
from train.config import RunConfig, checked
from train.distributed.launch import launched
from train.planning.plan import SAFE, device_memories, plan_inputs, resolved
from train.planning.shapes import configuration
from train.start import STARTS

GATE = "float32"  # the losslessness check's dtype where the target fits in it: coarse numbers blur the comparison


def with_processes(run: RunConfig) -> RunConfig:
    """Return a run with its number of processes, where it is null: those of a launcher, or one for each accelerator."""
    if run.launcher.num_processes is not None:
        return run
    nodes, processes = run.launcher.num_nodes, _accelerators(run)
    if launched():
        world = os.environ.get("WORLD_SIZE", "1")
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        nodes = int(world) // processes
    return replace(run, launcher=replace(run.launcher, num_processes=processes, num_nodes=nodes))


def _accelerators(run: RunConfig) -> int:
    """Return how many processes a node has by itself: of a plan for other devices those of `device.count`."""
    if run.device.count is not None:
        return run.device.count
    several = (run.model.device or default_device()) == "cuda" and run.device.type != "cpu"
    return torch.cuda.device_count() if several else 1


def chosen(run: RunConfig) -> RunConfig:
    """Return a run with the first of its possible placements and strategies that fits, and the dtype of its last check.

    Where none fits it is the one that lacks least.

    Raises:
        ValueError: none of them is possible, and why the first is not.
    """
    run = with_processes(run)
    options = list(_options(run))
    return _with_gate(_first_that_fits(options) if len(options) > 1 else options[0])


def in_words(run: RunConfig) -> str:
    """Return one line about what was chosen, as overrides."""
    launcher, gate = run.launcher, run.eval.gate_dtype
    nodes = f"{launcher.num_nodes} x " if launcher.num_nodes > 1 else ""
    processes = "1 process" if launcher.local == 1 else f"{launcher.local} processes"
    last = f" eval.gate_dtype={gate}" if run.eval.prompts else ""
    return (
        f"{nodes}{processes}, placed by the plan: model.placement={run.model.placement} "
        f"launcher.strategy={launcher.strategy} trainer.micro_tokens={run.trainer.micro_tokens}{last}"
    )


def alone_on_cpu(run: RunConfig) -> bool:
    """Whether a run is a single process on a CPU, which leaves nothing to choose."""
    return run.launcher.world == 1 and resolved(run.device, run.model.device).type == "cpu"


def _options(run: RunConfig) -> Iterator[RunConfig]:
    """Yield the run with every placement and strategy that it may have, the fastest first."""
    several, alone = run.launcher.world > 1, alone_on_cpu(run)
    placements: tuple[str, ...] = (run.model.placement,)
    if run.model.placement == AUTO:
        possible = {
            REPLICATE: True, **dict.fromkeys(TOGETHER, several), DEVICE_MAP: not alone, OFFLOAD: not alone,
        }  # fmt: skip
        placements = tuple(kind for kind in PLACEMENTS if possible[kind])
    strategies: tuple[str, ...] = (run.launcher.strategy,)
    if run.launcher.strategy == AUTO:
        strategies = ("ddp", "fsdp2") if several else ("ddp",)
    for placement, strategy in product(placements, strategies):
        model, launcher = replace(run.model, placement=placement), replace(run.launcher, strategy=strategy)
        yield replace(run, model=model, launcher=launcher)


def _first_that_fits(options: list[RunConfig]) -> RunConfig:
    fullest: dict[int, float] = {}
    errors: list[ValueError] = []
    for number, option in enumerate(options):
        try:
            fullest[number] = _fullest(option)
        except ValueError as error:
            errors.append(error)
            continue
        if fullest[number] <= SAFE:
            return option
    if not fullest:
        raise errors[0]
    return options[min(fullest, key=lambda number: fullest[number])]


def _fullest(run: RunConfig) -> float:
    """Return the share of the fullest device that a possible run takes; refuse one that loading would refuse."""
    if run.model.placement == TENSOR_PARALLEL:
        text: Any = configuration(run.model).get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            raise ValueError(f"model.placement={TENSOR_PARALLEL}: transformers has no plan to cut {run.model.path} up")
    micro = run.trainer.micro_tokens or run.data.length
    init = run.init if run.init in STARTS else None  # a head that is given is about as large as the one configured
    tried = checked(replace(run, init=init, trainer=replace(run.trainer, micro_tokens=micro)))
    return max(memory.peak / memory.capacity for memory in device_memories(plan_inputs(tried)))


def _with_gate(run: RunConfig) -> RunConfig:
    """Return a run with the dtype of its losslessness check: GATE where that fits, else the one that it is timed in."""
    if run.eval.gate_dtype != AUTO:
        return run
    exact = replace(run, eval=replace(run.eval, gate_dtype=GATE))
    if not run.eval.prompts or alone_on_cpu(run) or _fullest(exact) <= SAFE:
        return exact
    served = next((name for name in (run.eval.dtype, run.model.dtype) if name != AUTO), None)
    fast = fast_dtype(torch.device(str(resolved(run.device, run.model.device).type)))
    name = served or next(name for name, dtype in DTYPES.items() if dtype == fast)
    return replace(run, eval=replace(run.eval, gate_dtype=name))
