"""Attention over packed documents on the device: one kernel gives what a loop over the documents does on the CPU."""

import pytest
import torch

from heads import rows
from inference.target import attention
from inference.target.attention import FLEX, LOOP, NEEDED, VARLEN, Documents, route, spans_of, varlen_options
from tests.heads.test_flex import T, documents

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 1, 20, 200])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("kernel", "dtype", "near"),
    [(VARLEN, torch.bfloat16, 2e-2), (FLEX, torch.float32, 2e-3), (FLEX, torch.bfloat16, 2e-2)],
    ids=str,
)
def test_one_kernel_is_the_loop(
    kernel: str, dtype: torch.dtype, near: float, width: int, window: int | None, device: torch.device
) -> None:
    """On the same numbers, the loop in fp64: groups of queries, windows, several rows, padding."""
    torch.manual_seed(0)
    document = documents()
    states = [torch.randn(2, heads, T, width).to(dtype) for heads in (6, 2, 2)]
    results = []
    runs = ((device, dtype, kernel if device.type == "cuda" else LOOP), (torch.device("cpu"), torch.float64, LOOP))
    for on, wide, attend in runs:
        there = Documents((window,), spans_of(document), rows.positions(document).to(on))
        query, key, value = (x.to(on, wide) for x in states)
        with torch.no_grad():
            results.append(attention.KERNELS[attend](query, key, value, None, window, there).cpu().double())
    assert (results[0] - results[1]).norm() <= near * results[1].norm()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, VARLEN), (torch.float32, FLEX)], ids=str)
def test_a_gpu_has_the_kernels(dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    query = torch.empty(1, 4, 32, 64, dtype=dtype, device=device)
    options = varlen_options(device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert options >= NEEDED
        assert route(query, query, options) == kernel
    if device.type != "cuda":
        assert route(query, query, options) == LOOP


def test_a_pass_over_documents_does_not_make_the_host_wait(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA alone says where the host waits")
    document, spans = documents(), spans_of(documents())
    states = [torch.randn(2, heads, T, 64, device=device, dtype=torch.bfloat16) for heads in (6, 2, 2)]
    position = rows.positions(document.to(device))
    for attend in (attention.attend_varlen, attention.attend_flex):
        attend(*states, None, 20, Documents((20,), spans, position))  # compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            attend(*states, None, 20, Documents((20,), spans, position))
        finally:
            torch.cuda.set_sync_debug_mode("default")
