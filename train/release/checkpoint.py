"""format=checkpoint: a copy of the target's folder with a trained head as its multi-token-prediction (MTP) module.

All other tensors keep their bytes. Large unchanged files are hard links if both folders are on one file system; small
files are copies, which can be edited without changing the target's.
"""

import math
import os
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from heads.common.errors import one_line
from heads.common.files import replacing, write_json
from heads.common.untrusted import parsed_file
from heads.formats.checkpoint import tensor_files
from heads.formats.mtp_layouts import Layout, text_section
from heads.formats.published.exporting import written
from heads.formats.store import CONFIG, INDEX, WEIGHTS
from heads.formats.weights import header
from heads.mtp import TARGET, Mtp

MODULE = "model-mtp.safetensors"
# New names for the target's files whose names clash with the single-file name or with the module's file.
RENAMED = {WEIGHTS: "model-target.safetensors", MODULE: "model-target-mtp.safetensors"}
AS_TRAINED = {"layer": TARGET, "feature_layers": None, "lm_head": "shared"}
SMALL = 1 << 26  # bytes; smaller files are copied, not linked


def write_copy(head: Mtp, checkpoint: str, layout: Layout, out: Path) -> None:
    """Write a copy of the target's checkpoint with this head as its MTP module, whole; refuse what does not fit."""
    try:
        files = tensor_files(checkpoint)
        shards = {path: header(path) for path in sorted({*files.values()})}
        lost = sorted(name for name, path in files.items() if name not in shards[path])
        if lost:
            raise ValueError(f"its index names {lost[0]}, which its file does not hold")
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{checkpoint}: not a whole checkpoint ({one_line(error)}); download it again, or give another target"
        ) from error
    folder, layers, out = next(iter(shards)).parent, head.embeddings.num_layers, out.resolve()
    if out.exists() and not (out / MODULE).is_file():
        raise ValueError(f"{out}: is there, and no earlier copy; give another out=FOLDER")
    config = parsed_file((folder / CONFIG).resolve(), "download it again")
    for key, value in {**AS_TRAINED, "raw_state": layout.raw_state}.items():
        if (actual := getattr(head.config, key)) != value:
            raise ValueError(
                f"format=checkpoint: the head has {key}={written(actual)}, which the target's own module has not; "
                f"train with head.{key}={written(value)}"
            )
    entries = {name: entry for of_file in shards.values() for name, entry in of_file.items()}
    usual = f".layers.{layers - 1}.input_layernorm.weight"  # a multimodal target's are behind a further prefix
    usual = next((name for name in sorted(entries) if name.endswith(usual)), f"model{usual}")
    last = usual.removesuffix("input_layernorm.weight")
    split = not any(name.startswith(last) and name.endswith(".gate_up_proj") for name in entries)
    inner = layout.inner.format(layers)
    # drafts all tokens
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
        for path, held in shards.items():
            name, unchanged = RENAMED.get(path.name, path.name), held.keys() - tensors
            where |= dict.fromkeys(unchanged, name)
            total += sum(math.prod(entries[tensor].shape) * entries[tensor].dtype.itemsize for tensor in unchanged)
            if len(unchanged) == len(held):
                _bring(path, new / name)
            elif unchanged:
                with safe_open(path, "pt") as opened:
                    save_file(
                        {tensor: opened.get_tensor(tensor) for tensor in unchanged},
                        new / name,
                        metadata={"format": "pt"},
                    )
        save_file(tensors, new / MODULE, metadata={"format": "pt"})
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        text_section(config)[layout.count_key] = 1
        write_json(new / CONFIG, config)
        write_json(new / INDEX, index)


def _bring(source: str | Path, new: str | Path) -> None:
    """Hard-link a large file; copy a small file, or one from another file system."""
    path = Path(source).resolve()
    with suppress(OSError):
        if path.stat().st_size > SMALL:
            os.link(path, new)
            return
    shutil.copyfile(path, new)
