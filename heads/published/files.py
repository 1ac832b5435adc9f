"""The files of a published head: which they are, the names of its tensors, and the tensors themselves."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from heads.errors import one_line
from heads.store import CONFIG, WEIGHTS

INDEX = f"{WEIGHTS}.index.json"
SAFE = (WEIGHTS, "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
PREFIX = re.compile(r"^(speculator|medusa_heads?|model)\.")  # what trainers put before all of a head's names


def is_published(folder: Path) -> bool:
    """Say whether a folder holds weights beside the config.json of another project, so no head of our own."""
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ours = not isinstance(content, dict) or "format" in content
    return not ours and any((folder / name).is_file() for name in (*SAFE, INDEX, *PICKLED))


def config_of(folder: Path) -> dict[str, Any]:
    """Return config.json, the decoder layer's numbers of the speculators format among its own."""
    content: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    layer = content.get("transformer_layer_config")
    return content | (layer if isinstance(layer, dict) else {})


def names_of(folder: Path) -> set[str]:
    """Return the names of the tensors, without their prefix; safetensors come before a pickle beside them.

    Raises:
        ValueError: a file is missing, truncated or damaged, or holds more than tensors.
    """
    if (folder / INDEX).is_file() and not any((folder / name).is_file() for name in SAFE):
        return {PREFIX.sub("", name) for name in _shards(folder)}
    path = _weights(folder)
    return {PREFIX.sub("", name) for name in (_unpickled(path) if path.name in PICKLED else _header(path))}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors by their names without prefix.

    Raises:
        ValueError: as `names_of`.
    """
    if (folder / INDEX).is_file() and not any((folder / name).is_file() for name in SAFE):
        files = sorted(set(_shards(folder).values()))
        found = {name: tensor for file in files for name, tensor in _safe(folder / file).items()}
    else:
        path = _weights(folder)
        found = _unpickled(path) if path.name in PICKLED else _safe(path)
    return {PREFIX.sub("", name): tensor for name, tensor in found.items()}


def further_files(folder: Path) -> list[str]:
    """Return which files a download of the small ones and WEIGHTS still lacks: the index's shards, else a pickle."""
    if any((folder / name).is_file() for name in SAFE):
        return []
    return sorted(set(_shards(folder).values())) if (folder / INDEX).is_file() else list(PICKLED)


def _weights(folder: Path) -> Path:
    for name in (*SAFE, *PICKLED):
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"{folder}: no weights; one of {', '.join((*SAFE, INDEX, *PICKLED))} is read")


def _shards(folder: Path) -> dict[str, str]:
    """Return the file of each tensor. The index comes from outside, so what it names must lie beside it."""
    try:
        files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        plain = all(Path(file).name == file and file.endswith(".safetensors") for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX}: damaged ({one_line(error)}); download it again") from None
    if not plain:
        raise ValueError(f"{folder / INDEX}: names a file that is no .safetensors beside it; download it again")
    return files


def _header(path: Path) -> set[str]:
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: truncated, damaged or missing ({one_line(error)}); download it again") from None


def _safe(path: Path) -> dict[str, Tensor]:
    _header(path)  # the same damage under the same message
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return a pickle's tensors, unread until they are used.

    The authors' own checkpoints of EAGLE, Medusa and Hydra exist as pickles alone. An ordinary unpickler calls whatever
    the file names; torch's restricted one knows how to make tensors and plain containers and refuses the rest.
    """
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        reason = one_line(error).split(". ")[0]
        raise ValueError(f"{path}: damaged, or holds more than tensors ({reason}); find it as safetensors") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path}: not a mapping of names to tensors; find the head's own state dict")
    return tensors
