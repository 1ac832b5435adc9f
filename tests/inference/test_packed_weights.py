"""Tests of packed weights: the results of torch's linear layers, whatever their rows are a view of."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from heads.common.resolvers import ROOT
from inference.decode import speculate
from inference.drafters.plain import Baseline
from inference.request import RequestParams
from inference.target.packed import PACKED, is_packable, prepack_weights
from inference.target.target import Target
from inference.verification.sample import GREEDY


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def layers(request: pytest.FixtureRequest) -> tuple[nn.Linear, nn.Linear]:
    """Return a packed layer and its unpacked copy."""
    plain = nn.Linear(96, 2048, dtype=request.param)
    if not is_packable(plain.weight):
        pytest.skip("oneDNN has no bfloat16 on this machine")
    packed = deepcopy(plain)
    prepack_weights(packed)
    return packed, plain


def same(packed: Tensor, plain: Tensor) -> bool:
    """Whether two results are equal: in bfloat16 to the bit."""
    return torch.equal(packed, plain) if plain.dtype == torch.bfloat16 else torch.allclose(packed, plain, atol=1e-5)


@torch.no_grad()
def test_the_results_are_those_of_the_plain_layer(layers: tuple[nn.Linear, nn.Linear]) -> None:
    """Also of slices, after a weight has changed in place, and of a copy with weights of its own."""
    packed, plain = layers
    dtype = plain.weight.dtype
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((1, 96), (2, 3, 96), (16, 96), (65, 96))]
    inputs += [torch.randn(1, 9, 96, dtype=dtype)[:, -1:], torch.randn(4, 192, dtype=dtype)[:, :96]]
    assert all(same(packed(x), plain(x)) for x in inputs)
    assert packed in PACKED
    copied = deepcopy(packed)
    for layer in (packed, plain):
        layer.weight.add_(1)
    assert all(same(packed(x), plain(x)) for x in inputs)
    assert not same(copied(inputs[0]), packed(inputs[0]))


def test_gradients_go_by_the_plain_layer(layers: tuple[nn.Linear, nn.Linear]) -> None:
    """A head may train through a packed lm_head."""
    x = torch.randn(2, 96, dtype=layers[1].weight.dtype, requires_grad=True)
    grads = [torch.autograd.grad(layer(x).float().square().sum(), x)[0] for layer in layers]
    assert torch.equal(*grads)
    assert layers[0] not in PACKED


def test_a_target_is_packed_when_it_decodes_and_not_when_it_is_loaded() -> None:
    """A training on a CPU only reads features, and would hold all weights twice."""
    target = Target.load(str(ROOT / "examples" / "tiny"), "float32", "cpu")
    assert target.embeddings.lm_head not in PACKED
    speculate(target, Baseline(target.device), [1, 2, 3], RequestParams(2, GREEDY))
    assert target.embeddings.lm_head in PACKED
