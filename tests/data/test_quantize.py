import pytest
import torch

from data.features.store import DTYPES, decode, encode, size


def states(width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, width, generator=generator) * torch.logspace(-4, 4, 7)[:, None]
    x[0, 0] *= 0
    x[1, 1, 3] = 1e6  # an outlier, as massive activations are
    x[2, 2] = 1e-42
    return x


def bound(x: torch.Tensor, dtype: str) -> torch.Tensor:
    most = x.abs().amax(-1, keepdim=True).double()
    tiny = torch.finfo(torch.float32).tiny
    error = {
        "fp32": torch.zeros_like(x).double(),
        "bf16": x.abs().double() / 2**8,
        "fp8": x.abs().double() / 2**4 + most / 448 / 2**10,
    }[dtype]
    return error * (1 + 1e-5) + (tiny if dtype != "fp32" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_is_bounded(dtype: str) -> None:
    x = states()
    found = decode(encode(x, dtype), torch.float32)
    assert ((found.double() - x.double()).abs() <= bound(x, dtype)).all()
    assert found.isfinite().all()
    assert (found[0, 0] == 0).all()


def test_each_token_of_each_layer_has_its_own_scale() -> None:
    x, dtype = states(), "fp8"
    scale = encode(x, dtype).scale
    assert scale is not None
    assert scale.shape == x.shape[:-1]
    whole = decode(encode(x, dtype), torch.float32)
    alone = decode(encode(x[3, 4], dtype), torch.float32)
    assert torch.equal(whole[3, 4], alone)


def test_bf16_of_bf16_is_exact() -> None:
    x = states().bfloat16()
    assert torch.equal(decode(encode(x, "bf16"), torch.bfloat16), x)
    found, wanted = encode(x, "fp8"), encode(x.float(), "fp8")
    assert found.scale is not None
    assert wanted.scale is not None
    assert found.scale.equal(wanted.scale)
    assert found.value.float().equal(wanted.value.float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_coding_again_changes_nothing(dtype: str) -> None:
    once = decode(encode(states(), dtype), torch.float32)
    again = decode(encode(once, dtype), torch.float32)
    assert torch.allclose(once, again, rtol=1e-6, atol=0)


def test_sizes_are_those_of_the_tensors() -> None:
    for dtype in DTYPES:
        value, scale = encode(torch.ones(3, 64), dtype)
        held = value.numel() * value.element_size() + (0 if scale is None else scale.numel() * scale.element_size())
        assert held == 3 * size(64, dtype)


@pytest.mark.parametrize("width", [64, 128, 4096])
def test_fp8_takes_little_more_than_half_of_bf16(width: int) -> None:
    assert size(width, "fp8") <= 0.55 * size(width, "bf16")
