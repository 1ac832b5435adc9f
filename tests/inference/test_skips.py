"""The search for sub-layers to skip: its forecast against decoding, its simulation and climb against brute force."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from heads.common.typed import build
from inference.decode import Settings, autoregress, speculate
from inference.drafters.contrib.layer_skip import (
    FORMAT,
    LayerSkip,
    Rating,
    SearchSettings,
    SkipFile,
    Text,
    climb,
    drafting_cost,
    foresee,
    load_skips,
    play,
    rate,
    record,
    save_skips,
    search,
)
from inference.protocol import Context
from inference.target.stack import Skips
from inference.target.target import Target
from inference.verification.rng import Generator
from inference.verification.sample import GREEDY
from tests import toys

TOKENS = 24
SETTINGS = SearchSettings(depth=3, stop=0.0, evaluations=24, seed=0)


def texts(target: Target) -> list[Text]:
    return [
        record(target, toys.prompt(seed), autoregress(target, toys.prompt(seed), Settings(TOKENS, GREEDY)).tokens)
        for seed in range(2)
    ]


def drafter(folder: Path, target: Target, skips: Skips, depth: int) -> LayerSkip:
    path = folder / "skips.json"
    save_skips(path, SkipFile(FORMAT, target.spec, list(skips.attention), list(skips.mlp), depth, 0.0, {}))
    return LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")


@pytest.mark.parametrize(("name", "attention"), [("llama", (0,)), ("mistral", ()), ("gpt2", (0,))])
def test_the_forecast_is_the_first_drafted_token_everywhere(
    tmp_path: Path, name: str, attention: tuple[int, ...]
) -> None:
    target, skips = toys.target(name, torch.float64), Skips(attention, (1,))
    text = texts(target)[0]
    source = drafter(tmp_path, target, skips, 1)
    right, sure = foresee(target.parts, skips, text)
    assert len(right) == len(text.token) - text.prompt
    assert {layer.get_seq_length() for layer in text.cache.hf.layers} == {len(text.token)}
    assert any(right)
    for i, end in enumerate(range(text.prompt, len(text.token))):
        cache = target.cache()
        target.prefill(torch.tensor(text.token[: end - 1]), cache)
        context = Context(text.token[:end], GREEDY, Generator(0, target.device), 1, cache)
        assert (int(source.propose(context).tree.token[1]) == text.token[end]) == right[i]
        assert 0 < sure[i] <= 1


def test_at_depth_one_the_forecast_is_exact(tmp_path: Path) -> None:
    target, skips = toys.target(), Skips((), (1,))
    right, _ = foresee(target.parts, skips, texts(target)[0])
    prompt = toys.prompt(0)
    made = speculate(target, drafter(tmp_path, target, skips, 1), prompt, Settings(TOKENS, GREEDY))
    # The engine's first token comes from the prefill, and its last step has no room for a draft.
    counts, row = [], 1
    while row < len(right):
        counts.append(int(right[row] and row + 1 < len(right)))
        row += 1 + counts[-1]
    assert [step.accepted for step in made.steps] == counts
    assert sum(counts) > 0


def replay(right: list[bool], sure: list[float], depth: int, stop: float) -> tuple[int, int, int]:
    """Draft token by token as the drafter does; a token after a wrong one is taken to be as sure as the text's."""
    row = passes = drafted = 0
    while row < len(right):
        passes += 1
        accepted, alive = 0, True
        for i in range(depth):
            if row + i >= len(right):
                break
            drafted += 1
            alive = alive and right[row + i]
            accepted += alive
            if sure[row + i] < stop:
                break
        row += accepted + 1
    return min(row, len(right)), passes, drafted


def test_playing_a_text_through_is_drafting_token_by_token() -> None:
    order = random.Random(0)
    for _ in range(300):
        size = order.randrange(1, 12)
        right = [order.random() < 0.7 for _ in range(size)]
        sure = [order.random() for _ in range(size)]
        depth, stop = order.randrange(1, 5), order.choice([0.0, 0.3])
        assert play(right, sure, depth, stop) == replay(right, sure, depth, stop)


def test_skipping_nothing_gains_nothing_and_the_cost_is_the_share_of_weights() -> None:
    target = toys.target()
    nothing = rate(target.parts, Skips((), ()), texts(target), SETTINGS)
    assert nothing.cost == 1
    assert nothing.speed == pytest.approx(1, abs=0.05)  # only the ends of the answers differ
    assert nothing.tau > 1.9
    attention, mlp, lm_head = 32 * (32 + 16 + 16 + 32), 3 * 32 * 48, 40 * 32
    left = 2 * attention + mlp + lm_head
    cost = left / (3 * attention + 3 * mlp + lm_head)
    assert drafting_cost(target.parts, Skips((2,), (0, 1))) == pytest.approx(cost)


@pytest.mark.parametrize("seed", range(3))
def test_the_climb_with_enough_candidates_finds_the_best_set(seed: int) -> None:
    order = random.Random(seed)
    sets = [frozenset(bits) for n in range(7) for bits in itertools.combinations(range(6), n)]
    speed = {bits: order.random() for bits in sets}
    asked: list[frozenset[int]] = []

    def score(bits: frozenset[int]) -> Rating:
        asked.append(bits)
        return Rating(speed[bits], 1, 1.0, 1.0)

    best, rating = climb(score, 6, SearchSettings(1, 0.0, 64, seed))
    assert rating.speed == speed[best] == max(speed.values())
    assert len(asked) == len(set(asked)) == 64
    asked.clear()
    best, rating = climb(score, 6, SearchSettings(1, 0.0, 20, seed))
    assert len(asked) == len(set(asked)) <= 20
    assert rating.speed == max(speed[bits] for bits in asked)


def test_the_search_beats_skipping_nothing_and_repeats_itself() -> None:
    target = toys.target()
    found, rating = search(target.parts, texts(target), SETTINGS)
    again, _ = search(target.parts, texts(target), SETTINGS)
    assert found == again
    assert found.attention or found.mlp
    assert rating.speed > rate(target.parts, Skips((), ()), texts(target), SETTINGS).speed
    assert rating == rate(target.parts, found, texts(target), SETTINGS)


def test_a_file_survives_the_round_trip(tmp_path: Path) -> None:
    target = toys.target()
    kept = SkipFile(FORMAT, target.spec, [0, 2], [1], 4, 0.25, {"predicted_tau": 1.5})
    save_skips(tmp_path / "deep" / "skips.json", kept)
    assert load_skips(tmp_path / "deep" / "skips.json", target) == kept


@pytest.mark.parametrize(
    ("values", "said"), [((0, 0.0, 9, 0), "depth"), ((1, 1.0, 9, 0), "stop"), ((1, 0.0, 1, 0), "evaluations")]
)
def test_a_bad_setting_is_named(values: tuple[int, float, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=rf"search\.{said} is"):
        build(SearchSettings, dict(zip(("depth", "stop", "evaluations", "seed"), values, strict=True)), "search")
