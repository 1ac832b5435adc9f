"""Masked attention of a tree's few queries over a KV cache, on CUDA: Triton kernels that split the keys.

As in flash-decoding (Dao et al., 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html), the keys are split
into chunks that blocks attend to in parallel, so that a few sequences fill the device; the chunks' outputs are then
merged by their sums of exponentials. The query heads that share keys and values are rows of one block, which loads them
once. Keys, values and the mask may have any strides.
Shape letters: B batch, H query heads, G key-value heads, T queries, S keys, E head width (F the values').
"""

import logging
import sys
from functools import cache
from importlib.util import find_spec
from subprocess import CalledProcessError
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heads.modules import layers
from heads.shapes import HeadRows

log = logging.getLogger(__name__)

MAX_QUERIES, MAX_WIDTH = 256, 256  # limits of queries and head width for the kernel
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
STEP = 64  # keys per iteration of a block
ROWS = 64  # maximum number of rows of a block
CHUNKS = 64  # maximum number of key chunks, so that merging stays cheap
BLOCKS_PER_MULTIPROCESSOR = 2
LOG2_E = 1.4426950408889634
KIND = "cuda"  # device type with a kernel
SHARED: dict[int | None, int] = {}  # index of a prepared device -> shared memory of a block in bytes


def prepare(device: torch.device) -> None:
    """Use the kernel on a CUDA device if it runs there; otherwise warn and use torch's attention."""
    unsupported = torch.version.hip is not None or not torch.cuda.is_available() or find_spec("triton") is None
    if unsupported or torch.cuda.get_device_capability(device) < (8, 0):
        return
    index = torch.empty(0, device=device).device.index
    if index in SHARED:
        return
    from triton.errors import TritonError

    layers.masked_kernel = sys.modules[__name__]
    with torch.inference_mode():
        properties: Any = torch.cuda.get_device_properties(device)
        SHARED[index] = properties.shared_memory_per_block_optin
        states = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=device)
        try:
            tree_attention(states, states, states, torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), 1.0)
        except (TritonError, RuntimeError, OSError, ImportError, CalledProcessError) as error:  # e.g. no compiler
            del SHARED[index]
            log.warning("tree attention runs by torch's kernels: %s", str(error).strip().split("\n")[0])


def shared_bytes(rows: int, width: int, item: int, mask: int, stages: int) -> int:
    """Return the most shared memory of a block in bytes; an entry of the mask has `mask` bytes."""
    return item * rows * width + stages * STEP * (2 * item * width + rows * mask)


def takes(query: HeadRows, key: Float[Tensor, "B G S E"], value: Float[Tensor, "B G S F"], mask: Tensor) -> bool:
    """Return whether the kernel is used: few queries, a prepared device, no gradient."""
    if query.device.type != KIND or query.device.index not in SHARED or mask.dim() != 4:
        return False
    queries, width = query.shape[2], padded(max(query.shape[-1], value.shape[-1]))
    small = queries <= MAX_QUERIES and width <= MAX_WIDTH and query.dtype in DTYPES
    alike = query.dtype == key.dtype == value.dtype
    fits = shared_bytes(ROWS, width, query.itemsize, mask.itemsize, 1) <= SHARED[query.device.index]
    shaped = mask.shape[1:] == (1, queries, key.shape[2]) and mask.shape[0] in (1, query.shape[0])
    learns = torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value, mask))
    return small and alike and fits and shaped and not learns


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded(size: int) -> int:
    """Return the next power of two for a block's rows or width, which Triton's matmuls need."""
    return max(16, 1 << (size - 1).bit_length())


@torch.library.custom_op("headstart::tree_attention", mutates_args=())
def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend where a boolean mask is true, or with an additive mask; a query whose keys are all masked returns zeros.

    The query is "B H T E", the key "B G S E", the value "B G S F", copied where the last stride is not 1; the mask is
    "1 or B, 1, T, S", and what is returned "B H T F", in memory "B T H F".
    """
    from heads.modules import tree_kernels

    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    (batch, heads, queries, width), (groups, keys, values) = query.shape, value.shape[1:]
    share = heads // groups
    rows = min(padded(share * queries), ROWS)
    sequence_groups, blocks = batch * groups, -(-share * queries // rows)
    chunks = min(CHUNKS, -(-BLOCKS_PER_MULTIPROCESSOR * multiprocessors(query.device) // (sequence_groups * blocks)))
    chunk = -(-keys // (chunks * STEP)) * STEP
    chunks = -(-keys // chunk)
    out = query.new_empty(batch, queries, heads, values).transpose(1, 2)
    parts = torch.empty(batch, heads, queries, chunks, values, dtype=torch.float32, device=query.device)
    sums = torch.empty(parts.shape[:4], dtype=torch.float32, device=query.device)
    additive, wide_e, wide_f = mask.dtype != torch.bool, padded(width), padded(values)
    room, sizes = SHARED.get(query.device.index, 0), (rows, max(wide_e, wide_f), query.itemsize, mask.itemsize)
    stages = next((count for count in (3, 2) if shared_bytes(*sizes, count) <= room), 1)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        tree_kernels.attend[sequence_groups, blocks, chunks](
            query, key, value, mask if additive else mask.view(torch.uint8), parts, sums,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            mask.stride(0) if len(mask) > 1 else 0, *mask.stride()[2:],
            scale * LOG2_E, queries, keys, chunk, groups,
            SHARE=share, E=width, F=values, WIDE_E=wide_e, WIDE_F=wide_f, ROWS=rows, STEP=STEP, ADDITIVE=additive,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_stages=stages,
        )  # fmt: skip
        tree_kernels.merge[batch * heads * queries,](
            parts, sums, out, *out.stride()[:3], heads, queries,
            CHUNKS=chunks, WIDE=1 << (chunks - 1).bit_length(), F=values, WIDE_F=wide_f, num_warps=4,
        )  # fmt: skip
    return out


@tree_attention.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, _mask: Tensor, _scale: float) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
