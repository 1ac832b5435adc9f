"""Masked attention split over its keys, for a device that the heads of a few sequences do not fill.

A kernel works through all keys of a block of queries one after another, so that one sequence with 8 heads of keys and
values keeps 8 units of a device busy for as long as its text is long. As in flash-decoding (Dao et al., 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html) the keys are cut into equal pieces, all pieces are attended at
once, and their results are weighted by their sums of exponentials. Pieces are views: no key or value is copied.
Shape letters: B batch, G key-value heads, R queries, S keys, E head width (F the values'), C pieces, P keys of a piece.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

QUERIES = 64  # that a block of CUDA's memory-efficient kernel takes
LEAST = 512  # keys of a piece, below which merging costs what it brings
ALIGNED = 8  # keys: of 16 bits, what the kernel reads of a mask at once
DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # that it knows


def count_pieces(query: Tensor, key: Tensor) -> int:
    """Return how many pieces to cut keys "B G S E" into: a power of 2, with which queries "B G R E" fill the device.

    It follows from shapes and device alone. 1 on a CPU, and where a gradient is wanted: the merge has none.
    """
    if query.device.type != "cuda" or query.dtype not in DTYPES or query.requires_grad:
        return 1
    (batch, groups, rows, width), keys, pieces = query.shape, key.shape[2], 1
    if batch > 1 and rows > width // 4:  # a mask for each head of a sequence would weigh as much as keys and values
        return 1
    blocks = batch * groups * -(-rows // QUERIES)
    units = torch.cuda.get_device_properties(query.device).multi_processor_count
    while 2 * pieces * blocks <= units and 2 * pieces * LEAST <= keys and keys % (2 * pieces * ALIGNED) == 0:
        pieces *= 2
    return pieces


def split_attention(
    query: Float[Tensor, "B G R E"],
    key: Float[Tensor, "B G S E"],
    value: Float[Tensor, "B G S F"],
    mask: Shaped[Tensor, "#B 1 R S"],
    scale: float | None,
    pieces: int,
) -> Float[Tensor, "B G R F"]:
    """Attend under a boolean or an additive mask in `pieces` equal ones of the keys, merged in fp32 at least."""
    batch, groups = query.shape[:2]
    keys, values = (states.flatten(0, 1).unflatten(1, (pieces, -1)) for states in (key, value))
    bias = _finite(mask, query.dtype).expand(batch, groups, -1, -1).flatten(0, 1).unflatten(2, (pieces, -1))
    queries = query.flatten(0, 1)[:, None].expand(-1, pieces, -1, -1)
    out, log_sum = _attend(queries, keys, values, bias.transpose(1, 2), scale)
    merged = (log_sum.softmax(1)[..., None] * out).sum(1).to(query.dtype)
    return merged.unflatten(0, (batch, groups))


def _finite(mask: Shaped[Tensor, "#B 1 R S"], dtype: torch.dtype) -> Float[Tensor, "#B 1 R S"]:
    """Return an additive mask that is finite, in the kernel's base 2 too.

    A row of a piece that sees nothing then has a log-sum-exp so low that its weight is 0. Of a row of minus infinities
    the kernel says 0, which is a weight like any other.
    """
    low = torch.finfo(dtype).min / 4
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, low)
    return mask.clamp_min(low)


def _attend(
    query: Float[Tensor, "n C R E"],
    key: Float[Tensor, "n C P E"],
    value: Float[Tensor, "n C P F"],
    bias: Float[Tensor, "n C R P"],
    scale: float | None,
) -> tuple[Float[Tensor, "n C R F"], Float[Tensor, "n C R"]]:
    """Return each piece's attention and the natural logarithm of its sums of exponentials."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)
    out, log_sum, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, scale=scale)
    return out, log_sum[..., : query.shape[2]]  # the kernel pads it to a block of queries
