"""The memory, disk, operations and hours of a run in closed form, from configurations alone (docs/training_plan.md).

A device has the process's own memory, the target, the head with its optimiser, and the largest stage of a step: the
target's forward pass, the head's step, the optimiser, a measurement of τ. Stages follow each other, so they do not add
up. The final evaluation comes after all of these are freed. Every token is counted as trained, in one epoch.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from omegaconf import OmegaConf
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from data.features.served import LayerIds
from data.features.store import size
from heads.common.resolvers import ROOT
from heads.common.target_config import check_sequence_length, context_of
from heads.common.typed import typed
from heads.common.untrusted import visible
from heads.formats.published.export import unserved
from inference.target.config import DTYPES, device_named, fast_dtype
from inference.target.loading import check_quantized, saved_quantization
from inference.target.placement import (
    DEVICE_MAP,
    FSDP,
    GB,
    OFFLOAD,
    TENSOR_PARALLEL,
    TOGETHER,
    check_offload,
    check_processes,
    check_shape,
    check_weights,
)
from train.config import IGNORE, DeviceConfig, RunConfig, checked
from train.distributed.strategy import BUCKET
from train.planning.check import reads_target
from train.planning.shapes import HeadCost, TargetShape, configuration, head_cost, target_shape, weight_bytes
from train.start import AUTO, check_copied

GIB = 2**30
SAFE = 0.9  # the share of a device's memory that a run may use
AHEAD = 2  # layers of a gathered or offloaded target on a device at once
ROW_BYTES = 9  # bytes of a packed token: its id, document and mask
HOST_BASE = 1.5  # GiB of host memory of a process with torch's CUDA libraries
SIDE = 1024  # of the matrices by which a CPU's operations per second are measured
PRUNED = 32000  # EAGLE-3's draft vocabulary
# The values of features=stored; where the store is does not matter to a plan.
STORED = "features.mode=stored features.on_missing=fail features.path=store"
DEVICES = ROOT / "conf" / "device"
CGROUPS, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of control groups of version 2 and 1


class Memory(NamedTuple):
    """The memory of the fullest device, or of a node's host, in bytes."""

    process: int  # before anything is loaded
    resident: dict[str, int]
    stages: dict[str, int]
    evaluation: int  # the final one, in place of all the others but the process's
    slack: float  # of the widest stage, that the allocator holds above what is asked of it
    capacity: int | None  # None if it is not known

    @property
    def peak(self) -> int:
        """The bytes at the widest moment."""
        widest = max(self.stages.values(), default=0)
        return self.process + max(sum(self.resident.values()) + round((1 + self.slack) * widest), self.evaluation)

    @property
    def utilization(self) -> float:
        """The share of the capacity that is used, 0 if that is not known."""
        return self.peak / self.capacity if self.capacity else 0.0


class Plan(NamedTuple):
    """The plan of a run: its resolved device, the shapes of target and head, and their memory."""

    run: RunConfig
    device: DeviceConfig
    shape: TargetShape
    cost: HeadCost
    micro_batch_size: int  # packed sequences of one forward pass
    memory: Memory  # of the device of the first process, which also measures and evaluates
    host: Memory | None  # of a node; None on a CPU, which is the device

    @property
    def utilization(self) -> float:
        """The share that is used of the device, or of the host where that is more."""
        return max(memory.utilization for memory in (self.memory, self.host) if memory is not None)

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.utilization <= 1

    @property
    def state_bytes(self) -> int:
        """The bytes of a checkpoint: weights, moments, the EMA."""
        trainer, cost = self.run.trainer, self.cost
        return 4 * (cost.trained * (1 + (trainer.ema > 0)) + cost.frozen + moments(cost, trainer.optimizer == "muon"))

    @property
    def disk(self) -> dict[str, int]:
        """The bytes of checkpoints, of the saved head, and of a feature store of all tokens."""
        trainer, features = self.run.trainer, self.run.features
        # The best checkpoint too, and one that is being written.
        sizes = {"checkpoints": (trainer.keep + (2 if trainer.eval_prompts else 1)) * self.state_bytes}
        sizes["head"] = 4 * self.cost.whole
        if features.mode == "stored":
            row = (len(self.cost.feature_layers) + 1) * size(self.shape.width, features.dtype)
            sizes["features"] = trainer.steps * trainer.batch_tokens * row
        return sizes

    @property
    def flops(self) -> tuple[int, int]:
        """The operations of the whole run, measurements left out: the target's and the head's."""
        micro_batches, tokens = (
            self.run.trainer.steps * self.run.sequences_per_step / self.micro_batch_size,
            self.micro_batch_size * self.run.data.length,
        )
        target = self.shape.flops(tokens, self.run.data.length)
        return round(micro_batches * target), round(micro_batches * self.cost.flops)

    @property
    def device_hours(self) -> tuple[float, float] | None:
        """The hours of one device for the target's passes and for the head, None if its peak is not known."""
        peak = self.device.tflops
        if peak is None and self.device.type == "cpu" and self.run.device.type is None:
            peak = cpu_tflops()
        if peak is None:
            return None
        target, head = (flops / (3600e12 * peak * self.device.mfu) for flops in self.flops)
        return target, head

    @property
    def hours(self) -> float | None:
        """The hours of the training; the processes of a machine share its CPU, whose rate is that of all its cores."""
        if self.device_hours is None:
            return None
        target, head = self.device_hours
        launcher = self.run.launcher
        devices = launcher.num_nodes if self.device.type == "cpu" else launcher.world
        return (head + (target if self.run.features.runs_target else 0)) / devices


def plan(run: RunConfig) -> Plan:
    """Return the plan of a run whose `trainer.micro_tokens` is known; nothing is loaded or written.

    The head is the one configured, also where `init` names one of its kind.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, the engine's layers are not
            those that it reads, or loading would refuse the placement.
    """
    assert run.trainer.micro_tokens is not None
    check_copied(run.head, run.init, run.model.where.placement)
    device = resolved(run.device, run.model.device)
    kind, length, launcher = str(device.type), run.data.length, run.launcher
    _check_placed(run, kind, launcher.local if device.count is None else device.count)
    config = configuration(run.model)
    check_sequence_length(length, context_of(config.get_text_config()), run.model.path)
    fast = fast_dtype(torch.device(kind))
    dtype = fast if run.model.dtype == "auto" else DTYPES[run.model.dtype]
    bf16 = run.trainer.precision == "bf16" or (run.trainer.precision == "auto" and fast == torch.bfloat16)
    mine = -(-run.sequences_per_step // launcher.world)
    micro_batch_size = min(mine, run.trainer.micro_tokens // length)
    shape, further = target_shape(run.model), mine > micro_batch_size
    cost = head_cost(run, config.get_text_config(), micro_batch_size, kind, bf16=bf16, accumulates=further)
    if run.features.mode == "engine":
        LayerIds.of(run.features.vllm_layers, cost.feature_layers, shape.layers)
    # A quantised checkpoint's embeddings are not loaded without its layers, nor those that compute with buffers.
    loaded = reads_target(run) or saved_quantization(config) is not None or not shape.apart
    layers = int(weight_bytes(run.model, dtype.itemsize, kind) * shape.inner) if loaded else 0
    target, gathered, offloaded = target_state(run, shape, layers, dtype.itemsize, device.count)
    gate = dtype.itemsize if run.eval.gate_dtype == AUTO else DTYPES[run.eval.gate_dtype].itemsize
    last = int(weight_bytes(run.model, gate, kind) * shape.inner)
    evaluated, again, host_again = dict[str, int](), 0, 0
    if run.eval.prompts:
        evaluated, again, host_again = target_state(run, shape, last, gate, device.count)
    stages = _head_stages(run, shape, cost, micro_batch_size, dtype.itemsize, 2 if bf16 else 4, on_cpu=kind == "cpu")
    if layers:
        passes = _target_stages(run, shape, cost, micro_batch_size, dtype.itemsize, further=further)
        stages |= {name: gathered + taken for name, taken in passes.items()}
    capacity = round(float(device.memory_gb or 0) * GIB)
    memory = Memory(
        round(device.context_gb * GIB), target | head_state(run, cost), stages, sum(evaluated.values()) + again,
        device.slack, capacity // launcher.local if kind == "cpu" else capacity,
    )  # fmt: skip
    planned = Plan(run, device, shape, cost, micro_batch_size, memory, None)
    trainer, local = run.trainer, launcher.local
    held = {
        "data": ROW_BYTES * trainer.steps * trainer.batch_tokens,
        "a checkpoint that is being written": planned.state_bytes // launcher.world,
    }
    if kind == "cpu":
        return planned._replace(memory=memory._replace(resident=memory.resident | held))
    held = {name: local * taken for name, taken in (held | {"target: layers": offloaded}).items() if taken}
    here = None if run.device.type is not None else host_bytes()
    return planned._replace(host=Memory(round(local * HOST_BASE * GIB), held, {}, host_again, 0, here))


def _check_placed(run: RunConfig, device: str, accelerators: int) -> None:
    """Check placement, processes and devices as loading the target would."""
    where, model, launcher = run.model.where, run.model, run.launcher
    config, group = configuration(model), model.tensor_parallel or launcher.local
    check_weights(where, check_quantized(model.path, config, model.quantize), None)
    check_offload(where, device)
    if where.needs_all_ranks:
        check_processes(where, launcher.world, group)
    if where.placement == TENSOR_PARALLEL:
        text: Any = config.get_text_config()
        if not getattr(text, "base_model_tp_plan", None):
            raise ValueError(f"model.placement={TENSOR_PARALLEL}: transformers has no plan to cut {model.path} up")
        check_shape(text, group, model.path)
    devices = len(model.devices or range(accelerators))
    if where.placement == DEVICE_MAP and device != "cpu" and devices < launcher.local:
        raise ValueError(
            f"model.placement=device_map has {devices} devices for {launcher.local} processes: start fewer, or give "
            "more model.devices"
        )


def target_state(
    run: RunConfig, shape: TargetShape, layers: int, item: int, count: int | None
) -> tuple[dict[str, int], int, int]:
    """Return the target's bytes: on the first process's device, gathered there during a pass, on the host.

    `layers` are the bytes of all layers, 0 if they are not loaded; `item` those of a value of embedding and lm_head,
    which are whole on every trainer's device. A node has `count` devices, None for one a process.
    """
    where, launcher = run.model.where, run.launcher
    ahead, gathered, host, parts, there = AHEAD * layers // shape.layers, 0, 0, 1, layers
    if where.placement == TENSOR_PARALLEL:
        parts = run.model.tensor_parallel or launcher.local
    elif where.placement == FSDP:
        parts, gathered = launcher.world, ahead
    elif where.placement == DEVICE_MAP:
        mine = (where.devices or range(count or launcher.local))[:: launcher.local]
        there = layers // len(mine) if 0 in mine else 0  # the devices of a process share its layers out evenly
    elif where.placement == OFFLOAD:
        stay = min(layers, int((where.memory_gb or 0) * GB))
        there, host = min(layers, stay + ahead), 0 if where.offload == "disk" else layers - stay
    ends = item * shape.embeddings
    # transformers' own shard of them, which trainers do not read.
    shard = ends // parts if layers and parts > 1 else 0
    return {"target: embedding, lm_head": ends + shard, "target: layers": there // parts}, gathered, host


def head_state(run: RunConfig, cost: HeadCost) -> dict[str, int]:
    """Return the bytes of a process for the head and its optimiser between steps, all in fp32.

    Muon keeps one moment of matrices between hidden states; an EMA is sharded as the weights are.
    """
    strategy, world, whole = run.launcher.strategy, run.launcher.world, 4 * cost.trained
    zero, sharded = strategy.startswith("zero"), strategy in ("zero3", "fsdp2") and world > 1
    weights, gradients, states = {
        "ddp": (1, 1, 1), "zero2": (1, world, world), "zero3": (world,) * 3, "fsdp2": (world,) * 3,
    }[strategy]  # fmt: skip
    buckets = 8 * min(BUCKET, cost.trained) if zero else whole if strategy == "ddp" and world > 1 else 0
    sizes = {
        "head: weights": 4 * cost.frozen + whole / weights + (whole / world if zero else 0),  # DeepSpeed's own copy
        "head: gradients": whole / gradients + buckets,
        "head: optimiser": 4 * moments(cost, run.trainer.optimizer == "muon") / states,
        "head: gathered": 2 * whole * sharded,  # while it computes, and gradients before they are scattered
        "head: EMA": whole / weights * (run.trainer.ema > 0),
    }
    return {name: round(taken) for name, taken in sizes.items() if taken}


def moments(cost: HeadCost, muon: bool) -> int:
    """Return the number of an optimiser's moments."""
    return cost.trained + (cost.vectors if muon else cost.trained)


def _head_stages(
    run: RunConfig, shape: TargetShape, cost: HeadCost, micro_batch_size: int, item: int, value: int, *, on_cpu: bool
) -> dict[str, int]:
    """Return the temporary bytes of each stage of a step, without the target's.

    A value has `item` bytes in the target, `value` in the head.
    """
    copied = value if run.objective.noise > 0 or value != item else 0
    features = micro_batch_size * run.data.length * shape.width * (len(cost.feature_layers) + 1)
    stages = {"head's step": features * (item + copied) + cost.activations + cost.loss}
    if on_cpu or run.trainer.optimizer == "muon":  # else it is fused
        stages["optimiser"] = 12 * cost.largest
    if on_cpu:
        stages["writing the head"] = 8 * cost.trained
    return stages


def _target_stages(
    run: RunConfig, shape: TargetShape, cost: HeadCost, micro_batch_size: int, item: int, *, further: bool
) -> dict[str, int]:
    """Return the temporary bytes of each stage of the target.

    Where a step has `further` micro-batches, the features of the one before are there until the target's pass has
    ended. A tensor-parallel group runs its processes' sequences in turn.
    """
    length, read, tensor_parallel = run.data.length, len(cost.feature_layers), run.model.placement == TENSOR_PARALLEL
    tokens, group = (
        micro_batch_size * length,
        (run.model.tensor_parallel or run.launcher.local) if tensor_parallel else 1,
    )
    stages = {}
    if run.features.runs_target:
        features = (1 + (group > 1) + further) * tokens * shape.width * (read + 1) * item
        stages["target's pass"] = shape.working(tokens, length, item, read, group) + features
    if run.trainer.eval_prompts:  # one prompt and answer is decoded, by buffers that double when they are full
        reach = length + run.trainer.eval_tokens
        dims = shape.layer_dims
        cached = 2 * reach * shape.layers * 2 * dims.num_kv_heads * dims.head_dim * item // group
        stages["measuring τ"] = item * cost.whole + cached + shape.working(reach, reach, item, read, group)
    return stages


def preset(name: str) -> DeviceConfig:
    """Return a device of conf/device."""
    values: Any = OmegaConf.merge(*(OmegaConf.load(DEVICES / f"{file}.yaml") for file in ("here", name)))
    values.pop("defaults", None)
    return typed(DeviceConfig, values)


def by_driver_name(driver: str) -> DeviceConfig | None:
    """Return the device with the longest `match`, to a word's end, in the name that a driver reports; None without."""
    presets = map(preset, sorted(file.stem for file in DEVICES.glob("*.yaml")))
    matching = [device for device in presets if device.match and re.search(rf"{re.escape(device.match)}(?!\w)", driver)]
    return max(matching, key=lambda device: len(device.match or ""), default=None)


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """Return a device's peak in operations per second: the `given` 10^12, else its preset's, if known."""
    if given is None and device.type == "cuda":
        named = by_driver_name(torch.cuda.get_device_name(device))
        given = None if named is None else named.tflops
    return None if given is None else given * 1e12


def resolved(device: DeviceConfig, requested: str | None) -> DeviceConfig:
    """Return a device with its type and memory filled in, where they are null by this machine's.

    `requested` is the run's `model.device`, None for torch's default device; one of another type is refused.
    """
    kind = device_named(requested).type if device.type is None else device.type
    if requested is not None and requested.partition(":")[0] != kind:
        raise ValueError(f"device={device.name} is of type {kind}, and model.device={requested} is not: leave one out")
    if kind == "cpu":
        cpu = preset("cpu")
        base = device if device.type is not None else replace(device, context_gb=cpu.context_gb, slack=cpu.slack)
        return replace(base, type=kind, memory_gb=device.memory_gb or host_bytes() / GIB)
    if device.memory_gb is not None:
        return replace(device, type=kind)
    properties = torch.cuda.get_device_properties(requested or "cuda")
    match = by_driver_name(properties.name)
    tflops = device.tflops or (None if match is None else match.tflops)
    return replace(device, type=kind, memory_gb=properties.total_memory / GIB, tflops=tflops, name=properties.name)


def host_bytes() -> int:
    """Return this machine's memory in bytes, or the limit that a container or a cluster's job has where it is less."""
    least = int(psutil.virtual_memory().total)
    for line in GROUPS.read_text().splitlines() if GROUPS.is_file() else []:
        _, kind, group = line.split(":", 2)
        folder = CGROUPS / kind / group[1:]
        for file in (above / name for above in (folder, *folder.parents) for name in LIMITS):
            if file.is_file() and (limit := file.read_text().strip()).isdigit():
                least = min(least, int(limit))
    return least


@cache
def cpu_tflops() -> float:
    """Return the 10^12 operations per second of this CPU's threads in a product of matrices, the best of some."""
    matrix, seconds = torch.ones(SIDE, SIDE, dtype=fast_dtype(torch.device("cpu"))), []
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - begin)
    return 2 * SIDE**3 / min(seconds) / 1e12


def alone_on_cpu(run: RunConfig) -> bool:
    """Whether a run is a single process on a CPU, which leaves nothing to choose."""
    return run.launcher.world == 1 and resolved(run.device, run.model.device).type == "cpu"


def resolve_micro_batch(run: RunConfig) -> RunConfig:
    """Return a run with its `trainer.micro_tokens`, where they are null: the most that fit SAFE of every device.

    The micro-batch is a power of two of sequences, at most a process's share of a step. A device that one sequence
    fills already, as a final evaluation may, leaves the choice to the share of a process.
    """
    if run.trainer.micro_tokens is not None:
        return run

    def of(micro_batch_size: int) -> RunConfig:
        return replace(run, trainer=replace(run.trainer, micro_tokens=micro_batch_size * run.data.length))

    least = plan(of(1)).memory
    limit = max(least.peak, SAFE * (least.capacity or 0))
    micro_batch_size = 1 << max(0, (run.sequences_per_step // run.launcher.world).bit_length() - 1)
    while micro_batch_size > 1 and plan(of(micro_batch_size)).memory.peak > limit:
        micro_batch_size //= 2
    return of(micro_batch_size)


def table(planned: Plan) -> Group:
    """Return a plan as tables for the terminal; if it does not fit, with overrides that make it."""
    run, shape, cost, device = planned.run, planned.shape, planned.cost, planned.device
    totals = _table(f"plan: {run.name} -> {run.out}")
    totals.add_row("data", escape(visible(run.data.named)))
    counts = {
        "target parameters": shape.parameters, "active parameters": shape.active + shape.embeddings,
        "head parameters": cost.whole, "trained parameters": cost.trained, "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens, "micro tokens": run.trainer.micro_tokens,
    }  # fmt: skip
    for name, count in counts.items():
        totals.add_row(name, f"{count:,}")
    totals.add_row("a step", f"{run.trainer.batch_tokens:,} tokens in sequences of {run.data.length:,}")
    for name, taken in planned.disk.items():
        totals.add_row(f"disk: {name}", gib(taken))
    totals.add_row("operations, target and head", "{:.2g} + {:.2g}".format(*planned.flops))
    if planned.hours is None or planned.device_hours is None:
        totals.add_row("hours", f"not known: device={device.name} has no peak; give device.tflops")
    else:
        totals.add_row(f"time at an assumed {device.mfu:.0%} of {device.name}'s peak", spoken(planned.hours))
        if device.type != "cpu":
            totals.add_row("GPU hours", f"{planned.hours * run.launcher.world:,.1f}")
        if run.features.mode == "stored":
            totals.add_row("GPU hours of the extraction, elsewhere", f"{planned.device_hours[0]:,.1f}")
    lines = [in_words(run), *filter(None, [unserved(run.head, shape.beyond)])]
    memories = [_memory_table("the fullest device", planned.memory)]
    memories += [] if planned.host is None else [_memory_table("host memory of each node", planned.host)]
    if planned.fits:
        lines.append("it fits; without plan=true the same command runs it")
    elif words := remedy(run):
        lines.append(f"it does not fit; with this it does: {words}")
    else:
        lines.append("it does not fit with any change: take more or larger devices, or another head")
    return Group(totals, *memories, *(escape(visible(line)) for line in lines))


def _table(title: str) -> Table:
    shown = Table(title=title, show_header=False, min_width=60)
    shown.add_column(overflow="fold")
    shown.add_column(justify="right")
    return shown


def _memory_table(title: str, use: Memory) -> Table:
    fits = "fits" if use.utilization <= 1 else "does NOT fit"
    shown = _table(f"{title}: {gib(use.peak)}" + ("" if use.capacity is None else f" of {gib(use.capacity)}, {fits}"))
    stages = {f"while: {stage}": round((1 + use.slack) * taken) for stage, taken in use.stages.items()}
    last = {"final evaluation, all else freed": use.evaluation} if use.evaluation else {}
    for name, taken in {"process": use.process, **use.resident, **stages, **last}.items():
        shown.add_row(name, gib(taken))
    return shown


def gib(taken: float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{taken / GIB:,.2f} GiB" if taken >= 2**27 else f"{taken / 2**20:,.1f} MiB"


def spoken(hours: float) -> str:
    """Format a time in hours, minutes or seconds."""
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.0f} min" if hours >= 1 / 30 else f"{3600 * hours:.0f} s"


def in_words(run: RunConfig) -> str:
    """Return the chosen values in one line, as overrides."""
    launcher, gate = run.launcher, run.eval.gate_dtype
    nodes = f"{launcher.num_nodes} x " if launcher.num_nodes > 1 else ""
    processes = "1 process" if launcher.local == 1 else f"{launcher.local} processes"
    disk = f" model.offload={run.model.offload}" if run.model.placement == OFFLOAD else ""
    last = f" eval.gate_dtype={gate}" if run.eval.prompts else ""
    idle = ""
    if (few := run.sequences_per_step) < launcher.world:
        idle = (
            f"; a step of trainer.batch_tokens={run.trainer.batch_tokens} is {few} sequence{'s' * (few > 1)} for "
            f"{launcher.world} processes, so some have nothing to do: give {launcher.world * run.data.length} or more"
        )
    return (
        f"{nodes}{processes}, placed by the plan: model.placement={run.model.placement}{disk} "
        f"launcher.strategy={launcher.strategy} trainer.micro_tokens={run.trainer.micro_tokens}{last}{idle}"
    )


def check_memory(run: RunConfig) -> None:
    """Refuse a run that does not fit by its plan, before anything is loaded, unless plan=ignore.

    A process by itself on a CPU has the memory that is free.
    """
    where = "a device"
    if alone_on_cpu(run):
        free = run.device.memory_gb or min(psutil.virtual_memory().available, host_bytes()) / GIB
        run, where = replace(run, device=replace(run.device, memory_gb=free)), "this machine"
    planned = plan(run)
    if planned.fits or run.plan == IGNORE:
        return
    lacking = planned.memory
    if planned.host is not None and planned.memory.utilization <= 1:
        where, lacking = "a node's host", planned.host
    raise ValueError(
        f"{run.name} does not fit: it needs {gib(lacking.peak)} of memory, and {where} has "
        f"{gib(lacking.capacity or 0)} free: give {remedy(run) or 'another head, or more or larger devices'}; "
        f"plan=true shows where it goes, plan={IGNORE} starts all the same"
    )


def remedy(run: RunConfig) -> str | None:
    """Return overrides with which a run fits: the first single change, else several in turn; None if none do.

    The least costly changes come first, those that leave the training's result as it is before the others.
    """
    for words in _changes(run):
        if (changed := _changed(run, words)) is not None and changed.fits:
            return words
    chosen: list[str] = []
    least = plan(run).utilization
    for words in _changes(run):
        if {word.split("=")[0] for word in words.split()} & {word.split("=")[0] for word in chosen}:
            continue
        changed = _changed(run, words)
        if changed is not None and changed.utilization < least:
            run, least = changed.run, changed.utilization
            chosen += words.split()
            if changed.fits:
                return " ".join(chosen)
    return None


def _changed(run: RunConfig, overrides: str) -> Plan | None:
    """Return the plan of a run with overrides as on the command line, None if its settings are refused."""
    words = overrides.replace("features=stored", STORED).split()
    sections: Any = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    try:
        return plan(checked(replace(run, **{key: replace(getattr(run, key), **v) for key, v in sections.items()})))
    except ValueError:
        return None


def _changes(run: RunConfig) -> Iterator[str]:
    """Yield possible changes of a run as overrides; the least costly come first."""
    assert run.trainer.micro_tokens is not None
    length, half = run.data.length, run.data.length // 2
    head, several = asdict(run.head), run.launcher.world > 1
    unsharded, whole = run.launcher.strategy == "ddp", run.model.placement == "replicate"
    options = {
        "model.offload=disk": run.model.placement == "offload" and run.model.offload == "cpu",
        f"trainer.micro_tokens={length}": run.trainer.micro_tokens >= 2 * length,
        "launcher.strategy=fsdp2": several and unsharded,
        **{f"model.placement={kind}": several and whole for kind in TOGETHER},
        "trainer.recompute=true": not run.trainer.recompute,
        "features=stored trainer.eval_prompts=0": run.features.mode == "live",
        "eval.prompts=0": run.eval.prompts > 0,
        "trainer.optimizer=muon": run.trainer.optimizer == "adamw" and unsharded,
        "model.placement=offload": whole,
        "model.quantize=int8": run.model.quantize is None,
        f"head.draft_vocab={PRUNED}": head.get("draft_vocab", PRUNED) is None,
        "head.lm_head=shared": head.get("lm_head") == "own",
        f"data.length={half} trainer.micro_tokens={half}": length > 512,
    }
    yield from (overrides for overrides, possible in options.items() if possible)
