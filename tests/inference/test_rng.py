"""The random numbers: what each kind depends on, and what it does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.verification.rng import Coupled, Drafting, Generator, Rng
from inference.verification.rules import Chosen
from inference.verification.tree import DraftTree, chain
from inference.verification.verify import RULES

CPU = torch.device("cpu")
PROBS = torch.full((4, 100), 0.01)
Make = Callable[[int, int], Any]  # of a seed, and of the tokens before the draft
KINDS: dict[str, Make] = {
    "generator": lambda seed, _: Generator(seed, CPU),
    "coupled": lambda seed, count: Coupled(seed, CPU, range(count)),
    "drafting": lambda seed, count: Drafting(seed, CPU, range(count)),
}


def drawn(rng: Rng) -> list[Any]:
    """Draw everything that a kind gives."""
    coins = [rng.accept(0.5) for _ in range(40)]
    return [list(rng.sample(PROBS)), rng.distinct(PROBS, 1).tolist(), rng.distinct(PROBS, 3).tolist(), coins]


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
    for tokens in rng.distinct(probs, 4).tolist():
        assert sorted(tokens[:2]) == [1, 3]
        assert tokens[2:] == [-1, -1]
    every = KINDS[kind](3, 5).distinct(PROBS, 200).tolist()
    assert all(sorted(tokens) == list(range(100)) for tokens in every)


def test_coupled_noise_is_the_positions_whoever_reads_it() -> None:
    first, second = Coupled(1, CPU, range(5)), Coupled(1, CPU, range(6))
    assert first.sample(PROBS, 2) == second.sample(PROBS) != first.sample(PROBS)
    assert first.distinct(PROBS, 3, 2).equal(second.distinct(PROBS, 3))
    assert first.distinct(PROBS, 3)[:, 0].tolist() == first.sample(PROBS)
    assert drawn(Coupled(1, CPU, range(3)).at(6, CPU)) == drawn(Coupled(1, CPU, range(6)))
    assert list(first.at(6, CPU).sample(PROBS.double())) == second.sample(PROBS)


class Told(Coupled):
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
