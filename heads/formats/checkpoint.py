"""A checkpoint's tensors on disk or the Hub, the MTP module among them, and a copy with a trained head as that module.

In the copy all other tensors keep their bytes; large unchanged files are hard links if the file system has them.
"""

import math
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from heads.base import NamedTensors
from heads.common.errors import one_line
from heads.common.files import replacing, write_json
from heads.common.gguf import dequantised
from heads.common.untrusted import parsed_file
from heads.formats.mtp_layouts import Layout, layout_of, prefixes, text_section
from heads.formats.published.exporting import written
from heads.formats.store import CONFIG, INDEX, WEIGHTS
from heads.formats.weights import header, shards
from heads.mtp import TARGET, Mtp

MODULE = "model-mtp.safetensors"
# New names for the target's files whose names clash with the single-file name or with the module's file.
RENAMED = {WEIGHTS: "model-target.safetensors", MODULE: "model-target-mtp.safetensors"}
AS_TRAINED = {"layer": TARGET, "feature_layers": None, "lm_head": "shared"}
SMALL = 1 << 26  # bytes; smaller files are copied, not linked


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


def write_copy(head: Mtp, checkpoint: str, layout: Layout, out: Path) -> None:
    """Write a copy of the target's checkpoint with this head as its MTP module, whole; refuse what does not fit."""
    try:
        files = tensor_files(checkpoint)
        held_by = {path: header(path) for path in sorted({*files.values()})}
        lost = sorted(name for name, path in files.items() if name not in held_by[path])
        if lost:
            raise ValueError(f"its index names {lost[0]}, which its file does not hold")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{checkpoint}: not a whole checkpoint ({one_line(error)}); download it again, or give another target"
        ) from error
    folder, layers, out = next(iter(held_by)).parent, head.embeddings.num_layers, out.resolve()
    if out.exists() and not (out / MODULE).is_file():
        raise ValueError(f"{out}: is there, and no earlier copy; give another out=FOLDER")
    config = parsed_file((folder / CONFIG).resolve(), "download it again")
    for key, value in {**AS_TRAINED, "raw_state": layout.raw_state}.items():
        if (actual := getattr(head.config, key)) != value:
            raise ValueError(
                f"format=checkpoint: the head has {key}={written(actual)}, which the target's own module has not; "
                f"train with head.{key}={written(value)}"
            )
    entries = {name: entry for of_file in held_by.values() for name, entry in of_file.items()}
    usual = f".layers.{layers - 1}.input_layernorm.weight"  # a multimodal target's are behind a further prefix
    usual = next((name for name in sorted(entries) if name.endswith(usual)), f"model{usual}")
    last = usual.removesuffix("input_layernorm.weight")
    split = not any(name.startswith(last) and name.endswith(".gate_up_proj") for name in entries)
    inner = layout.inner.format(layers)
    module = {name: x for name, x in head.state_dict().items() if name != "vocab.ids" and "candidate_" not in name}
    tensors = layout.write(module, layers, split=split)
    like = {name: name.replace(inner, last, 1) for name in tensors}  # the last layer's tensor of the same kind
    odd = {name for name in entries if name.startswith(last)} ^ {one for one in like.values() if one in entries}
    odd |= {one for name, one in like.items() if one in entries and entries[one].shape != tensors[name].shape}
    if odd:
        raise ValueError(f"{checkpoint}: the head's layer is not built like its last one ({min(odd)}); train it again")
    plain = entries[usual]
    tensors = {name: tensor.to(entries.get(like[name], plain).dtype).contiguous() for name, tensor in tensors.items()}
    with replacing(out) as new:
        brought = shutil.ignore_patterns(".*", "*.safetensors", CONFIG, INDEX)
        shutil.copytree(folder, new, ignore=brought, copy_function=_bring, dirs_exist_ok=True)
        where, total = dict.fromkeys(tensors, MODULE), sum(tensor.nbytes for tensor in tensors.values())
        for path, held in held_by.items():
            name, unchanged = RENAMED.get(path.name, path.name), held.keys() - tensors
            where |= dict.fromkeys(unchanged, name)
            total += sum(math.prod(entries[tensor].shape) * entries[tensor].dtype.itemsize for tensor in unchanged)
            if len(unchanged) == len(held):
                _bring(path, new / name)
            elif unchanged:
                with safe_open(path, "pt") as opened:
                    others = {tensor: opened.get_tensor(tensor) for tensor in unchanged}
                    save_file(others, new / name, metadata={"format": "pt"})
        save_file(tensors, new / MODULE, metadata={"format": "pt"})
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        text_section(config)[layout.count_key] = 1
        write_json(new / CONFIG, config)
        write_json(new / INDEX, index)


def _bring(source: str | Path, new: str | Path) -> None:
    """Hard-link a large file; copy a small one, to be edited without changing the target's."""
    path = Path(source).resolve()
    with suppress(OSError):
        if path.stat().st_size > SMALL:
            os.link(path, new)
            return
    shutil.copyfile(path, new)
