"""What a process keeps and needs in memory, from plain numbers: the head by its strategy, the target by its placement.

A device holds what is resident, and on top of it what the widest of its stages takes: the target's pass, the head's
step, the optimiser, a measurement of τ, the final evaluation. Stages come one after the other and never add up.
"""

from dataclasses import dataclass
from typing import NamedTuple

from inference.target.placement import DEVICE_MAP, FSDP, GB, OFFLOAD, REPLICATE, TENSOR_PARALLEL, Placement
from train.distributed.strategy import BUCKET
from train.planning.shapes import TargetShape
from train.planning.trace import NONE, Size, Trace, block

AHEAD = 2  # layers of a target that are whole on a device at once where they are gathered or streamed


class Layout(NamedTuple):
    """Who shares what: `processes` on each of `nodes`, `accelerators` of a node, `group` of them tensor-parallel."""

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
    def placement(self) -> str:
        """How the target lies."""
        return self.where.placement

    @property
    def devices(self) -> list[int]:
        """The devices of a node that layers may lie on under device_map."""
        return list(range(self.accelerators)) if self.where.devices is None else self.where.devices

    def mapped(self, device: int) -> float:
        """Return how much of the layers lies on a device under device_map, which shares a process's out evenly."""
        shares = [self.devices[process :: self.processes] for process in range(self.processes)]
        return sum((1 / len(share) for share in shares if device in share), 0.0)


@dataclass(frozen=True)
class Held:
    """What lies on a device or in a node's memory: by name what stays, and by stage what comes and goes."""

    resident: dict[str, Size]
    stages: dict[str, dict[str, Size]]

    def peak(self, base: int | float, slack: float, heap: bool) -> int:
        """Return the bytes at the widest moment.

        Args:
            base: bytes of a process before it loads anything.
            slack: of the allocator, as a fraction of what is asked of it.
            heap: whether it is glibc's, which keeps small blocks and gives back large ones; of each kind the widest
                moment then counts.
        """
        kept = sum(self.resident.values(), NONE)
        stages = [sum(parts.values(), NONE) for parts in self.stages.values()]
        if not heap:
            return round(base + (1 + slack) * (kept.total + max((each.total for each in stages), default=0)))
        most = NONE
        for each in stages:
            most = most.most(each)
        return round(base + kept.large + most.large + (1 + slack) * (kept.small + most.small))


def head_state(trace: Trace, layout: Layout, muon: bool, averaged: bool) -> dict[str, Size]:
    """Return what a process holds of the head and its optimiser between steps, all of it in fp32.

    Args:
        trace: the head's sizes.
        layout: the strategy and who shares it.
        muon: one moment in place of two for the matrices between hidden states.
        averaged: whether a running average is kept, cut up as the weights are.
    """
    count, world, whole = trace.trained, layout.world, trace.weights
    moments = (trace.trained + trace.vectors) / count if muon else 2.0
    cut = {"ddp": (1, 1, 1), "zero2": (1, world, world), "zero3": (world, world, world), "fsdp2": (world, world, world)}
    weights, gradients, states = cut[layout.strategy]
    held = {
        "head: weights": whole.times(1 / weights),
        "head: gradients": whole.times(1 / gradients),
        "head: optimiser": whole.times(moments / states),
    }
    if layout.strategy.startswith("zero"):
        held["head: weights"] = whole.times(1 / weights + 1 / world)  # DeepSpeed moves a copy of its own
        held["head: buckets"] = block(2 * min(BUCKET, count) * 4)
    elif layout.strategy == "ddp" and world > 1:
        held["head: buckets"] = whole
    if weights > 1:  # whole while it computes, and its gradients before they are scattered
        held["head: gathered"] = block(2 * count * 4)
    if trace.resting:
        held["head: frozen"] = block(4 * trace.resting)
    if averaged:
        held["head: running average"] = whole.times(1 / weights)
    return held


def target_state(
    shape: TargetShape, layout: Layout, layers: int, item: int, device: int = 0
) -> tuple[dict[str, Size], int, int]:
    """Return what a device holds of the target, what of it is gathered in a pass, and what the host holds.

    Args:
        shape: the target's.
        layout: its placement and who shares it.
        layers: bytes of all layers, quantised or not; 0 where they are not loaded.
        item: bytes of a value of embedding and lm_head, which are whole on every trainer's device.
        device: a process's, by its number on the node.
    """
    each = AHEAD * layers // shape.layers
    stay = min(layers, int((layout.where.memory_gb or 0) * GB))
    there, gathered, host = {
        REPLICATE: (layers, 0, 0),
        TENSOR_PARALLEL: (layers // layout.group, 0, 0),
        FSDP: (layers // layout.world, each, 0),
        DEVICE_MAP: (round(layers * layout.mapped(device)), 0, 0),
        OFFLOAD: (min(layers, stay + each), 0, 0 if layout.where.offload == "disk" else layers - stay),
    }[layout.placement]
    held = {"target: embedding, lm_head": block(item * shape.embeddings)}
    parts = {TENSOR_PARALLEL: layout.group, FSDP: layout.world}.get(layout.placement, 1)
    if layers and parts > 1:
        held["target: its own part of these"] = block(item * shape.embeddings // parts)
    if there:
        held["target: layers"] = Size(there, 0)
    return held, gathered, host


def pass_stage(
    shape: TargetShape, layout: Layout, tokens: int, length: int, item: int, features: int
) -> dict[str, Size]:
    """Return what the target's pass takes; a tensor-parallel group runs the rows of one process after the other."""
    group = layout.group if layout.placement == TENSOR_PARALLEL else 1
    working, made = shape.working(tokens, length, item, features, group), features_size(shape, tokens, item, features)
    found = {"target: activations, mask": spread(working, tokens * item * shape.width), "features": made}
    return found | ({"features of another's turn": made} if group > 1 else {})


def features_size(shape: TargetShape, tokens: int, item: int, features: int) -> Size:
    """Return the size of a micro-batch's features: the layers that the head reads, and the last state."""
    row = tokens * shape.width * item
    return block(row * features) + block(row)


def head_stage(trace: Trace, features: Size, accumulates: bool, noise: bool, heap: bool) -> dict[str, Size]:
    """Return what the head's step takes above its resident state.

    Args:
        trace: of one micro-batch.
        features: what it reads.
        accumulates: whether gradients stand there from micro-batch to micro-batch.
        noise: whether noise is added to the features, which makes copies of them.
        heap: whether small and large blocks count apart.
    """
    own = NONE if accumulates else trace.weights
    peak = trace.peak if heap else Size(trace.most, 0)
    own = own if heap else Size(own.total, 0)
    kept = trace.kept if heap else Size(trace.kept.total, 0)
    return {
        "features": features.times(3 if noise else 1),
        "head: activations": kept,
        "loss: logits chunks, gradients": peak.less(own).less(kept),
    }


def spread(total: int, each: int) -> Size:
    """Return the size of memory that is made of many blocks of about this size."""
    return Size(total, 0) if each >= block(each).large > 0 else Size(0, total)


def optimizer_stage(trace: Trace, layout: Layout, muon: bool, heap: bool) -> dict[str, Size]:
    """Return what the optimiser's step takes.

    AdamW makes a copy of the second moments at once on a GPU, and on a CPU two of one tensor after the other. Muon
    goes matrix by matrix.
    """
    if heap:
        return {"optimiser: update": block(trace.largest) + block(trace.largest)}
    if muon:
        return {"optimiser: update": Size(4 * trace.vectors + 2 * trace.largest, 0)}
    return {"optimiser: update": Size(4 * trace.trained // (1 if layout.strategy == "ddp" else layout.world), 0)}


def measure_stage(
    shape: TargetShape, layout: Layout, trace: Trace, tokens: int, item: int, on_host: bool
) -> dict[str, Size]:
    """Return what a measurement of τ takes: a copy of the head, keys and values, and the pass over a prompt.

    Args:
        shape: the target's.
        layout: its placement.
        trace: the head's sizes.
        tokens: of a prompt and its answer.
        item: bytes of a value of the target.
        on_host: whether the device is the host, where the copy is made in fp32 first.
    """
    group = layout.group if layout.placement == TENSOR_PARALLEL else 1
    return {
        "τ: decoding copy of the head": block((item + (4 if on_host else 0)) * trace.whole),
        "τ: keys and values": block(shape.cache(2 * tokens, item) // group),  # a buffer doubles when it is full
        "τ: pass over a prompt": block(shape.working(tokens, tokens, item, trace.feature_layers, group)),
    }
