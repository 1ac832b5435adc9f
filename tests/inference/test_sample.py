"""The law that is sampled, against transformers' own processors."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inference.rng import Generator
from inference.sample import GREEDY, Sampling, distribution


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.3, 5, 1.0), (0.9, 0, 0.6), (0.8, 7, 0.8)]
)
def test_equals_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    torch.testing.assert_close(distribution(logits, Sampling(temperature, top_k, top_p)), expected.softmax(-1))


def test_zero_is_one_hot() -> None:
    law = distribution(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), GREEDY)
    assert law.tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert Generator(0, torch.device("cpu")).draw(law) == [1]


def test_draws_follow_the_law() -> None:
    law, count = torch.tensor([0.5, 0.3, 0.2, 0.0]), 20_000
    drawn = torch.tensor(Generator(0, torch.device("cpu")).draw(law.expand(count, 4)))
    share = torch.bincount(drawn, minlength=4) / count
    assert share[3] == 0
    error = ((share - law).abs() / (law * (1 - law) / count).sqrt().clamp_min(1e-12))[:3]
    assert error.max() < 4  # standard errors


def test_distinct_draws_without_replacement() -> None:
    law, count = torch.tensor([0.6, 0.3, 0.1, 0.0]), 20_000
    drawn = Generator(1, torch.device("cpu")).distinct(law.expand(count, 4), 4)
    assert (drawn[:, 3] == -1).all()
    assert (drawn[:, :3].sort(-1).values == torch.arange(3)).all()
    second = ((drawn[:, 0] == 0) & (drawn[:, 1] == 1)).float().mean().item()
    expected = 0.6 * 0.3 / 0.4
    assert abs(second - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize("values", [(-1.0, 0, 1.0), (1.0, -2, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.5)])
def test_out_of_range_is_named(values: tuple[float, int, float]) -> None:
    with pytest.raises(ValueError, match="give"):
        Sampling(*values)
