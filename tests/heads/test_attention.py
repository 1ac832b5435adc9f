"""The attention of training against scores written out, and its gradient; blocks of any size give the same."""

import pytest
import torch
from torch import Tensor

from heads import rows
from heads.modules import attention
from heads.modules.attention import KeyValue, attend_rows, pattern

DOUBLE = torch.float64


def written_out(query: Tensor, true: KeyValue, own: list[KeyValue], seen: Tensor) -> Tensor:
    """Softmax over all keys of each query, `seen` "B N T"."""
    share = query.shape[1] // true[0].shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in true)
    scores = [(query @ key.mT).masked_fill(~seen[:, None], -1e300)]
    scores += [(query * own_key.repeat_interleave(share, 1)).sum(-1, keepdim=True) for own_key, _ in own]
    weight = (torch.cat(scores, -1) * query.shape[-1] ** -0.5).softmax(-1)
    out = weight[..., : key.shape[2]] @ value
    for i, (_, own_value) in enumerate(own):
        out = out + weight[..., key.shape[2] + i, None] * own_value.repeat_interleave(share, 1)
    return out


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, requires_grad=True)


@pytest.mark.parametrize("block", [4, 5, 256])
@pytest.mark.parametrize("length", [None, 1, 3, 6])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_rows_of_a_chain(steps: int, length: int | None, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    torch.manual_seed(0)
    document = torch.tensor([[0] * 5 + [1] * 6, [0] * 9 + [-1] * 2])
    position = rows.positions(document)
    seen = rows.visible(document)
    if length is not None:
        seen = seen & (position[:, :, None] + steps - position[:, None, :] < length)
    query, true = random(2, 4, 11, 6), (random(2, 2, 11, 6), random(2, 2, 11, 6))
    own = [(random(2, 2, 11, 6), random(2, 2, 11, 6)) for _ in range(steps)]
    inputs = [query, *true, *(x for pair in own for x in pair)]
    found = attend_rows(query, true, own, pattern(position, length, steps))
    expected = written_out(query, true, own, seen)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((x * upstream).sum(), inputs) for x in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_sums_in_bf16_are_made_in_fp32() -> None:
    """Scores are made, and outputs and gradients over 8 blocks of queries summed, in fp32.

    The bounds are in errors of rounding the exact result, and below what those errors were when all of that was bf16:
    2.9, 3.5, 3.9, 3.5, 5.1 and 1.6.
    """
    torch.manual_seed(0)
    position = torch.arange(1000)[None]
    parts = [random(1, 4, 1000, 16), *(random(1, 2, 1000, 16) for _ in range(4))]
    upstream, results = random(1, 4, 1000, 16).detach(), []
    for dtype in (torch.bfloat16, DOUBLE):
        query, *halves = inputs = [part.detach().bfloat16().to(dtype).requires_grad_() for part in parts]
        out = attend_rows(query, (halves[0], halves[1]), [(halves[2], halves[3])], pattern(position, None, 1))
        results.append([out.detach(), *torch.autograd.grad((out * upstream.bfloat16().to(dtype)).sum(), inputs)])
    for found, exact, near in zip(*results, (1.7, 2.4, 2.3, 1.9, 2.2, 1.01), strict=True):
        assert found.dtype == torch.bfloat16
        assert (found - exact).norm() < near * (exact.bfloat16() - exact).norm()
