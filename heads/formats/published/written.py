"""Writing an exported folder: checked tensor by tensor against the format, and moved to its path whole or not at all.

Engines do not check for us: vLLM leaves a tensor that is missing as memory happened to be, SGLang passes over names
that it does not know, and both then draft without an error and without success.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.common.errors import one_line
from heads.formats.layer_ids import STATES, as_states
from heads.formats.store import CONFIG, WEIGHTS, replacing

Shapes = dict[str, tuple[int, ...]]
OFFSETS, KNOWN = "d2t", "t2d"  # over the draft's vocabulary an offset to the target's id, over the target's a mask
DTYPES = {OFFSETS: torch.int64, KNOWN: torch.bool}  # of all other tensors the one that config.json names
NUMBERS = ("target_hidden_size", "logit_scale")  # keys that engines read as numbers, so that a null stops them


class Foreign(NamedTuple):
    """A head as another project lays it out: its config.json, its tensors, and the shapes that the format demands.

    The shapes are made of config.json alone, as its reader makes them, and not of the head.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shapes: Shapes


def put(folder: Path, foreign: Foreign, dtype: torch.dtype) -> None:
    """Write a folder whole, checked as it lies on disk, or leave what was there.

    Args:
        folder: where; its parents are made.
        foreign: what.
        dtype: of its floating-point tensors.

    Raises:
        ValueError: the check fails: one line that names the tensor or the key.
        OSError: the disk is full or the folder cannot be written.
    """
    tensors = {name: _stored(tensor, dtype) for name, tensor in foreign.tensors.items()}
    try:
        with replacing(folder) as new:
            save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
            (new / CONFIG).write_text(json.dumps(foreign.config, indent=2) + "\n", encoding="utf-8")
            try:
                check(new, foreign.shapes, dtype)
            except ValueError as error:
                raise ValueError(f"{folder}: not exported, {error}") from None
    except (OSError, SafetensorError) as error:
        raise OSError(f"{folder}: could not be written ({one_line(error)}); free space") from error


def check(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Check an exported folder: its config.json, and that its tensors are those of the format and no others.

    Raises:
        ValueError: naming the tensor or the key, and what is expected of it.
    """
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(folder / WEIGHTS)
    _check_keys(config, dtype)
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing:
        raise ValueError(f"the tensor {missing[0]} is missing, which the format demands")
    if unknown:
        raise ValueError(f"the tensor {unknown[0]} is none of the format's; engines stop at it, or leave it out")
    for name, tensor in tensors.items():
        expected = DTYPES.get(name, dtype)
        if tuple(tensor.shape) != shapes[name] or tensor.dtype != expected:
            actual = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ValueError(f"{name} is {actual}, expected {shapes[name]} {expected} by its {CONFIG}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds values that are not finite in {dtype}; train again with a lower trainer.lr")
    if OFFSETS in tensors:
        _check_vocabulary(tensors[OFFSETS], tensors.get(KNOWN), int(config["vocab_size"]))


def _check_keys(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Check the keys that engines fall over, or silently draft other tokens by."""
    if config.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings is true: engines would put the embedding in the lm_head's place")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("attention_bias or mlp_bias is true: engines would make biases that no tensor fills")
    if config.get("bias") and config.get("architectures"):
        raise ValueError("bias is true: engines would make biases of the attention that no tensor fills")
    if null := [key for key in NUMBERS if key in config and config[key] is None]:
        raise ValueError(f"{null[0]} is null: leave the key out")
    if config.get("torch_dtype") not in (None, str(dtype).removeprefix("torch.")):
        raise ValueError(f"torch_dtype is {config['torch_dtype']}, the tensors are {dtype}")
    if STATES in config:
        _check_layers(config[STATES], config["eagle_config"][STATES], config["num_aux_hidden_states"])


def _check_layers(states: list[int], outputs: list[int], count: int) -> None:
    """Check the ids at the top level, which count hidden states from the embedding on, and those within."""
    if states != sorted(set(states)) or len(states) != count or states != as_states(outputs):
        raise ValueError(
            f"{STATES} is {states} and within eagle_config {outputs}: not {count} increasing layers, counted from 1 "
            "and from 0"
        )


def _check_vocabulary(offset: Int[Tensor, "W"], mask: Bool[Tensor, "V"] | None, full: int) -> None:
    ids = torch.arange(len(offset)) + offset
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= full:
        raise ValueError(f"{OFFSETS} does not lead to increasing ids below {full}; its entry i is the id less i")
    if mask is not None and not torch.equal(mask.nonzero()[:, 0], ids):
        raise ValueError(f"{OFFSETS} and {KNOWN} do not name the same tokens")


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor's own copy on the CPU, so that no two share memory, floats in the dtype of the export."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", kind, copy=True).contiguous()
