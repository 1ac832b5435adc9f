"""Safetensors files read as what they are: the header is checked before a tensor is made, and a head before it is.

A header or a configuration may claim any size; memory is taken for what the file really holds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.base import Embeddings
from heads.common.errors import one_line
from heads.common.untrusted import CUT, regular, shown

# What a head's tensors may be made of; of the others torch cannot say whether they are finite.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
LARGEST, DEEPEST = 1 << 40, 8  # of a tensor: a dimension, and how many there are
LONGEST = 1 << 22  # bytes of a header, enough for tens of thousands of tensors


class Entry(NamedTuple):
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def header(path: Path) -> dict[str, Entry]:
    """Return what a file holds, without reading it.

    Raises:
        ValueError: the file is missing, truncated or damaged, or holds a type or shape that no head is made of.
    """
    try:
        with regular(path).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")  # of the header that follows
        if size > LONGEST:
            raise ValueError(f"{path}: a header of {size} bytes, more than the tensors of any head need; save it again")
        with safe_open(path, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in list(opened.keys())}
            told = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: truncated, damaged or missing ({one_line(error)[:CUT]}); save or download it again"
        ) from None
    for name, (shape, dtype) in told.items():
        if len(shape) > DEEPEST or any(size > LARGEST for size in shape):
            raise ValueError(
                f"{path}: {shown(name)} is of shape {shown(shape)}, which no head has; save or download it again"
            )
        if dtype not in DTYPES:
            raise ValueError(f"{path}: {shown(name)} is of type {dtype}; the types read are {', '.join(DTYPES)}")
    return {name: Entry(shape, DTYPES[dtype]) for name, (shape, dtype) in told.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors.

    Raises:
        ValueError: as `header`.
    """
    names = header(path)
    try:
        with safe_open(path, "pt") as opened:
            return {name: opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{path}: truncated, damaged or missing ({one_line(error)[:CUT]}); save or download it again"
        ) from None


def outline(kind: Any, config: Any, embeddings: Embeddings, where: str) -> dict[str, Tensor]:
    """Return a head's tensors without memory, to be compared with a file before the head is made.

    Raises:
        ValueError: no head can be made of this configuration; the message begins with `where`.
    """
    try:
        with torch.device("meta"):
            made: dict[str, Tensor] = kind(config, embeddings).state_dict()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{where}no head can be made of it: {one_line(error)[:CUT]}") from error
    return made


def check_fit(path: Path, own: Mapping[str, Tensor], name_of: str) -> None:
    """Check that a file holds exactly these tensors, in shape and kind.

    Raises:
        ValueError: naming the first difference.
    """
    told = header(path)
    missing, unknown = sorted(own.keys() - told.keys()), sorted(told.keys() - own.keys())
    if missing or unknown:
        raise ValueError(
            f"{path.parent}: the weights do not fit their {name_of}: missing {shown(missing)}, unknown {shown(unknown)}"
        )
    for name, entry in told.items():
        mine = own[name]
        if tuple(mine.shape) != entry.shape or mine.is_floating_point() != entry.dtype.is_floating_point:
            found, wanted = f"{entry.shape} {entry.dtype}", f"{tuple(mine.shape)} {mine.dtype}"
            raise ValueError(f"{path.parent}: {name} is {found} but its {name_of} and the target make it {wanted}")
