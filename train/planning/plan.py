"""The plan of a run from configurations alone: memory by device, disk, FLOPs and hours.

Nothing is loaded or written. What depends on data is taken at its largest: every token is trained, no row comes twice.
Each assumption is a key of conf/device or stands in docs/training_plan.md.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from data.features.quantize import size
from data.features.store import TOP_BYTES
from inference.target.config import DTYPES, fast_dtype
from inference.target.placement import (
    DEVICE_MAP,
    TENSOR_PARALLEL,
    check_offload,
    check_processes,
    check_shape,
)
from train.config import DeviceConfig, RunConfig
from train.planning.check import reads_target
from train.planning.device import GIB, resolved
from train.planning.memory import (
    Layout,
    MemoryUse,
    features_size,
    head_stage,
    head_state,
    measure_stage,
    optimizer_stage,
    pass_stage,
    target_state,
)
from train.planning.shapes import QUANTIZED, TargetShape, configuration, target_shape
from train.planning.trace import Job, Size, Trace, trace
from train.start import AUTO, CHECKPOINT, LAST_LAYER, check_copied

ROW_BYTES = 9  # a packed token: its number, its document, its mask
HOST_BASE = 1.5  # GiB of host memory of a process with torch's CUDA libraries


class PlanInputs(NamedTuple):
    """A run and the sizes derived from it.

    Attributes:
        item: bytes of a value of the target.
        rows: rows of a micro-batch.
        micro: micro-batches of a process in a step.
        layers: bytes of the target's layers, 0 where they stay on disk.
    """

    run: RunConfig
    device: DeviceConfig
    shape: TargetShape
    traced: Trace
    layout: Layout
    item: int
    rows: int
    micro: int
    layers: int

    @property
    def heap(self) -> bool:
        """Whether the device's memory is the process's own."""
        return self.device.type == "cpu"


@dataclass(frozen=True)
class DeviceMemory:
    """The planned memory of one device: node, index, use by name, peak and capacity in bytes."""

    node: int
    device: int
    held: MemoryUse
    peak: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the capacity is enough."""
        return self.peak <= self.capacity


def plan_inputs(run: RunConfig) -> PlanInputs:
    """Return the inputs of a plan: the device, the target's shape, the trace, the processes, sizes.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, or would have to be loaded.
    """
    if run.init not in (None, AUTO, LAST_LAYER, CHECKPOINT):
        raise ValueError(f"init={run.init} brings the head's numbers, and plan=true loads nothing: leave init out")
    check_copied(run.init, run.model.placement)
    device = resolved(run.device, run.model.device)
    fast = fast_dtype(torch.device(str(device.type)))
    dtype = fast if run.model.dtype == "auto" else DTYPES[run.model.dtype]
    bf16 = run.trainer.precision == "bf16" or (run.trainer.precision == "auto" and fast == torch.bfloat16)
    shape, launcher = target_shape(run.model), run.launcher
    accelerators = launcher.num_processes if device.count is None else device.count
    layout = Layout(
        launcher.strategy, run.model.where, launcher.num_processes, launcher.num_nodes,
        accelerators, run.model.tensor_parallel or launcher.num_processes,
    )  # fmt: skip
    _check_placed(run, layout, str(device.type))
    length = run.data.length
    mine = -(-max(1, run.trainer.batch_tokens // length) // layout.world)
    rows = min(mine, max(1, run.trainer.micro_tokens // length))
    micro = -(-mine // rows)
    job = Job(
        run.head, run.peft, run.objective, shape.layer, shape.layers, shape.width, shape.vocab, dtype, bf16,
        str(device.type), rows, length, run.trainer.recompute, micro > 1,
    )  # fmt: skip
    weight_bytes = QUANTIZED.get(run.model.quantize or "", dtype.itemsize)
    layers = int(weight_bytes * shape.inner) if reads_target(run) else 0
    return PlanInputs(run, device, shape, trace(job), layout, dtype.itemsize, rows, micro, layers)


def _check_placed(run: RunConfig, layout: Layout, device: str) -> None:
    """Check placement, processes and devices as loading the target would."""
    where = layout.where
    check_offload(where, device)
    if where.together:
        check_processes(where, layout.world, layout.group)
    if where.placement == TENSOR_PARALLEL:
        check_shape(configuration(run.model).get_text_config(), layout.group, run.model.path)
    if where.placement == DEVICE_MAP and device != "cpu" and len(layout.devices) < layout.processes:
        raise ValueError(
            f"model.placement=device_map has {len(layout.devices)} devices for {layout.processes} processes: start "
            "fewer, or give more model.devices"
        )


def device_use(inputs: PlanInputs, main: bool, number: int) -> MemoryUse:
    """Return the memory use of a process's device; the main process also measures, or all of them together."""
    run, traced, layout, shape = inputs.run, inputs.traced, inputs.layout, inputs.shape
    tokens, length = inputs.rows * run.data.length, run.data.length
    target, gathered, _ = target_state(shape, layout, inputs.layers, inputs.item, number)
    muon = run.trainer.optimizer == "muon"
    features = features_size(shape, tokens, inputs.item, traced.feature_layers)
    resident = target | head_state(traced, layout, muon, run.trainer.ema > 0)
    stages = {
        "head's step": head_stage(traced, features, inputs.micro > 1, run.objective.noise > 0, inputs.heap),
        "optimiser": optimizer_stage(traced, layout, muon, inputs.heap),
    }
    whole = {"target: gathered layers": Size(gathered, 0)} if gathered else {}
    if inputs.layers and run.features.mode != "stored":
        stages["target's pass"] = whole | pass_stage(shape, layout, tokens, length, inputs.item, traced.feature_layers)
    if (main or layout.where.together) and run.trainer.eval_prompts and inputs.layers:
        reach = length + run.trainer.eval_tokens
        stages["measuring τ"] = whole | measure_stage(shape, layout, traced, reach, inputs.item, inputs.heap)
    if main and run.eval.prompts:
        again = int(QUANTIZED.get(run.model.quantize or "", 4) * shape.inner) + 4 * shape.embeddings
        stages["final evaluation"] = {"target again, in fp32": Size(again, 0)}
    return MemoryUse(resident, stages)


def host_use(inputs: PlanInputs) -> MemoryUse:
    """Return the use of a node's host memory beside its devices."""
    run, layout = inputs.run, inputs.layout
    _, _, offloaded = target_state(inputs.shape, layout, inputs.layers, inputs.item)
    tokens = run.trainer.steps * run.trainer.batch_tokens
    snapshot = round(state_bytes(inputs) / layout.nodes)
    resident = {
        "processes": Size(round(HOST_BASE * GIB * layout.processes), 0),
        "data, if no row comes twice": Size(ROW_BYTES * tokens * layout.processes, 0),
        "a checkpoint that is being written": Size(snapshot, 0),
    }
    if offloaded:
        resident["target: layers"] = Size(offloaded * layout.processes, 0)
    return MemoryUse(resident, {})


def state_bytes(inputs: PlanInputs) -> int:
    """Return the bytes of a checkpoint: weights, moments, the running average."""
    trained = 12 + (4 if inputs.run.trainer.ema > 0 else 0)
    return inputs.traced.trained * trained + inputs.traced.frozen * 4


def device_memories(inputs: PlanInputs) -> list[DeviceMemory]:
    """Return the memory of every device of every node."""
    device, layout = inputs.device, inputs.layout
    capacity, memories = round(float(device.memory_gb or 0) * GIB), []
    base = device.context_gb * GIB
    for node in range(layout.nodes):
        for process in range(layout.processes):
            held = device_use(inputs, node == process == 0, process)
            peak = held.peak(base, device.slack, inputs.heap)
            room = capacity // layout.processes if inputs.heap else capacity
            memories.append(DeviceMemory(node, process, held, peak, room))
        beyond = layout.devices if layout.placement == DEVICE_MAP and not inputs.heap else []
        for spare in (number for number in beyond if number >= layout.processes):
            held = MemoryUse({"target: layers": Size(round(inputs.layers * layout.mapped(spare)), 0)}, {})
            memories.append(DeviceMemory(node, spare, held, held.peak(base, device.slack, False), capacity))
    return memories


def disk(inputs: PlanInputs) -> dict[str, int]:
    """Return the bytes of checkpoints, of the saved head, and of a feature store of all tokens."""
    run, shape = inputs.run, inputs.shape
    # The best one too, and one that is being written.
    checkpoints = run.trainer.keep + (2 if run.trainer.eval_prompts else 1)
    sizes = {"checkpoints": checkpoints * state_bytes(inputs), "head": 4 * inputs.traced.whole}
    if run.features.mode != "live":
        row = size(shape.width, run.features.dtype)
        last = row if run.features.teacher == "state" else run.features.k * TOP_BYTES
        tokens = run.trainer.steps * run.trainer.batch_tokens
        sizes["features, if no row comes twice"] = tokens * (inputs.traced.feature_layers * row + last)
    return sizes


def work(inputs: PlanInputs) -> dict[str, Any]:
    """Return the floating-point operations of the whole run, and its hours at the assumed fraction of the peak.

    Measurements are left out.
    """
    run, device, shape = inputs.run, inputs.device, inputs.shape
    tokens = inputs.rows * run.data.length
    steps = run.trainer.steps * max(1, run.trainer.batch_tokens // run.data.length) / inputs.rows
    target = round(shape.flops(tokens, run.data.length) * steps)
    head = round(inputs.traced.flops * steps)
    cost: dict[str, Any] = {"target_flops": target, "head_flops": head, "flops": target + head}
    if device.tflops is None:
        return cost
    rate = 3600 * device.tflops * 1e12 * device.mfu
    stored = run.features.mode == "stored"
    if stored:
        cost["gpu_hours_of_extraction"] = target / rate
    hours = (head if stored else target + head) / rate
    return cost | {"gpu_hours": hours, "hours": hours / inputs.layout.world}


def plan(run: RunConfig) -> dict[str, Any]:
    """Return the plan of a run: counts, bytes, floating-point operations, hours, and the memory of every device.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, or would have to be loaded.
    """
    inputs = plan_inputs(run)
    traced, shape, devices = inputs.traced, inputs.shape, device_memories(inputs)
    held = head_state(traced, inputs.layout, run.trainer.optimizer == "muon", False)
    return {
        "target_parameters": shape.parameters,
        "active_parameters": shape.active + shape.embeddings,
        "head_parameters": traced.whole,
        "trained_parameters": traced.trained,
        "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens,
        "target_bytes": inputs.layers + inputs.item * shape.embeddings,
        "head_and_optimizer_bytes": sum(size.total for size in held.values()),
        "checkpoint_bytes": sum(disk(inputs).values()),
        "peak_bytes": max(memory.peak for memory in devices),
        **work(inputs),
        "devices": devices,
        "host": None if inputs.heap else host_use(inputs),
        "disk": disk(inputs),
        "fits": all(memory.fits for memory in devices),
        "device": asdict(inputs.device),
    }
