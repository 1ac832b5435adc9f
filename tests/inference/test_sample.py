"""The law that is sampled, against transformers' own processors."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.verification.rng import RequestRng, Samples, seed_key
from inference.verification.sample import GREEDY, Sampling, distribution, penalize
from tests import oracle


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7, 0, 1.0),
        Sampling(1.3, 5, 1.0),
        Sampling(0.9, 0, 0.6),
        Sampling(0.8, 7, 0.8),
        Sampling(0.8, 0, 1.0, 0.3),
        Sampling(1.2, 9, 0.9, 0.1, 1.3),
        Sampling(1.0, 0, 1.0, 0.0, 0.7),
    ],
)
@pytest.mark.parametrize("size", [20, 3000])  # above LIKELIEST too
def test_equals_transformers(sampling: Sampling, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, size, generator=generator, dtype=torch.float64)
    token = torch.randint(size, (50, 12), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(token, logits)
    expected = TemperatureLogitsWarper(sampling.temperature)(token, expected)
    expected = TopKLogitsWarper(sampling.top_k)(token, expected) if sampling.top_k else expected
    expected = TopPLogitsWarper(sampling.top_p)(token, expected) if sampling.top_p < 1 else expected
    expected = MinPLogitsWarper(sampling.min_p)(token, expected)
    seen = torch.zeros(50, size, dtype=torch.bool).scatter(1, token, True)
    found = distribution(penalize(logits, seen, sampling), sampling)
    torch.testing.assert_close(found, expected.softmax(-1))


def test_zero_is_one_hot() -> None:
    law = distribution(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), GREEDY)
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert Samples(torch.tensor([0])).sample(law[None]).tolist() == [[1]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 5, 0.8, 0.1), Sampling(1.0, 0, 1.0)])
def test_a_row_has_one_law_wherever_it_stands(sampling: Sampling) -> None:
    logits = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(0))
    rows = [[distribution(row, sampling).tolist() for row in some] for some in logits]
    assert distribution(logits, sampling).tolist() == rows


def test_a_flat_row_next_to_a_peaked_one_keeps_all_tokens_that_reach_top_p() -> None:
    logits = torch.stack([torch.linspace(0, height, 3000, dtype=torch.float64) for height in (1, 300)])
    expected = TopPLogitsWarper(0.9)(torch.zeros(2, 0), logits).softmax(-1)
    torch.testing.assert_close(distribution(logits, Sampling(1.0, 0, 0.9)), expected)


def test_draws_follow_the_law() -> None:
    law, count = torch.tensor([0.5, 0.3, 0.2, 0.0]), 20_000
    drawn = Samples(torch.tensor([0])).sample(law.expand(1, count, 4))[0]
    share = torch.bincount(drawn, minlength=4) / count
    assert share[3] == 0
    error = ((share - law).abs() / (law * (1 - law) / count).sqrt().clamp_min(1e-12))[:3]
    assert error.max() < 4  # standard errors


def test_distinct_draws_without_replacement() -> None:
    law, count = torch.tensor([0.6, 0.3, 0.1, 0.0]), 20_000
    drawn = Samples(torch.tensor([1])).sample_distinct(law.expand(1, count, 4), 4)[0]
    assert (drawn[:, 3] == -1).all()
    assert (drawn[:, :3].sort(-1).values == torch.arange(3)).all()
    second = ((drawn[:, 0] == 0) & (drawn[:, 1] == 1)).float().mean().item()
    expected = 0.6 * 0.3 / 0.4
    assert abs(second - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((-1.0, 0, 1.0), "temperature"), ((1.0, -1, 1.0), "top_k"), ((1.0, 0, 0.0), "top_p"), ((1.0, 0, 1.5), "top_p"),
        ((math.nan, 0, 1.0), "temperature"), ((1.0, 0, math.nan), "top_p"),
        ((1.0, 0, 1.0, -0.1), "min_p"), ((1.0, 0, 1.0, 1.1), "min_p"), ((1.0, 0, 1.0, 0.0, 0.0), "repetition_penalty"),
    ],
)  # fmt: skip
def test_out_of_range_is_named(values: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is .*give"):
        Sampling(*values)


CPU = torch.device("cpu")
PROBS = torch.full((4, 100), 0.01)


def drawn(draws: RequestRng) -> list[Any]:
    """Draw everything that a kind gives."""
    tokens = [draws.token(PROBS[:1], depth) for depth in range(1, 6)]
    samples = draws.samples(CPU)
    return [tokens, samples.sample_distinct(PROBS[None], 3).tolist(), draws.noise(range(2), PROBS).tolist()]


@pytest.mark.parametrize("coupled", [False, True])
def test_all_is_a_function_of_the_key_and_of_the_position(coupled: bool) -> None:
    one = drawn(RequestRng(1, 5, coupled))
    assert one == drawn(RequestRng(1, 5, coupled)) == drawn(RequestRng(1, 9, coupled).at(5))
    for other in (RequestRng(2, 5, coupled), RequestRng(1, 6, coupled)):
        assert all(ours != theirs for ours, theirs in zip(one, drawn(other), strict=True))


def test_coupled_noise_is_the_positions_whoever_reads_it() -> None:
    first, second = RequestRng(1, 5, coupled=True), RequestRng(1, 6, coupled=True)
    assert first.token(PROBS[:1], 2) == second.token(PROBS[:1], 1) != first.token(PROBS[:1], 1)
    assert first.noise(range(1, 3), PROBS).equal(second.noise(range(2), PROBS))
    assert oracle.Coins(1, 5).sample(PROBS[:1]) == [RequestRng(seed_key(1), 5, coupled=True).token(PROBS[:1], 1)]
