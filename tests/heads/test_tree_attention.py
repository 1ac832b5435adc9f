"""The tree-attention kernel in Triton's interpreter: what torch's attention gives; and where it is used."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from heads.common.resolvers import ROOT
from heads.modules import tree_attention
from tests.heads.kernel_cases import INTERPRETED, MASKS, SHAPES, UNITS


def test_the_kernel_gives_what_torch_gives() -> None:
    """Queries that see nothing in a piece of the keys give nothing there, and those that see nothing at all zeros."""
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "heads" / "kernel_cases.py")]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["blind"] == [True, False]
    assert len(found["errors"]) == len(SHAPES) * len(INTERPRETED) * len(MASKS)
    near = {"torch.float32": 2e-6, "torch.float16": 2e-3}
    assert not {case: error for case, error in found["errors"].items() if not error < near[case.split()[-2]]}


@pytest.mark.parametrize(
    ("blocks", "keys", "length"),
    [
        (8, 1024, 64),  # one token of one sequence: 16 pieces, as many as there are steps
        (8, 65536, 2048),  # 32 pieces
        (32, 1536, 192),  # a tree of 60 nodes: 8 pieces
        (256, 1024, 512),  # chains of 32 sequences
        (4096, 1024, 1024),  # a full device: all in one
    ],
)
def test_a_device_that_is_not_full_splits_the_keys(blocks: int, keys: int, length: int) -> None:
    assert tree_attention.piece_length(blocks, keys, UNITS) == length


def test_the_kernel_takes_few_queries_on_cuda_that_want_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "HAS_TRITON", True)
    with FakeTensorMode():
        mask = torch.empty(1, 1, 61, 512, dtype=torch.bool, device="cuda")

        def takes(queries: int = 61, width: int = 128, dtype: torch.dtype = torch.bfloat16, on: str = "cuda") -> bool:
            query, value = (torch.empty(1, 8, size, width, dtype=dtype, device=on) for size in (queries, 512))
            return tree_attention.takes(query, value, mask)

        assert takes()
        assert not takes(on="cpu")
        assert not takes(dtype=torch.float64)
        assert not takes(queries=2048)
        assert not takes(width=512)
        query = torch.empty(1, 8, 61, 128, device="cuda", requires_grad=True)
        assert not tree_attention.takes(query, query, mask)
        assert not tree_attention.takes(query.detach(), query, mask.expand(1, 8, -1, -1))
