import itertools
import json
import lzma
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu import text
from examples.tiny import recipe as recipes
from examples.tiny.recipe import Part, Point, Recipe

SMALL = Recipe(
    vocab=300, width=32, inner=48, heads=4, kv_heads=2, layers=4, shallow=2, context=64, window=32, batch_tokens=128,
    peak_lr=1e-2, warm_steps=2,
)  # fmt: skip
CHATS = [
    ["How is it going?", "It is going well, so well that I sing.", "Why?", "Why not? I sing what I like."],
    ["def one():", "    return 1\n"],
    ["Où ?", "Là-bas, là où la mer est bleue."],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    sample = [recipes.chat(turns) for turns in CHATS]
    return recipes.make_tokenizer(sample, SMALL, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(recipes.time, "monotonic", lambda: float(next(ticks)))


def test_a_chat_is_what_the_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    for turns in CHATS:
        told = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        assert tokenizer.apply_chat_template(told, tokenize=False) == recipes.chat(turns)


def test_the_deep_model_repeats_the_shallow_one() -> None:
    shallow = recipes.build(SMALL, SMALL.shallow, SMALL.vocab)
    deep = recipes.stack(shallow, SMALL, SMALL.vocab)
    assert len(deep.model.layers) == SMALL.layers
    for i, layer in enumerate(deep.model.layers):
        ours, theirs = layer.state_dict(), shallow.model.layers[i % SMALL.shallow].state_dict()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert deep.lm_head.weight is deep.model.embed_tokens.weight


def test_training_learns_and_says_how_far_it_came(ticking: None) -> None:
    torch.manual_seed(0)
    stream = torch.arange(7).repeat(200)
    shallow = recipes.build(SMALL, SMALL.layers, SMALL.vocab)
    curve: list[Point] = []
    # The clock is read once a step, and once more at each point of the curve.
    seen = recipes.train(shallow, stream, SMALL, Part(45.0, 1.0, 0.1, 1000), curve)
    assert [point.step for point in curve] == [1, 20, 40]
    assert [point.tokens for point in curve] == [1000 + step * SMALL.batch_tokens for step in (1, 20, 40)]
    assert (seen - 1000) % SMALL.batch_tokens == 0
    assert seen > curve[-1].tokens
    assert curve[-1].loss < 0.5 * curve[0].loss


def test_what_is_held_out_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "add_code", lambda *_, **__: None)
    story = "Once there was a {}. " + "It went to the sea and came back again. " * 12
    (tmp_path / "tinystories_10k.txt").write_text("<|endoftext|>".join(story.format(f"cat{i}") for i in range(4)))
    (tmp_path / "tinystories_heldout.txt").write_text(story.format("dog"))
    chats = [
        {"conversations": [{"role": "user", "content": f"q{i}?"}, {"role": "assistant", "content": f"a{i}"}]}
        for i in range(200)
    ]
    with lzma.open(tmp_path / "topical_chat.jsonl.xz", "wt") as file:
        file.write("".join(json.dumps(each) + "\n" for each in chats))
    found = text.gathered(tmp_path)
    assert {each.source for each in found.read} == {path.name for path in tmp_path.iterdir()}
    assert len(found.chats["prose"]) == 4
    kept = found.held_out["dialogue"]
    assert 0 < len(kept) < 20
    assert len(kept) + len(found.chats["dialogue"]) == 200
    trained = "\n".join(found.documents())
    assert "cat3" in trained
    assert len(found.held_out["prose"]) == 1
    assert "dog" not in trained
    assert not any(f">{turn}<" in trained for each in kept for turn in each.turns)
