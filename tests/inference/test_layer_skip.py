"""Self-speculation by skipped sub-layers: the draft is the naive one, its rows are dropped, and the file is checked."""

import copy
import itertools
import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from heads.common.target_config import cache_argument
from heads.common.typed import build
from inference.decode import RequestParams, autoregress
from inference.drafters.contrib.layer_skip import (
    FORMAT,
    LayerSkip,
    Rating,
    SearchSettings,
    SkipFile,
    Text,
    drafting_cost,
    forecast,
    hill_climb,
    play,
    rate,
    record,
    save_skips,
    search,
)
from inference.protocol import Context, Proposal
from inference.target.stack import Skips
from inference.target.target import Target
from inference.verification.rng import Draws
from inference.verification.sample import GREEDY, Sampling, distribution
from tests import toys

TOKENS = 24
SKIPS = Skips((0, 2), (1,))  # the first layer's attention too: transformers reads the cache's length from that layer
EASY = Skips((), (1,))  # accepted now and then
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype


def drafter(folder: Path, target: Target, skips: Skips, depth: int = 4, stop: float = 0.0) -> LayerSkip:
    path = folder / "skips.json"
    save_skips(path, SkipFile(FORMAT, target.spec, list(skips.attention), list(skips.mlp), depth, stop, {}))
    return LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")


def thinned(target: Target, skips: Skips) -> torch.nn.Module:
    """Copy the model and silence the skipped sub-layers by zeroing what they write."""
    model = copy.deepcopy(target.model)
    layers = Target(model, target.tokenizer, target.name).decoder_layers
    for names, chosen in ((("self_attn", "attn"), skips.attention), (("mlp",), skips.mlp)):
        for i in chosen:
            module = next(child for name, child in layers[i].named_children() if name in names)
            last = next(m for n, m in module.named_modules() if n in ("o_proj", "down_proj", "c_proj"))
            for parameter in last.parameters():
                parameter.data.zero_()
    return model


class Naive:
    """The draft by transformers' own means: the full model's cache of the text, then the silenced copy on top."""

    def __init__(self, target: Target, skips: Skips) -> None:
        self.full, self.thin = target.model, thinned(target, skips)

    def logits(self, text: list[int], drafted: list[int]) -> Tensor:
        cache = DynamicCache()
        self.full(input_ids=torch.tensor([text[:-1]]), use_cache=True, **{cache_argument(self.full): cache})
        for token in [text[-1], *drafted]:
            out = self.thin(input_ids=torch.tensor([[token]]), use_cache=True, **{cache_argument(self.full): cache})
        return out.logits[0, -1]

    def chain(self, text: list[int], depth: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < depth:
            drafted.append(int(self.logits(text, drafted).argmax()))
        return drafted


def propose(source: LayerSkip, target: Target, sampling: Sampling = GREEDY, room: int = 9) -> Proposal:
    text, cache = toys.prompt(3, 12), target.cache()
    target.prefill(torch.tensor(text[:-1]), cache)
    made = source.propose(Context(text, sampling, Draws(0, 0, coupled=False), room, cache))
    assert {layer.get_seq_length() for layer in cache.hf.layers} == {11}, "the draft's rows are dropped"
    return made


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_the_draft_is_the_naive_one_and_q_its_law(tmp_path: Path, name: str) -> None:
    target, sampling = toys.target(name, torch.float64), Sampling(0.9, 15, 0.95)
    naive, near = Naive(target, SKIPS), EXACT.get(name, 1e-9)
    source = drafter(tmp_path, target, SKIPS)
    text = toys.prompt(3, 12)
    assert propose(source, target).tree.token.tolist() == [text[-1], *naive.chain(text, 4)]
    made = propose(source, target, sampling)
    assert made.q is not None
    drawn = made.tree.token[1:].tolist()
    assert len(drawn) == 4
    for i in range(4):
        law = distribution(naive.logits(text, drawn[:i]), sampling)
        assert law[drawn[i]] > 0
        torch.testing.assert_close(made.q[i], law.to(made.q), rtol=near, atol=near)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)])
def test_a_draft_ends_after_its_first_unsure_token(tmp_path: Path, sampling: Sampling) -> None:
    target = toys.target("llama", torch.float64)
    whole = propose(drafter(tmp_path, target, EASY, depth=8), target, sampling).tree.token.tolist()
    naive, text = Naive(target, EASY), toys.prompt(3, 12)
    sure = [float(naive.logits(text, whole[1:i]).softmax(-1)[whole[i]]) for i in range(1, 9)]
    stop = sorted(sure)[2] + 1e-6  # three of the tokens fall below it
    short = propose(drafter(tmp_path, target, EASY, depth=8, stop=stop), target, sampling).tree.token.tolist()
    length = next(i for i in range(8) if sure[i] < stop) + 1
    assert short == whole[: length + 1]
    own = LayerSkip(LayerSkip.Config(str(tmp_path / "skips.json"), 7, 0.0), target, "own numbers")
    assert propose(own, target, sampling).tree.token.tolist() == whole[:8]


def test_no_proposal_is_deeper_than_the_room(tmp_path: Path) -> None:
    target = toys.target()
    for room in (0, 2):
        made = propose(drafter(tmp_path, target, EASY), target, room=room)
        assert len(made.tree.token) == room + 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1}', "missing"),
        ("format", "not a file of skipped sub-layers"),
        ("layer", "skips layer 3"),
        ("below", "skips layer -1"),
        ("target", "another target, somebody, not of llama"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: str | None, said: str) -> None:
    path, target = tmp_path / "skips.json", toys.target()
    drafter(tmp_path, target, EASY)
    kept = json.loads(path.read_text())
    changed = {"format": {"format": 7}, "layer": {"mlp": [3]}, "below": {"attention": [-1]}}
    changed["target"] = {"target": kept["target"] | {"name": "somebody", "fingerprint": "f00d"}}
    path.unlink()
    if content is not None:
        path.write_text(json.dumps(kept | changed[content]) if content in changed else content)
    with pytest.raises(ValueError, match=said) as error:
        LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_target_that_takes_no_mask_is_refused(tmp_path: Path) -> None:
    target = toys.target("qwen3")
    target.takes_trees = False
    vars(target).pop("parts", None)
    try:
        with pytest.raises(ValueError, match="takes no mask of ours"):
            drafter(tmp_path, target, EASY)
    finally:
        target.takes_trees = True


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (LayerSkip.Config, (None, 4, 0.0), "skips is missing"),
        (LayerSkip.Config, ("x", 0, 0.0), "depth"),
        (LayerSkip.Config, ("x", 4, 1.0), "stop"),
        (SearchSettings, (0, 0.0, 9, 0), "depth is"),
        (SearchSettings, (1, 1.0, 9, 0), "stop is"),
        (SearchSettings, (1, 0.0, 1, 0), "evaluations is"),
    ],
)
def test_a_bad_value_is_named(kind: Any, values: tuple[Any, ...], said: str) -> None:
    keys = [field.name for field in fields(kind)]
    with pytest.raises(ValueError, match=rf"drafter\.layer_skip\.{said}"):
        build(kind, dict(zip(keys, values, strict=True)), "drafter.layer_skip")


SETTINGS = SearchSettings(depth=3, stop=0.0, evaluations=24, seed=0)


def texts(target: Target) -> list[Text]:
    return [
        record(target, toys.prompt(seed), autoregress(target, toys.prompt(seed), RequestParams(TOKENS, GREEDY)).tokens)
        for seed in range(2)
    ]


@pytest.mark.parametrize(("name", "attention"), [("llama", (0,)), ("mistral", ()), ("gpt2", (0,))])
def test_the_forecast_is_the_first_drafted_token_everywhere(
    tmp_path: Path, name: str, attention: tuple[int, ...]
) -> None:
    target, skips = toys.target(name, torch.float64), Skips(attention, (1,))
    text = texts(target)[0]
    source = drafter(tmp_path, target, skips, 1)
    right, sure = forecast(target.parts, skips, text)
    assert len(right) == len(text.token) - text.prompt
    assert {layer.get_seq_length() for layer in text.cache.hf.layers} == {len(text.token)}
    assert any(right)
    for i, end in enumerate(range(text.prompt, len(text.token))):
        cache = target.cache()
        target.prefill(torch.tensor(text.token[: end - 1]), cache)
        context = Context(text.token[:end], GREEDY, Draws(0, 0, coupled=False), 1, cache)
        assert (int(source.propose(context).tree.token[1]) == text.token[end]) == right[i]
        assert 0 < sure[i] <= 1


@pytest.mark.parametrize(
    ("right", "depth", "stop", "played"),
    [
        ("yyyyyy", 2, 0.0, (6, 2, 4)),  # two accepted and the target's own, twice
        ("nnn", 2, 0.0, (3, 3, 5)),  # nothing accepted; of the last draft one token is left
        ("ynyyny", 3, 0.0, (6, 3, 7)),
        ("yyyyyy", 4, 0.4, (6, 2, 5)),  # the third token is unsure: it ends the draft and is kept
        ("yynyyy", 4, 0.4, (6, 2, 6)),
    ],
)
def test_playing_a_text_through_is_drafting_token_by_token(
    right: str, depth: int, stop: float, played: tuple[int, int, int]
) -> None:
    assert play([each == "y" for each in right], [0.9, 0.9, 0.3, 0.9, 0.9, 0.9][: len(right)], depth, stop) == played


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

    best, rating = hill_climb(score, 6, SearchSettings(1, 0.0, 64, seed))
    assert rating.speed == speed[best] == max(speed.values())
    assert len(asked) == len(set(asked)) == 64
    asked.clear()
    best, rating = hill_climb(score, 6, SearchSettings(1, 0.0, 20, seed))
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
