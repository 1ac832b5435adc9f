"""Placement of a frozen target: replicated, tensor-parallel, FSDP, over several devices, or offloaded.

transformers and accelerate place the weights; this file maps a placement to their options and refuses what cannot work.

- replicate: the whole target on every process's device.
- tensor_parallel: each layer sharded among a group of processes by transformers' plan; groups are replicas.
- fsdp: each layer's weights sharded among all processes and gathered for its forward pass (torch's fully_shard).
- device_map: whole layers on the devices of one process; each process has its own copy.
- offload: layers in CPU memory or on disk, copied to the device for their forward pass.

Under tensor_parallel and fsdp all processes must run the same passes in the same order.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import distributed, nn
from transformers import PreTrainedConfig

REPLICATE, TENSOR_PARALLEL, FSDP, DEVICE_MAP, OFFLOAD = "replicate", "tensor_parallel", "fsdp", "device_map", "offload"
PLACEMENTS = (REPLICATE, TENSOR_PARALLEL, FSDP, DEVICE_MAP, OFFLOAD)  # fastest first
AUTO = "auto"  # in a planned run the first that fits, elsewhere REPLICATE
TOGETHER = (TENSOR_PARALLEL, FSDP)  # placements under which all processes run every pass together
OFFLOADS = ("cpu", "disk")
GB = 10**9


@dataclass(frozen=True)
class Placement:
    """The placement of a target.

    Attributes:
        placement: one of `PLACEMENTS`.
        tensor_parallel: processes that share one target, a divisor of all processes; None for those of a node.
        devices: indices of the devices under device_map, divided among a node's processes; None for all.
        offload: the place of offloaded layers: "cpu" for host memory, "disk" for the checkpoint's files.
        memory_gb: in 10^9 bytes; under device_map the most weights on each device, None for its free memory; under
            offload the layers that stay on the device, None for none.
    """

    placement: str
    tensor_parallel: int | None
    devices: list[int] | None
    offload: str
    memory_gb: float | None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether all processes run every pass of the target together."""
        return self.placement in TOGETHER

    @property
    def group_size(self) -> int:
        """The number of processes of a tensor-parallel group."""
        return self.tensor_parallel or int(os.environ.get("LOCAL_WORLD_SIZE", str(_world())))


HERE = Placement(REPLICATE, None, None, "cpu", None)


def check_alone(where: Placement, who: str) -> None:
    """Refuse a placement that needs all processes in every pass, for a command that runs passes in one."""
    if where.needs_all_ranks:
        raise ValueError(
            f"model.placement={where.placement} needs processes that make every pass together, which is not so in "
            f"{who}: give model.placement=device_map, or offload"
        )


def check(where: Placement, quantized: str | None, adapter: str | None, device: torch.device) -> None:
    """Refuse a placement that cannot work, before anything is loaded.

    `quantized` is the weights' quantisation, in the checkpoint or while loading; None if they are not.
    """
    check_weights(where, quantized, adapter)
    if where.needs_all_ranks:
        accelerator = torch._C._get_accelerator().type
        if device.type != accelerator:
            raise ValueError(
                f"model.placement={where.placement} uses this machine's {accelerator} devices, but model.device is "
                f"{device.type}: leave model.device out, or hide the devices (CUDA_VISIBLE_DEVICES=)"
            )
        check_processes(where, _world(), where.group_size)
    elif where.placement == DEVICE_MAP and device.type != "cpu":
        devices_of(where, device)
    check_offload(where, device.type)


def check_weights(where: Placement, quantized: str | None, adapter: str | None) -> None:
    """Refuse a placement that these weights cannot have."""
    kind = where.placement
    if kind == REPLICATE:
        return
    if adapter is not None:
        raise ValueError(
            f"model.placement={kind}: model.adapter={adapter} is merged into whole weights on one device: merge it, "
            "save the model and give that as model.path"
        )
    if quantized is not None and kind != DEVICE_MAP:
        raise ValueError(
            f"model.placement={kind} cannot shard or move quantised weights ({quantized}): take full ones, or "
            "model.placement=device_map"
        )


def check_offload(where: Placement, device: str) -> None:
    """Refuse to offload from a device type without a separate memory."""
    if where.placement == OFFLOAD and device == "cpu" and where.offload == "cpu":
        raise ValueError(
            "model.placement=offload: on a CPU the weights are in its memory anyway: give model.offload=disk"
        )


def check_processes(where: Placement, world: int, group: int) -> None:
    """Refuse to shard a target within one process, or in tensor-parallel groups of unequal size."""
    kind = where.placement
    if world == 1 and where.tensor_parallel != 1:
        raise ValueError(
            f"model.placement={kind} shares the target among processes, and there is one: give launcher.num_processes, "
            "or model.placement=device_map"
        )
    if kind == TENSOR_PARALLEL and world % group:
        raise ValueError(
            f"model.tensor_parallel={group} does not divide the {world} processes: give a divisor, or other "
            "launcher.num_processes"
        )


def check_shape(config: PreTrainedConfig, group: int, path: str) -> None:
    """Refuse a tensor-parallel group whose size does not divide the target's heads or MLP."""
    heads = config.num_attention_heads
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "MLP columns": getattr(config, "intermediate_size", None) or group,
    }
    for name, size in sizes.items():
        if size % group:
            raise ValueError(
                f"model.tensor_parallel={group} does not divide the {size} {name} of {path}: give a divisor "
                "of it, or model.placement=fsdp"
            )


def options(
    where: Placement, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, trust: bool
) -> dict[str, Any]:
    """Return from_pretrained's options for a placement, empty for replicate; refuse sizes that do not fit."""
    world = _world()
    if where.placement == TENSOR_PARALLEL and where.group_size > 1:
        check_shape(config.get_text_config(), where.group_size, str(config.name_or_path))
        return _tensor_parallel(where.group_size, world // where.group_size, device)
    if where.placement == FSDP:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(fsdp_size=world)}
    if where.placement == DEVICE_MAP:
        if device.type == "cpu":
            return {"device_map": {"": "cpu"}}
        numbers, free = devices_of(where, device), torch.cuda.mem_get_info
        cap = {n: int(free(n)[0] * 0.9) if where.memory_gb is None else int(where.memory_gb * GB) for n in numbers}
        return {"device_map": "auto", "max_memory": cap}
    if where.placement == OFFLOAD:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
        return {"device_map": dict(_offloaded(skeleton, where, str(device), dtype))}
    return {}


def _tensor_parallel(size: int, copies: int, device: torch.device) -> dict[str, Any]:
    from transformers.distributed.configuration_utils import DistributedConfig

    if copies == 1:
        return {"distributed_config": DistributedConfig(tp_size=size)}
    if "dp_replicate_size" in DistributedConfig.__dataclass_fields__:
        return {"distributed_config": DistributedConfig(tp_size=size, dp_replicate_size=copies)}
    # Older versions of transformers take replicas as a further mesh dimension.
    return {"distributed_config": DistributedConfig(tp_size=size, fsdp_size=copies), "device_mesh": mesh(size, device)}


def mesh(size: int, device: torch.device) -> Any:
    """Return the device mesh: replicas x tensor-parallel ranks; a group's ranks are consecutive."""
    return torch.distributed.device_mesh.init_device_mesh(
        device.type, (_world() // size, size), mesh_dim_names=("copy", "tp")
    )


def devices_of(where: Placement, device: torch.device) -> list[int]:
    """Return the devices of this process's target: its share of the node's, its own device first.

    Raises:
        ValueError: there are no such devices, or fewer than processes.
    """
    count = torch.cuda.device_count()
    numbers = list(range(count)) if where.devices is None else where.devices
    if odd := [n for n in numbers if not 0 <= n < count]:
        raise ValueError(f"model.devices names {odd[0]}, and there are {count} devices: count from 0")
    processes, mine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if len(numbers) < processes:
        raise ValueError(
            f"model.placement=device_map has {len(numbers)} devices for {processes} processes: start fewer, or give "
            "more model.devices"
        )
    devices = numbers[mine::processes]
    return sorted(devices, key=lambda n: n != device.index)


def _offloaded(
    skeleton: "transformers.PreTrainedModel", where: Placement, device: str, dtype: torch.dtype
) -> Iterator[tuple[str, str]]:
    """Yield each part's name and device: layers offloaded except the first ones, all else on the device."""
    count = skeleton.config.get_text_config().num_hidden_layers
    room = int((where.memory_gb or 0) * GB)

    def down(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
        nonlocal room
        for name, child in module.named_children():
            full = prefix + name
            if isinstance(child, nn.ModuleList) and len(child) == count:
                for i, layer in enumerate(child):
                    room -= sum(parameter.numel() for parameter in layer.parameters()) * dtype.itemsize
                    yield f"{full}.{i}", device if room >= 0 else where.offload
            elif any(isinstance(inner, nn.ModuleList) and len(inner) == count for inner in child.modules()):
                yield from down(child, f"{full}.")
            else:
                yield full, device

    yield from down(skeleton, "")


def _world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1
