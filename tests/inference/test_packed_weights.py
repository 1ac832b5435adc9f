"""Tests of packed weights: the same bits as torch's linear layers, whatever their rows are a view of."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from inference.target.packed import PACKED, is_packable, pack


@pytest.fixture
def layers() -> tuple[nn.Linear, nn.Linear]:
    """Return a packed layer and its unpacked copy."""
    plain = nn.Linear(96, 160).bfloat16()
    if not is_packable(plain.weight):
        pytest.skip("oneDNN has no bfloat16 on this machine")
    packed = deepcopy(plain)
    pack(packed)
    return packed, plain


@torch.no_grad()
def test_the_bits_are_those_of_the_plain_layer(layers: tuple[nn.Linear, nn.Linear]) -> None:
    """Also of slices, after a weight has changed in place, and of a copy with weights of its own."""
    packed, plain = layers
    inputs: list[Tensor] = [torch.randn(shape).bfloat16() for shape in ((1, 96), (2, 3, 96), (16, 96), (65, 96))]
    inputs += [torch.randn(1, 9, 96).bfloat16()[:, -1:], torch.randn(4, 192).bfloat16()[:, :96]]
    assert all(torch.equal(packed(x), plain(x)) for x in inputs)
    assert packed in PACKED
    copied = deepcopy(packed)
    for layer in (packed, plain):
        layer.weight.add_(1)
    assert all(torch.equal(packed(x), plain(x)) for x in inputs)
    assert not torch.equal(copied(inputs[0]), packed(inputs[0]))


def test_gradients_go_by_the_plain_layer(layers: tuple[nn.Linear, nn.Linear]) -> None:
    """A head may train through a packed lm_head."""
    x = torch.randn(2, 96, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.autograd.grad(layer(x).float().square().sum(), x)[0] for layer in layers]
    assert torch.equal(*grads)
    assert layers[0] not in PACKED
