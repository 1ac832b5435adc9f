"""What a training step samples of its rows: anchors and feature noise.

All numbers are hashes of the run's seed, the step and a row's number in the data, by which they are the same on every
kind of device, for any number of processes and any cut of a step into micro-batches, and after a resumption.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Features
from inference.verification.rng import BITS, key_of, keyed

ANCHORS, NOISE = range(2)  # the keys of a row's numbers, by what they are for
VALUES = {"cpu": 2**15, "cuda": 2**22}  # hashed at a time: few enough for a CPU's cache, and for a GPU's memory


def row_keys(seed: int, step: int, index: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Return the keys of a step's rows, from which all that is sampled of them follows."""
    keys: Tensor = keyed(keyed(key_of(seed), step), index)
    return keys


def sample_anchors(useful: Bool[Tensor, "B T"], count: int | None, keys: Int[Tensor, "B"]) -> Int[Tensor, "B n"] | None:
    """Sample `count` anchor rows of each packed sequence, useful ones first; None for `trained_rows`."""
    length = useful.shape[1]
    if count is None or count >= length:
        return None
    row = torch.arange(length, device=useful.device)
    order = keyed(keyed(keys, ANCHORS)[:, None], row)  # a permutation of 32 bits: no two rows have the same
    return (order + (useful.long() << BITS)).topk(count).indices.sort().values


def trained_rows(useful: Bool[Tensor, "B T"]) -> Int[Tensor, "B n"] | None:
    """Return the useful rows of each packed sequence, in order, with others up to a common number; None for all.

    The numbers are few: multiples of 1/16 of the length.
    """
    length, most = useful.shape[1], int(useful.sum(1).max())
    step = max(1, length // 16)
    count = -(-most // step) * step
    if not 0 < count < length:
        return None
    return useful.long().argsort(dim=1, descending=True, stable=True)[:, :count].sort(1).values


def noisy(features: Features, noise: float, keys: Int[Tensor, "B"]) -> Features:
    """Add EAGLE's uniform feature noise, scaled by the length it was tuned at over that of these rows."""
    if noise == 0:
        return features
    length, layers = features.hidden.shape[1:3]
    scale, device = noise * 512 / length, features.last.device
    position, layer = (torch.arange(size, device=device) for size in (length, 1 + layers))
    key = keyed(keyed(keyed(keys, NOISE)[:, None], position)[:, :, None], layer)
    last, hidden = _jittered(features.last, key[:, :, 0], scale), _jittered(features.hidden, key[:, :, 1:], scale)
    return features._replace(last=last, hidden=hidden)


def _jittered(x: Float[Tensor, "*n D"], key: Int[Tensor, "*n"], scale: float) -> Float[Tensor, "*n D"]:
    """Return x with uniform noise from -scale / 2 to scale / 2, a key for each of its vectors."""
    out: Any = x.clone(memory_format=torch.contiguous_format)
    unit = torch.arange(x.shape[-1], device=x.device)
    size = max(1, VALUES.get(x.device.type, VALUES["cuda"]) // x.shape[-1])
    for some, keys in zip(out.flatten(0, -2).split(size), key.flatten().split(size), strict=True):
        some.add_(keyed(keys[:, None], unit).float().mul_(scale / 2**BITS).sub_(scale / 2))
    return out
