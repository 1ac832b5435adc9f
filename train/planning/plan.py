"""What a run would do, from configurations alone: nothing is loaded, nothing is written.

Memory device by device, disk, FLOPs and hours. What is not known before there is data is taken at its largest: every
token is trained, no row comes twice. Each assumption is a key of conf/device or stands in docs/training_plan.md.
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
from train.planning.device import GIB, settled
from train.planning.memory import (
    Held,
    Layout,
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


class Given(NamedTuple):
    """A run, and what follows from it: the device, the target's shape, the trace, who shares what, and sizes in bytes.

    `rows` are those of a micro-batch, `micro` how many of these a process has a step, `layers` the target's layers in
    bytes, 0 where they stay on disk.
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
class Place:
    """A device or a node's memory: where it is, what it holds, the bytes at its widest moment and those it has."""

    node: int
    device: int | None
    held: Held
    peak: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether it is enough."""
        return self.peak <= self.capacity


def given(run: RunConfig) -> Given:
    """Return what a plan is made of.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, or is one to be loaded.
    """
    if run.init not in (None, AUTO, LAST_LAYER, CHECKPOINT):
        raise ValueError(f"init={run.init} brings the head's numbers, and plan=true loads nothing: leave init out")
    check_copied(run.init, run.model.placement)
    device = settled(run.device, run.model.device)
    place = torch.device(str(device.type))
    kind = fast_dtype(place) if run.model.dtype == "auto" else DTYPES[run.model.dtype]
    bf16 = run.trainer.precision == "bf16" or (run.trainer.precision == "auto" and fast_dtype(place) == torch.bfloat16)
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
        run.head, run.peft, run.objective, shape.layer, shape.layers, shape.width, shape.vocab, kind, bf16, place.type,
        rows, length, run.trainer.recompute, micro > 1,
    )  # fmt: skip
    quantize = QUANTIZED.get(run.model.quantize or "", kind.itemsize)
    layers = int(quantize * shape.inner) if reads_target(run) else 0
    return Given(run, device, shape, trace(job), layout, kind.itemsize, rows, micro, layers)


def _check_placed(run: RunConfig, layout: Layout, device: str) -> None:
    """Check what loading would check, of the processes and devices that are planned for."""
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


def device_held(known: Given, main: bool, number: int) -> Held:
    """Return what lies on the device of a process; the main one also measures, or all of them together."""
    run, traced, layout, shape = known.run, known.traced, known.layout, known.shape
    tokens, length = known.rows * run.data.length, run.data.length
    target, gathered, _ = target_state(shape, layout, known.layers, known.item, number)
    muon = run.trainer.optimizer == "muon"
    features = features_size(shape, tokens, known.item, traced.feature_layers)
    resident = target | head_state(traced, layout, muon, run.trainer.ema > 0)
    stages = {
        "head's step": head_stage(traced, features, known.micro > 1, run.objective.noise > 0, known.heap),
        "optimiser": optimizer_stage(traced, layout, muon, known.heap),
    }
    whole = {"target: gathered layers": Size(gathered, 0)} if gathered else {}
    if known.layers and run.features.mode != "stored":
        stages["target's pass"] = whole | pass_stage(shape, layout, tokens, length, known.item, traced.feature_layers)
    if (main or layout.where.together) and run.trainer.eval_prompts and known.layers:
        reach = length + run.trainer.eval_tokens
        stages["measuring τ"] = whole | measure_stage(shape, layout, traced, reach, known.item, known.heap)
    if main and run.eval.prompts:
        again = int(QUANTIZED.get(run.model.quantize or "", 4) * shape.inner) + 4 * shape.embeddings
        stages["final evaluation"] = {"target again, in fp32": Size(again, 0)}
    return Held(resident, stages)


def host_held(known: Given) -> Held:
    """Return what lies in a node's memory beside its devices."""
    run, layout = known.run, known.layout
    _, _, offloaded = target_state(known.shape, layout, known.layers, known.item)
    tokens = run.trainer.steps * run.trainer.batch_tokens
    snapshot = round(state_bytes(known) / layout.nodes)
    resident = {
        "processes": Size(round(HOST_BASE * GIB * layout.processes), 0),
        "data, if no row comes twice": Size(ROW_BYTES * tokens * layout.processes, 0),
        "a checkpoint that is being written": Size(snapshot, 0),
    }
    if offloaded:
        resident["target: layers"] = Size(offloaded * layout.processes, 0)
    return Held(resident, {})


def state_bytes(known: Given) -> int:
    """Return the bytes of what a run must keep to go on: weights, moments, the running average."""
    kept = 12 + (4 if known.run.trainer.ema > 0 else 0)
    return known.traced.trained * kept + known.traced.resting * 4


def places(known: Given) -> list[Place]:
    """Return every device of every node, and the nodes' own memory where it is another."""
    device, layout = known.device, known.layout
    capacity, found = round(float(device.memory_gb or 0) * GIB), []
    base = device.context_gb * GIB
    for node in range(layout.nodes):
        for process in range(layout.processes):
            held = device_held(known, node == process == 0, process)
            peak = held.peak(base, device.slack, known.heap)
            room = capacity // layout.processes if known.heap else capacity
            found.append(Place(node, process, held, peak, room))
        beyond = layout.devices if layout.placement == DEVICE_MAP and not known.heap else []
        for spare in (number for number in beyond if number >= layout.processes):
            held = Held({"target: layers": Size(round(known.layers * layout.mapped(spare)), 0)}, {})
            found.append(Place(node, spare, held, held.peak(base, device.slack, False), capacity))
    return found


def disk(known: Given) -> dict[str, int]:
    """Return the bytes of checkpoints, of the kept head, and of a feature store of all tokens."""
    run, shape = known.run, known.shape
    kept = run.trainer.keep + (
        2 if run.trainer.eval_prompts else 1
    )  # the best one's too, and one that is being written
    found = {"checkpoints": kept * state_bytes(known), "head": 4 * known.traced.whole}
    if run.features.mode != "live":
        row = size(shape.width, run.features.dtype)
        last = row if run.features.teacher == "state" else run.features.k * TOP_BYTES
        tokens = run.trainer.steps * run.trainer.batch_tokens
        found["features, if no row comes twice"] = tokens * (known.traced.feature_layers * row + last)
    return found


def work(known: Given) -> dict[str, Any]:
    """Return floating-point operations of the whole run, and the hours that they take at the assumed share of the peak.

    Those of a measurement are not in it.
    """
    run, device, shape = known.run, known.device, known.shape
    tokens = known.rows * run.data.length
    steps = run.trainer.steps * max(1, run.trainer.batch_tokens // run.data.length) / known.rows
    target = round(shape.flops(tokens, run.data.length) * steps)
    head = round(known.traced.flops * steps)
    found: dict[str, Any] = {"target_flops": target, "head_flops": head, "flops": target + head}
    if device.tflops is None:
        return found
    rate = 3600 * device.tflops * 1e12 * device.mfu
    stored = run.features.mode == "stored"
    if stored:
        found["gpu_hours_of_extraction"] = target / rate
    hours = (head if stored else target + head) / rate
    return found | {"gpu_hours": hours, "hours": hours / known.layout.world}


def plan(run: RunConfig) -> dict[str, Any]:
    """Return what a run takes: counts, bytes, floating-point operations, hours, and every place that holds something.

    Raises:
        ValueError: the target's configuration cannot be read, the head does not fit it, or is one to be loaded.
    """
    known = given(run)
    traced, shape, run_places = known.traced, known.shape, places(known)
    resting = traced.resting * 4
    held = head_state(traced, known.layout, run.trainer.optimizer == "muon", False)
    return {
        "target_parameters": shape.parameters,
        "active_parameters": shape.active + shape.embeddings,
        "head_parameters": traced.whole,
        "trained_parameters": traced.trained,
        "steps": run.trainer.steps,
        "tokens": run.trainer.steps * run.trainer.batch_tokens,
        "target_bytes": known.layers + known.item * shape.embeddings,
        "head_and_optimizer_bytes": sum(part.total for part in held.values())
        + (0 if "head: frozen" in held else resting),
        "checkpoint_bytes": sum(disk(known).values()),
        "peak_bytes": max(place.peak for place in run_places),
        **work(known),
        "places": run_places,
        "host": None if known.heap else host_held(known),
        "disk": disk(known),
        "fits": all(place.fits for place in run_places),
        "device": asdict(known.device),
    }
