import json
import lzma
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu import text
from examples.tiny import recipe as recipes
from examples.tiny.recipe import Recipe

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


def test_a_chat_is_what_the_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    for turns in CHATS:
        told = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        assert tokenizer.apply_chat_template(told, tokenize=False) == recipes.chat(turns)


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
