"""Grouped-query attention under a mask: what transformers computes, without a copy of keys and values."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heads.modules.layers import grouped_attention
from inference.target.attention import GROUPED, SDPA, use_kernels
from inference.verification.tree import DraftTree
from tests import toys
from tests.inference.test_packed import Largest

BATCH, HEADS, GROUPS, QUERIES, KEYS, WIDTH = 2, 8, 2, 3, 300, 64


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, HEADS, QUERIES, WIDTH, generator=chance, dtype=torch.float64)
    key, value = torch.randn(2, BATCH, GROUPS, KEYS, WIDTH, generator=chance, dtype=torch.float64)
    return query, key, value, torch.rand(BATCH, 1, QUERIES, KEYS, generator=chance) < 0.5


@pytest.mark.parametrize("form", ["boolean", "additive", "none", "one query"])
def test_every_query_head_attends_to_its_groups_keys(form: str) -> None:
    query, key, value, seen = tensors()
    mask: Tensor | None = seen
    if form == "additive":
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, float("-inf"))
    if form == "none":
        mask = None
    if form == "one query":
        query, mask = query[:, :, :1], seen[:, :, :1]
    repeated = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    expected = scaled_dot_product_attention(query, *repeated, mask, scale=0.3)
    torch.testing.assert_close(grouped_attention(query, key, value, mask, 0.3), expected, rtol=1e-12, atol=1e-12)


def test_no_key_is_copied() -> None:
    query, key, value, mask = tensors()
    with Largest() as largest:
        grouped_attention(query, key, value, mask)
    assert largest.most < key.numel()


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


@pytest.mark.parametrize(("kind", "ruled_out"), [("cuda", [False]), ("cpu", [])])
def test_cudnns_attention_is_ruled_out(kind: str, ruled_out: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds a plan for tens of milliseconds at every new length, and every step has one."""
    flags: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", flags.append)
    use_kernels(torch.device(kind))
    assert flags == ruled_out
