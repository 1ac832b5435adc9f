"""Estimate the memory of a process from sizes: the head's by its strategy, the target's by its placement.

A device holds what a process takes before it loads anything, the resident tensors, and beside them those of its largest
stage: the target's forward pass, the head's step, the optimiser, a measurement of τ, writing the head. Stages follow
each other, so they never add up. The final evaluation comes when all of these are freed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

from inference.target.placement import DEVICE_MAP, FSDP, GB, OFFLOAD, REPLICATE, TENSOR_PARALLEL, Placement
from train.distributed.strategy import BUCKET
from train.planning.shapes import TargetShape
from train.planning.trace import NONE, Size, Trace, blocks, times

COMPILED = 140 * 2**20  # bytes of oneDNN's code for products in bf16, once its cache is full: measured
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
    def placement(self) -> str:
        """The target's placement."""
        return self.where.placement

    @property
    def shared(self) -> int:
        """The number of devices among which each of the target's layers is sharded."""
        return self.group if self.placement == TENSOR_PARALLEL else 1

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
    """The memory of a device or a node."""

    process: int  # bytes that a process takes before it loads anything
    resident: dict[str, Size]  # sizes by name
    stages: dict[str, dict[str, Size]]  # temporary sizes by stage and name
    evaluation: dict[str, Size]  # sizes of the final evaluation by name, in place of all the others but the process's

    def asked(self) -> int:
        """Return the bytes that are asked for at once at most."""
        stages = max(map(total, self.stages.values()), default=0)
        return self.process + max(total(self.resident) + stages, total(self.evaluation))

    def peak(self, slack: float, heap: bool) -> int:
        """Return the peak in bytes.

        `slack` is the allocator's overhead, as a fraction of the requested bytes. With `heap` it is glibc's allocator,
        which keeps small temporary blocks and leaves holes between them, and returns large ones: each kind's own peak
        then counts.
        """
        if not heap:
            return round(self.process + (1 + slack) * (self.asked() - self.process))
        most = reduce(or_, (sum(sizes.values(), NONE) for sizes in self.stages.values()), NONE)
        training = total(self.resident) + most["large"] + (1 + slack) * most["small"]
        return round(self.process + max(training, total(self.evaluation)))


def total(sizes: Mapping[str, Size]) -> int:
    """Return the bytes of sizes by name."""
    return sum(size.total() for size in sizes.values())


def head_state(trace: Trace, layout: Layout, muon: bool, averaged: bool) -> dict[str, Size]:
    """Return the memory of a process for the head and its optimiser between steps, all in fp32.

    With `muon` matrices between hidden states have one moment; a running average is sharded as the weights are.
    """
    count, world, whole = trace.trained, layout.world, trace.weights
    moments = moments_of(trace, muon)
    cut = {"ddp": (1, 1, 1), "zero2": (1, world, world), "zero3": (world, world, world), "fsdp2": (world, world, world)}
    weights, gradients, states = cut[layout.strategy]
    held = {
        "head: weights": times(whole, 1 / weights),
        "head: gradients": times(whole, 1 / gradients),
        "head: optimiser": times(whole, moments / states),
    }
    if layout.strategy.startswith("zero"):
        held["head: weights"] = times(whole, 1 / weights + 1 / world)  # DeepSpeed moves a copy of its own
        held["head: buckets"] = blocks(2 * min(BUCKET, count) * 4)
    elif layout.strategy == "ddp" and world > 1:
        held["head: buckets"] = whole
    if weights > 1:  # whole while it computes, and its gradients before they are scattered
        held["head: gathered"] = blocks(2 * count * 4)
    if trace.frozen:
        held["head: frozen"] = blocks(4 * trace.frozen)
    if averaged:
        held["head: running average"] = times(whole, 1 / weights)
    return held


def moments_of(trace: Trace, muon: bool) -> float:
    """Return how many moments a trained parameter has on average."""
    return (trace.trained + trace.vectors) / trace.trained if muon else 2.0


def target_state(
    shape: TargetShape, layout: Layout, layers: int, item: int, device: int = 0
) -> tuple[dict[str, Size], dict[str, Size], int]:
    """Return the target's memory: on a device of a node, gathered there during a forward pass, and on the host.

    `layers` are the bytes of all layers, 0 where they are not loaded; `item` those of a value of embedding and lm_head,
    which are whole on every trainer's device.
    """
    ahead = AHEAD * layers // shape.layers
    stay = min(layers, int((layout.where.memory_gb or 0) * GB))
    there, gathered, host = {
        REPLICATE: (layers, 0, 0),
        TENSOR_PARALLEL: (layers // layout.group, 0, 0),
        FSDP: (layers // layout.world, ahead, 0),
        DEVICE_MAP: (round(layers * layout.mapped(device)), 0, 0),
        OFFLOAD: (min(layers, stay + ahead), 0, 0 if layout.where.offload == "disk" else layers - stay),
    }[layout.placement]
    held = {"target: embedding, lm_head": blocks(item * shape.embeddings)}
    parts = {TENSOR_PARALLEL: layout.group, FSDP: layout.world}.get(layout.placement, 1)
    if layers and parts > 1:
        held["target: its own part of these"] = blocks(item * shape.embeddings // parts)
    if there:
        held["target: layers"] = Counter(large=there)
    return held, {"target: gathered layers": Counter(large=gathered)} if gathered else {}, host


def pass_stage(
    shape: TargetShape, layout: Layout, tokens: int, length: int, item: int, features: int, several: bool
) -> dict[str, Size]:
    """Return the memory of the target's forward pass; a tensor-parallel group runs its processes' rows in turn.

    Where a step has `several` micro-batches, the features of the one before are there until the pass has ended.
    """
    working = shape.working(tokens, length, item, features, layout.shared)
    output = features_size(shape, tokens, item, features)
    sizes = {"target: activations, mask": blocks(working, tokens * item * shape.width), "features": output}
    others = {"features of another's turn": layout.shared > 1, "features of the micro-batch before": several}
    return sizes | {name: output for name, there in others.items() if there}


def features_size(shape: TargetShape, tokens: int, item: int, features: int) -> Size:
    """Return the size of a micro-batch's features: the layers that the head reads, and the last state."""
    row = tokens * shape.width * item
    return blocks(row * features) + blocks(row)


def head_stage(trace: Trace, features: Size, copy: Size, accumulates: bool, heap: bool) -> dict[str, Size]:
    """Return the memory of the head's step above its resident state.

    Gradients are resident where a step `accumulates` them over micro-batches; `copy` is that of features with noise, or
    in the head's dtype.
    """
    peak, activations, gradients = trace.peak, trace.activations, NONE if accumulates else trace.weights
    if not heap:
        peak = Counter(large=trace.most)
        activations, gradients = (Counter(large=size.total()) for size in (activations, gradients))
    return {
        "features": features + copy,
        "head: activations": activations,
        "loss: logits chunks, gradients": peak - gradients - activations,
    }


def measure_stage(
    shape: TargetShape, layout: Layout, trace: Trace, tokens: int, item: int, heap: bool
) -> dict[str, Size]:
    """Return the memory of a measurement of τ over prompts and answers of so many tokens.

    A copy of the head, on a host made in fp32 first, the KV cache, and the prefill of a prompt.
    """
    return {
        "τ: decoding copy of the head": blocks((item + (4 if heap else 0)) * trace.whole),
        # A buffer doubles when it is full.
        "τ: keys and values": blocks(shape.cache(2 * tokens, item) // layout.shared),
        "τ: pass over a prompt": blocks(shape.working(tokens, tokens, item, trace.feature_layers, layout.shared)),
    }
