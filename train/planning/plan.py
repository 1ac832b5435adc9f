"""The plan of a run from configurations alone: memory by device, disk, FLOPs and hours.

Nothing is loaded or written. What depends on data is taken at its largest: every token is trained, no row comes twice.
Each assumption is a key of conf/device or is named in docs/training_plan.md.
"""

import re
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from omegaconf import OmegaConf

from data.features.quantize import size
from data.features.vllm_features import LayerIds
from heads.common.resolvers import ROOT
from heads.common.target_config import check_rows, context_of
from heads.common.typed import typed
from inference.target.config import DTYPES, device_named, fast_dtype
from inference.target.loading import check_quantized, saved_quantization
from inference.target.placement import (
    DEVICE_MAP,
    TENSOR_PARALLEL,
    check_offload,
    check_processes,
    check_shape,
    check_weights,
)
from train.config import DeviceConfig, RunConfig
from train.planning import memory
from train.planning.check import reads_target, unserved
from train.planning.memory import Layout, MemoryUse
from train.planning.shapes import (
    TargetShape,
    configuration,
    quantization_note,
    saved_bytes,
    target_shape,
    weight_bytes,
)
from train.planning.trace import NONE, Job, Size, Trace, blocks, head_of, times, trace
from train.start import AUTO, STARTS, check_copied

GIB = 2**30
CGROUPS, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LIMITS = ("memory.max", "memory.limit_in_bytes")  # of control groups of version 2 and 1
DEVICES = ROOT / "conf" / "device"
ROW_BYTES = 9  # a packed token: its number, its document, its mask
SAFE = 0.9  # of a device's memory that micro-batches may take: what is measured may be a tenth above the plan
GROWING = STEP, PASS = "head's step", "target's pass"  # stages whose memory grows with the rows of a micro-batch
SIDE = 1024  # of the matrices by which a CPU's operations a second are measured
HOST_BASE = 1.5  # GiB of host memory of a process with torch's CUDA libraries


class PlanInputs(NamedTuple):
    """A run and the sizes derived from it."""

    run: RunConfig
    device: DeviceConfig
    shape: TargetShape
    job: Job
    traced: Trace
    layout: Layout
    item: int  # bytes of a value of the target
    rows: int  # of a micro-batch
    micro: int  # micro-batches of a process in a step
    layers: int  # bytes of the target's layers, 0 where they stay on disk

    @property
    def heap(self) -> bool:
        """Whether the device's memory is the process's own."""
        return self.device.type == "cpu"


@dataclass(frozen=True)
class DeviceMemory:
    """The planned memory of one device: node, index, use by name, peaks and capacity in bytes."""

    node: int
    device: int
    held: MemoryUse
    peak: int
    fixed: int  # the peak without the stages that grow with a micro-batch
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether the capacity is enough."""
        return self.peak <= self.capacity


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
    """Return a device's peak in floating-point operations a second: the `given` 10^12, else its preset's, if known."""
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

    They are a power of two of rows, of those that a process has in a step. What takes more with a row at a time, as a
    final evaluation may, does not count: it takes as much whatever they are.
    """
    if run.trainer.micro_tokens is not None:
        return run

    def of(rows: int) -> RunConfig:
        return replace(run, trainer=replace(run.trainer, micro_tokens=rows * run.data.length))

    def fits(rows: int) -> bool:
        memories = device_memories(plan_inputs(of(rows)))
        return all(memory.peak <= max(memory.fixed, SAFE * memory.capacity) for memory in memories)

    most = most_rows(run)
    if fits(most):
        return of(most)
    between = range(1, most.bit_length() - 1)
    return of(2 ** bisect_left(between, True, key=lambda power: not fits(2**power)))


def most_rows(run: RunConfig) -> int:
    """Return the largest power of two of rows within those that a process has in a step, at least one."""
    return 1 << max(0, (run.rows // run.launcher.world).bit_length() - 1)


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
    job = Job(
        run.head, run.peft, run.objective, run.trainer, config, dtype, bf16, str(device.type), rows, length, micro > 1,
    )  # fmt: skip
    try:
        traced = trace(job)
    except Exception:
        target_shape(run.model)  # whose error comes before those of a head on it
        raise
    shape = target_shape(run.model)
    # A quantised checkpoint's embeddings are not loaded without its layers, nor those that compute with buffers.
    loaded = reads_target(run) or saved_quantization(configuration(run.model)) is not None or not shape.apart
    layers = int(weight_bytes(run.model, dtype.itemsize, str(device.type)) * shape.inner) if loaded else 0
    return PlanInputs(run, device, shape, job, traced, layout, dtype.itemsize, rows, micro, layers)


def _check_placed(run: RunConfig, layout: Layout, device: str) -> None:
    """Check placement, processes and devices as loading the target would."""
    where, model = layout.where, run.model
    check_weights(where, check_quantized(model.path, configuration(model), model.quantize), None)
    check_offload(where, device)
    if where.together:
        check_processes(where, layout.world, layout.group)
    if where.placement == TENSOR_PARALLEL:
        check_shape(configuration(model).get_text_config(), layout.group, model.path)
    if where.placement == DEVICE_MAP and device != "cpu" and len(layout.devices) < layout.processes:
        raise ValueError(
            f"model.placement=device_map has {len(layout.devices)} devices for {layout.processes} processes: start "
            "fewer, or give more model.devices"
        )


def device_use(inputs: PlanInputs, main: bool, number: int) -> MemoryUse:
    """Return the memory use of a process's device; the main process also measures, or all of them together."""
    run, traced, layout, shape = inputs.run, inputs.traced, inputs.layout, inputs.shape
    tokens, length = inputs.rows * run.data.length, run.data.length
    target, gathered, _ = memory.target_state(shape, layout, inputs.layers, inputs.item, number)
    muon = run.trainer.optimizer == "muon"
    value = inputs.item if inputs.job.autocast else 4  # bytes of a value of the features as the head reads them
    features, copy = (memory.features_size(shape, tokens, item, traced.feature_layers) for item in (inputs.item, value))
    copied = run.objective.noise > 0 or value != inputs.item
    several, heap = inputs.micro > 1, inputs.heap
    resident = target | memory.head_state(traced, layout, muon, run.trainer.ema > 0)
    stages = {
        STEP: memory.head_stage(traced, features, copy if copied else NONE, several, heap),
        "optimiser": {"optimiser: update": traced.update},
    }
    if heap:  # what lies on the host elsewhere
        resident |= host_state(inputs)
        if inputs.job.autocast or inputs.item == 2:
            resident["code of products in bf16"] = Counter(large=memory.COMPILED)
        # In fp32 each; the gradients are gone by then, and count as resident.
        stages["writing the head"] = {"head: weights, a copy of it, its file": traced.weights + traced.weights}
    if inputs.layers and run.features.runs_target:
        stages[PASS] = gathered | memory.pass_stage(
            shape, layout, tokens, length, inputs.item, traced.feature_layers, several
        )
    if (main or layout.where.together) and run.trainer.eval_prompts and inputs.layers:
        reach = length + run.trainer.eval_tokens
        stages["measuring τ"] = gathered | memory.measure_stage(shape, layout, traced, reach, inputs.item, inputs.heap)
    evaluation = evaluation_use(inputs, number) if main or layout.where.together else {}
    return MemoryUse(round(inputs.device.context_gb * GIB), resident, stages, evaluation)


def evaluation_use(inputs: PlanInputs, number: int) -> dict[str, Size]:
    """Return the sizes of the final evaluation on a device: the target, in the dtype of the losslessness check."""
    if not inputs.run.eval.prompts:
        return {}
    held, gathered, _ = _evaluated(inputs, number)
    return held | gathered


def _evaluated(inputs: PlanInputs, number: int) -> tuple[dict[str, Size], dict[str, Size], int]:
    """Return the target's memory in the final evaluation, as `memory.target_state`."""
    run, shape = inputs.run, inputs.shape
    gate = inputs.item if run.eval.gate_dtype == AUTO else DTYPES[run.eval.gate_dtype].itemsize
    layers = int(weight_bytes(run.model, gate, str(inputs.device.type)) * shape.inner)
    return memory.target_state(shape, inputs.layout, layers, gate, number)


def spare_use(inputs: PlanInputs, number: int) -> MemoryUse:
    """Return the memory use of a device that holds layers alone, of another one's process."""
    layers = Counter(large=round(inputs.layers * inputs.layout.mapped(number)))
    evaluation = {name: size for name, size in evaluation_use(inputs, number).items() if name == "target: layers"}
    return MemoryUse(round(inputs.device.context_gb * GIB), {"target: layers": layers}, {}, evaluation)


def host_use(inputs: PlanInputs) -> MemoryUse:
    """Return the use of a node's host memory beside its devices."""
    layout = inputs.layout
    _, _, offloaded = memory.target_state(inputs.shape, layout, inputs.layers, inputs.item)
    held = {name: times(size, layout.processes) for name, size in host_state(inputs).items()}
    if offloaded:
        held["target: layers"] = Counter(large=offloaded * layout.processes)
    evaluated = _evaluated(inputs, 0)[2] if inputs.run.eval.prompts else 0  # by the first process alone
    evaluation = {"target: layers": Counter(large=evaluated)} if evaluated else {}
    return MemoryUse(round(HOST_BASE * GIB * layout.processes), held, {}, evaluation)


def host_capacity(inputs: PlanInputs) -> int | None:
    """Return the bytes of host memory beside the devices, None where they are not this machine's, or are a CPU."""
    return None if inputs.heap or inputs.run.device.type is not None else host_bytes()


def host_share(inputs: PlanInputs) -> float:
    """Return the share of a node's host memory that a run takes, 0 where that memory is not known."""
    capacity = host_capacity(inputs)
    return 0.0 if capacity is None else host_use(inputs).asked() / capacity


def host_state(inputs: PlanInputs) -> dict[str, Size]:
    """Return what lies in a process's host memory beside itself; checkpoints are shared among all processes."""
    run = inputs.run
    return {
        "data, if no row comes twice": blocks(ROW_BYTES * run.trainer.steps * run.trainer.batch_tokens),
        "a checkpoint that is being written": times(
            inputs.traced.weights, state_bytes(inputs) / (4 * inputs.traced.trained * inputs.layout.world)
        ),
    }


def state_bytes(inputs: PlanInputs) -> int:
    """Return the bytes of a checkpoint: weights, moments, the running average."""
    trainer, traced = inputs.run.trainer, inputs.traced
    copies = 1 + memory.moments_of(traced, trainer.optimizer == "muon") + (trainer.ema > 0)
    return round(4 * (copies * traced.trained + traced.frozen))


def device_memories(inputs: PlanInputs) -> list[DeviceMemory]:
    """Return the memory of every device of every node."""
    device, layout = inputs.device, inputs.layout
    capacity, memories = round(float(device.memory_gb or 0) * GIB), []
    for node in range(layout.nodes):
        for process in range(layout.processes):
            held = device_use(inputs, node == process == 0, process)
            fixed = replace(held, stages={name: size for name, size in held.stages.items() if name not in GROWING})
            peak, least = (use.peak(device.slack, inputs.heap) for use in (held, fixed))
            room = capacity // layout.processes if inputs.heap else capacity
            memories.append(DeviceMemory(node, process, held, peak, least, room))
        beyond = layout.devices if layout.placement == DEVICE_MAP and not inputs.heap else []
        for spare in (number for number in beyond if number >= layout.processes):
            held = spare_use(inputs, spare)
            peak = held.peak(device.slack, False)
            memories.append(DeviceMemory(node, spare, held, peak, peak, capacity))
    return memories


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
        "head": 4 * inputs.traced.whole,
    }
    if run.features.mode in ("stored", "hybrid"):
        row = size(shape.width, run.features.dtype)
        tokens = run.trainer.steps * run.trainer.batch_tokens
        sizes["features, if no row comes twice"] = tokens * (inputs.traced.feature_layers + 1) * row
    return sizes


def work(inputs: PlanInputs) -> dict[str, Any]:
    """Return the floating-point operations of the whole run, and its hours at the assumed fraction of the peak.

    Measurements are left out.
    """
    run, device, shape = inputs.run, inputs.device, inputs.shape
    tokens = inputs.rows * run.data.length
    steps = run.trainer.steps * run.rows / inputs.rows
    target = round(shape.flops(tokens, run.data.length) * steps)
    head = round(inputs.traced.flops * steps)
    cost: dict[str, Any] = {"target_flops": target, "head_flops": head}
    if device.tflops is None:
        return cost
    rate = 3600 * device.tflops * 1e12 * device.mfu
    if run.features.mode == "stored":
        cost["gpu_hours_of_extraction"] = target / rate
    hours = (target + head if run.features.runs_target else head) / rate
    # The processes of a machine share its CPU, whose rate is that of all its cores.
    return cost | {"gpu_hours": hours, "hours": hours / (inputs.layout.nodes if inputs.heap else inputs.layout.world)}


def with_measured_flops(inputs: PlanInputs) -> PlanInputs:
    """Return a plan's inputs with the measured operations a second of its device, where that is this CPU."""
    if not inputs.heap or inputs.device.tflops is not None or inputs.run.device.type is not None:
        return inputs
    return inputs._replace(device=replace(inputs.device, tflops=cpu_tflops(inputs.job.autocast)))


@cache
def cpu_tflops(bf16: bool) -> float:
    """Return the 10^12 operations a second of this CPU's threads in a product of matrices, the best of some."""
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
    traced, shape, devices = inputs.traced, inputs.shape, device_memories(inputs)
    if run.features.mode == "engine":
        LayerIds.of(run.features.vllm_layers, head_of(inputs.job)[0].feature_layers, shape.layers)
    loaded, _, _ = memory.target_state(shape, inputs.layout, inputs.layers, inputs.item)
    return {
        "target_parameters": shape.parameters,
        "active_parameters": shape.active + shape.embeddings,
        "head_parameters": traced.whole,
        "trained_parameters": traced.trained,
        "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens,
        "micro_tokens": run.trainer.micro_tokens,
        "peak_bytes": max(device.peak for device in devices),
        "loaded_bytes": memory.total(loaded),
        **work(inputs),
        "devices": devices,
        "host": None if inputs.heap else host_use(inputs),
        "disk": disk(inputs),
        "quantization": quantization_note(run.model, str(inputs.device.type)),
        "unserved": unserved(run.model.path, shape.beyond),
        "host_capacity": host_capacity(inputs),
        "fits": all(device.fits for device in devices) and host_share(inputs) <= 1,
        "device": asdict(inputs.device),
    }
