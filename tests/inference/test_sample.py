"""The law that is sampled, against transformers' own processors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.verification.rng import CoupledRng, DraftRng, Rng, SeededRng
from inference.verification.rules import Chosen
from inference.verification.sample import GREEDY, Sampling, distribution, penalize
from inference.verification.tree import DraftTree, chain
from inference.verification.verify import RULES


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
    assert SeededRng(0, torch.device("cpu")).sample(law) == [1]


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
    drawn = torch.tensor(SeededRng(0, torch.device("cpu")).sample(law.expand(count, 4)))
    share = torch.bincount(drawn, minlength=4) / count
    assert share[3] == 0
    error = ((share - law).abs() / (law * (1 - law) / count).sqrt().clamp_min(1e-12))[:3]
    assert error.max() < 4  # standard errors


def test_distinct_draws_without_replacement() -> None:
    law, count = torch.tensor([0.6, 0.3, 0.1, 0.0]), 20_000
    drawn = SeededRng(1, torch.device("cpu")).sample_distinct(law.expand(count, 4), 4)
    assert (drawn[:, 3] == -1).all()
    assert (drawn[:, :3].sort(-1).values == torch.arange(3)).all()
    second = ((drawn[:, 0] == 0) & (drawn[:, 1] == 1)).float().mean().item()
    expected = 0.6 * 0.3 / 0.4
    assert abs(second - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ((-1.0, 0, 1.0), "temperature"), ((1.0, -1, 1.0), "top_k"), ((1.0, 0, 0.0), "top_p"), ((1.0, 0, 1.5), "top_p"),
        ((1.0, 0, 1.0, -0.1), "min_p"), ((1.0, 0, 1.0, 1.1), "min_p"), ((1.0, 0, 1.0, 0.0, 0.0), "repetition_penalty"),
    ],
)  # fmt: skip
def test_out_of_range_is_named(values: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is .*give"):
        Sampling(*values)


CPU = torch.device("cpu")
PROBS = torch.full((4, 100), 0.01)
Make = Callable[[int, int], Any]  # of a seed, and of the tokens before the draft
KINDS: dict[str, Make] = {
    "generator": lambda seed, _: SeededRng(seed, CPU),
    "coupled": lambda seed, count: CoupledRng(seed, CPU, range(count)),
    "drafting": lambda seed, count: DraftRng(seed, CPU, range(count)),
}


def drawn(rng: Rng) -> list[Any]:
    """Draw everything that a kind gives."""
    coins = [rng.accept(0.5) for _ in range(40)]
    return [
        list(rng.sample(PROBS)),
        rng.sample_distinct(PROBS, 1).tolist(),
        rng.sample_distinct(PROBS, 3).tolist(),
        coins,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_a_function_of_the_seed_and_of_the_position(kind: str) -> None:
    make = KINDS[kind]
    one = drawn(make(1, 5))
    assert one == drawn(make(1, 5))
    assert all(ours != theirs for ours, theirs in zip(one, drawn(make(2, 5)), strict=True))
    if kind != "generator":
        assert all(ours != theirs for ours, theirs in zip(one, drawn(make(1, 6)), strict=True))
    at = make(1, 5)
    before = drawn(at.at(7, CPU))
    drawn(at)
    assert before == drawn(at.at(7, CPU)) == drawn(make(1, 9).at(7, CPU))
    for other in (make(1, 5).at(8, CPU), make(2, 5).at(7, CPU)):
        assert all(ours != theirs for ours, theirs in zip(before, drawn(other), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_coins_and_distinct_tokens_keep_to_their_probabilities(kind: str) -> None:
    rng = KINDS[kind](3, 5)
    assert all(rng.accept(1.0) and not rng.accept(0.0) for _ in range(50))
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 3)
    for tokens in rng.sample_distinct(probs, 4).tolist():
        assert sorted(tokens[:2]) == [1, 3]
        assert tokens[2:] == [-1, -1]
    every = KINDS[kind](3, 5).sample_distinct(PROBS, 200).tolist()
    assert all(sorted(tokens) == list(range(100)) for tokens in every)


def test_coupled_noise_is_the_positions_whoever_reads_it() -> None:
    first, second = CoupledRng(1, CPU, range(5)), CoupledRng(1, CPU, range(6))
    assert first.sample(PROBS, 2) == second.sample(PROBS) != first.sample(PROBS)
    assert first.sample_distinct(PROBS, 3, 2).equal(second.sample_distinct(PROBS, 3))
    assert first.sample_distinct(PROBS, 3)[:, 0].tolist() == first.sample(PROBS)
    assert drawn(CoupledRng(1, CPU, range(3)).at(6, CPU)) == drawn(CoupledRng(1, CPU, range(6)))
    assert list(first.at(6, CPU).sample(PROBS.double())) == second.sample(PROBS)


class Told(CoupledRng):
    """Accepts everything, and notes how deep below the root the next token is sampled."""

    def accept(self, probability: float) -> bool:
        return True

    def sample(self, probs: Tensor, depth: int = 1) -> list[int]:
        self.depth = depth
        return [0] * len(probs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tokens", [[5], [5, 0], [5, 0, 0]])
def test_the_next_token_is_sampled_at_its_own_position(rule: str, tokens: list[int]) -> None:
    tree: DraftTree = chain(torch.tensor(tokens))
    p = torch.tensor([[0.9, 0.1]] * len(tokens))
    rng = Told(1, CPU, range(4))
    found: Chosen = RULES[rule].walk(tree, p, p, rng)
    assert found == (list(range(len(tokens))), 0)
    assert rng.depth == len(tokens)
