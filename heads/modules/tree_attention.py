"""Masked attention of a tree's few queries over a cache, on CUDA: Triton kernels of ours that split the keys.

As in flash-decoding (Dao et al., 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html) the keys are cut into
pieces that are attended at once, so that a few sequences fill the device, and the pieces' results are weighted by their
sums of exponentials. The query heads that share keys and values are rows of one block, which reads them once; keys,
values and the mask are read where they lie, whatever their strides.
Shape letters: B batch, H query heads, G key-value heads, T queries, S keys, E head width (F the values').
"""

from functools import cache
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

FEW, WIDEST = 256, 256  # queries, and numbers of a head, up to which the kernel is used
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEP = 64  # keys that a block attends at a time
ROWS = 16, 64  # of a block, at the least and the most
PIECES = 64  # at most, so that merging stays cheap
FILLED = 2  # blocks to each unit of the device
LOG2_E = 1.4426950408889634
HAS_TRITON = find_spec("triton") is not None


def takes(query: Float[Tensor, "B H T E"], value: Float[Tensor, "B G S F"], mask: Tensor) -> bool:
    """Whether the kernel attends: few queries on CUDA, of heads that it knows, where no gradient is wanted."""
    small = query.shape[2] <= FEW and max(query.shape[-1], value.shape[-1]) <= WIDEST
    fits = small and mask.shape[1] == 1 and query.dtype in DTYPES and not query.requires_grad
    return HAS_TRITON and query.device.type == "cuda" and fits


@cache
def units(device: torch.device) -> int:
    """Return how many blocks a device runs at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def piece_length(blocks: int, keys: int, units: int) -> int:
    """Return of how many keys a piece is, in whole steps, so that so many blocks fill the device."""
    pieces = min(PIECES, -(-FILLED * units // blocks))
    return -(-keys // (pieces * STEP)) * STEP


@torch.library.custom_op("headstart::tree_attention", mutates_args=())
def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend where a boolean mask is true, or with an additive one; a query that sees nothing gives zeros.

    Args:
        query: "B H T E".
        key: "B G S E".
        value: "B G S F"; these three are copied where their last stride is not 1.
        mask: "1 or B, 1, T, S".

    Returns:
        "B H T F", in memory as "B T H F".
    """
    import triton

    from heads.modules import tree_kernels

    def wide(size: int) -> int:
        return max(16, triton.next_power_of_2(size))

    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    (batch, heads, queries, width), (groups, keys, values) = query.shape, value.shape[1:]
    share = heads // groups
    rows = min(max(ROWS[0], triton.next_power_of_2(share * queries)), ROWS[1])
    alone, blocks = batch * groups, triton.cdiv(share * queries, rows)
    piece = piece_length(alone * blocks, keys, units(query.device))
    pieces = triton.cdiv(keys, piece)
    out = query.new_empty(batch, queries, heads, values).transpose(1, 2)
    parts = torch.empty(batch, heads, queries, pieces, values, dtype=torch.float32, device=query.device)
    sums = torch.empty(parts.shape[:4], dtype=torch.float32, device=query.device)
    additive, wide_e, wide_f = mask.dtype != torch.bool, wide(width), wide(values)
    stages = 3 if max(wide_e, wide_f) * query.itemsize <= 512 else 1  # that shared memory holds
    tree_kernels.attend[alone, blocks, pieces](
        query, key, value, mask if additive else mask.view(torch.uint8), parts, sums,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        mask.stride(0) if len(mask) > 1 else 0, *mask.stride()[2:],
        scale * LOG2_E, queries, keys, piece, groups,
        SHARE=share, E=width, F=values, WIDE_E=wide_e, WIDE_F=wide_f, ROWS=rows, STEP=STEP, ADDITIVE=additive,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_stages=stages,
    )  # fmt: skip
    tree_kernels.merge[batch * heads * queries,](
        parts, sums, out, *out.stride()[:3], heads, queries,
        PIECES=pieces, WIDE=triton.next_power_of_2(pieces), F=values, WIDE_F=wide_f, num_warps=2,
    )  # fmt: skip
    return out


@tree_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, _mask: Tensor, _scale: float) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
