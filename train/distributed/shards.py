"""What one process holds of a tensor that a strategy cuts up, and how the whole of it is put together and taken apart.

A parameter tells by itself: a DTensor under FSDP2; under ZeRO-3 one of DeepSpeed's, whose own part is `ds_tensor`;
under ZeRO-2 whole, beside a slice of master weights; else whole. All but `held` are calls of every process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_gather, get_rank, get_world_size
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional


def zero_stage(p: Tensor) -> int:
    """Return which stage of ZeRO has cut up a parameter or what belongs to it; 0 for none."""
    return 3 if hasattr(p, "ds_id") else 2 if hasattr(p, "_hp_mapping") else 0


def held(p: Tensor) -> Tensor:
    """Return what this process holds of a parameter: in training the same tensor always, changed in place."""
    part: Tensor = getattr(p, "ds_tensor", p)
    return part.detach()


def whole(p: Tensor, part: Tensor) -> Tensor:
    """Return the whole of what is cut up as parameter `p` is, `part` being this process's."""
    if isinstance(part, DTensor):
        full: Tensor = part.full_tensor()
        return full
    if zero_stage(p) < 3 or not part.ndim:  # a count of steps is everybody's
        return part
    parts = [torch.empty_like(part) for _ in range(get_world_size())]
    all_gather(parts, part.contiguous())
    shape: torch.Size = vars(p)["ds_shape"]
    return torch.cat(parts)[: shape.numel()].view(shape)


@torch.no_grad()
def put(p: Tensor, part: Tensor, value: Tensor) -> None:
    """Write this process's part of a whole tensor that is cut up as parameter `p` is; all processes have the value."""
    value = value.to(part.device)
    if isinstance(part, DTensor):
        part.copy_(distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None))
    else:
        part.copy_(own_slice(value, part) if zero_stage(p) == 3 else value)


def own_slice(value: Tensor, part: Tensor) -> Tensor:
    """Return this process's slice under ZeRO-3: equally many numbers each, zeros at the end of the last."""
    flat = value.flatten()
    padded = functional.pad(flat, (0, get_world_size() * part.numel() - len(flat)))
    return padded.narrow(0, get_rank() * part.numel(), part.numel())


def master_state(p: Tensor, key: str) -> Tensor:
    """Return the whole of the optimiser's state `key` of a parameter that ZeRO has cut up."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found: Tensor = safe_get_full_optimizer_state(p, key)
    return found


def put_master(p: Tensor, value: Tensor, key: str | None = None) -> None:
    """Write the master weights of a parameter that ZeRO has cut up, or with `key` its optimiser's state."""
    from deepspeed import utils

    extra = () if key is None else (key,)
    if zero_stage(p) == 3:
        put_local: Any = utils.safe_set_local_fp32_param if key is None else utils.safe_set_local_optimizer_state
        put_local(p, own_slice(value, held(p)).to(held(p).device), *extra)
    else:
        put_full: Any = utils.safe_set_full_fp32_param if key is None else utils.safe_set_full_optimizer_state
        put_full(p, value.to(p.device), *extra)
