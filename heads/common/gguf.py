"""A target in GGUF, llama.cpp's format: read by transformers, its weights dequantised once.

Configuration, chat template and EOS tokens come from the file's metadata. The first load writes the weights in
bfloat16 to an ordinary folder of the Hub's cache, from which every later load reads.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from transformers import PreTrainedConfig

from heads.common.files import claim, replacing
from heads.common.progress import CONSOLE, print_above_bars

SUFFIX = ".gguf"


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that a path names or its folder holds, None without one; refuse several and parts."""
    given = Path(path)
    files = [given] if given.is_file() else sorted(given.glob(f"*{SUFFIX}")) if given.is_dir() else []
    file = files[0] if files else None
    if file is None or file.suffix != SUFFIX or any(given.glob("*.safetensors")):
        return None
    if "-of-0" in file.stem:
        raise ValueError(f"{file.name} is a part of a split GGUF: join them by llama-gguf-split --merge")
    if len(files) > 1:
        raise ValueError(f"holds {len(files)} GGUF files: give one as model.path, such as {file}")
    return file


def resolve_gguf(path: str) -> tuple[str, dict[str, str]]:
    """Return a model's folder or Hub name, and from_pretrained's extra arguments for a GGUF file.

    A file that has been dequantised is read as an ordinary folder.
    """
    file = gguf_file(path)
    if file is None:
        return path, {}
    folder = _folder(file)
    return (str(folder), {}) if folder.is_dir() else (str(file.parent), {"gguf_file": file.name})


@cache
def metadata(folder: str, gguf_file: str) -> dict[str, Any]:
    """Return the values that a GGUF file's config.json would have; reading a vocabulary takes seconds."""
    return PreTrainedConfig.get_config_dict(folder, gguf_file=gguf_file)[0]


def tokenizer_of(folder: str, given: dict[str, str], trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that `resolve_gguf` says where to find."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **given)
    if given:  # transformers 5.17 reads the BOS token as the EOS token
        tokenizer.eos_token_id = metadata(folder, **given).get("eos_token_id", tokenizer.eos_token_id)
    return tokenizer


def dequantised(path: str) -> str:
    """Return a model's folder or Hub name; of a GGUF file the folder with its weights, made where it is not.

    Refuse an architecture, a quantisation or a rotary scaling that transformers does not know, and a full disk.
    """
    folder, given = resolve_gguf(path)
    if not given:
        return folder
    new = _folder(Path(folder, given["gguf_file"]))
    # Since 5.24 transformers keeps the quantised blocks, and it cannot save a model that has them.
    kind = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": kind(dequantize=True)} if kind else {}
    with claim(new.with_suffix(".lock"), wait=True):
        if not new.is_dir():
            _check_rotary(folder, given["gguf_file"])
            print_above_bars(f"{path}: dequantised to bfloat16 once, in {new}")
            if not CONSOLE.is_terminal:
                transformers.logging.disable_progress_bar()
            with replacing(new) as written:
                tokenizer_of(folder, given).save_pretrained(written)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.bfloat16, **given, **options
                )
                model.save_pretrained(written)
    return str(new)


def _check_rotary(folder: str, gguf_file: str) -> None:
    """Refuse a file whose rotary scaling transformers drops (findings/transformers_gguf_drops_rope_scaling.sh)."""
    from gguf import GGUFReader

    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf_file).get_text_config()
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") != "default":
        return
    reader = GGUFReader(Path(folder, gguf_file))
    kinds = {field.contents() for name, field in reader.fields.items() if name.endswith(".rope.scaling.type")}
    if kinds - {"none"} or any(tensor.name.startswith("rope_f") for tensor in reader.tensors):
        raise ValueError(f"{gguf_file} has rotary scaling, which transformers drops: give the folder it was made of")


def _folder(file: Path) -> Path:
    state = file.resolve(), file.stat().st_size, file.stat().st_mtime_ns
    return Path(constants.HF_HOME, "gguf", f"{file.stem}-{sha256(repr(state).encode()).hexdigest()[:12]}")
