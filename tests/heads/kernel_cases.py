"""Cases of the tree-attention kernel; as a script they run in Triton's interpreter, which wants a process of its own.

TRITON_INTERPRET=1 python tests/heads/kernel_cases.py
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parents[2])

from heads.modules import layers, tree_attention
from heads.modules.layers import grouped_attention

UNITS = 132  # of the device that is interpreted
CALLS: list[int] = []  # of the kernel
INTERPRETED = (torch.float32, torch.float16)  # the interpreter knows no bfloat16
MASKS = ("boolean", "lowest", "infinite", "shared")
SHAPES = {  # B, key-value heads, query heads of each, queries, keys, width, the values'
    "one token": (1, 2, 4, 1, 300, 64, 64),
    "tree": (1, 2, 4, 20, 192, 32, 32),
    "chains": (3, 2, 4, 5, 200, 64, 64),
    "no groups": (2, 3, 1, 7, 130, 32, 32),
    "odd widths": (2, 1, 3, 7, 96, 24, 40),
}


def states(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values that are views of a longer cache, and which keys each query sees."""
    batch, groups, share, queries, keys, width, values = shape
    chance = torch.Generator().manual_seed(0)
    query = torch.randn(batch, queries, groups * share, width, generator=chance).to(dtype).transpose(1, 2)
    key, value = (torch.randn(batch, groups, keys + 88, size, generator=chance).to(dtype) for size in (width, values))
    seen = torch.rand(batch, 1, queries, keys, generator=chance) < 0.7
    seen[..., keys // 3 :] = False  # whole chunks that nobody sees
    seen[..., 0] = True
    return query, key[:, :, :keys], value[:, :, :keys], seen


def masked(seen: Tensor, mask: str, dtype: torch.dtype) -> Tensor:
    """Return a kind of mask of what is seen."""
    lowest = {"lowest": torch.finfo(dtype).min, "infinite": float("-inf")}.get(mask)
    return seen if lowest is None else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, lowest)


def error(shape: str, dtype: torch.dtype, mask: str) -> float:
    """Return how far the kernel is from torch's attention in fp64."""
    query, key, value, seen = states(SHAPES[shape], dtype)
    seen = seen[:1] if mask == "shared" else seen
    whole = grouped_attention(*(each.double() for each in (query, key, value)), seen, 0.3)
    if mask == "shared":  # of another layout
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    torch._dynamo.reset()
    compiled = torch.compile(grouped_attention, fullgraph=True, backend="eager")
    attend = compiled if mask == "boolean" else grouped_attention
    before = len(CALLS)
    found = attend(query, key, value, masked(seen, mask, dtype), 0.3)
    assert len(CALLS) == before + 1, "the kernel did not attend"
    assert found.dtype == dtype
    assert found.transpose(1, 2).is_contiguous(), "an engine's layers want it so"
    return float((found.double() - whole).abs().max())


def blind() -> list[bool]:
    """Return whether queries give zeros: one that sees nothing, and one that sees something."""
    query, key, value, seen = states(SHAPES["chains"], torch.float32)
    seen[1, :, 2] = False
    found = tree_attention.tree_attention(query, key, value, seen, 0.3)
    return [not found[1, :, row].any() for row in (2, 3)]


def main() -> None:
    """Print the error of each case."""
    layers.masked_kernel = tree_attention
    tree_attention.KIND, tree_attention.SHARED = "cpu", {None: 227 * 1024}
    tree_attention.multiprocessors = lambda _: CALLS.append(1) or UNITS
    cases = product(SHAPES, INTERPRETED, MASKS)
    print(json.dumps({"blind": blind(), "errors": {f"{a} {b} {c}": error(a, b, c) for a, b, c in cases}}))


if __name__ == "__main__":
    main()
