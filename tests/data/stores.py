"""Small stores for tests: rows made up from their numbers, and a packed data set of random documents."""

from dataclasses import replace
from typing import Any

import torch

from data.batches import Packed, pack
from data.features.store import Copying, StoreSpec
from data.text.masks import Sample
from heads.base import NamedTensors
from tests import toys

SPEC = StoreSpec("print", "toy", None, (0, 2), 8, 40, "data", rows=11, length=6, dtype="bf16", shard_rows=2)


def spec(**changed: Any) -> StoreSpec:
    """Return a toy store's kind, with some values changed."""
    return replace(SPEC, **changed)


def made(rows: list[int]) -> NamedTensors:
    """Return tensors that follow from the rows' numbers."""
    found = []
    for row in rows:
        generator = torch.Generator().manual_seed(row)
        found.append(torch.randn(3, 6, 8, generator=generator).bfloat16())
    stacked = torch.stack(found)
    return {"hidden": stacked[:, :2].transpose(1, 2).contiguous(), "last": stacked[:, 2].contiguous()}


def ready(rows: list[int]) -> Copying:
    """Return the same, as rows that are on the host."""
    return Copying(made(rows), torch.tensor(True), None, "toy")


def packed(count: int = 24, length: int = 16, seed: int = 0) -> Packed:
    """Return packed rows of random documents."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, length + 1, (count,), generator=generator).tolist()
    samples = []
    for i, size in enumerate(sizes):
        token = torch.randint(toys.VOCAB, (size,), generator=generator).tolist()
        samples.append(Sample(str(i), token, [1] * size))
    return pack(samples, length)
