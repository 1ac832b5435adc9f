"""A checkpoint's tensors on disk, for tensors that transformers does not load unchanged; and its fingerprint."""

from collections.abc import Collection
from math import prod

import torch
import transformers
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from heads.common.typed import Json
from heads.formats.checkpoint import module_files, tensor_files
from heads.formats.mtp_layouts import promise, text_section
from heads.formats.store import QUANTISED
from heads.formats.weights import FEW, digest

ADAPTER = "adapter_config.json"
MOST_OF_A_BYTE = 16  # parameters a byte: more than any quantisation has
# Prefixes of a text tower's parameters in multimodal checkpoints and in text-only ones.
RENAMED = {
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


def lost_module(checkpoint: str, values: Json) -> str | None:
    """Return the fault of a checkpoint whose config.json promises an MTP module that no file holds, None without it.

    A module of a layout that is not read here is none that was lost.
    """
    key = promise(values)
    layers = text_section(values).get("num_hidden_layers")
    if key is None or not isinstance(layers, int):
        return None
    if any("mtp" in name or f"layers.{layers}." in name for name in module_files(checkpoint, layers)):
        return None
    return f"its {key} promises an MTP module, and its files hold none"


def stored_names(model: "transformers.PreTrainedModel", files: Collection[str]) -> dict[str, str]:
    """Return each parameter's first tensor in a checkpoint's files, by transformers' renaming.

    Parameters that are cut out of a tensor while loading are left out.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        Transpose,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    parameters = dict(model.named_parameters())
    same = {name: name for name in files if name in parameters}
    if not (missing := parameters.keys() - same.keys()):
        return same
    rules = get_model_conversion_mapping(model, RENAMED)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    parts = {
        pattern: (index, converter.operations)
        for converter in converters
        for index, pattern in enumerate(converter.source_patterns)
    }
    first: dict[str, tuple[int, str]] = {}  # (index among the joined tensors, stored name)
    for stored in set(files) - parameters.keys():
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, parameters)
        index, steps = (0, []) if pattern is None else parts[pattern]
        if name in missing and all(isinstance(step, MergeModulelist | Concatenate | Transpose) for step in steps):
            first[name] = min(first.get(name, (index, stored)), (index, stored))
    return same | {name: stored for name, (_, stored) in first.items()}


def check_files(checkpoint: str, config: PreTrainedConfig) -> None:
    """Check that a checkpoint's files fit its configuration, before memory is allocated.

    Raises:
        ValueError: they are far too small, or hold an adapter, which transformers would load unasked.
        OSError, ValueError, KeyError, SafetensorError: see `tensor_files`.
    """
    if cached_file(checkpoint, ADAPTER, _raise_exceptions_for_missing_entries=False) is not None:
        raise ValueError(f"it holds an {ADAPTER} too: move the adapter out, and give it as model.adapter")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(weight.numel() for weight in model.parameters())
    size = sum(file.stat().st_size for file in {*tensor_files(checkpoint).values()})
    if count > MOST_OF_A_BYTE * size:
        raise ValueError(f"its config.json makes a model of {count} parameters, and its files have {size} bytes")


def fingerprint(model: "transformers.PreTrainedModel", checkpoint: str) -> str:
    """Hash a few values of every parameter in bf16, so that the same weights agree in any float dtype.

    Weights that were quantised while loading are read from the checkpoint, so a head fits the target and its quantised
    form. If the checkpoint itself is quantised, the hash is of the other parameters, and begins with `QUANTISED`.
    """
    parameters = dict(model.named_parameters())
    quantised = {name for name, parameter in parameters.items() if not _plain(parameter)}
    few = {name: parameters[name].detach().flatten()[:FEW] for name in parameters.keys() - quantised}
    prefix = ""
    if getattr(model, "hf_quantizer", None) is not None:
        try:
            few |= _originals(model, checkpoint, quantised)
        except (OSError, ValueError, KeyError, SafetensorError):
            prefix = QUANTISED
    return prefix + digest(few)


def fingerprint_on_disk(model: "transformers.PreTrainedModel", checkpoint: str) -> str:
    """Return the fingerprint of a model without loading it, from its checkpoint.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: a parameter cannot be read there, or is quantised.
    """
    return digest(_originals(model, checkpoint, {name for name, _ in model.named_parameters()}))


def _plain(parameter: Tensor) -> bool:
    """Return whether a parameter is not quantised: quantised ones are integers, or tensor subclasses."""
    return type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.element_size() > 1


def _originals(
    model: "transformers.PreTrainedModel", checkpoint: str, names: set[str]
) -> dict[str, Shaped[Tensor, "N"]]:
    """Return the first values of these parameters in the checkpoint; refuse quantised ones."""
    if not names:
        raise ValueError(f"{checkpoint}: no parameter is quantised, so the weights that are must be buffers")
    files, few = tensor_files(checkpoint), {}
    all_stored = stored_names(model, files)
    for name, parameter in model.named_parameters():
        if name not in names:
            continue
        if (stored := all_stored.get(name)) is None:
            raise ValueError(f"its files hold no {name} that can be read by itself")
        with safe_open(files[stored], "pt") as opened:
            tensor = opened.get_slice(stored)
            shape = tensor.get_shape()
            if sorted(shape) == sorted(parameter.shape) and tuple(shape) != tuple(parameter.shape):
                raise ValueError(f"its files hold {name} with rows and columns exchanged")
            few[name] = tensor[: min(-(-FEW // max(1, prod(shape[1:]))), shape[0])].flatten()[:FEW]
        if not _plain(nn.Parameter(few[name], requires_grad=False)):
            raise ValueError(f"{checkpoint}: {name} is quantised there")
    return few
