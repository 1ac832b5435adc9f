"""Self-speculation by skipped sub-layers: the draft is the naive one, its rows are dropped, and the file is checked."""

import copy
import json
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
    SearchSettings,
    SkipFile,
    Text,
    rate,
    recorded,
    save_skips,
    search,
)
from inference.protocol import DraftContext, Proposal
from inference.target.model import LayerSkippedTarget, SkipSet
from inference.target.target import Target
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY, Sampling, distribution
from tests import toys
from tests.refusals import refuses

TOKENS = 24
SKIPS = SkipSet((0, 2), (1,))  # the first layer's attention too: transformers reads the cache's length from that layer
EASY = SkipSet((), (1,))  # accepted now and then
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype


def drafter(folder: Path, target: Target, skips: SkipSet, depth: int = 4, stop: float = 0.0) -> LayerSkip:
    path = folder / "skips.json"
    save_skips(path, SkipFile(FORMAT, target.spec, list(skips.attention), list(skips.mlp), depth, stop, {}))
    return LayerSkip(LayerSkip.Config(str(path), None, None), target, "layer skip")


def thinned(target: Target, skips: SkipSet) -> torch.nn.Module:
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

    def __init__(self, target: Target, skips: SkipSet) -> None:
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
    made = source.propose(DraftContext(text, sampling, RequestRng(0, 0, coupled=False), room, cache))
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
        ("{", "damaged .*; search again with eval/search_skips.py"),
        ('{"format": 1}', "missing"),
        ("format", "format is 7"),
        ("target", "made for another target, somebody"),
        ("layer", "skips layer 9, which .* has not; search again with eval/search_skips.py"),
        ("depth", "depth is 1025: give 1024 or less"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path, target = tmp_path / "skips.json", toys.target()
    drafter(tmp_path, target, EASY)
    kept = json.loads(path.read_text())
    changed: dict[str, Any] = {
        "format": {"format": 7},
        "target": {"target": kept["target"] | {"name": "somebody", "fingerprint": "f"}},
        "layer": {"mlp": [9]},
        "depth": {"depth": 1025},  # a chain so deep would take all memory
    }
    path.write_text(json.dumps(kept | changed[content]) if content in changed else content)
    line = refuses(said, LayerSkip, LayerSkip.Config(str(path), None, None), target, "layer skip")
    assert str(path) in line


def test_a_target_that_takes_no_mask_is_refused(tmp_path: Path) -> None:
    target = toys.target("qwen3")
    target.takes_trees = False
    try:
        with pytest.raises(ValueError, match="ignores custom masks"):
            drafter(tmp_path, target, EASY)
    finally:
        target.takes_trees = True


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (LayerSkip.Config, ("x", 0, 0.0), "depth"),
        (LayerSkip.Config, ("x", 4, 1.0), "stop"),
        (SearchSettings, (0, 9, 0), "depth is"),
        (SearchSettings, (1, 1, 0), "evaluations is"),
    ],
)
def test_a_bad_value_is_named(kind: Any, values: tuple[Any, ...], said: str) -> None:
    keys = [field.name for field in fields(kind)]
    with pytest.raises(ValueError, match=rf"drafter\.layer_skip\.{said}"):
        build(kind, dict(zip(keys, values, strict=True)), "drafter.layer_skip")


SETTINGS = SearchSettings(depth=3, evaluations=100, seed=0)


def texts(target: Target) -> list[Text]:
    return [
        recorded(
            target, toys.prompt(seed), autoregress(target, toys.prompt(seed), RequestParams(TOKENS, GREEDY)).tokens
        )
        for seed in range(2)
    ]


@pytest.mark.parametrize(("name", "attention"), [("llama", (0,)), ("mistral", ()), ("gpt2", (0,))])
def test_a_set_is_rated_by_the_first_drafted_token_everywhere(
    tmp_path: Path, name: str, attention: tuple[int, ...]
) -> None:
    target, skips = toys.target(name, torch.float64), SkipSet(attention, (1,))
    text = texts(target)[0]
    token, prompt = text[0].tolist(), text[1]
    source, right = drafter(tmp_path, target, skips, 1), []
    for end in range(prompt, len(token)):
        cache = target.cache()
        target.prefill(torch.tensor(token[: end - 1]), cache)
        context = DraftContext(token[:end], GREEDY, RequestRng(0, 0, coupled=False), 1, cache)
        right.append(int(source.propose(context).tree.token[1]) == token[end])
    rating = rate(target, skips, [text], 1)
    assert {layer.get_seq_length() for layer in text[2].hf.layers} == {len(token)}
    assert 0 < rating.tau - 1 == pytest.approx(sum(right) / len(right))


def test_skipping_nothing_gains_nothing_and_the_cost_is_the_share_of_weights() -> None:
    target = toys.target()
    nothing = rate(target, SkipSet((), ()), texts(target), 3)
    assert (nothing.cost, nothing.speed) == (1, pytest.approx(1))
    attention, mlp, lm_head = 32 * (32 + 16 + 16 + 32), 3 * 32 * 48, 40 * 32
    norms = 3 * 2 * 32
    cost = (2 * attention + mlp + norms + lm_head) / (3 * attention + 3 * mlp + norms + lm_head)
    assert LayerSkippedTarget(target, SkipSet((2,), (0, 1))).cost == pytest.approx(cost)


def test_a_rating_takes_the_depth_of_the_greatest_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tokens right at a tenth of the cost: 1.5 / 1.1, 1.75 / 1.2, 1.875 / 1.3, 1.9375 / 1.4."""
    target = toys.target()
    token, prompt, cache = texts(target)[0]
    guesses = torch.nn.functional.one_hot(token[prompt:], toys.VOCAB).float()
    guesses[::2] = guesses[::2].roll(1, -1)
    monkeypatch.setattr(LayerSkippedTarget, "run", lambda *_: guesses)
    thinned = LayerSkippedTarget.__init__

    def cheap(self: LayerSkippedTarget, *given: Any) -> None:
        thinned(self, *given)
        self.cost = 0.1

    monkeypatch.setattr(LayerSkippedTarget, "__init__", cheap)
    rating = rate(target, SkipSet((), ()), [(token, prompt, cache)], 4)
    assert rating == (pytest.approx(1.75 / 1.2), 2, pytest.approx(1.75), 0.1)


def test_the_search_beats_skipping_nothing_and_repeats_itself() -> None:
    target = toys.target()
    found, rating = search(target, texts(target), SETTINGS)
    again, _ = search(target, texts(target), SETTINGS)
    assert found == again
    assert found.attention or found.mlp
    assert rating.speed > rate(target, SkipSet((), ()), texts(target), SETTINGS.depth).speed
    assert rating == rate(target, found, texts(target), SETTINGS.depth)
