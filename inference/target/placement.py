"""Placement of a frozen target: replicated, tensor-parallel, FSDP, over several devices, or offloaded.

transformers and accelerate place the weights; this file maps a placement to their options and refuses what cannot work.

- replicate: the whole target on every process's device.
- tensor_parallel: each layer sharded among a group of processes by transformers' plan; groups are replicas.
- fsdp: each layer's weights sharded among all processes and gathered for its forward pass (torch's fully_shard).
- device_map: whole layers on the devices of one process; each process has its own copy.
- offload: layers in CPU memory or on disk, copied to the device for their forward pass.

Under tensor_parallel and fsdp all processes must run the same passes in the same order.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from heads.base import to_device
from heads.common.target_config import read_target_config
from heads.common.typed import Json
from heads.formats.weights import FEW, digest
from inference.target.checkpoint import fingerprint, fingerprint_on_disk
from inference.target.embeddings import TargetEmbeddings

REPLICATE, TENSOR_PARALLEL, FSDP, DEVICE_MAP, OFFLOAD = "replicate", "tensor_parallel", "fsdp", "device_map", "offload"
PLACEMENTS = (REPLICATE, TENSOR_PARALLEL, FSDP, DEVICE_MAP, OFFLOAD)  # fastest first
AUTO = "auto"  # in a planned run the first that fits, elsewhere REPLICATE
SHARDED = (TENSOR_PARALLEL, FSDP)  # placements under which all processes run every pass together
OFFLOADS = ("cpu", "disk")
GB = 10**9


@dataclass(frozen=True)
class Placement:
    """The placement of a target.

    Attributes:
        kind: one of `PLACEMENTS`.
        tensor_parallel: processes that share one target, a divisor of all processes; None for those of a node.
        devices: indices of the devices under device_map, divided among a node's processes; None for all.
        offload: the place of offloaded layers: "cpu" for host memory, "disk" for the checkpoint's files.
        memory_gb: in 10^9 bytes; under device_map the most weights on each device, None for its free memory; under
            offload the layers that stay on the device, None for none.
    """

    kind: str
    tensor_parallel: int | None
    devices: list[int] | None
    offload: str
    memory_gb: float | None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether all processes run every pass of the target together."""
        return self.kind in SHARDED

    @property
    def group_size(self) -> int:
        """The number of processes of a tensor-parallel group."""
        return self.tensor_parallel or int(os.environ.get("LOCAL_WORLD_SIZE", str(_world())))


HERE = Placement(REPLICATE, None, None, "cpu", None)


def check_single_process(placement: Placement, who: str) -> None:
    """Refuse a placement that needs all processes in every pass, for a command that runs passes in one."""
    if placement.needs_all_ranks:
        raise ValueError(
            f"model.placement={placement.kind} needs processes that make every pass together, which is not so in "
            f"{who}: give model.placement=device_map, or offload"
        )


def check(placement: Placement, quantized: str | None, adapter: str | None, device: torch.device) -> None:
    """Refuse a placement that cannot work, before anything is loaded.

    `quantized` is the weights' quantisation, in the checkpoint or while loading; None if they are not.
    """
    check_weights(placement, quantized, adapter)
    if placement.needs_all_ranks:
        accelerator = torch._C._get_accelerator().type
        if device.type != accelerator:
            raise ValueError(
                f"model.placement={placement.kind} uses this machine's {accelerator} devices, but model.device is "
                f"{device.type}: leave model.device out, or hide the devices (CUDA_VISIBLE_DEVICES=)"
            )
        check_processes(placement, _world(), placement.group_size)
    elif placement.kind == DEVICE_MAP and device.type != "cpu":
        devices_of(placement, device)
    check_offload(placement, device.type)


def check_weights(placement: Placement, quantized: str | None, adapter: str | None) -> None:
    """Refuse a placement that these weights cannot have."""
    kind = placement.kind
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


def check_offload(placement: Placement, device: str) -> None:
    """Refuse to offload from a device type without a separate memory."""
    if placement.kind == OFFLOAD and device == "cpu" and placement.offload == "cpu":
        raise ValueError(
            "model.placement=offload: on a CPU the weights are in its memory anyway: give model.offload=disk"
        )


def check_processes(placement: Placement, world: int, group: int) -> None:
    """Refuse to shard a target within one process, or in tensor-parallel groups of unequal size."""
    kind = placement.kind
    if world == 1 and placement.tensor_parallel != 1:
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
    placement: Placement, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, trust: bool
) -> Json:
    """Return from_pretrained's options for a placement, empty for replicate; refuse sizes that do not fit."""
    from transformers.distributed.configuration_utils import DistributedConfig

    world = _world()
    if placement.kind == TENSOR_PARALLEL and placement.group_size > 1:
        size, copies = placement.group_size, world // placement.group_size
        check_shape(config.get_text_config(), size, str(config.name_or_path))
        sizes: Json = {"tp_size": size}
        extra = Json()
        if copies > 1 and "dp_replicate_size" in DistributedConfig.__dataclass_fields__:
            sizes["dp_replicate_size"] = copies
        elif copies > 1:  # older versions of transformers take replicas as a further mesh dimension
            sizes["fsdp_size"], extra["device_mesh"] = copies, mesh(size, device)
        return {"distributed_config": DistributedConfig(**sizes), **extra}
    if placement.kind == FSDP:
        return {"distributed_config": DistributedConfig(fsdp_size=world)}
    if placement.kind == DEVICE_MAP:
        if device.type == "cpu":
            return {"device_map": {"": "cpu"}}
        indices, most = devices_of(placement, device), placement.memory_gb
        cap = {n: int(torch.cuda.mem_get_info(n)[0] * 0.9 if most is None else most * GB) for n in indices}
        return {"device_map": "auto", "max_memory": cap}
    if placement.kind == OFFLOAD:
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
        modules, count = dict(skeleton.named_modules()), skeleton.config.get_text_config().num_hidden_layers
        layers = next(n for n, one in modules.items() if isinstance(one, nn.ModuleList) and len(one) == count)
        leaves = (name for name, module in modules.items() if not [*module.children()])
        devices = {name: str(device) for name in leaves if not name.startswith(f"{layers}.")}
        room = int((placement.memory_gb or 0) * GB)
        for i in range(count):  # the first ones stay on the device
            room -= sum(weight.numel() for weight in modules[f"{layers}.{i}"].parameters()) * dtype.itemsize
            devices[f"{layers}.{i}"] = str(device) if room >= 0 else placement.offload
        return {"device_map": devices}
    return {}


def mesh(size: int, device: torch.device) -> Any:
    """Return the device mesh: replicas x tensor-parallel ranks; a group's ranks are consecutive."""
    return torch.distributed.device_mesh.init_device_mesh(
        device.type, (_world() // size, size), mesh_dim_names=("copy", "tp")
    )


def devices_of(placement: Placement, device: torch.device) -> list[int]:
    """Return the devices of this process's target: its share of the node's, its own device first.

    Raises:
        ValueError: there are no such devices, or fewer than processes.
    """
    count = torch.cuda.device_count()
    indices = list(range(count)) if placement.devices is None else placement.devices
    if odd := [n for n in indices if not 0 <= n < count]:
        raise ValueError(f"model.devices names {odd[0]}, and there are {count} devices: count from 0")
    processes, mine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    check_devices(len(indices), processes)
    return sorted(indices[mine::processes], key=lambda n: n != device.index)


def check_devices(devices: int, processes: int) -> None:
    """Refuse fewer devices of a node than processes under device_map."""
    if devices < processes:
        raise ValueError(
            f"model.placement=device_map has {devices} devices for {processes} processes: start fewer, or give "
            "more model.devices"
        )


def _world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


Rows = Callable[[Tensor, Tensor, Tensor], Any]


class Placed(NamedTuple):
    """A placed target."""

    device: torch.device  # the device of features, embeddings and tokens; layers may be elsewhere
    embeddings: TargetEmbeddings  # embedding and lm_head, not sharded, on that device
    fingerprint: str  # hash of the weights and of a merged adapter's, equal under every placement
    group: distributed.ProcessGroup | None = None  # this process's tensor-parallel group; None without one
    needs_all_ranks: bool = False  # whether every pass needs all processes
    adapter: str | None = None  # the name of the adapter that was merged; None without one


def placed(
    model: "transformers.PreTrainedModel", placement: Placement, path: str, device: torch.device, trust: bool
) -> Placed:
    """Return a placed model that transformers has distributed; every process calls it if passes need all of them.

    Raises:
        ValueError: sharding was asked for and nothing is sharded.
    """
    if placement.needs_all_ranks and placement.group_size > 1 and not any(map(_is_sharded, model.parameters())):
        raise ValueError(f"model.placement={placement.kind}: transformers shards no weight of {path}; choose another")
    embeddings = _embeddings(model, read_target_config(path, trust), device, trust)
    if getattr(model, "hf_quantizer", None) is not None:
        digest_of_target = fingerprint(model, path)
    else:
        try:
            digest_of_target = fingerprint_on_disk(model, path)
        except (OSError, ValueError, KeyError, SafetensorError):  # whose names differ there
            names = {name for name, _ in model.named_parameters()}
            few = {name: value.flatten()[:FEW].clone() for name, value in whole(model) if name in names}
            digest_of_target = digest(few)
    group = None
    if placement.kind == TENSOR_PARALLEL and placement.group_size > 1:
        group = mesh(placement.group_size, device)["tp"].get_group()
    if placement.needs_all_ranks:
        # The first call makes a module the FSDP root; later the decoder stack is called directly.
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return Placed(device, embeddings, digest_of_target, group, needs_all_ranks=placement.needs_all_ranks)


def whole(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's full parameters, gathered from the processes or fetched from offloading.

    Every process must call it for the same modules in the same order.
    """
    from accelerate.utils import align_module_device

    # It warns that weights of a 2-d mesh are gathered in two steps, as intended.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for prefix, submodule in module.named_modules():
        with align_module_device(submodule):
            for name, value in list(submodule.named_parameters(recurse=False)):
                full = value.full_tensor() if _is_sharded(value) else value
                yield f"{prefix}.{name}".lstrip("."), full.detach()


def _embeddings(
    model: "transformers.PreTrainedModel", config: Any, device: torch.device, trust: bool
) -> TargetEmbeddings:
    """Return the model's embeddings, or full copies on the device if they are sharded or elsewhere."""
    originals = [model.get_input_embeddings(), model.get_output_embeddings()]
    if all(_is_here(module, device) for module in originals):
        return TargetEmbeddings(model)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    skeleton.tie_weights()
    copies = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    tied = copies[0].weight is copies[1].weight
    for source, copy in zip(originals, copies, strict=True):
        for name, value in whole(source):
            copied = value if _is_here(source, device) else value.to(device, copy=True)
            setattr(copy, name, nn.Parameter(copied, requires_grad=False))
        for name, buffer in source.named_buffers():
            setattr(copy, name, buffer.to(device))
    if tied:
        copies[1].weight = copies[0].weight
    return TargetEmbeddings(skeleton.eval())


def _is_here(module: nn.Module, device: torch.device) -> bool:
    """Return whether all of a module is on a device, not sharded."""
    return all(not _is_sharded(parameter) and parameter.device == device for parameter in module.parameters())


def _is_sharded(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def run_in_turns(group: distributed.ProcessGroup, run: Rows, token: Tensor, document: Tensor) -> Any:
    """Run this process's packed sequences through passes that need all processes of a group.

    Each process of the group has its own sequences (data parallelism of the head). In turn, all of them run one
    process's sequences, and that process keeps the result. So no work is done twice, and no process holds more than one
    turn's features and its own. `run` takes tokens and documents "B T", and the documents on the host; B and T may
    differ by process. The host waits twice, for the shapes and for the documents, at any size of the group.
    """
    mine, own_result = distributed.get_rank(group), None
    shapes = torch.stack(_gathered(group, to_device(torch.tensor(token.shape), token.device))).tolist()
    sizes = [rows * length for rows, length in shapes]
    padded = functional.pad(torch.stack([token, document]).flatten(1), (0, max(sizes) - token.numel()))
    turns = torch.stack(_gathered(group, padded))
    on_host = turns[:, 1].cpu()
    for turn, (size, form) in enumerate(zip(sizes, shapes, strict=True)):
        token, document = turns[turn, :, :size].unflatten(1, form)
        result = run(token, document, on_host[turn, :size].view(form))
        if turn == mine:
            own_result = result
        del result  # free its memory before the next turn
    return own_result


def _gathered(group: distributed.ProcessGroup, x: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(x) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, x.contiguous(), group=group)
    return gathered
