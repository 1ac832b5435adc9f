"""What a run leaves to the plan: its processes, the target's placement, the head's strategy, the last check's dtype.

Whatever is given stays as it is. Of the rest the first combination is taken that fits SAFE of every device with one row
of a micro-batch, and of the host's memory where that is known, the fastest first; `train.planning.plan.sized` then
chooses the micro-batch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from inference.target.config import DTYPES, default_device, fast_dtype
from inference.target.placement import AUTO, DEVICE_MAP, OFFLOAD, PLACEMENTS, REPLICATE, TENSOR_PARALLEL, TOGETHER
from train.config import RunConfig, checked
from train.distributed.started import launched, on_node, world
from train.planning.plan import (
    SAFE,
    PlanInputs,
    device_memories,
    host_share,
    most_rows,
    plan_inputs,
    resolved,
    sized,
)
from train.planning.shapes import configuration

GATE = "float32"  # the losslessness check's dtype where the target fits in it: coarse numbers blur the comparison


def with_processes(run: RunConfig) -> RunConfig:
    """Return a run with its number of processes, where it is null: those of a launcher, or one for each accelerator."""
    if run.launcher.num_processes is not None:
        return run
    nodes, there = run.launcher.num_nodes, run.device.count  # of a plan for other devices
    processes = there or (accelerators(run.model.device) if run.device.type != "cpu" else 1)
    if launched():
        processes = on_node()
        nodes = world() // processes
    return replace(run, launcher=replace(run.launcher, num_processes=processes, num_nodes=nodes))


def accelerators(device: str | None) -> int:
    """Return how many processes a machine starts by itself: one for each accelerator, one on a CPU or on a `device`."""
    return torch.cuda.device_count() if (device or default_device()) == "cuda" else 1


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
    disk = f" model.offload={run.model.offload}" if run.model.placement == OFFLOAD else ""
    last = f" eval.gate_dtype={gate}" if run.eval.prompts else ""
    idle = ""
    if run.rows < launcher.world:
        idle = (
            f"; a step of trainer.batch_tokens={run.trainer.batch_tokens} is {run.rows} row{'s' * (run.rows > 1)} for "
            f"{launcher.world} processes, so some have nothing to do: give {launcher.world * run.data.length} or more"
        )
    return (
        f"{nodes}{processes}, placed by the plan: model.placement={run.model.placement}{disk} "
        f"launcher.strategy={launcher.strategy} trainer.micro_tokens={run.trainer.micro_tokens}{last}{idle}"
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
    # After all others: from files, where this machine's memory may not hold what its devices do not.
    if run.model.placement == AUTO and OFFLOAD in placements and run.model.offload == "cpu" and run.device.type is None:
        model = replace(run.model, placement=OFFLOAD, offload="disk")
        for strategy in strategies:
            yield replace(run, model=model, launcher=replace(run.launcher, strategy=strategy))


def _first_that_fits(options: list[RunConfig]) -> RunConfig:
    errors: list[ValueError] = []
    for option in options:
        try:
            if _fits(option):
                return option
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(options):
        raise errors[0]
    return min(options, key=_lacking)


def _lacking(run: RunConfig) -> float:
    """Return the share that a run takes of what it fills most with one row, the least it can; without end for none."""
    try:
        inputs = _inputs(_possible(run), 1)
        return max(host_share(inputs), *(memory.peak / memory.capacity for memory in device_memories(inputs)))
    except ValueError:
        return math.inf


def _fits(run: RunConfig) -> bool:
    """Whether a possible run fits, with the micro-batch that `sized` will choose; refuse what loading would refuse."""
    run = _possible(run)
    inputs = _inputs(run, most_rows(run))
    if host_share(inputs) > SAFE or any(use.fixed > SAFE * use.capacity for use in device_memories(inputs)):
        return False
    return all(use.peak <= SAFE * use.capacity for use in device_memories(_inputs(sized(run), 1)))


def _possible(run: RunConfig) -> RunConfig:
    """Return a run that may be planned; refuse what loading would refuse."""
    if run.model.placement == TENSOR_PARALLEL:
        text: Any = configuration(run.model).get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            raise ValueError(f"model.placement={TENSOR_PARALLEL}: transformers has no plan to cut {run.model.path} up")
    return checked(run)


def _inputs(run: RunConfig, rows: int) -> PlanInputs:
    """Return the inputs of a plan with so many rows, unless the run has its own micro-batch."""
    micro = run.trainer.micro_tokens or rows * run.data.length
    return plan_inputs(replace(run, trainer=replace(run.trainer, micro_tokens=micro)))


def _with_gate(run: RunConfig) -> RunConfig:
    """Return a run with the dtype of its losslessness check: GATE where that fits, else the one that it is timed in."""
    if run.eval.gate_dtype != AUTO:
        return run
    exact = replace(run, eval=replace(run.eval, gate_dtype=GATE))
    if not run.eval.prompts or alone_on_cpu(run) or _fits(exact):
        return exact
    served = next((name for name in (run.eval.dtype, run.model.dtype) if name != AUTO), None)
    fast = fast_dtype(torch.device(str(resolved(run.device, run.model.device).type)))
    name = served or next(name for name, dtype in DTYPES.items() if dtype == fast)
    return replace(run, eval=replace(run.eval, gate_dtype=name))
