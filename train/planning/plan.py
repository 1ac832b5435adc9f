"""The plan of a run from configurations alone: memory by device, disk, FLOPs and hours.

Nothing is loaded or written. What depends on data is taken at its largest: every token is trained, no row comes twice.
Each assumption is a key of conf/device or a constant of this package (docs/training_plan.md).

A device holds a process's own, the resident tensors, and those of its largest stage: the target's forward pass, the
head's step, the optimiser, a measurement of τ, writing the head. Stages follow each other, so they never add up. The
final evaluation comes when all of these are freed.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from omegaconf import OmegaConf

from data.features.store import size
from data.features.vllm_features import LayerIds
from heads.common.resolvers import ROOT
from heads.common.target_config import check_rows, context_of
from heads.common.typed import typed
from inference.target.config import DTYPES, device_named, fast_dtype
from inference.target.loading import check_quantized, saved_quantization
from inference.target.placement import (
    DEVICE_MAP,
    FSDP,
    GB,
    OFFLOAD,
    REPLICATE,
    TENSOR_PARALLEL,
    Placement,
    check_offload,
    check_processes,
    check_shape,
    check_weights,
)
from train.config import DeviceConfig, RunConfig
from train.distributed.strategy import BUCKET
from train.planning.check import reads_target, unserved
from train.planning.shapes import (
    HeadCost,
    TargetShape,
    configuration,
    head_cost,
    quantization_note,
    saved_bytes,
    target_shape,
    weight_bytes,
)
from train.start import AUTO, STARTS, check_copied

AHEAD = 2  # layers of a target that are whole on a device at once when they are gathered or streamed


class Layout(NamedTuple):
    """The processes and devices: `processes` on each of `nodes`, `accelerators` of a node, `group` tensor-parallel."""

    strategy: str
    where: Placement
    processes: int
    nodes: int
    accelerators: int
    group: int

    @property
    def world(self) -> int:
        """All processes."""
        return self.processes * self.nodes

    @property
    def shared(self) -> int:
        """The number of devices among which each of the target's layers is sharded."""
        return self.group if self.where.placement == TENSOR_PARALLEL else 1

    @property
    def devices(self) -> list[int]:
        """The devices of a node that layers are placed on under device_map."""
        return list(range(self.accelerators)) if self.where.devices is None else self.where.devices

    def mapped(self, device: int) -> float:
        """Return the fraction of the layers on a device under device_map: each process divides them evenly."""
        groups = [self.devices[process :: self.processes] for process in range(self.processes)]
        return sum((1 / len(group) for group in groups if device in group), 0.0)


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a device of a node, or of a node's host, in bytes."""

    node: int
    device: int | None  # None for a node's host
    process: int  # before anything is loaded
    resident: dict[str, int]
    stages: dict[str, dict[str, int]]  # temporary sizes by stage and name
    evaluation: dict[str, int]  # of the final evaluation, in place of all the others but the process's
    slack: float  # of the widest stage, that the allocator holds above what is asked of it
    capacity: int | None  # None where it is not known

    @property
    def allocator(self) -> int:
        """The bytes that the allocator holds above what is asked of it."""
        return round(self.slack * max(map(total, self.stages.values()), default=0))

    @property
    def peak(self) -> int:
        """The bytes at the widest moment."""
        stages = max(map(total, self.stages.values()), default=0)
        return self.process + max(total(self.resident) + stages + self.allocator, total(self.evaluation))

    @property
    def utilization(self) -> float:
        """The share of the capacity that is used, 0 where that is not known."""
        return self.peak / self.capacity if self.capacity else 0.0


def total(sizes: Mapping[str, int]) -> int:
    """Return the bytes of sizes by name."""
    return sum(sizes.values())


def head_state(cost: HeadCost, layout: Layout, muon: bool, averaged: bool) -> dict[str, int]:
    """Return the bytes of a process for the head and its optimiser between steps, all in fp32.

    With `muon` matrices between hidden states have one moment; an EMA is sharded as the weights are.
    """
    world, whole = layout.world, 4 * cost.trained
    cut = {"ddp": (1, 1, 1), "zero2": (1, world, world), "zero3": (world, world, world), "fsdp2": (world, world, world)}
    weights, gradients, states = cut[layout.strategy]
    zero = layout.strategy.startswith("zero")
    sizes = {
        "head: weights": whole / weights + (whole / world if zero else 0),  # DeepSpeed moves a copy of its own
        "head: gradients": whole / gradients,
        "head: optimiser": 4 * moments(cost, muon) / states,
        "head: buckets": 8 * min(BUCKET, cost.trained)
        if zero
        else whole
        if layout.strategy == "ddp" and world > 1
        else 0,
        "head: gathered": 2 * whole if weights > 1 else 0,  # while it computes, and gradients before they are scattered
        "head: frozen": 4 * cost.frozen,
        "head: EMA": whole / weights if averaged else 0,
    }
    return {name: round(size) for name, size in sizes.items() if size}


def moments(cost: HeadCost, muon: bool) -> int:
    """Return the number of an optimiser's moments."""
    return cost.trained + (cost.vectors if muon else cost.trained)


def target_state(
    shape: TargetShape, layout: Layout, layers: int, item: int, device: int = 0
) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the target's memory: on a device of a node, gathered there during a forward pass, and on the host.

    `layers` are the bytes of all layers, 0 where they are not loaded; `item` those of a value of embedding and lm_head,
    which are whole on every trainer's device.
    """
    placement = layout.where.placement
    ahead = AHEAD * layers // shape.layers
    stay = min(layers, int((layout.where.memory_gb or 0) * GB))
    there, gathered, host = {
        REPLICATE: (layers, 0, 0),
        TENSOR_PARALLEL: (layers // layout.group, 0, 0),
        FSDP: (layers // layout.world, ahead, 0),
        DEVICE_MAP: (round(layers * layout.mapped(device)), 0, 0),
        OFFLOAD: (min(layers, stay + ahead), 0, 0 if layout.where.offload == "disk" else layers - stay),
    }[placement]
    parts = {TENSOR_PARALLEL: layout.group, FSDP: layout.world}.get(placement, 1)
    held = {
        "target: embedding, lm_head": item * shape.embeddings,
        "target: its own part of these": item * shape.embeddings // parts if layers and parts > 1 else 0,
        "target: layers": there,
    }
    return (
        {name: size for name, size in held.items() if size},
        {"target: gathered layers": gathered} if gathered else {},
        host,
    )


def pass_stage(
    shape: TargetShape, layout: Layout, tokens: int, length: int, item: int, features: int, several: bool
) -> dict[str, int]:
    """Return the bytes of the target's forward pass; a tensor-parallel group runs its processes' rows in turn.

    Where a step has `several` micro-batches, the features of the one before are there until the pass has ended.
    """
    output = features_bytes(shape, tokens, item, features)
    sizes = {
        "target: activations, mask": shape.working(tokens, length, item, features, layout.shared),
        "features": output,
        "features of another's turn": output * (layout.shared > 1),
        "features of the micro-batch before": output * several,
    }
    return {name: size for name, size in sizes.items() if size}


def features_bytes(shape: TargetShape, tokens: int, item: int, features: int) -> int:
    """Return the bytes of a micro-batch's features: the layers that the head reads, and the last state."""
    return tokens * shape.width * item * (features + 1)


GIB = 2**30
CGROUPS, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of control groups of version 2 and 1
DEVICES = ROOT / "conf" / "device"
ROW_BYTES = 9  # a packed token: its number, its document, its mask
SAFE = 0.9  # of a device's memory that a run may take
SIDE = 1024  # of the matrices by which a CPU's operations per second are measured
LAYERS = "target: layers"
HOST_BASE = 1.5  # GiB of host memory of a process with torch's CUDA libraries


class PlanInputs(NamedTuple):
    """A run and the sizes derived from it."""

    run: RunConfig
    device: DeviceConfig
    shape: TargetShape
    cost: HeadCost
    layout: Layout
    item: int  # bytes of a value of the target
    bf16: bool  # whether the head's products are in bf16
    rows: int  # of a micro-batch
    micro: int  # micro-batches of a process in a step
    layers: int  # bytes of the target's layers, 0 where they are not loaded

    @property
    def on_cpu(self) -> bool:
        """Whether the device's memory is the process's own."""
        return self.device.type == "cpu"


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
        memory_gb = device.memory_gb or host_bytes() / GIB
        base = device if device.type is not None else replace(device, context_gb=cpu.context_gb, slack=cpu.slack)
        return replace(base, type=kind, memory_gb=memory_gb)
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


def alone_on_cpu(run: RunConfig) -> bool:
    """Whether a run is a single process on a CPU, which leaves nothing to choose."""
    return run.launcher.world == 1 and resolved(run.device, run.model.device).type == "cpu"


def resolve_micro_batch(run: RunConfig) -> RunConfig:
    """Return a run with its `trainer.micro_tokens`, where they are null: the most that fit SAFE of every device.

    They are a power of two of rows, of those that a process has in a step. A device that one row fills already, as a
    final evaluation may, leaves the choice to the others.
    """
    if run.trainer.micro_tokens is not None:
        return run

    def of(rows: int) -> RunConfig:
        return replace(run, trainer=replace(run.trainer, micro_tokens=rows * run.data.length))

    def uses(rows: int) -> list[MemoryUse]:
        return device_memories(plan_inputs(of(rows)))

    limits = [max(use.peak, SAFE * (use.capacity or 0)) for use in uses(1)]
    rows = 1 << max(0, (run.rows // run.launcher.world).bit_length() - 1)
    while rows > 1 and any(use.peak > limit for use, limit in zip(uses(rows), limits, strict=True)):
        rows //= 2
    return of(rows)


def plan_inputs(run: RunConfig) -> PlanInputs:
    """Return the inputs of a plan, with its errors; nothing of it is left open.

    The head is the one configured: another one that `init` names is about as large.
    """
    assert run.trainer.micro_tokens is not None
    check_copied(run.head, run.init, run.model.where.placement)
    device = resolved(run.device, run.model.device)
    fast = fast_dtype(torch.device(str(device.type)))
    dtype = fast if run.model.dtype == "auto" else DTYPES[run.model.dtype]
    bf16 = run.trainer.precision == "bf16" or (run.trainer.precision == "auto" and fast == torch.bfloat16)
    launcher = run.launcher
    accelerators = launcher.local if device.count is None else device.count
    layout = Layout(
        launcher.strategy, run.model.where, launcher.local, launcher.num_nodes,
        accelerators, run.model.tensor_parallel or launcher.local,
    )  # fmt: skip
    _check_placed(run, layout, str(device.type))
    length = run.data.length
    mine = -(-run.rows // layout.world)
    rows = min(mine, run.trainer.micro_tokens // length)
    micro = -(-mine // rows)
    config = configuration(run.model).get_text_config()
    check_rows(length, context_of(config), run.model.path)
    shape = target_shape(run.model)
    cost = head_cost(run, config, rows, str(device.type), bf16=bf16, accumulates=micro > 1)
    # A quantised checkpoint's embeddings are not loaded without its layers, nor those that compute with buffers.
    loaded = reads_target(run) or saved_quantization(configuration(run.model)) is not None or not shape.apart
    layers = int(weight_bytes(run.model, dtype.itemsize, str(device.type)) * shape.inner) if loaded else 0
    return PlanInputs(run, device, shape, cost, layout, dtype.itemsize, bf16, rows, micro, layers)


def _check_placed(run: RunConfig, layout: Layout, device: str) -> None:
    """Check placement, processes and devices as loading the target would."""
    where, model = layout.where, run.model
    check_weights(where, check_quantized(model.path, configuration(model), model.quantize), None)
    check_offload(where, device)
    if where.needs_all_ranks:
        check_processes(where, layout.world, layout.group)
    if where.placement == TENSOR_PARALLEL:
        check_shape(configuration(model).get_text_config(), layout.group, model.path)
    if where.placement == DEVICE_MAP and device != "cpu" and len(layout.devices) < layout.processes:
        raise ValueError(
            f"model.placement=device_map has {len(layout.devices)} devices for {layout.processes} processes: start "
            "fewer, or give more model.devices"
        )


def device_memories(inputs: PlanInputs) -> list[MemoryUse]:
    """Return the memory of every device of every node."""
    device, layout = inputs.device, inputs.layout
    capacity, memories = round(float(device.memory_gb or 0) * GIB), []
    spare = layout.devices if layout.where.placement == DEVICE_MAP and not inputs.on_cpu else []
    trainer = inputs.run.trainer
    always = head_state(inputs.cost, layout, trainer.optimizer == "muon", trainer.ema > 0)
    always |= host_state(inputs) if inputs.on_cpu else {}
    for node in range(layout.nodes):
        for number in sorted({*range(layout.processes), *spare}):
            main = node == number == 0
            target, _, _ = target_state(inputs.shape, layout, inputs.layers, inputs.item, number)
            evaluated, gathered, _ = _evaluated(inputs, number)
            held = target | always, _stages(inputs, number, main), evaluated | gathered
            if number >= layout.processes:  # it holds layers of another one's process, and nothing else
                parts = [{name: size for name, size in sizes.items() if name == LAYERS} for sizes in (held[0], held[2])]
                held = parts[0], {}, parts[1]
            elif not (main or layout.where.needs_all_ranks):
                held = *held[:2], {}
            memories.append(
                MemoryUse(
                    node, number, round(device.context_gb * GIB), *held, device.slack,
                    capacity // layout.processes if inputs.on_cpu else capacity,
                )
            )  # fmt: skip
    return memories


def _stages(inputs: PlanInputs, number: int, main: bool) -> dict[str, dict[str, int]]:
    """Return what each stage of a step takes for its time; the main process also measures, or all of them together."""
    run, cost, layout, shape = inputs.run, inputs.cost, inputs.layout, inputs.shape
    tokens, length, read = inputs.rows * run.data.length, run.data.length, len(cost.feature_layers)
    value = 2 if inputs.bf16 else 4  # bytes of a value of the features as the head reads them
    copied = run.objective.noise > 0 or value != inputs.item
    features = features_bytes(shape, tokens, inputs.item + (value if copied else 0), read)
    scratch = 12 * cost.largest if inputs.on_cpu or run.trainer.optimizer == "muon" else 0  # none where it is fused
    stages = {
        "head's step": {
            "features": features, "head: activations": cost.activations, "loss: logits, gradients": cost.loss,
        },
        "optimiser": {"optimiser: update": scratch},
    }  # fmt: skip
    if inputs.on_cpu:
        stages["writing the head"] = {"head: a copy of it, its file": 8 * cost.trained}
    _, gathered, _ = target_state(shape, layout, inputs.layers, inputs.item, number)
    if inputs.layers and run.features.runs_target:
        stages["target's pass"] = gathered | pass_stage(
            shape, layout, tokens, length, inputs.item, read, inputs.micro > 1
        )
    if (main or layout.where.needs_all_ranks) and run.trainer.eval_prompts and inputs.layers:
        reach = length + run.trainer.eval_tokens
        stages["measuring τ"] = gathered | {  # by decoding one prompt and answer
            "τ: decoding copy of the head": inputs.item * cost.whole,
            # A buffer doubles when it is full.
            "τ: keys and values": shape.cache(2 * reach, inputs.item) // layout.shared,
            "τ: pass over a prompt": shape.working(reach, reach, inputs.item, read, layout.shared),
        }
    return stages


def _evaluated(inputs: PlanInputs, number: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the target's memory in the final evaluation, as `target_state`; nothing without one."""
    run, shape = inputs.run, inputs.shape
    if not run.eval.prompts:
        return {}, {}, 0
    gate = inputs.item if run.eval.gate_dtype == AUTO else DTYPES[run.eval.gate_dtype].itemsize
    layers = int(weight_bytes(run.model, gate, str(inputs.device.type)) * shape.inner)
    return target_state(shape, inputs.layout, layers, gate, number)


def host_use(inputs: PlanInputs) -> MemoryUse:
    """Return the use of a node's host memory, next to its devices'; its capacity is known of this machine alone."""
    layout = inputs.layout
    _, _, offloaded = target_state(inputs.shape, layout, inputs.layers, inputs.item)
    held = {name: size * layout.processes for name, size in host_state(inputs).items()}
    held |= {LAYERS: offloaded * layout.processes} if offloaded else {}
    evaluated = _evaluated(inputs, 0)[2]  # by the first process
    process = round(HOST_BASE * GIB * layout.processes)
    capacity = None if inputs.run.device.type is not None else host_bytes()
    return MemoryUse(0, None, process, held, {}, {LAYERS: evaluated} if evaluated else {}, 0.0, capacity)


def uses(inputs: PlanInputs) -> list[MemoryUse]:
    """Return the memory of every device, and of a node's host where that is another one."""
    return [*device_memories(inputs), *([] if inputs.on_cpu else [host_use(inputs)])]


def host_state(inputs: PlanInputs) -> dict[str, int]:
    """Return what a process holds in its host's memory; checkpoints are shared among all processes."""
    trainer = inputs.run.trainer
    return {
        "data, if no row comes twice": ROW_BYTES * trainer.steps * trainer.batch_tokens,
        "a checkpoint that is being written": state_bytes(inputs) // inputs.layout.world,
    }


def state_bytes(inputs: PlanInputs) -> int:
    """Return the bytes of a checkpoint: weights, moments, the EMA."""
    trainer, cost = inputs.run.trainer, inputs.cost
    held = cost.trained + cost.frozen + moments(cost, trainer.optimizer == "muon")
    return 4 * (held + cost.trained * (trainer.ema > 0))


def disk(inputs: PlanInputs) -> dict[str, int]:
    """Return the bytes of the target, of checkpoints, of the saved head, and of a feature store of all tokens."""
    run, shape = inputs.run, inputs.shape
    # The best one too, and one that is being written.
    checkpoints = run.trainer.keep + (2 if run.trainer.eval_prompts else 1)
    saved = saved_bytes(run.model)
    quantized = 0 if saved is None else round(saved * shape.inner) + 2 * shape.embeddings
    sizes = {
        "target, quantised" if quantized else "target, in 16 bits": quantized or 2 * shape.parameters,
        "checkpoints": checkpoints * state_bytes(inputs),
        "head": 4 * inputs.cost.whole,
    }
    if run.features.mode == "stored":
        row = size(shape.width, run.features.dtype)
        tokens = run.trainer.steps * run.trainer.batch_tokens
        sizes["features, if no row comes twice"] = tokens * (len(inputs.cost.feature_layers) + 1) * row
    return sizes


def work(inputs: PlanInputs) -> dict[str, Any]:
    """Return the floating-point operations of the whole run, and its hours at the assumed fraction of the peak.

    Measurements are left out.
    """
    run, device, shape = inputs.run, inputs.device, inputs.shape
    tokens = inputs.rows * run.data.length
    steps = run.trainer.steps * run.rows / inputs.rows
    target = round(shape.flops(tokens, run.data.length) * steps)
    head = round(inputs.cost.flops * steps)
    cost: dict[str, Any] = {"target_flops": target, "head_flops": head}
    if device.tflops is None:
        return cost
    rate = 3600 * device.tflops * 1e12 * device.mfu
    if run.features.mode == "stored":
        cost["gpu_hours_of_extraction"] = target / rate
    hours = (target + head if run.features.runs_target else head) / rate
    # The processes of a machine share its CPU, whose rate is that of all its cores.
    return cost | {"gpu_hours": hours, "hours": hours / (inputs.layout.nodes if inputs.on_cpu else inputs.layout.world)}


def with_measured_flops(inputs: PlanInputs) -> PlanInputs:
    """Return a plan's inputs with the measured operations per second of its device, where that is this CPU."""
    if not inputs.on_cpu or inputs.device.tflops is not None or inputs.run.device.type is not None:
        return inputs
    return inputs._replace(device=replace(inputs.device, tflops=cpu_tflops(inputs.bf16)))


@cache
def cpu_tflops(bf16: bool) -> float:
    """Return the 10^12 operations per second of this CPU's threads in a product of matrices, the best of some."""
    matrix, seconds = torch.ones(SIDE, SIDE, dtype=torch.bfloat16 if bf16 else torch.float32), []
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - begin)
    return 2 * SIDE**3 / min(seconds) / 1e12


def plan(run: RunConfig) -> dict[str, Any]:
    """Return the plan of a run: counts, bytes, floating-point operations, hours, and the memory of every device.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, or would have to be loaded, or
            the engine's layers are not those that it reads.
    """
    if run.init not in STARTS:
        raise ValueError(f"init={run.init} brings the head's numbers, and plan=true loads nothing: leave init out")
    inputs = with_measured_flops(plan_inputs(run))
    cost, shape, devices = inputs.cost, inputs.shape, device_memories(inputs)
    if run.features.mode == "engine":
        LayerIds.of(run.features.vllm_layers, cost.feature_layers, shape.layers)
    loaded, _, _ = target_state(shape, inputs.layout, inputs.layers, inputs.item)
    return {
        "target_parameters": shape.parameters,
        "active_parameters": shape.active + shape.embeddings,
        "head_parameters": cost.whole,
        "trained_parameters": cost.trained,
        "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens,
        "micro_tokens": run.trainer.micro_tokens,
        "peak_bytes": max(device.peak for device in devices),
        "loaded_bytes": total(loaded),
        **work(inputs),
        "devices": devices,
        "host": None if inputs.on_cpu else host_use(inputs),
        "disk": disk(inputs),
        "quantization": quantization_note(run.model, str(inputs.device.type)),
        "unserved": unserved(run.model.path, shape.beyond),
        "fits": all(use.utilization <= 1 for use in uses(inputs)),
        "device": asdict(inputs.device),
    }
