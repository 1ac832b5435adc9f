"""Attention over the documents of packed rows: the features under a mask, without anything as large as one."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from heads import rows
from inference.target import attention as packed
from inference.target import probe
from inference.target.attention import GROUPED, Span, spans_of, within
from inference.target.target import Target
from tests import toys

PACKED = ["llama", "qwen3", "mistral", "gemma3", "gpt2"]
DOCUMENT = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4, [0] * 24, [0] * 3 + [1] * 21])


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor):
                self.most = max(self.most, each.numel())
        return out


def test_the_spans_of_rows_are_their_documents() -> None:
    expected = [(0, 0, 9), (0, 9, 20), (0, 20, 24), (1, 0, 24), (2, 0, 3), (2, 3, 24)]
    assert spans_of(DOCUMENT) == [Span(*each) for each in expected]
    same = torch.tensor([[0, 0], [0, 0]])  # the last document of a row and the first of the next may have one number
    assert spans_of(same) == [Span(0, 0, 2), Span(1, 0, 2)]


@pytest.mark.parametrize("name", PACKED)
def test_documents_one_by_one_are_documents_under_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target(name, torch.float64)
    assert target.packing is not None
    token = torch.tensor([toys.prompt(seed, 24) for seed in range(3)])
    found = target.features(token, DOCUMENT, (0, 2))
    monkeypatch.setattr(target, "packing", None)
    masked = target.features(token, DOCUMENT, (0, 2))
    torch.testing.assert_close(found.hidden, masked.hidden, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.last_hidden, masked.last_hidden, rtol=1e-9, atol=1e-9)
    whole = torch.zeros_like(DOCUMENT)  # longer than a window, where there is one
    monkeypatch.undo()
    expected = target.base(input_ids=token, use_cache=False).last_hidden_state
    torch.testing.assert_close(target.features(token, whole, ()).last_hidden, expected, rtol=1e-9, atol=1e-9)


def test_an_attention_that_is_not_the_usual_one_keeps_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toys.target("gemma2").packing is None, "scores are capped"
    fresh = toys.target("llama")
    monkeypatch.setattr(packed, "within", lambda query, *_: query)
    assert not probe.packs(fresh)
    monkeypatch.undo()
    assert probe.packs(fresh)


def test_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    target = toys.target("llama")
    monkeypatch.setattr(packed, "within", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.features(torch.zeros(3, 24, dtype=torch.long), DOCUMENT, ())
    assert target.config._attn_implementation == GROUPED


@pytest.mark.parametrize("window", [None, 5, 7, 29, 40])
def test_a_window_goes_over_a_document_in_blocks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "BLOCK", 8)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 30, 8, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(1, 2, 30, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    back = torch.arange(30)[:, None] - torch.arange(30)
    mask = (back >= 0) & (back < (window or 30))
    both = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    expected = scaled_dot_product_attention(query, *both, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(within(query, key, value, 0.3, window), expected)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_groups_are_copied_where_no_kernel_takes_them(
    window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool]] = []

    def attend(*states: Any, enable_gqa: bool, **options: Any) -> Any:
        calls.append((states[2].shape[1], enable_gqa))
        return scaled_dot_product_attention(*states, enable_gqa=enable_gqa, **options)

    query, key, value = (torch.randn(1, count, 30, 8, dtype=torch.float64) for count in (8, 2, 2))
    expected = within(query, key, value, None, window)
    monkeypatch.setattr(packed, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(packed, "takes_groups", lambda _query, **_: grouped)
    torch.testing.assert_close(within(query, key, value, None, window), expected)
    assert set(calls) == {(2, True) if grouped else (8, False)}


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "takes"),
    [
        ("cuda", torch.bfloat16, False, True),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.float32, True, True),
    ],
)
def test_cudas_kernels_take_groups_in_16_bits_without_a_mask(
    device: str, dtype: torch.dtype, masked: bool, takes: bool
) -> None:
    """With the rest torch would write out the scores of all heads. A tensor without values stands for the device."""
    with FakeTensorMode():
        query = torch.empty(1, 8, 30, 16, dtype=dtype, device=device)
    assert packed.takes_groups(query, masked=masked) == takes


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_memory_grows_with_the_length_not_its_square(name: str) -> None:
    target: Target = toys.target(name)
    for length in (64, 128):
        document = torch.arange(length)[None] // (length // 2)
        with Largest() as noted:
            target.features(torch.zeros(1, length, dtype=torch.long), document, ())
        with Largest() as masked:
            rows.visible(document)
        assert noted.most <= length * 4 * 32, "a hidden state or the MLP's, but no mask"
        assert masked.most == length * length
