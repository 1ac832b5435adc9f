"""Sharded tensors: the shard of a process, gathering the whole tensor and scattering it again.

A parameter's type shows the strategy: a DTensor under FSDP2; under ZeRO-3 one of DeepSpeed's, whose shard is
`ds_tensor`; under ZeRO-2 whole, beside a slice of master weights; else whole. All but `held` are collective calls.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_gather, get_rank, get_world_size
from torch.nn import functional


def zero_stage(p: Tensor) -> int:
    """Return the stage of ZeRO that has sharded a parameter or its optimiser state; 0 for none."""
    return 3 if hasattr(p, "ds_id") else 2 if hasattr(p, "_hp_mapping") else 0


def held(p: Tensor) -> Tensor:
    """Return this process's shard of a parameter; during training always the same, updated tensor."""
    shard: Tensor = getattr(p, "ds_tensor", p)
    return shard.detach()


def whole(p: Tensor, shard: Tensor) -> Tensor:
    """Gather the whole of a tensor that is sharded as parameter `p` is from each process's `shard`."""
    from torch.distributed.tensor import DTensor

    if isinstance(shard, DTensor):
        full: Tensor = shard.full_tensor()
        return full
    if zero_stage(p) < 3 or not shard.ndim:  # a count of steps is not sharded
        return shard
    shards = [torch.empty_like(shard) for _ in range(get_world_size())]
    all_gather(shards, shard.contiguous())
    shape: torch.Size = vars(p)["ds_shape"]
    return torch.cat(shards)[: shape.numel()].view(shape)


@torch.no_grad()
def put(p: Tensor, shard: Tensor, value: Tensor) -> None:
    """Write this process's part of a whole `value` to a `shard` that is sharded as parameter `p` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    value = value.to(shard.device)
    if isinstance(shard, DTensor):
        shard.copy_(distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None))
    else:
        shard.copy_(local_slice(value, shard) if zero_stage(p) == 3 else value)


def local_slice(value: Tensor, shard: Tensor) -> Tensor:
    """Return this process's slice under ZeRO-3: all of the shard's size, the last padded with zeros."""
    flat = value.flatten()
    padded = functional.pad(flat, (0, get_world_size() * shard.numel() - len(flat)))
    return padded.narrow(0, get_rank() * shard.numel(), shard.numel())


def master_state(p: Tensor, key: str) -> Tensor:
    """Return the whole optimiser state `key` of a parameter that ZeRO has sharded."""
    from deepspeed.utils import safe_get_full_optimizer_state

    state: Tensor = safe_get_full_optimizer_state(p, key)
    return state


def put_master(p: Tensor, value: Tensor, key: str | None = None) -> None:
    """Write the master weights of a parameter that ZeRO has sharded, or with `key` its optimiser state."""
    from deepspeed import utils

    extra = () if key is None else (key,)
    if zero_stage(p) == 3:
        put_local: Any = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        put_local(p, local_slice(value, held(p)).to(held(p).device), *extra)
    else:
        put_full: Any = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
        put_full(p, value.to(p.device), *extra)
