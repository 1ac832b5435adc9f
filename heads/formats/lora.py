"""LoRA adapters of heads: low-rank factors in peft's layout, and the Hub id of the base head.

The head's config.json is in the same folder. Reading needs no peft: the tensor names say which weights are adapted,
and patterns in the adapter's configuration are ignored.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import pad

from heads.base import NamedTensors
from heads.common.untrusted import parsed_file, shown
from heads.formats.weights import read_weights

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
PREFIX, DOWN, UP = "base_model.model.", "lora_A.weight", "lora_B.weight"
# Keys of peft that change the meaning of the factors; none is supported.
FURTHER = ("use_rslora", "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")
REMEDY = "download it again, or publish it again"
LARGEST = 1 << 20  # the largest r and lora_alpha
ROUNDED = 1e-4  # largest relative error of the factors, from rounding in fp32


class Adapter(NamedTuple):
    """A LoRA adapter: the Hub id of its base head, and two factors for each weight "O I".

    The adapter adds `scale` times the product of the factors "O R" and "R I" to a weight.
    """

    base: str
    scale: float
    factors: dict[str, tuple[Tensor, Tensor]]


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in a folder; refuse a damaged one, or more than low-rank factors."""
    path = folder / CONFIG
    config = parsed_file(path, REMEDY)
    config = config if isinstance(config, dict) else {}
    base, rank, alpha = (config.get(key, 0) for key in ("base_model_name_or_path", "r", "lora_alpha"))
    sized = rank and all(type(size) is int and 0 <= size <= LARGEST for size in (rank, alpha))
    if config.get("peft_type") != "LORA" or not isinstance(base, str) or not sized:
        raise ValueError(f"{path}: not a head's adapter, which has peft_type LORA, whole r and lora_alpha, and a base")
    if odd := next((key for key in FURTHER if config.get(key)), None):
        raise ValueError(f"{path}: {odd} is {shown(config[odd])}; of adapters, only plain low-rank factors are read")
    path, factors = folder / WEIGHTS, {}
    tensors = read_weights(path)
    for name in [name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)]:
        down, up = tensors.pop(name + DOWN).float(), tensors.pop(name + UP, torch.empty(0)).float()
        if down.ndim != 2 or up.ndim != 2 or not up.shape[1] == down.shape[0] == rank:
            raise ValueError(f"{path}: {shown(name)} has not two factors of rank {rank}; {REMEDY}")
        factors[f"{name.removeprefix(PREFIX)}weight"] = up, down
    if tensors:
        raise ValueError(f"{path}: {shown(next(iter(tensors)))} is no factor of a weight; {REMEDY}")
    return Adapter(base, alpha / rank, factors)


def merge(head: nn.Module, adapter: Adapter, folder: Path) -> nn.Module:
    """Merge an adapter into a head, in fp32; refuse factors for unknown weights, and factors that are too large."""
    weights = head.float().state_dict()
    for name, (up, down) in adapter.factors.items():
        if name not in weights or weights[name].shape != (len(up), down.shape[1]):
            raise ValueError(f"{folder}: adapts {shown(name)}, which {adapter.base} lacks in that shape; {REMEDY}")
        weights[name] += adapter.scale * up @ down
        if not weights[name].isfinite().all():
            raise ValueError(f"{folder}: {shown(name)} holds values that are not finite once adapted; {REMEDY}")
    return head


def adapter_files(base: str, before: NamedTensors, after: NamedTensors, rank: int) -> dict[str, bytes]:
    """Return the files of the adapter that turns the weights `before` into `after`, in fp32; refuse a higher rank.

    The factors come from the singular value decomposition of each weight's change.
    """
    tensors: NamedTensors = {}
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after or before[name].shape != after[name].shape:
            raise ValueError(f"base={base}: another kind of head than the run's: only one has {name} in that shape")
        change = after[name].double() - before[name].double()
        if not change.any():
            continue
        if change.ndim != 2 or not name.endswith(".weight"):
            raise ValueError(f"base={base}: {name} differs from the run's, and is no matrix that LoRA adapts")
        left, sizes, right = torch.svd_lowrank(change, min(rank, *change.shape), niter=4)
        sizes, padding = sizes.sqrt(), rank - len(sizes)  # zeros pad a smaller matrix: peft needs one rank for all
        up, down = pad(left * sizes, (0, padding)), pad(right * sizes, (0, padding)).T
        if float((change - up @ down).norm()) > ROUNDED * float(change.norm()):
            raise ValueError(
                f"base={base}: {name} differs from the run's by more than rank {rank}: not what it adapted"
            )
        stem = PREFIX + name.removesuffix("weight")
        tensors |= {stem + DOWN: down.float().contiguous(), stem + UP: up.float().contiguous()}
    if not tensors:
        raise ValueError(f"base={base}: the run's head has the same weights: there is nothing to publish")
    layers = sorted({name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in tensors})
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "r": rank, "lora_alpha": rank}
    config |= {"target_modules": layers, "lora_dropout": 0.0, "bias": "none", "inference_mode": True}
    return {CONFIG: json.dumps(config, indent=2).encode() + b"\n", WEIGHTS: save(tensors, {"format": "pt"})}
