"""Drafter-invariant decoding: at T > 0 the text depends on the seed alone, whatever drafts."""

import functools
import itertools

import pytest
import torch
from torch import Tensor

from heads import HEADS
from inference.decode import Generation, Settings, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import grow
from inference.protocol import Context, Drafter, DrafterState, Proposal
from inference.verification.rng import Coupled, Generator
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree, children
from inference.verification.verify import decide
from tests import enumeration, toys
from tests.enumeration import verify

CPU = torch.device("cpu")
TOKENS = 12
SAMPLINGS = {
    "T0": Sampling(0.0, 0, 1.0),
    "T0.7": Sampling(0.7, 0, 1.0),
    "T1.5": Sampling(1.5, 0, 1.0),
    "all": Sampling(1.0, 20, 0.95, 0.02, 1.2),
}


# The text depends on no head: each drafts in one tree under one sampling, and one of them in every tree under two.
PRODUCT = [
    pytest.param(
        head,
        tree,
        sampling,
        marks=[]
        if (i % len(toys.TREES), i % len(SAMPLINGS)) == (j, k) or (head == "eagle" and sampling in ("T1.5", "all"))
        else pytest.mark.slow,
    )
    for i, head in enumerate(HEADS)
    for j, tree in enumerate(toys.TREES)
    for k, sampling in enumerate(SAMPLINGS)
]


class Guess(Drafter, DrafterState):
    """Drafts fixed tokens, right or wrong, without laws."""

    name, tree = "guess", "chain-3"

    def start(self, prompt: list[int]) -> "Guess":
        return self

    def propose(self, context: Context) -> Proposal:
        ahead = [(3 * i + len(context.token)) % toys.VOCAB for i in range(min(3, context.room))]
        return Proposal(DraftTree(torch.tensor([context.token[-1], *ahead]), torch.arange(-1, len(ahead))))


def settings(sampling: str, seed: int) -> Settings:
    return Settings(TOKENS, SAMPLINGS[sampling], seed=seed, rule="coupled")


@functools.cache
def plain(sampling: str, seed: int) -> list[int]:
    return autoregress(toys.target("llama", torch.float64), toys.prompt(seed), settings(sampling, seed)).tokens


def drafted(head: str, tree: str, sampling: str, seed: int) -> Generation:
    target = toys.target("llama", torch.float64)
    source = HeadDrafter(toys.head(head, target), toys.TREES[tree], head)
    return speculate(target, source, toys.prompt(seed), settings(sampling, seed))


@pytest.mark.parametrize(("head", "tree", "sampling"), PRODUCT)
def test_every_draft_gives_plain_decodings_text(head: str, tree: str, sampling: str) -> None:
    for seed in range(2):
        made = drafted(head, tree, sampling, seed)
        assert made.tokens == plain(sampling, seed)
        rule = "greedy" if sampling == "T0" else "coupled"
        assert {step.rule for step in made.steps if step.drafted} == {rule}


def test_drafts_without_laws_give_it_too() -> None:
    for sampling in SAMPLINGS:
        made = speculate(toys.target("llama", torch.float64), Guess(), toys.prompt(0), settings(sampling, 0))
        assert made.tokens == plain(sampling, 0)


def test_the_text_is_the_seeds() -> None:
    text = {seed: autoregress(toys.target(), toys.prompt(0), settings("T1.5", seed)).tokens for seed in range(3)}
    assert len(set(map(tuple, text.values()))) == 3
    assert all(map(toys.lively, text.values()))
    assert autoregress(toys.target(), toys.prompt(0), settings("T1.5", 1)).tokens == text[1]


class Twin(Drafter, DrafterState):
    """A draft head's stand-in whose law is nearly the target's: it runs the target itself, with a little noise."""

    name, tree = "twin", "chain-1"

    def __init__(self, coupled: bool) -> None:
        self.coupled = coupled

    def start(self, prompt: list[int]) -> "Twin":
        return self

    def propose(self, context: Context) -> Proposal:
        target = toys.target()
        pass_ = target.prefill(torch.tensor(context.token), target.cache())
        assert pass_.logits is not None
        law = pass_.logits[0].softmax(-1)
        token = context.rng.distinct(law, 1) if self.coupled else torch.multinomial(law, 1)
        return Proposal(DraftTree(torch.tensor([context.token[-1], int(token)]), torch.tensor([-1, 0])))


def test_a_draft_with_the_targets_law_and_noise_is_always_accepted() -> None:
    settings = Settings(TOKENS, Sampling(1.0, 0, 1.0), rule="coupled")
    made = speculate(toys.target(), Twin(coupled=True), toys.prompt(0), settings)
    assert all(step.accepted == 1 for step in made.steps if step.drafted)
    torch.manual_seed(0)
    independent = speculate(toys.target(), Twin(coupled=False), toys.prompt(0), settings)
    assert independent.tokens == made.tokens
    assert any(step.accepted == 0 for step in independent.steps)


def race(kind: type[Coupled], laws: Tensor, seeds: int) -> Tensor:
    """Return the tokens at successive positions, one row a seed."""
    drawn = []
    for seed in range(seeds):
        rng = kind(seed, CPU, range(7))
        drawn.append([rng.sample(law[None], depth)[0] for depth, law in enumerate(laws, 1)])
    return torch.tensor(drawn)


class Forgetful(Coupled):
    """BROKEN: noise that is the same at every position."""

    def race(self, probs: Tensor, depth: int = 1) -> Tensor:
        return super().race(probs, 1)


def chi_square(kind: type[Coupled]) -> float:
    """Compare the pairs of tokens at two positions with the product of their laws."""
    laws = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    count = 3000
    drawn = race(kind, laws, count)
    found = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    expected = count * (laws[0][:, None] * laws[1]).flatten()
    return float(((found - expected) ** 2 / expected).sum())


def test_the_law_of_the_noise_is_the_targets() -> None:
    assert chi_square(Coupled) < 39.3  # 99.9 % point at 15 degrees of freedom is 37.7; the seeds are fixed


def test_noise_that_forgets_the_position_is_caught() -> None:
    assert chi_square(Forgetful) > 200


def test_acceptance_is_the_couplings() -> None:
    """Both winners agree with probability sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (2408.07978)."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.3, 0.3, 0.3, 0.1])
    expected = sum(1 / float(torch.maximum(p / p[x], q / q[x]).sum()) for x in range(4))
    count, agreed = 4000, 0
    for seed in range(count):
        rng = Coupled(seed, CPU, range(0))
        agreed += rng.sample(p[None]) == rng.sample(q[None])
    assert abs(agreed / count - expected) < 4 * (expected * (1 - expected) / count) ** 0.5
    assert expected < 1 - 0.5 * float((p - q).abs().sum())  # the price of invariance


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


def test_noise_is_keyed_by_position_and_not_by_call() -> None:
    one, other = (Coupled(5, CPU, range(10)) for _ in range(2))
    law = torch.full((1, 50), 0.02)
    forward = [one.sample(law, depth) for depth in (1, 2, 3)]
    assert [other.sample(law, depth) for depth in (3, 2, 1)] == forward[::-1]
    later = Coupled(5, CPU, range(12))
    assert later.sample(law, 1) == forward[2]
    assert one.distinct(law, 3, 2)[0, 0] == forward[1][0]
    assert Coupled(5, CPU, range(0)).distinct(torch.tensor([[0.0, 1.0, 0.0]]), 3).tolist() == [[1, -1, -1]]


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic", "sampled", "independent", "ragged"])
def test_policies_race_their_laws_against_the_noise_of_each_depth(tree: str) -> None:
    """A head with the target's laws ranks the target's own choice first at every depth, so a path ends at a leaf."""
    sampling = enumeration.SAMPLINGS["penalty"]
    tables = enumeration.Tables(0, "equal")
    for seed in range(8):
        rng = Coupled(seed, CPU, enumeration.PROMPT)
        context = Context(list(enumeration.PROMPT), sampling, rng, 2)
        tree_, q, *_ = grow(tables, None, tables.level([()]), enumeration.TREES[tree], [context])[0]
        assert q is None
        path, *_ = decide(tree_, tables.scores(tree_, sampling), None, sampling, rng, "coupled")
        assert not children(tree_)[path[-1]]


def test_every_position_draws_by_itself() -> None:
    """What is drafted ahead at a position is the same when asked again, and says nothing of the next one's draft."""
    law = torch.full((1, 500), 0.002)
    drawn = [tuple(Generator(5, CPU).at(position, CPU).sample(law)) for position in (*range(20), *range(20))]
    assert drawn[:20] == drawn[20:]
    assert len(set(drawn)) > 15
