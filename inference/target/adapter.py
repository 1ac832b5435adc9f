"""A PEFT adapter of a target: found, merged into the target's weights, and part of its fingerprint.

After merging, the engine, heads and kernels see an ordinary model. Tokenizer and chat template are the base model's.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open

from heads.common.errors import one_line
from heads.common.target_config import UNFIT
from heads.common.untrusted import parse_json, shown
from heads.formats.hub import REPO, downloaded
from heads.formats.weights import FEW, digest
from inference.target import checkpoint, loading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUMBERS = (
    "r",
    "alpha",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)  # the keys that scale it


class Adapter(NamedTuple):
    """An adapter that was merged: its name, and the fingerprint of the target's and the adapter's files."""

    name: str
    fingerprint: str


def check(adapter: str, quantize: str | None) -> Path:
    """Return an adapter's folder: one that peft saved, or OWNER/NAME on the Hub.

    Raises:
        ValueError: it is missing or not in safetensors, or the target is to be quantised.
    """
    if quantize not in (None, loading.AS_IT_IS):
        raise ValueError(
            f"model.adapter={adapter} is merged into full weights, which model.quantize={quantize} does not keep: "
            "merge it, save the model, and give that as model.path with model.quantize"
        )
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        if not REPO.fullmatch(adapter):
            raise ValueError(f"model.adapter={adapter}: no such folder; give one that peft saved, or OWNER/NAME")
        folder = downloaded(adapter, [CONFIG, WEIGHTS])
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"model.adapter={adapter}: not an adapter as peft saves it, it holds no {name}")
    return folder


def merge(
    model: "transformers.PreTrainedModel", path: str, adapter: str, folder: Path
) -> tuple["transformers.PreTrainedModel", Adapter]:
    """Merge an adapter into the model that is loaded from `path`.

    Raises:
        ValueError: it is of another model or of a kind that cannot be merged, or the checkpoint is quantised.
    """
    if loading.method_of(model) is not None:
        raise ValueError(
            f"model.adapter={adapter}: {path} is quantised, and an adapter is merged into full weights: merge it into "
            "those, save the model, quantise it and give that as model.path"
        )
    try:
        hashed = fingerprint(checkpoint.fingerprint(model, path), folder)
        import peft

        config: Any = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} adds tokens, not weights, and cannot be merged")
        wrapped: Any = peft.PeftModel(model, config)
        report: Any = wrapped.load_adapter(str(folder), "default", torch_device=str(model.device))
        if odd := [*report.missing_keys, *report.unexpected_keys]:
            raise ValueError(f"only one of both has {odd[0]}")
        merged: Any = wrapped.merge_and_unload()
    except (*UNFIT, re.error) as error:
        reason = one_line(error)[:300]
        raise ValueError(
            f"model.adapter={adapter} cannot be merged into model.path={path}: {reason}; give the model that it was "
            "trained for, or save it with peft again"
        ) from error
    return merged, Adapter(adapter, hashed)


def read_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's configuration; refuse a file without one."""
    config = parse_json((folder / CONFIG).read_bytes())
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} is {shown(config)}, expected a mapping")
    return config


def fingerprint(base: str, folder: Path) -> str:
    """Hash the base model's fingerprint, a few values of each of the adapter's tensors, and their scales.

    The merged weights would not do: merged in bf16 and in fp32 they differ in their last bits. Refuse a tensor that
    cannot be merged.
    """
    config, few = read_config(folder), {}
    with safe_open(folder / WEIGHTS, "pt") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
                raise ValueError(f"{name} is of {tensor.dtype} and holds what is no finite number of a weight")
            few[name] = tensor.flatten()[:FEW].clone()
    return digest(few, base + json.dumps([config.get(name) for name in NUMBERS]))
