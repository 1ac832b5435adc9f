"""Drafter-invariant decoding: at T > 0 the text depends on the seed alone, whatever drafts."""

import functools
import itertools

import pytest
import torch

from heads import HEADS
from inference.decode import Generation, Settings, autoregress, speculate
from inference.verification.rng import Coupled
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree
from tests import toys
from tests.enumeration import verify
from tests.inference.test_decode import Oracle

CPU = torch.device("cpu")
TOKENS = 12
SAMPLINGS = {
    "T0": Sampling(0.0, 0, 1.0),
    "T0.7": Sampling(0.7, 0, 1.0),
    "T1.5": Sampling(1.5, 0, 1.0),
    "all": Sampling(1.0, 20, 0.95, 0.02, 1.2),
}


# The text depends on no head: each drafts in one tree under one sampling.
PRODUCT = [(head, [*toys.TREES][i % len(toys.TREES)], [*SAMPLINGS][i % len(SAMPLINGS)]) for i, head in enumerate(HEADS)]


def settings(sampling: str, seed: int) -> Settings:
    return Settings(TOKENS, SAMPLINGS[sampling], seed=seed, rule="coupled")


@functools.cache
def plain(sampling: str, seed: int) -> list[int]:
    return autoregress(toys.target("llama", torch.float64), toys.prompt(seed), settings(sampling, seed)).tokens


def drafted(head: str, tree: str, sampling: str, seed: int) -> Generation:
    target = toys.target("llama", torch.float64)
    return speculate(target, toys.drafter(head, target, tree), toys.prompt(seed), settings(sampling, seed))


@pytest.mark.parametrize(("head", "tree", "sampling"), PRODUCT)
def test_every_draft_gives_plain_decodings_text(head: str, tree: str, sampling: str) -> None:
    for seed in range(2):
        made = drafted(head, tree, sampling, seed)
        assert made.tokens == plain(sampling, seed)
        rule = "greedy" if sampling == "T0" else "coupled"
        assert {step.rule for step in made.steps if step.drafted} == {rule}


def test_drafts_without_laws_give_it_too() -> None:
    for sampling in SAMPLINGS:
        text = [token + (i % 5 == 3) for i, token in enumerate(plain(sampling, 0))]
        drafter = Oracle(text, 3, wrong_first=True)
        made = speculate(toys.target("llama", torch.float64), drafter, toys.prompt(0), settings(sampling, 0))
        assert made.tokens == plain(sampling, 0)


def test_the_text_is_the_seeds() -> None:
    text = {seed: autoregress(toys.target(), toys.prompt(0), settings("T1.5", seed)).tokens for seed in range(3)}
    assert len(set(map(tuple, text.values()))) == 3
    assert all(map(toys.lively, text.values()))
    assert autoregress(toys.target(), toys.prompt(0), settings("T1.5", 1)).tokens == text[1]


def test_the_output_is_the_targets_whatever_is_drafted() -> None:
    """Exact: with each position's token fixed by the noise, every tree over the vocabulary leads to that text."""
    p = torch.softmax(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), -1)
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 2])
    for tokens in itertools.product(range(3), repeat=4):
        tree = DraftTree(torch.tensor([0, tokens[0], tokens[1], tokens[2], tokens[3], tokens[2], tokens[3]]), parent)
        laws = p[[0, 1, 1, 2, 2, 2, 2]]  # a law a depth, so that the text does not depend on the path
        for seed in range(4):
            rng = Coupled(seed, CPU, range(3))
            path, token = verify(tree, laws, None, rng, "coupled")
            text = [int(tree.token[node]) for node in path[1:]] + [token]
            assert text == [rng.sample(laws[[0, 1, 3]][[i]], i + 1)[0] for i in range(len(text))]
