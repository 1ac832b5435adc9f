"""Text that goes between tokenizers: it grows by tokens that may split characters, and comes back as tokens."""

import itertools

import pytest

from inference.drafters.contrib.assistant_slem import GrowingText, continuation
from inference.drafters.vocabulary import encode, opening
from inference.text_stream import decode
from tests.tokenizers import KINDS, TEXT, trained

LONG = " ".join(TEXT)
PLAIN = " ".join(TEXT[:2])


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(KINDS, KINDS)))
def test_a_growing_text_is_what_encoding_all_of_it_gives(ours: str, theirs: str) -> None:
    source, other = trained(ours), trained(theirs)
    token = encode(source, PLAIN if "words" in (ours, theirs) else LONG)[0]
    growing = GrowingText(source, other, 10, token[:9])
    split = 0
    for end in range(10, len(token) + 1):
        growing.extend(token[end - 1 : end])
        if growing.complete:
            text = decode(source, token[:end])
            assert growing.text == text
            assert growing.token == opening(other) + encode(other, text)[0]
        else:
            split += 1
    assert growing.complete
    assert (split > 0) == (ours in ("bytes", "sentencepiece") and theirs != "words")


def test_only_the_end_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def watched(tokenizer: object, text: str) -> object:
        lengths.append(len(text))
        return encode(trained("metaspace"), text)

    token = encode(trained("bytes"), PLAIN * 4)[0]
    growing = GrowingText(trained("bytes"), trained("metaspace"), 6, token[:100])
    monkeypatch.setattr("inference.drafters.contrib.assistant_slem.encode", watched)
    for t in token[100:]:
        growing.extend([t])
    assert growing.token == encode(trained("metaspace"), PLAIN * 4)[0]
    assert len(lengths) > 20
    assert max(lengths) < 60 < len(growing.text)


def test_a_prompt_that_ends_inside_a_character_waits() -> None:
    source = trained("sentencepiece")
    token = encode(source, "日本")[0]
    growing = GrowingText(source, trained("bytes"), 10, token[:2])
    assert not growing.complete


def test_special_tokens_are_no_text() -> None:
    prompt = [0, *encode(trained("bytes"), "the cat")[0]]
    growing = GrowingText(trained("bytes"), trained("sentencepiece"), 10, prompt)
    growing.extend([1])
    assert growing.text == "the cat"
    assert growing.complete
    assert growing.token == trained("sentencepiece")("the cat")["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [PLAIN, LONG, "日本語 naïve 😀😀 \n\n  x"])
def test_a_continuation_adds_exactly_its_text(kind: str, text: str) -> None:
    """At every border: between words, inside them, before and after spaces."""
    tokenizer, found, borders = trained(kind), 0, 0
    for end in range(1, len(text)):
        context = encode(tokenizer, text[:end])[0]
        before, after = decode(tokenizer, context), text[end : end + 20]
        if before != text[:end]:
            continue  # the tokenizer itself loses something, or spells the border in its own way
        ahead = continuation(tokenizer, context[-10:], after)
        borders += 1
        if ahead:
            assert decode(tokenizer, context + ahead) == before + after
            found += 1
    if text == PLAIN and kind != "words":
        assert found == borders > 50
    if kind == "bytes":
        assert found == borders


def test_a_continuation_is_the_tokenizers_own_where_no_token_spans_the_border() -> None:
    for kind in KINDS:
        tokenizer = trained(kind)
        token, spans = encode(tokenizer, PLAIN)
        for i in range(11, len(token)):
            text = decode(tokenizer, token)[len(decode(tokenizer, token[:i])) :]
            if spans[i][0] < spans[i][1] and encode(tokenizer, decode(tokenizer, token[:i]))[0] == token[:i]:
                assert continuation(tokenizer, token[i - 10 : i], text) == token[i:]


def test_nothing_that_reads_otherwise_is_returned() -> None:
    words = trained("words")
    context = encode(words, "the old")[0]
    assert continuation(words, context, "er cat") == []
    assert continuation(words, context, " cat") == encode(words, "cat")[0]
    assert continuation(words, [], "the cat") == encode(words, "the cat")[0]
