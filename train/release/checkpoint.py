"""format=checkpoint: a copy of the target's folder whose module for multi-token prediction is a trained head.

Every other tensor keeps its bytes. Weights that do not change, and other large files, are hard links where both folders
are on one file system; small files are copies, which can be edited without changing the target's.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.common.errors import one_line
from heads.common.files import replacing
from heads.common.untrusted import parse_json, parsed_file
from heads.formats.mtp_layouts import COUNT, FAMILIES, Layout
from heads.formats.published.exporting import written
from heads.formats.store import CONFIG, INDEX, WEIGHTS
from heads.formats.weights import DTYPES
from heads.mtp import TARGET, Mtp
from inference.target.checkpoint import tensor_files

MODULE = "model-mtp.safetensors"
# What a file of the target is called whose own name is that of a single file, or of the module.
RENAMED = {WEIGHTS: "model-target.safetensors", MODULE: "model-target-mtp.safetensors"}
AS_TRAINED = {"layer": TARGET, "feature_layers": None, "lm_head": "shared", "draft_vocab": None}
SMALL = 1 << 26  # bytes of a file that is copied all the same


class Shard(NamedTuple):
    """A file of the target; `entries` are its header's, a tensor's type, shape and place."""

    path: Path
    entries: dict[str, dict[str, Any]]


class Copy(NamedTuple):
    """What a copy is made of: the target's folder and shards, the module's tensors as they are named there, config."""

    folder: Path
    shards: list[Shard]
    tensors: dict[str, Tensor]
    config: dict[str, Any]


def write_copy(head: Mtp, checkpoint: str, layout: Layout, out: Path) -> None:
    """Write the copy of a checkpoint, a folder or Hub name, with this head in its layout; whole or not at all.

    Raises:
        ValueError: the head is of another kind, or the checkpoint is not whole: one line, before anything is written.
        OSError: the disk refused.
    """
    plan = _planned(head, checkpoint, layout)
    out = out.resolve()
    folder = plan.folder.resolve()
    if out.is_relative_to(folder) or folder.is_relative_to(out):
        raise ValueError(f"{out}: that or the target's {folder} lies in the other; give another out=FOLDER")
    if out.exists() and not (out / MODULE).is_file():
        raise ValueError(f"{out}: is there, and no earlier copy; give another out=FOLDER")
    try:
        with replacing(out) as new:
            _write(plan, new)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out}: could not be written ({one_line(error)}); free space, or give another out") from error


def _planned(head: Mtp, checkpoint: str, layout: Layout) -> Copy:
    try:
        files = tensor_files(checkpoint)
        shards = [_shard(path) for path in sorted({*files.values()})]
        held = {shard.path: shard.entries for shard in shards}
        lost = sorted(name for name, path in files.items() if name not in held[path])
        if lost:
            raise ValueError(f"its index names {lost[0]}, which its file does not hold")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{checkpoint}: not a whole checkpoint ({one_line(error)}); download it again, or give another target"
        ) from error
    folder, layers = shards[0].path.parent, head.embeddings.num_layers
    config: dict[str, Any] = parsed_file((folder / CONFIG).resolve(), "download it again")
    for key, value in {**AS_TRAINED, "raw_state": layout.raw_state}.items():
        if (actual := getattr(head.config, key)) != value:
            raise ValueError(
                f"format=checkpoint: the head has {key}={written(actual)}, which the target's own module has not; "
                f"train with head.{key}={written(value)}"
            )
    entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
    last = f"model.layers.{layers - 1}."
    split = not any(name.startswith(last) and name.endswith(".gate_up_proj") for name in entries)
    inner = layout.inner.format(layers)
    tensors = layout.write(head.state_dict(), layers, split=split)
    like = {name: name.replace(inner, last, 1) for name in tensors}  # the last layer's tensor of the same kind
    odd = {name for name in entries if name.startswith(last)} ^ {one for one in like.values() if one in entries}
    odd |= {one for name, one in like.items() if one in entries and entries[one]["shape"] != [*tensors[name].shape]}
    if odd:
        raise ValueError(f"{checkpoint}: the head's layer is not built like its last one ({min(odd)}); train it again")
    usual = entries[f"{last}input_layernorm.weight"]
    stored = {name: entries.get(one, usual)["dtype"] for name, one in like.items()}
    if unknown := {*stored.values()} - DTYPES.keys():
        raise ValueError(f"{checkpoint}: its last layer is stored as {min(unknown)}; give its unquantised checkpoint")
    dtypes = {name: DTYPES[dtype] for name, dtype in stored.items()}
    return Copy(
        folder, shards, {name: tensor.to(dtypes[name]).contiguous() for name, tensor in tensors.items()},
        {**config, COUNT: 1},
    )  # fmt: skip


def layout_of(config: dict[str, Any], checkpoint: str) -> Layout:
    """Return how a target's family holds its module; refuse a family without one, and what is not written."""
    name = (config.get("architectures") or ["?"])[0]
    if name not in FAMILIES:
        raise ValueError(
            f"format=checkpoint: {checkpoint} is a {name}, in which engines look for no module that could be written "
            f"(known: {', '.join(FAMILIES)}); format=vllm serves a Llama or Qwen with head.layer=llama"
        )
    if config.get("quantization_config"):
        raise ValueError(
            f"format=checkpoint: {checkpoint} is quantised, and engines would take its module so too; give its "
            "unquantised checkpoint as target"
        )
    if (config.get(COUNT) or 1) != 1:
        raise ValueError(
            f"format=checkpoint: {checkpoint} has {config[COUNT]} modules, which draft one after another, and the "
            "head is one for all depths"
        )
    return FAMILIES[name]


def _beside(folder: Path) -> Iterator[Path]:
    """Yield the files and folders that are brought as they are: not the weights, nor what is written again."""
    for path in folder.iterdir():
        as_it_is = path.suffix != ".safetensors" and path.name not in (CONFIG, INDEX)
        if not path.name.startswith(".") if path.is_dir() else path.is_file() and as_it_is:
            yield path


def _write(plan: Copy, new: Path) -> None:
    for path in _beside(plan.folder):
        if path.is_dir():
            shutil.copytree(path, new / path.name, copy_function=_bring)
        else:
            _bring(path, new / path.name)
    names = {shard.path: RENAMED.get(shard.path.name, shard.path.name) for shard in plan.shards}
    where = dict.fromkeys(plan.tensors, MODULE)
    for shard in plan.shards:
        replaced = plan.tensors.keys() & shard.entries
        where |= dict.fromkeys(shard.entries.keys() - replaced, names[shard.path])
        if not replaced:
            _link(shard.path.resolve(), new / names[shard.path])
        elif len(replaced) < len(shard.entries):
            with safe_open(shard.path, "pt") as opened:
                others = {name: opened.get_tensor(name) for name in shard.entries.keys() - replaced}
            save_file(others, new / names[shard.path], metadata={"format": "pt"})
    save_file(plan.tensors, new / MODULE, metadata={"format": "pt"})
    (new / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
    entries = {name: _size(entry) for shard in plan.shards for name, entry in shard.entries.items()}
    total = sum((entries | {name: tensor.nbytes for name, tensor in plan.tensors.items()}).values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (new / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bring(source: str | Path, new: str | Path) -> None:
    """Copy a small file, and link a large one."""
    path = Path(source).resolve()
    if path.stat().st_size > SMALL:
        _link(path, Path(new))
    else:
        shutil.copyfile(path, new)


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except FileExistsError:  # of two shards: a copy would be written through the first one's link into the target
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, new)


def _shard(path: Path) -> Shard:
    """Return a file's header; refuse a file that is truncated or damaged."""
    with safe_open(path, "pt") as opened, path.open("rb") as file:
        names = set(opened.keys())
        size = int.from_bytes(file.read(8), "little")
        entries = parse_json(file.read(size))
    return Shard(path, {name: entries[name] for name in entries if name in names})


def _size(entry: dict[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)
