"""Attention over the documents of packed rows: the features under a mask, without anything as large as one."""

from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from heads import rows
from heads.modules import flex
from heads.modules.layers import grouped_attention
from inference.target import attention, probe
from inference.target import attention as packed
from inference.target.attention import (
    FLEX,
    GROUPED,
    LOOP,
    NEEDED,
    SDPA,
    VARLEN,
    Documents,
    Span,
    route,
    spans_of,
    varlen_options,
    within,
)
from inference.verification.tree import DraftTree
from tests import toys

PACKED = ["llama", "qwen3", "mistral", "gemma3", "gpt2"]
DOCUMENT = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4, [0] * 24, [0] * 3 + [1] * 21])


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor) and not func.is_view:
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
    monkeypatch.setattr(packed, "within", lambda *_: 1 / 0)  # a model's own code may fail in any way
    assert not probe.packs(fresh)
    monkeypatch.undo()
    assert probe.packs(fresh)


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


def test_cudas_kernels_take_groups_in_16_bits_without_a_mask() -> None:
    """With the rest torch would write out the scores of all heads. A tensor without values stands for the device."""
    with FakeTensorMode():
        half = torch.empty(1, 8, 30, 16, dtype=torch.bfloat16, device="cuda")
        assert packed.takes_groups(half, masked=False)
        assert not packed.takes_groups(half, masked=True)
        assert not packed.takes_groups(half.float(), masked=False)
        assert packed.takes_groups(half.cpu(), masked=True)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_memory_grows_with_the_length_not_its_square(name: str) -> None:
    target = toys.target(name)
    for length in (64, 128):
        with Largest() as noted:
            document = torch.arange(length)[None] // (length // 2)
            target.features(torch.zeros(1, length, dtype=torch.long), document, ())
        assert noted.most <= length * 4 * 32, "a hidden state or the MLP's, but no mask"


OFFERED = {"with groups": frozenset({*NEEDED, "enable_gqa"}), "without": frozenset(NEEDED)}


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "options", "expected"),
    [
        ("cuda", torch.float16, (256, 256), "with groups", VARLEN),
        ("cuda", torch.bfloat16, (128, 128), None, FLEX),
        ("cuda", torch.bfloat16, (20, 20), "without", FLEX),
        ("cuda", torch.bfloat16, (192, 128), "without", FLEX),
        ("cuda", torch.bfloat16, (288, 288), "without", LOOP),
        ("cuda", torch.float32, (128, 128), "without", FLEX),
        ("cuda", torch.float32, (8, 8), "without", LOOP),
        ("cpu", torch.bfloat16, (128, 128), "without", LOOP),
    ],
)
def test_the_kernel_follows_from_device_dtype_and_widths(
    device: str, dtype: torch.dtype, widths: tuple[int, int], options: str | None, expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(flex, "widest", lambda *_: flex.WIDE)
    with FakeTensorMode():
        query, value = (torch.empty(1, 4, 32, width, dtype=dtype, device=device) for width in widths)
    assert route(query, value, OFFERED[options] if options else frozenset()) == expected


@pytest.mark.parametrize(
    ("device", "built", "capability", "runs"),
    [
        ("cuda", True, (9, 0), True), ("cuda", True, (7, 5), False), ("cuda", False, (9, 0), False),
        ("cpu", True, (9, 0), False),
    ],
)  # fmt: skip
def test_variable_length_attention_runs_where_it_was_built_and_the_device_can(
    device: str, built: bool, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = varlen_options.__wrapped__(torch.device(device))
    assert (found >= NEEDED) == runs
    assert bool(found) == runs


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute what torch documents of its variable-length attention, "T H E", and refuse what its kernel would."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    sizes = cu_q.diff().tolist()
    assert (cu_q[0], cu_q[-1], cu_k[-1]) == (0, len(query), len(key))
    assert min(sizes) > 0
    assert longest == (max(sizes), max(sizes))
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert enable_gqa or query.shape[1] == key.shape[1]
    outs = []
    for q, k, v in zip(*(x.split(sizes) for x in (query, key, value)), strict=True):
        back = torch.arange(len(q))[:, None] - torch.arange(len(k))
        left, right = (len(q) if bound < 0 else bound for bound in window_size)
        seen = (back <= left) & (back >= -right)
        states = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of CUDA run here: one as it is documented, the other as it is, uncompiled."""
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen)
    monkeypatch.setattr(flex, "kernel", lambda: torch_flex.flex_attention)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((4, 2), 1), ((6, 1), 5)])
@pytest.mark.parametrize("kernel", [*OFFERED, FLEX])
def test_a_kernel_gives_what_the_loop_does(
    kernel: str, heads: tuple[int, int], window: int | None, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several documents, of one and of padding, each row of another number."""
    torch.manual_seed(0)
    documents = Documents((window,), spans_of(DOCUMENT), rows.positions(DOCUMENT))
    wide = 8 if kernel in OFFERED else 12
    query, key, value = random(3, heads[0], 24, 8), random(3, heads[1], 24, 8), random(3, heads[1], 24, wide)
    monkeypatch.setattr(attention, "varlen_options", lambda _: OFFERED.get(kernel))
    attend = attention.KERNELS[FLEX if kernel == FLEX else VARLEN]
    for scale in (None, 0.3):
        expected = attention.attend_in_loop(query, key, value, scale, window, documents)
        found = attend(query, key, value, scale, window, documents)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("name", "kernel"), [(name, FLEX if i % 2 else VARLEN) for i, name in enumerate(PACKED)] + [("mistral", FLEX)]
)
def test_a_target_has_the_features_of_the_loop(
    name: str, kernel: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with windows in some layers or in all among them."""
    target = toys.target(name, torch.float64)
    token = torch.tensor([toys.prompt(seed, 24) for seed in range(3)])
    expected = target.features(token, DOCUMENT, (0, 2))
    monkeypatch.setattr(attention, "route", lambda *_: kernel)
    monkeypatch.setattr(attention, "within", None)
    monkeypatch.setattr(attention, "varlen_options", lambda _: OFFERED["with groups"])
    found = target.features(token, DOCUMENT, (0, 2))
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.last_hidden, expected.last_hidden, rtol=1e-10, atol=1e-10)


def test_every_query_head_attends_to_its_groups_keys_without_a_copy_of_them() -> None:
    query, key, value = random(2, 8, 3, 64), random(2, 2, 300, 64), random(2, 2, 300, 64)
    seen = torch.rand(2, 1, 3, 300) < 0.5
    additive = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    both = key.repeat_interleave(4, 1), value.repeat_interleave(4, 1)
    for some, mask in ((query, seen), (query, additive), (query, None), (query[:, :, :1], seen[:, :, :1])):
        expected = scaled_dot_product_attention(some, *both, mask, scale=0.3)
        with Largest() as largest:
            found = grouped_attention(some, key, value, mask, 0.3)
        assert largest.most < key.numel()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_target_attends_so_and_has_the_logits_of_the_model_as_it_came(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafted = toys.target(name), DraftTree(torch.tensor([3, 1, 2, 5]), torch.tensor([-1, 0, 0, 1]))
    for layer in target.decoder_layers:  # by no toy's own
        monkeypatch.setattr(layer.self_attn, "scaling", 0.7)

    def logits(attention: str) -> Tensor:
        target.config._attn_implementation = attention
        cache = target.cache()
        target.prefill(torch.tensor(toys.prompt(3, 30)), cache)
        found = target.score(drafted, cache).logits
        assert found is not None
        return found

    assert target.config._attn_implementation == GROUPED
    try:
        expected = logits(SDPA)
    finally:
        ours = logits(GROUPED)
    torch.testing.assert_close(ours, expected)
