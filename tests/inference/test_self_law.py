"""Test 5 of the design for self-speculation: the law of the emitted tokens, by running every outcome."""

from pathlib import Path

import pytest
import torch

from inference.drafters.contrib.early_exit import EarlyExit
from inference.drafters.contrib.layer_skip import FORMAT, LayerSkip, SkipFile, save_skips
from inference.drafters.policy import TreeConfig
from inference.protocol import Context, Drafter
from inference.target.target import Target
from inference.verification.rng import Rng
from inference.verification.sample import Sampling, distribution
from tests import toys
from tests.enumeration import EXACT, distance, law, verify

HORIZON = 3
PROMPT = toys.prompt(3, 6)
SAMPLING = Sampling(1.5, 2, 1.0)  # few tokens to choose from, so that all outcomes can be run


def early_exit(target: Target, folder: Path, tree: str) -> EarlyExit:
    shapes = {"chain": TreeConfig("chain", 2, 0, 0, [], []), "tree": TreeConfig("sampled", 0, 0, 0, [], [2, 1])}
    return EarlyExit(EarlyExit.Config(2, shapes[tree]), target, "early exit")


def layer_skip(target: Target, folder: Path, stop: str) -> LayerSkip:
    file = SkipFile(FORMAT, target.spec, [], [1], 2, float(stop), {})
    save_skips(folder / "skips.json", file)
    return LayerSkip(LayerSkip.Config(str(folder / "skips.json"), None, None), target, "layer skip")


def next_law(target: Target, made: tuple[int, ...]) -> torch.Tensor:
    logits = target.prefill(torch.tensor([*PROMPT, *made]), target.cache()).logits
    assert logits is not None
    return distribution(logits[0, -1], SAMPLING)


def one_pass(target: Target, source: Drafter, depths: set[int]) -> dict[tuple[int, ...], float]:
    """Return the law of HORIZON tokens: one drafted and verified pass, then plain sampling."""
    prefix = len(PROMPT) - 1

    def program(rng: Rng) -> tuple[int, ...]:
        cache = target.cache()
        target.prefill(torch.tensor(PROMPT[:-1]), cache)
        made = source.propose(Context(PROMPT, SAMPLING, rng, HORIZON - 1, cache))
        score, entered = target.score, made.entered
        out = score(made.tree, cache) if entered is None else target.parts.score_from(entered, made.tree, cache)
        assert out.logits is not None
        path, bonus = verify(made.tree, distribution(out.logits[0], SAMPLING), made.q, rng)
        cache.keep(prefix, path)
        depths.add(len(path) - 1)
        emitted = [*made.tree.token[path[1:]].tolist(), bonus]
        while len(emitted) < HORIZON:
            emitted.append(rng.sample(next_law(target, tuple(emitted))[None])[0])
        return tuple(emitted[:HORIZON])

    return law(program)


@pytest.mark.parametrize(
    ("make", "shape"), [(early_exit, "chain"), (early_exit, "tree"), (layer_skip, "0"), (layer_skip, "0.3")]
)
def test_emitted_law_is_the_targets(tmp_path: Path, make: object, shape: str) -> None:
    target = toys.target("llama", torch.float64)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(HORIZON):
        expected = {
            (*path, token): weight * float(after[token])
            for path, weight in expected.items()
            for after in [next_law(target, path)]
            for token in after.nonzero()[:, 0].tolist()
        }
    depths: set[int] = set()
    assert callable(make)
    assert distance(one_pass(target, make(target, tmp_path, shape), depths), expected) < EXACT
    assert {0, 1} <= depths, "drafts were both accepted and rejected"
