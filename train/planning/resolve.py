"""`resolve`: the run of a composed configuration, with every open value filled in once.

Given values stay. Placement and strategy are the fastest that fit SAFE of every device with a micro-batch of one
sequence, and of the host's memory if known; then the micro-batch is the largest that fits.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from omegaconf import DictConfig

from heads import HEADS, best_line
from heads.common.progress import say
from heads.formats.published import export
from heads.formats.published.export import TargetFacts
from inference.target.config import DTYPES, default_device, fast_dtype
from inference.target.placement import AUTO, DEVICE_MAP, OFFLOAD, PLACEMENTS, REPLICATE, TOGETHER
from train.config import RunConfig, checked, run_config
from train.distributed.launch import launched, on_node, world
from train.planning.check import check_plan, check_settings
from train.planning.plan import SAFE, alone_on_cpu, check_memory, plan, resolve_micro_batch, resolved
from train.planning.shapes import configuration, embeddings_of, target_shape
from train.start import STARTS

GATE = "float32"  # the losslessness check's dtype if the target fits in it: 16-bit rounding blurs the comparison


def resolve(cfg: DictConfig) -> RunConfig:
    """Return the run of a composed configuration, checked and without open values.

    Filled in, in this order: the head, the number of processes, placement and strategy, the dtype of the losslessness
    check, the micro-batch. With `plan=true` nothing is written or downloaded for the checks.

    Raises:
        ValueError: settings are wrong, contradict each other, or fit no placement; the key and the remedy.
    """
    run = with_processes(run_config(cfg))
    if run.plan is True:
        check_plan(run)
        run = resolve_micro_batch(resolve_placement(run))
    else:
        check_settings(run)
        run = resolve_micro_batch(resolve_placement(run))
        check_memory(run)
    if run.engine is not None and run.init in STARTS:
        target = configuration(run.model)
        with torch.device("meta"):
            head: Any = HEADS[run.head.name](run.head, embeddings_of(target.get_text_config(), torch.float32))
        facts = TargetFacts(run.model.path, target.to_dict(), torch.bfloat16, 1)
        export.check(head, run.engine, facts, target_shape(run.model).beyond)
    if best := best_line(cfg):
        say(best)
    return run


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


def resolve_placement(run: RunConfig) -> RunConfig:
    """Return a run with the first of its possible placements and strategies that fits, and the dtype of its last check.

    Where none fits it is the one that lacks least.

    Raises:
        ValueError: none of them is possible, and why the first is not.
    """
    options = list(_options(run))
    if len(options) == 1:
        return _with_gate(options[0])
    shares, errors = dict[float, RunConfig](), list[ValueError]()
    for option in options:
        try:
            shares.setdefault(share := _share(option), option)
        except ValueError as error:
            errors.append(error)
            continue
        if share <= SAFE:
            break
    if not shares:
        raise errors[0]
    return _with_gate(shares[min(shares)])


def _options(run: RunConfig) -> Iterator[RunConfig]:
    """Yield the run with every placement and strategy that it may have, the fastest first."""
    several, on_cpu = run.launcher.world > 1, alone_on_cpu(run)
    placements: tuple[str, ...] = (run.model.placement,)
    if run.model.placement == AUTO:
        possible = {
            REPLICATE: True, **dict.fromkeys(TOGETHER, several), DEVICE_MAP: not on_cpu, OFFLOAD: not on_cpu,
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


def _share(run: RunConfig) -> float:
    """Return the share of the fullest device or host with the micro-batch that will be chosen.

    Raises:
        ValueError: loading the target would refuse the placement.
    """
    return plan(resolve_micro_batch(checked(run))).utilization


def _with_gate(run: RunConfig) -> RunConfig:
    """Return a run with the dtype of its losslessness check: GATE where that fits, else the one that it is timed in."""
    if run.eval.gate_dtype != AUTO:
        return run
    exact = replace(run, eval=replace(run.eval, gate_dtype=GATE))
    if not run.eval.prompts or alone_on_cpu(run) or _share(exact) <= SAFE:
        return exact
    served = next((name for name in (run.eval.dtype, run.model.dtype) if name != AUTO), None)
    fast = fast_dtype(torch.device(str(resolved(run.device, run.model.device).type)))
    name = served or next(name for name, dtype in DTYPES.items() if dtype == fast)
    return replace(run, eval=replace(run.eval, gate_dtype=name))
