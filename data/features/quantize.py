"""Quantisation of hidden states: pure functions, with a scale for each token's state of each layer.

The error of a value x whose row's largest is m: fp32 none, bf16 |x| / 2^8 at most (twice that of rounding to
nearest), fp8 (e4m3) |x| / 2^4 + m / 448 / 2^10, each but for fp32's own rounding.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LARGEST = 448.0  # fp8's largest value, to which a row's largest is scaled
SCALE_BYTES = 4


class Coded(NamedTuple):
    """Values in a dtype of DTYPES, with a scale for each row of them if the dtype needs one."""

    value: Shaped[Tensor, "*n D"]
    scale: Float[Tensor, "*n"] | None


def encode(x: Float[Tensor, "*n D"], dtype: str) -> Coded:
    """Return finite values in `dtype`, a key of DTYPES."""
    if dtype != "fp8":
        return Coded(x.to(DTYPES[dtype]), None)
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros has one too
    scaled = (x / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    return Coded(scaled.to(DTYPES[dtype]), scale)


def decode(coded: Coded, dtype: torch.dtype) -> Float[Tensor, "*n D"]:
    """Return the values as floats of `dtype`."""
    if coded.scale is None:
        return coded.value.to(dtype)
    return (coded.value.float() * coded.scale[..., None]).to(dtype)


def size(width: int, dtype: str) -> int:
    """Return the bytes that one row of `width` values takes."""
    return width * DTYPES[dtype].itemsize + (SCALE_BYTES if dtype == "fp8" else 0)
