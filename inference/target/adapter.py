"""A PEFT adapter that a target carries: found, merged into the target's weights, and part of its fingerprint.

Once merged, the model is a plain one: the engine, the heads and the kernels see no adapter. Tokenizer and chat template
stay the target's own.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from heads.common.errors import one_line
from heads.formats.hub import REPO, hub_errors
from inference.target import checkpoint, loading

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUMBERS = ("r", "alpha", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")  # what scales it


class Adapter(NamedTuple):
    """What was merged into a target: its name, and the fingerprint of target and adapter as their files hold them."""

    name: str
    fingerprint: str


def check(adapter: str, quantize: str | None) -> None:
    """Check what can be checked before the target is loaded.

    Raises:
        ValueError: there is no such adapter, or the target is to be quantised too.
    """
    if quantize not in (None, loading.AS_IT_IS):
        raise ValueError(
            f"model.adapter={adapter} is merged into full weights, which model.quantize={quantize} does not keep: "
            "merge it, save the model, and give that as model.path with model.quantize"
        )
    find(adapter)


def merge(model: PreTrainedModel, path: str, adapter: str) -> tuple[PreTrainedModel, Adapter]:
    """Merge an adapter into a loaded model.

    Args:
        model: what it was trained for; it is changed.
        path: the checkpoint that the model comes from.
        adapter: a folder that peft saved, or OWNER/NAME on the Hub.

    Raises:
        ValueError: there is no such adapter, it is of another model or of a kind that cannot be merged, or the
            checkpoint is quantised.
    """
    if loading.method_of(model) is not None:
        raise ValueError(
            f"model.adapter={adapter}: {path} is quantised, and an adapter is merged into full weights: merge it into "
            "those, save the model, quantise it and give that as model.path"
        )
    folder = find(adapter)
    try:
        mark = fingerprint(checkpoint.fingerprint(model, path), folder)
        config: Any = PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} adds tokens, not weights, and cannot be merged")
        wrapped: Any = PeftModel(model, config)
        found: Any = wrapped.load_adapter(str(folder), "default", torch_device=str(model.device))
        if odd := [*found.missing_keys, *found.unexpected_keys]:
            raise ValueError(f"only one of both has {odd[0]}")
        merged: PreTrainedModel = wrapped.merge_and_unload()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = one_line(error)[:300]
        raise ValueError(
            f"model.adapter={adapter} cannot be merged into model.path={path}: {reason}; give the model that it was "
            "trained for, or save it with peft again"
        ) from error
    return merged, Adapter(adapter, mark)


def find(adapter: str) -> Path:
    """Return the folder of an adapter.

    Raises:
        ValueError: there is none, or it is not in safetensors.
    """
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        if not REPO.fullmatch(adapter):
            raise ValueError(f"model.adapter={adapter}: no such folder; give one that peft saved, or OWNER/NAME")
        with hub_errors(adapter, "downloading"):
            folder = Path(HfApi().snapshot_download(adapter, allow_patterns=[CONFIG, WEIGHTS]))
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"model.adapter={adapter}: not an adapter as peft saves it, it holds no {name}")
    return folder


def fingerprint(base: str, folder: Path) -> str:
    """Hash the base model's fingerprint, a few values of each of the adapter's tensors, and what scales them.

    The merged weights are no help: merged in bf16 and in fp32 they differ in their last bits.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    digest = hashlib.sha256((base + json.dumps([config.get(name) for name in NUMBERS])).encode())
    with safe_open(folder / WEIGHTS, "pt") as opened:
        for name in sorted(opened.keys()):
            few = opened.get_tensor(name).flatten()[: checkpoint.FEW].to(torch.bfloat16)
            digest.update(name.encode() + few.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]
