"""Memory of a process in closed form: the head's by its strategy, the target's by its placement.

A device holds a process's own, the resident tensors, and those of its largest stage: the target's forward pass, the
head's step, the optimiser, a measurement of τ, writing the head. Stages follow each other, so they never add up. The
final evaluation comes when all of these are freed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from inference.target.placement import DEVICE_MAP, FSDP, GB, OFFLOAD, REPLICATE, TENSOR_PARALLEL, Placement
from train.distributed.strategy import BUCKET
from train.planning.head import HeadCost
from train.planning.shapes import TargetShape

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
    def share(self) -> float:
        """The share of the capacity that is used, 0 where that is not known."""
        return self.peak / self.capacity if self.capacity else 0.0


def total(sizes: Mapping[str, int]) -> int:
    """Return the bytes of sizes by name."""
    return sum(sizes.values())


def head_state(cost: HeadCost, layout: Layout, muon: bool, averaged: bool) -> dict[str, int]:
    """Return the bytes of a process for the head and its optimiser between steps, all in fp32.

    With `muon` matrices between hidden states have one moment; a running average is sharded as the weights are.
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
        "head: running average": whole / weights if averaged else 0,
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


def measure_stage(shape: TargetShape, layout: Layout, cost: HeadCost, tokens: int, item: int) -> dict[str, int]:
    """Return the bytes of decoding one prompt and answer of so many tokens: a copy of the head, cache, prefill."""
    features = len(cost.feature_layers)
    return {
        "τ: decoding copy of the head": item * cost.whole,
        # A buffer doubles when it is full.
        "τ: keys and values": shape.cache(2 * tokens, item) // layout.shared,
        "τ: pass over a prompt": shape.working(tokens, tokens, item, features, layout.shared),
    }
