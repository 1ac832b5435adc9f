"""The attention of training against scores written out, and its gradient; blocks of any size give the same."""

import pytest
import torch
from torch import Tensor

from heads import rows
from heads.modules import attention
from heads.modules.attention import KeyValue, Pattern, attend_rows, pattern

DOUBLE = torch.float64


def written_out(query: Tensor, true: KeyValue, own: list[KeyValue], seen: Tensor, own_seen: Tensor | None) -> Tensor:
    """Softmax over all keys of each query, `seen` "B N T"."""
    share = query.shape[1] // true[0].shape[1]
    key, value = (x.repeat_interleave(share, 1) for x in true)
    scores = [(query @ key.mT).masked_fill(~seen[:, None], -1e300)]
    for i, (own_key, _) in enumerate(own):
        score = (query * own_key.repeat_interleave(share, 1)).sum(-1, keepdim=True)
        scores.append(score if own_seen is None else score.masked_fill(~own_seen[:, i, None], -1e300))
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
    expected = written_out(query, true, own, seen, None)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((x * upstream).sum(), inputs) for x in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 256])
def test_queries_that_are_not_rows(block: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a block head asks: fewer or more queries than rows, each with an interval, that see their block's rows."""
    monkeypatch.setattr(attention, "BLOCK", block)
    torch.manual_seed(0)
    query, true, new = (
        random(2, 4, 6, 8),
        (random(2, 2, 11, 8), random(2, 2, 11, 8)),
        (random(2, 2, 6, 8), random(2, 2, 6, 8)),
    )
    first, upto = torch.tensor([[0, 0, 3, 5, 5, 9]]).expand(2, -1), torch.tensor([[0, 4, 4, 5, 10, 8]]).expand(2, -1)
    column, blocks = torch.arange(11), [[0, 1, 2], [3, 4, 5]]
    seen = (column >= first[..., None]) & (column <= upto[..., None])
    own = [
        tuple(torch.cat([x[:, :, some[i], None].expand(-1, -1, 3, -1) for some in blocks], 2) for x in new)
        for i in range(3)
    ]
    own_seen = torch.ones(3, 3).tril().bool().repeat(2, 1) if causal else None
    found = attend_rows(query, true, [new], Pattern(first, upto, size=3, causal=causal))
    expected = written_out(query, true, [(key, value) for key, value in own], seen, own_seen)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    inputs = [query, *true, *new]
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (found, expected)), strict=True):
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


def test_no_square_of_the_length_is_kept() -> None:
    """What is saved for the backward pass grows as the rows and the steps do."""

    def saved(length: int, steps: int) -> int:
        kept = 0

        def count(x: Tensor) -> Tensor:
            nonlocal kept
            kept += x.numel()
            return x

        parts = [torch.randn(1, 2, length, 4, requires_grad=True) for _ in range(3 + 2 * steps)]
        own = [(parts[3 + 2 * i], parts[4 + 2 * i]) for i in range(steps)]
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            attend_rows(parts[0], (parts[1], parts[2]), own, pattern(torch.arange(length)[None], None, steps))
        return kept

    assert saved(600, 2) == 2 * saved(300, 2)
    assert saved(300, 6) - saved(300, 4) == saved(300, 4) - saved(300, 2)
