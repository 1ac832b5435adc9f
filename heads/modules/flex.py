"""Attention of drafted rows by one fused kernel: torch's flex_attention (arXiv 2412.05496) with our mask.

Keys and values of the verified rows and of all drafted rows are concatenated, and a query attends to two intervals of
them (`block_mask`). The block mask is computed on the device from the bounds of whole blocks: no mask or scores of
all pairs are materialised, the host does not wait, and no size is compiled in, so one kernel serves all depths.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

TILE = 128  # queries and keys of a tile of the block mask
NARROWEST, NARROW, WIDE = 16, 128, 256  # head widths: the smallest, the largest on all devices, the largest
# Shared memory in bytes that heads wider than NARROW need, by bytes per value: for the smallest blocks of the backward
# pass (pytorch issue 198224) and of the forward pass. torch tries no smaller blocks, so compiling would fail.
FOR_WIDE = {2: 112 * 2**10, 4: 192 * 2**10}
KERNELS = 64  # limit of compiled kernels, one per shape of heads
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel supports these tensors: on CUDA, if its blocks fit the device.

    A dispatch mode, as of a FLOP counter, prevents compilation; flex_attention would then materialise all scores.
    """
    if query.device.type != "cuda" or query.dtype not in DTYPES or _get_current_dispatch_mode() is not None:
        return False
    return fits(query, value, widest(query.device.index, query.dtype.itemsize))


def fits(query: Tensor, value: Tensor, wide: int) -> bool:
    """Return whether the kernel supports heads of this width, at most `wide`."""
    widths = range(NARROWEST, wide + 1)
    return query.shape[-1] in widths and value.shape[-1] in widths


def widest(index: int | None, item: int) -> int:
    """Return the widest head of `item`-byte values that the kernel supports on a CUDA device; 0 if none."""
    properties: Any = torch.cuda.get_device_properties(index)
    if properties.major < 8:  # torch does not compile bf16 for these devices
        return 0
    return WIDE if properties.shared_memory_per_block_optin >= FOR_WIDE[item] else NARROW


# A constant for the compiler, since torch cannot trace a query of the device. The mark is the one that
# torch.compiler.assume_constant_result sets; that function would import dynamo at every command's start.
vars(widest)["_dynamo_marked_constant"] = True


def runs(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel runs for drafted rows: only in training, since new lengths would recompile."""
    return takes(query, value) and torch.is_grad_enabled() and query.requires_grad


@cache
def kernel() -> Callable[..., Tensor]:
    """Return flex_attention, compiled; uncompiled, it materialises all scores."""
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    return config.patch(recompile_limit=KERNELS)(torch.compile(flex_attention, fullgraph=True))


def block_mask(bounds: Int[Tensor, "4 B N"], length: int, steps: int) -> Any:
    """Return flex_attention's block mask of queries that attend to two intervals of keys.

    The keys are `length` verified rows, indexed from 0, and the rows of `steps` drafted steps; the row drafted for
    query n has the index -1 - n. `bounds` holds the indices of each query's first and last verified and drafted row.
    """
    from torch.nn.attention.flex_attention import BlockMask

    drafted = -1 - torch.arange(bounds.shape[2], device=bounds.device, dtype=torch.int32)
    column = torch.cat([torch.arange(length, device=bounds.device, dtype=torch.int32), drafted.repeat(steps)])
    first, upto, least, most = bounds.to(torch.int32).unbind()
    low, high = (end[..., None] for end in _extremes(bounds))
    never, true = torch.iinfo(column.dtype).max, column >= 0
    true_low, drafted_low = (_extremes(column.where(kind, never))[0] for kind in (true, ~true))
    true_high, drafted_high = (_extremes(column.where(kind, -never))[1] for kind in (true, ~true))
    # `some`: tiles with an unmasked pair; `all`: tiles without a masked pair.
    some = (true_high >= low[0]) & (true_low <= high[1]) | (drafted_high >= low[2]) & (drafted_low <= high[3])
    smallest, largest = _extremes(column)
    whole_queries, whole_keys = (
        torch.arange(-(-size // TILE), device=column.device) < size // TILE for size in (bounds.shape[2], len(column))
    )
    every = (smallest >= high[0]) & (largest <= low[1]) & whole_queries[:, None] & whole_keys
    counts, indices = _listed(some & ~every)
    # A lambda, since torch cannot compile jaxtyping's checks of arguments.
    return BlockMask.from_kv_blocks(
        counts, indices, *_listed(every), BLOCK_SIZE=TILE, seq_lengths=(bounds.shape[2], len(column)),
        mask_mod=lambda b, _head, n, key: ((column[key] >= first[b, n]) & (column[key] <= upto[b, n]))
        | ((column[key] >= least[b, n]) & (column[key] <= most[b, n])),
    )  # fmt: skip


def _extremes(x: Int[Tensor, "*n S"]) -> tuple[Int[Tensor, "*n s"], Int[Tensor, "*n s"]]:
    size = x.shape[-1]
    index = torch.arange(-(-size // TILE) * TILE, device=x.device).clamp_max(size - 1)
    return x[..., index].unflatten(-1, (-1, TILE)).aminmax(dim=-1)


def _listed(tiles: Bool[Tensor, "B n s"]) -> tuple[Int[Tensor, "B 1 n"], Int[Tensor, "B 1 n s"]]:
    """Return each query tile's number of key tiles, and all tiles' indices with these first."""
    flags = tiles[:, None].to(torch.int32)
    order = flags.argsort(dim=-1, descending=True, stable=True)
    return flags.sum(-1, dtype=torch.int32), order.to(torch.int32)
