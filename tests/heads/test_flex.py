"""The fused kernel gives what the blocks give, its mask is exact tile by tile, and the host says where it runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from heads import rows
from heads.common.resolvers import ROOT
from heads.modules import attention, flex, tree_attention
from heads.modules.attention import Pattern, attend_blocks, attend_fused, pattern
from tests.heads.kernel_cases import INTERPRETED, MASKS, SHAPES

T = 300  # rows, over tiles of 128


def documents() -> Tensor:
    """Documents that begin within tiles and at their bounds, and padding."""
    return torch.tensor([[0] * 128 + [1] * 140 + [2] * 32, [0] * 3 + [1] * 287 + [-1] * 10])


def chain(steps: int, length: int | None) -> tuple[Pattern, int]:
    return pattern(rows.positions(documents()), length, steps), T


def blocks(size: int, causal: bool) -> tuple[Pattern, int]:
    """As a block head drafts: slots of 50 anchors a row, which see the rows up to their anchor."""
    chosen = torch.randperm(T, generator=torch.Generator().manual_seed(1))[:50].sort().values.expand(2, -1)
    begin = chosen - rows.positions(documents()).gather(1, chosen)
    first, upto = (x[..., None].expand(-1, -1, size).flatten(1) for x in (begin, chosen))
    return Pattern(first, upto, size=size, causal=causal), 50 * size


CASES: dict[str, Callable[[], tuple[Pattern, int]]] = {
    "true rows": lambda: chain(0, None),
    "drafted": lambda: chain(3, None),
    "window": lambda: chain(2, 20),
    "a window of one step": lambda: chain(3, 3),
    "blocks": lambda: blocks(3, False),
    "causal blocks": lambda: blocks(4, True),
}
STEPS = {"true rows": 0, "drafted": 3, "window": 2, "a window of one step": 3}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex_attention make all scores at once, which on a CPU has a gradient if one insists."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "kernel", lambda: torch_flex.flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_what_the_blocks_give(name: str, uncompiled: None) -> None:
    torch.manual_seed(0)
    seen, queries = CASES[name]()
    pairs = [(random(2, 1, T, 8), random(2, 1, T, 12))]
    pairs += [(random(2, 1, queries, 8), random(2, 1, queries, 12)) for _ in range(STEPS.get(name, 1))]
    inputs = [random(2, 2, queries, 8), *(half for pair in pairs for half in pair)]
    found, expected = (attend(inputs[0], pairs, seen) for attend in (attend_fused, attend_blocks))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((out * upstream).sum(), inputs) for out in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def written_out(seen: Pattern, queries: int, steps: int) -> Tensor:
    """Which key each query sees, by the pattern's own words."""
    row, query = torch.arange(T), torch.arange(queries)
    true = (row >= seen.first[..., None]) & (row <= seen.last[..., None])
    drafted = (query // seen.size == query[:, None] // seen.size) & ((query <= query[:, None]) | (not seen.causal))
    return torch.cat([true, drafted.repeat(1, steps).expand(2, -1, -1)], 2)


def listed(counts: Tensor, indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Which pairs "B N S" lie in the tiles of a list."""
    tiles = torch.zeros(indices.shape, dtype=torch.bool)
    tiles.scatter_(-1, indices.long(), torch.arange(indices.shape[-1]) < counts[..., None])
    return tiles[:, 0].repeat_interleave(flex.TILE, 1).repeat_interleave(flex.TILE, 2)[:, : shape[0], : shape[1]]


@pytest.mark.parametrize("name", CASES)
def test_the_masks_tiles_are_exact(name: str) -> None:
    """What the kernel works through: tiles that it masks pair by pair, and those that it does not."""
    seen, queries = CASES[name]()
    steps = STEPS.get(name, 1)
    expected, mask = written_out(seen, queries, steps), seen.mask(T, steps)
    assert mask.shape == (2, 1, *expected.shape[1:])
    some = listed(mask.kv_num_blocks, mask.kv_indices, expected.shape[1:])
    every = listed(mask.full_kv_num_blocks, mask.full_kv_indices, expected.shape[1:])
    pair = torch.meshgrid(*map(torch.arange, expected.shape), indexing="ij")
    assert torch.equal(some & mask.mask_mod(pair[0], 0, *pair[1:]) | every, expected)
    assert not (some & every).any()


def test_the_mask_is_made_without_a_read_of_the_device() -> None:
    """Tensors without values: whoever asks for one fails, as the blocks do."""
    with FakeTensorMode():
        seen = pattern(torch.zeros(2, T, dtype=torch.long), 50, 2)
        assert seen.mask(T, 2).shape == (2, 1, T, 3 * T)
        with pytest.raises(DataDependentOutputException):
            seen.blocks(T)


@pytest.fixture
def counter(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Let the kernel be compiled for no device, and counted."""
    count, compiling = CompileCounterWithBackend("eager"), torch.compile
    with monkeypatch.context() as patch:
        patch.setattr(
            torch, "compile", lambda function, fullgraph: compiling(function, backend=count, fullgraph=fullgraph)
        )
        kernel = flex.kernel.__wrapped__()
    monkeypatch.setattr(attention, "kernel", lambda: kernel)
    torch.compiler.reset()
    return count


def drafted(width: int, depths: int) -> None:
    """Attend to documents of random lengths at several depths."""
    document = torch.randint(0, 3, (2, 256)).sort().values
    pairs = []
    for depth in range(depths):
        pairs.append((random(2, 2, 256, width), random(2, 2, 256, width)))
        attend_fused(random(2, 4, 256, width), pairs, pattern(rows.positions(document), 100, depth))


def test_one_kernel_serves_all_depths_and_documents(counter: CompileCounterWithBackend) -> None:
    for _ in range(2):
        drafted(16, 3)
    assert counter.frame_count == 2, "one for the first depth, and one for the others"


def on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kib: int) -> None:
    """Make CUDA devices ones of this compute capability, with so much shared memory for a block."""
    properties = SimpleNamespace(major=capability[0], shared_memory_per_block_optin=kib * 2**10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "trained", "fused"),
    [
        ("cuda", torch.bfloat16, 128, True, True),
        ("cuda", torch.float32, 64, True, True),
        ("cuda", torch.float64, 64, True, False),
        ("cuda", torch.float32, 8, True, False),
        ("cuda", torch.bfloat16, 128, False, False),
        ("cpu", torch.float32, 64, True, False),
    ],
)
def test_where_the_kernel_runs(
    device: str, dtype: torch.dtype, width: int, trained: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, (9, 0), 227)
    with FakeTensorMode():
        query = torch.empty(1, 4, 32, width, dtype=dtype, device=device, requires_grad=trained)
        assert not flex.runs(query, query)  # under a mode
    assert flex.runs(query, query) == fused
    with torch.no_grad():
        assert not flex.runs(query, query)


@pytest.mark.parametrize(
    ("capability", "kib", "dtype", "widest"),
    [
        ((9, 0), 227, torch.bfloat16, 256), ((9, 0), 227, torch.float32, 256), ((8, 0), 163, torch.bfloat16, 256),
        ((8, 0), 163, torch.float32, 128), ((8, 9), 99, torch.bfloat16, 128), ((12, 0), 99, torch.float16, 128),
        ((7, 5), 64, torch.float16, 0),
    ],
)  # fmt: skip
def test_wide_heads_are_left_to_the_blocks_where_the_kernels_do_not_fit(
    capability: tuple[int, int], kib: int, dtype: torch.dtype, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, capability, kib)
    for width in (64, 128, 192, 256):
        with FakeTensorMode():
            query = torch.empty(1, 4, 32, width, dtype=dtype, device="cuda")
        assert flex.takes(query, query) == (width <= widest)


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
