"""The files of a published head: their names, the tensor names in them, and the tensors."""

import re
from pathlib import Path

from heads.base import NamedTensors
from heads.common.errors import one_line
from heads.common.typed import Json
from heads.common.untrusted import inside, parse_json, regular
from heads.formats import weights
from heads.formats.store import CONFIG, INDEX, WEIGHTS

SAFE = (WEIGHTS, "medusa_lm_head.safetensors")
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
PREFIX = re.compile(r"^(speculator|medusa_heads?|model)\.")  # prefixes that trainers add to all tensor names


def is_published(folder: Path) -> bool:
    """Return whether a folder holds another project's head: weights next to a foreign config.json."""
    try:
        ours = "format" in config_of(folder)
    except ValueError:
        return False
    return not ours and any((folder / name).is_file() for name in (*SAFE, INDEX, *PICKLED))


def config_of(folder: Path) -> Json:
    """Return config.json, with the speculators format's dimensions of a layer at the top level; refuse a damaged file.

    Foreign files may name code for transformers to run (`auto_map`): here single keys are read, none of which does.
    """
    try:
        content = parse_json(regular(folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: damaged ({one_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{folder / CONFIG}: no JSON object; download it again")
    layer = content.get("transformer_layer_config")
    return content | (layer if isinstance(layer, dict) else {})


def names_of(folder: Path) -> set[str]:
    """Return the tensor names without prefix; a pickle next to safetensors is ignored, and refused alone."""
    return {PREFIX.sub("", name) for name in _sharded(folder) or weights.header(_weights(folder))}


def without_prefix(tensors: NamedTensors) -> NamedTensors:
    """Return tensors by their names without prefix."""
    return {PREFIX.sub("", name): tensor for name, tensor in tensors.items()}


def stored_tensors(folder: Path) -> NamedTensors:
    """Return the tensors by their names in the files, with the errors of `names_of`."""
    files = {inside(folder, file) for file in _sharded(folder).values()} or {_weights(folder)}
    return {name: tensor for file in sorted(files) for name, tensor in weights.read_weights(file).items()}


def further_files(folder: Path) -> list[str]:
    """Return the files to download after the small files and WEIGHTS: the index's shards, or a pickle."""
    whole = any((folder / name).is_file() for name in SAFE)
    return [] if whole else sorted({*_sharded(folder).values()} or PICKLED)


def _sharded(folder: Path) -> dict[str, str]:
    """Return the index's file of each tensor; empty if a single file takes precedence, as in transformers."""
    whole = any((folder / name).is_file() for name in SAFE)
    return {} if whole or not (folder / INDEX).is_file() else weights.shards(folder / INDEX)


def _weights(folder: Path) -> Path:
    for name in SAFE:
        if (folder / name).is_file():
            return folder / name
    for name in PICKLED:
        if (folder / name).is_file():
            raise ValueError(
                f"{folder / name}: a pickle, which can hold code and is not read; write it as safetensors once: "
                f"python train/convert.py pickle={folder / name} out=FOLDER, and name that folder"
            )
    raise ValueError(f"{folder}: no weights; one of {', '.join((*SAFE, INDEX))} is read")
