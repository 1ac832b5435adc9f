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
    if "HEADSTART_TRITON" not in os.environ:
        pytest.skip("make test-kernels runs it: torch for a CPU brings no Triton")
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "heads" / "kernel_cases.py")]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.environ["HEADSTART_TRITON"]},
        capture_output=True,
        text=True,
        check=False,
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


def test_the_kernel_takes_few_queries_on_a_prepared_device_that_want_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_attention, "SHARED", {0: 227 * 1024, 1: 99 * 1024})

    def takes(
        queries: int = 61, width: int = 128, dtype: torch.dtype = torch.bfloat16, on: str = "cuda:0",
        gradient: bool = False, mask: tuple[int, ...] = (1, 1, 61, 512),
    ) -> bool:  # fmt: skip
        with FakeTensorMode():
            shapes = (2, 8, queries, width), (2, 8, 512, width), (2, 8, 512, width)
            states = [torch.empty(shape, dtype=dtype, device=on) for shape in shapes]
            states[1].requires_grad_(gradient)
            return tree_attention.takes(*states, torch.empty(mask, dtype=torch.bool, device=on))

    assert takes()
    assert takes(mask=(2, 1, 61, 512))
    assert takes(on="cuda:1")
    assert not takes(on="cuda:2"), "which no target lies on"
    assert not takes(on="cpu")
    assert not takes(dtype=torch.float64)
    assert not takes(queries=257, mask=(1, 1, 257, 512))
    assert not takes(width=512)
    assert not takes(width=256, dtype=torch.float32, on="cuda:1"), "its blocks would not fit"
    assert not takes(gradient=True)
    for mask in [(1, 8, 61, 512), (1, 1, 1, 512), (1, 1, 61, 511), (61, 512)]:
        assert not takes(mask=mask)


@pytest.mark.parametrize(("shared", "stages"), [(227, 3), (163, 3), (99, 2), (64, 1)])
def test_as_many_steps_are_under_way_as_shared_memory_holds(shared: int, stages: int) -> None:
    """Of an H100, an A100, a 4090 and a T4, at the heads of an 8B under an additive mask."""
    fitting = [count for count in (1, 2, 3) if tree_attention.shared_bytes(64, 128, 2, 2, count) <= 1024 * shared]
    assert max(fitting, default=1) == stages
