"""Attention split over keys gives what the whole gives, copies no key, and is chosen by shapes and device alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from heads.modules import layers
from heads.modules.layers import grouped_attention
from heads.modules.split_keys import count_pieces

KEYS, WIDTH, PIECES, UNITS = 512, 32, 8, 132
NEAR = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 0.02}
LENGTHS = [40, 512, 130]  # of which the first and the last fully mask pieces of 64


def tensors(batch: int, groups: int, queries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values that are views of a longer cache, and which keys each query sees."""
    chance = torch.Generator().manual_seed(0)
    query = torch.randn(batch, queries, 4 * groups, WIDTH, generator=chance, dtype=torch.float64).transpose(1, 2)
    cache = torch.randn(2, batch, groups, KEYS + 88, WIDTH, generator=chance, dtype=torch.float64).to(dtype)
    seen = torch.arange(KEYS) < torch.tensor(LENGTHS[:batch])[:, None, None, None]
    seen = seen & (torch.rand(batch, 1, queries, KEYS, generator=chance) < 0.7)
    seen[..., 0] = True
    return query.to(dtype), cache[0][:, :, :KEYS], cache[1][:, :, :KEYS], seen


def additive(seen: Tensor, dtype: torch.dtype, shut: float) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, shut)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation makes, and the kernels of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.names, self.strides = 0, list[str](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in str(func):
            self.names.append(str(func))
            self.strides = [stride for tensor in args[:4] for stride in tensor.stride()[:-1]]
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("mask", ["boolean", "lowest", "infinite"])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("queries", [1, 60])
@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_pieces_give_what_the_whole_gives(
    batch: int, groups: int, queries: int, dtype: torch.dtype, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value, seen = tensors(batch, groups, queries, dtype)
    masks = {
        "boolean": seen,
        "lowest": additive(seen, dtype, torch.finfo(dtype).min),
        "infinite": additive(seen, dtype, float("-inf")),
    }
    whole = grouped_attention(*(states.double() for states in (query, key, value)), seen, 0.3)
    monkeypatch.setattr(layers, "count_pieces", lambda *_: PIECES)
    split = grouped_attention(query, key, value, masks[mask], 0.3)
    assert split.dtype == dtype
    torch.testing.assert_close(split.double(), whole, rtol=NEAR[dtype], atol=NEAR[dtype])


def test_no_key_is_copied_and_one_kernel_takes_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, seen = tensors(3, 4, 1, torch.float32)
    monkeypatch.setattr(layers, "count_pieces", lambda *_: PIECES)
    with Largest() as largest:
        grouped_attention(query, key, value, seen)
    assert largest.numel < key.numel() / 2
    assert largest.names == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]


def on_cuda(batch: int, rows: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the queries and keys of 8 groups on a device that is not there: shapes alone."""
    query = torch.empty(batch, 8, rows, 128, dtype=dtype, device="cuda")
    return query, torch.empty(batch, 8, keys, 128, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("batch", "rows", "keys", "dtype", "pieces"),
    [
        (1, 4, 768, torch.bfloat16, 1),  # short
        (1, 4, 1024, torch.bfloat16, 2),
        (1, 4, 65536, torch.bfloat16, 16),  # the baseline of one sequence: 8 of 132 units
        (1, 240, 65536, torch.bfloat16, 4),  # a tree of 60 nodes: 32 of them
        (1, 240, 65536, torch.float32, 4),
        (1, 240, 65536, torch.float64, 1),  # which no kernel takes
        (1, 240, 64 * 67, torch.bfloat16, 4),
        (1, 4, 8 * 513, torch.bfloat16, 1),  # not in equal pieces of aligned keys
        (4, 20, 65536, torch.bfloat16, 4),  # a chain of 4 for four sequences
        (2, 240, 65536, torch.bfloat16, 1),  # whose masks would weigh as much as their keys
        (32, 20, 65536, torch.bfloat16, 1),  # full
    ],
)
def test_a_device_that_is_not_full_splits_long_keys(
    batch: int, rows: int, keys: int, dtype: torch.dtype, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=UNITS))
    with FakeTensorMode():
        assert count_pieces(*on_cuda(batch, rows, keys, dtype)) == pieces


def test_a_cpu_splits_nothing_and_no_gradient_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=UNITS))
    assert count_pieces(torch.empty(1, 8, 4, 128), torch.empty(1, 8, 65536, 128)) == 1
    with FakeTensorMode():
        query, key = on_cuda(1, 4, 65536, torch.bfloat16)
        assert count_pieces(query.requires_grad_(), key) == 1


@pytest.mark.parametrize("batch", [1, 3])
def test_the_devices_kernel_takes_the_same_pieces(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes and strides: it has no CPU form, pads its sums to 32 queries and reads 8 numbers of a mask at once."""
    monkeypatch.setattr(layers, "count_pieces", lambda *_: PIECES)
    query, *others = (states.to("meta") for states in tensors(batch, 4, 5, torch.bfloat16))
    with Largest() as largest:
        assert grouped_attention(query, *others, 0.3).shape == query.shape
    assert largest.names == ["aten._scaled_dot_product_efficient_attention.default"]
    assert {stride % 8 for stride in largest.strides} == {0}
