"""The tree-attention kernel on a device: what torch's attention gives on the CPU, in every dtype."""

import pytest
import torch

from heads.modules.layers import grouped_attention
from heads.modules.tree_attention import prepare, takes
from tests.heads.kernel_cases import SHAPES, masked, states

pytestmark = pytest.mark.gpu
LARGE = {"8B tree": (1, 8, 4, 61, 2100, 128, 128), "8B batch": (32, 8, 4, 5, 1500, 128, 128),
         "latent": (1, 1, 16, 61, 700, 192, 128), "wide": (1, 4, 2, 61, 700, 256, 256)}  # fmt: skip
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("mask", ["boolean", "lowest"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("shape", SHAPES | LARGE)
def test_the_kernel_gives_what_torch_gives(shape: str, dtype: torch.dtype, mask: str, device: torch.device) -> None:
    query, key, value, seen = states((SHAPES | LARGE)[shape], dtype)
    whole = grouped_attention(*(each.double() for each in (query, key, value)), seen)
    given = [each.to(device) for each in (query, key, value, masked(seen, mask, dtype))]
    prepare(device)
    assert takes(*given) == (device.type == "cuda")
    found = grouped_attention(*given)
    torch.testing.assert_close(found.double().cpu(), whole, rtol=NEAR[dtype], atol=NEAR[dtype])
