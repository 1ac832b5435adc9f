"""The files of a published head: their names, the tensor names in them, and the tensors."""

import re
from pathlib import Path

from heads.base import NamedTensors
from heads.common.typed import Json
from heads.common.untrusted import inside, parsed_file
from heads.formats import weights
from heads.formats.store import CONFIG, INDEX, WEIGHTS

SAFE = (WEIGHTS, "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
PREFIX = re.compile(r"^(speculator|medusa_heads?|model)\.")  # prefixes that trainers add to all tensor names


def is_published(folder: Path) -> bool:
    """Return whether a folder holds another project's head: weights next to a foreign config.json."""
    try:
        ours = "format" in config_of(folder)
    except (OSError, ValueError):
        return False
    return not ours and any((folder / name).is_file() for name in (*SAFE, INDEX, *PICKLED))


def config_of(folder: Path) -> Json:
    """Return config.json, with the speculators format's dimensions of a layer at the top level; refuse a damaged file.

    Foreign files may name code for transformers to run (`auto_map`); the keys read here do not.
    """
    content = parsed_file(folder / CONFIG, "download it again")
    if not isinstance(content, dict):
        raise ValueError(f"{folder / CONFIG}: no JSON object; download it again")
    layer = content.get("transformer_layer_config")
    return content | (layer if isinstance(layer, dict) else {})


def names_of(folder: Path) -> set[str]:
    """Return the tensor names without prefix; a pickle next to safetensors is ignored, and refused alone."""
    return {PREFIX.sub("", name) for name in _sharded(folder) or weights.header(_weights(folder))}


def without_prefix(tensors: NamedTensors) -> NamedTensors:
    """Return tensors by their names without the common prefix."""
    return {PREFIX.sub("", name): tensor for name, tensor in tensors.items()}


def stored_tensors(folder: Path) -> NamedTensors:
    """Return the tensors by their names in the files, and raise the errors of `names_of`."""
    files = {inside(folder, file) for file in _sharded(folder).values()} or {_weights(folder)}
    return {name: tensor for file in sorted(files) for name, tensor in weights.read_weights(file).items()}


def further_files(folder: Path) -> list[str]:
    """Return the files to download after the small files and WEIGHTS: the index's shards, or a pickle."""
    return [] if _whole(folder) else sorted({*_sharded(folder).values()} or PICKLED)


def _whole(folder: Path) -> Path | None:
    return next((folder / name for name in SAFE if (folder / name).is_file()), None)


def _sharded(folder: Path) -> dict[str, str]:
    """Return the index's file of each tensor; empty if a single file takes precedence, as in transformers."""
    return {} if _whole(folder) or not (folder / INDEX).is_file() else weights.shards(folder / INDEX)


def _weights(folder: Path) -> Path:
    if whole := _whole(folder):
        return whole
    for name in PICKLED:
        if (folder / name).is_file():
            raise ValueError(
                f"{folder / name}: a pickle, which can hold code and is not read; write it as safetensors once: "
                f"python train/convert.py pickle={folder / name} out=FOLDER, and name that folder"
            )
    raise ValueError(f"{folder}: no weights; one of {', '.join((*SAFE, INDEX))} is read")
