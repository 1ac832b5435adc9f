"""Tokens of different tokenizers as texts, the intersection of vocabularies, and what lies outside it."""

import functools

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from inference.drafters.assistant import Vocabulary, token_texts
from inference.target.target import Target
from inference.verification.sample import Sampling, distribution
from tests import assistants
from tests.tokenizers import KINDS, TEXT, trained

PAIRS = [(kind, KINDS[(i + 1 + j) % len(KINDS)]) for i, kind in enumerate(KINDS) for j in range(2)]


@functools.cache
def model(kind: str, padding: int = 0) -> Target:
    tokenizer = trained(kind)
    return Target(assistants.tiny(len(tokenizer) + padding, 0).eval(), tokenizer, kind)


def shown(tokenizer: PreTrainedTokenizerFast, token: list[int]) -> str:
    """Return what tokens read in the middle of a text."""
    anchor = tokenizer("the", add_special_tokens=False)["input_ids"][-1:]
    return tokenizer.decode(anchor + token)[len(tokenizer.decode(anchor)) :]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_what_the_tokenizer_itself_decodes(kind: str) -> None:
    tokenizer, texts = trained(kind), token_texts(model(kind))
    expected = {number: shown(tokenizer, [number]) for number in range(3, len(tokenizer))}  # the first are special
    assert texts == {number: text for number, text in expected.items() if text and "\ufffd" not in text}
    assert len(texts) > 20


def test_added_tokens_read_as_they_are_decoded() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained("bytes").backend_tokenizer)
    tokenizer.add_tokens(["Ġ|x|"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    texts = token_texts(Target(assistants.tiny(len(tokenizer), 0).eval(), tokenizer, "added"))
    assert texts[tokenizer.convert_tokens_to_ids("Ġ|x|")] == " |x|"
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in texts


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_shared_tokens_read_the_same(ours: str, theirs: str) -> None:
    vocabulary = Vocabulary(model(ours), model(theirs), "tli")
    special = {0: 0, 1: 1, 2: 2}
    assert special.items() <= vocabulary.shared.items()
    assert len(set(vocabulary.shared.values())) == len(vocabulary.shared) > 8
    for a, b in vocabulary.shared.items():
        if a not in special:
            read = shown(trained(ours), [a]), shown(trained(theirs), [b])
            assert read[0] == read[1] or "\ufffd" in read[0] + read[1]


@pytest.mark.parametrize("padding", [0, 3])
def test_logits_become_a_law_on_shared_tokens(padding: int) -> None:
    target, assistant = model("bytes", padding), model("sentencepiece", padding)
    vocabulary = Vocabulary(target, assistant, "tli")
    logits = torch.randn(4, assistant.embeddings.vocab_size, generator=torch.Generator().manual_seed(0))
    law = distribution(vocabulary.to_target(logits), Sampling(1.0, 0, 1.0))
    assert law.shape == (4, target.embeddings.vocab_size)
    whole = logits.softmax(-1)
    kept = whole[:, list(vocabulary.shared.values())].sum(-1)
    expected = torch.zeros_like(law)
    for a, b in vocabulary.shared.items():
        expected[:, a] = whole[:, b] / kept
    torch.testing.assert_close(law, expected)
    drafted = law.argmax(-1)
    assert vocabulary.to_assistant(drafted).tolist() == [vocabulary.shared[t] for t in drafted.tolist()]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_what_follows_is_mapped_or_spelled(ours: str, theirs: str) -> None:
    vocabulary = Vocabulary(model(ours), model(theirs), "tli")
    pieces, others = token_texts(model(ours)), token_texts(model(theirs))
    spelled = 0
    for token, piece in pieces.items():
        followed = vocabulary.translate([token])
        assert "".join(others[t] for t in followed) in (piece, "")
        assert token not in vocabulary.shared or followed == [vocabulary.shared[token]]
        spelled += len(followed) > 1
    assert spelled > 0 or theirs != "sentencepiece"
    assert vocabulary.translate([5, 6, 1]) == vocabulary.translate([5]) + vocabulary.translate([6]) + [1]


def test_a_prompt_is_encoded_as_text() -> None:
    token = trained("bytes")(TEXT[0])["input_ids"]
    found = Vocabulary(model("bytes"), model("sentencepiece"), "tli").prompt(token)
    assert found == trained("sentencepiece")(TEXT[0])["input_ids"]
    assert found[0] == 0
    assert Vocabulary(model("sentencepiece"), model("bytes"), "tli").prompt(found) == token


def test_different_ends_of_the_answer_are_one() -> None:
    def made(end: str, *words: str) -> Target:
        tokenizer = assistants.words([*words])
        tokenizer.eos_token = end
        return Target(assistants.tiny(len(words), 0).eval(), tokenizer, end)

    target = made("<end>", "a", "b", "<end>")
    assert Vocabulary(target, made("<eos>", "a", "b", "<eos>"), "tli").shared == {0: 0, 1: 1, 2: 2}
    assert Vocabulary(target, made("<eos>", "<eos>", "a", "b"), "tli").shared == {0: 1, 1: 2, 2: 0}
    knows_both = made("<end>", "a", "<eos>", "<end>")
    knows_both.tokenizer.add_special_tokens({"pad_token": "<eos>"})
    assert Vocabulary(knows_both, made("<eos>", "a", "b", "<eos>"), "tli").shared == {0: 0, 1: 2}, "the end is one"
    padded, pads = made("<end>", "a", "b", "<end>"), made("<end>", "a", "<p>", "<end>")
    for one in (padded, pads):
        one.tokenizer.add_special_tokens({"pad_token": "<p>"})
    both = Vocabulary(padded, pads, "tli").shared, Vocabulary(pads, padded, "tli").shared
    assert both == ({0: 0, 2: 2}, {0: 0, 2: 2}), "a token beyond an embedding has no counterpart"


def test_same_vocabularies_pad_and_cut() -> None:
    small, large = model("words"), model("words", 2)
    size = small.embeddings.vocab_size
    logits = torch.randn(2, size + 2, generator=torch.Generator().manual_seed(0))
    cut, padded = Vocabulary(small, large, "same"), Vocabulary(large, small, "same")
    assert torch.equal(cut.to_target(logits), logits[:, :size])
    wide = padded.to_target(logits[:, :size])
    assert torch.equal(wide[:, :size], logits[:, :size])
    assert wide[:, size:].isneginf().all()
    assert padded.translate([3, size + 1, 4]) == [3, 4]
    assert padded.to_assistant(torch.tensor([3, size + 1])).tolist() == [3, 0], "an embedding's row"
    law = distribution(wide, Sampling(1.0, 0, 1.0))
    assert law[:, size:].eq(0).all()
    torch.testing.assert_close(law[:, :size], logits[:, :size].softmax(-1))


def test_what_cannot_be_compared_is_named_in_one_line() -> None:
    ours = Target(assistants.tiny(2, 0).eval(), assistants.words(["a", "b"]), "ours")
    other = Target(assistants.tiny(2, 0).eval(), assistants.words(["c", "d"]), "other")
    with pytest.raises(ValueError, match="other shares no token with ours: choose another one"):
        Vocabulary(ours, other, "tli")
