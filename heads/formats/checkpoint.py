"""A checkpoint's tensors on disk or the Hub, and the MTP module among them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils.hub import cached_file

from heads.base import NamedTensors
from heads.common.gguf import dequantised
from heads.formats.mtp_layouts import Layout, layout_of, prefixes
from heads.formats.store import INDEX, WEIGHTS
from heads.formats.weights import shards


def tensor_files(checkpoint: str, begins: tuple[str, ...] = ("",)) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, a folder or Hub name, chosen as transformers does.

    A single model.safetensors is preferred to an index's shards, which may be of another save. An index that names it
    too adds files, such as an MTP module's. Pickles and variants are never read. Only shards with tensors whose names
    begin with one of `begins` are downloaded. Refuse (OSError, ValueError, SafetensorError) a checkpoint without a
    readable model.safetensors, or with an index that leads out of its folder.
    """
    checkpoint = dequantised(checkpoint)
    paths = (cached_file(checkpoint, name, _raise_exceptions_for_missing_entries=False) for name in (WEIGHTS, INDEX))
    whole, index = (None if path is None else Path(path) for path in paths)
    named = {} if index is None else shards(index)
    if index is None or (whole is not None and WEIGHTS not in named.values()):
        file = whole or Path(str(cached_file(checkpoint, WEIGHTS)))  # raises that it is missing
        with safe_open(file, "pt") as opened:
            return {name: file for name in list(opened.keys()) if name.startswith(begins)}
    named = {name: shard for name, shard in named.items() if name.startswith(begins)}
    files = {shard: Path(str(cached_file(checkpoint, shard))) for shard in {*named.values()}}
    return {name: files[shard] for name, shard in named.items()}


def module_files(checkpoint: str, layers: int) -> dict[str, Path]:
    """Return the files of a checkpoint's MTP module, by its tensors' names; of all tensors if the index lists none.

    Shards next to a single model.safetensors are of another save, and are not read.
    """
    files = tensor_files(checkpoint, prefixes(layers))
    if layout_of(files, layers) is not None:
        return files
    files = tensor_files(checkpoint)
    paths = {*files.values()}
    if [path.name for path in paths] != [WEIGHTS]:
        paths.update(min(paths).parent.glob("*.safetensors"))
    held: dict[str, Path] = {}
    for path in sorted(paths):
        with safe_open(path, "pt") as opened:
            held |= dict.fromkeys(opened.keys(), path)
    return held | files


def read_module(files: Mapping[str, Path], layers: int) -> tuple[Layout, NamedTensors] | None:
    """Return the MTP module among a checkpoint's tensors: its layout, and the tensors by our names; None without one.

    Refuse (OSError, SafetensorError, RuntimeError, IndexError) a damaged one, and experts that do not stack.
    """
    if (layout := layout_of(files, layers)) is None:
        return None
    names = layout.ours(files, layers)
    opened: dict[Path, Any] = {file: safe_open(file, "pt") for file in {files[theirs] for theirs in names}}
    return layout, layout.read({ours: opened[files[theirs]].get_tensor(theirs) for theirs, ours in names.items()})
