"""Safe loading of safetensors: check the header before allocating tensors, and shapes before building the head.

A header or a configuration may claim any size; memory is allocated only for what the file holds.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from heads.base import Embeddings, NamedTensors
from heads.common.errors import one_line
from heads.common.target_config import UNFIT
from heads.common.untrusted import CUT, parse_json, plain_name, regular, shown

# Dtypes of a head's tensors; torch cannot check others for finite values.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
LARGEST, DEEPEST = 1 << 40, 8  # the largest dimension of a tensor, and the most dimensions
FEW = 16  # values per parameter that a fingerprint reads


class Entry(NamedTuple):
    """A tensor's entry in a file's header."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def header(path: Path) -> dict[str, Entry]:
    """Return the shapes and types of a file's tensors, without reading them; refuse a damaged file and odd tensors."""
    entries = {}
    with _whole(path), safe_open(regular(path), "pt") as opened:
        for name in list(opened.keys()):
            tensor = opened.get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), str(tensor.get_dtype())
            if len(shape) > DEEPEST or any(size > LARGEST for size in shape):
                raise ValueError(
                    f"{path}: {shown(name)} is of shape {shown(shape)}, which no head has; save or download it again"
                )
            if dtype not in DTYPES:
                raise ValueError(f"{path}: {shown(name)} is of type {dtype}; the types read are {', '.join(DTYPES)}")
            entries[name] = Entry(shape, DTYPES[dtype])
    return entries


def read_weights(path: Path) -> NamedTensors:
    """Return a file's tensors, after the checks of `header`."""
    names = header(path)
    with _whole(path), safe_open(path, "pt") as opened:
        return {name: opened.get_tensor(name) for name in names}


def shards(index: Path) -> dict[str, str]:
    """Return each tensor's file from an untrusted index, whose files must be in its folder."""
    try:
        files = parse_json(index.read_bytes())["weight_map"]
        odd = [file for file in files.values() if not (plain_name(file) and file.endswith(".safetensors"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: damaged ({one_line(error)}); download it again") from None
    if odd:
        raise ValueError(f"{index}: names {shown(odd[0])}, which is no .safetensors in its folder; download it again")
    return files


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Turn the errors of a truncated file into one line."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{path}: truncated, damaged or missing ({one_line(error)[:CUT]}); save or download it again"
        ) from None


def digest(few: NamedTensors, start: str = "") -> str:
    """Hash a string and the first values of named parameters, in bf16, so that all float dtypes give the same hash."""
    sha256 = hashlib.sha256(start.encode())
    for name in sorted(few):
        sha256.update(name.encode() + few[name].to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return sha256.hexdigest()[:32]


def meta_state_dict(kind: Any, config: Any, embeddings: Embeddings, where: str) -> NamedTensors:
    """Return a head's tensors on the meta device, to check a file by; refuse, from `where` on, what builds no head."""
    try:
        with torch.device("meta"):
            return kind(config, embeddings).state_dict()
    except UNFIT as error:
        raise ValueError(f"{where}no head can be made of it: {one_line(error)[:CUT]}") from error


def check_fit(path: Path, expected: NamedTensors) -> None:
    """Refuse a file that does not hold exactly these tensors and shapes, naming the first difference."""
    entries = header(path)
    missing, unknown = sorted(expected.keys() - entries.keys()), sorted(entries.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{path.parent}: the weights do not fit their config.json: missing {shown(missing)}, unknown "
            f"{shown(unknown)}"
        )
    for name, entry in entries.items():
        mine = expected[name]
        if tuple(mine.shape) != entry.shape or mine.is_floating_point() != entry.dtype.is_floating_point:
            actual, required = f"{entry.shape} {entry.dtype}", f"{tuple(mine.shape)} {mine.dtype}"
            raise ValueError(f"{path.parent}: {name} is {actual} but its config.json and the target make it {required}")
