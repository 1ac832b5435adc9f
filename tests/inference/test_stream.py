"""Streaming: whole characters alone, nothing lost, each piece in its writer's colour."""

import io
import random
from typing import Any
from unittest.mock import Mock, patch

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inference.decode import Generation, Settings, Step
from inference.protocol import Drafter
from inference.run import STYLES, answer, summary
from inference.target.target import Target
from inference.text_stream import TextStream, decode
from inference.verification.sample import GREEDY

GREEN, MAGENTA, DIM = "\x1b[32m", "\x1b[35m", "\x1b[2m"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes, so that every character beyond ASCII takes several tokens."""
    alphabet = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>")


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer that drops the space before a text's first word, as SentencePiece models do."""
    bare = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "three": 2}, unk_token="three"))
    bare.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=bare)


def stream(text: str) -> list[str]:
    made = TextStream(tokenizer())
    return [*(made.push(token) for token in tokenizer()(text).input_ids), made.rest()]


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語", "👩‍👩‍👧 of 🏳️‍🌈", "  two  spaces\n\ttab ", "ends amid 🦆"])
def test_every_piece_is_whole_and_all_of_them_are_the_text(text: str) -> None:
    pieces = stream(text)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) == len(text)


def test_a_cut_character_is_shown_at_the_end_alone() -> None:
    made, ids = TextStream(tokenizer()), tokenizer()("a🦆").input_ids
    assert [made.push(token) for token in ids[:-1]] == ["a", "", "", ""]
    assert made.rest() == "\ufffd"


def test_bytes_that_are_no_character_come_with_the_next_one() -> None:
    made, ids = TextStream(tokenizer()), tokenizer()("🦆b").input_ids
    assert [made.push(token) for token in (ids[1], ids[-1], ids[-1])] == ["", "\ufffdb", "b"]


def test_any_tokens_give_what_decoding_them_at_once_gives() -> None:
    ids = [random.Random(3).randrange(256) for _ in range(400)]
    made = TextStream(tokenizer())
    whole = "".join([*(made.push(token) for token in ids), made.rest()])
    assert whole == tokenizer().decode(ids)


def test_the_space_between_pieces_stays_and_special_tokens_go() -> None:
    made = TextStream(metaspace())
    assert [made.push(token) for token in (0, 1, 2, 1)] == ["one", " two", "three", " two"]
    marked = TextStream(tokenizer())
    end = tokenizer().eos_token_id
    assert [marked.push(token) for token in [*tokenizer()("ab").input_ids, end]] == ["a", "b", ""]
    assert marked.rest() == ""


def test_the_window_that_is_decoded_again_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    made, longest = TextStream(tokenizer()), 0

    def watched(by: PreTrainedTokenizerFast, token: list[int], special: bool) -> str:
        nonlocal longest
        longest = max(longest, len(token))
        return decode(by, token, special)

    monkeypatch.setattr("inference.text_stream.decode", watched)
    for token in tokenizer()("é" * 100).input_ids:
        made.push(token)
    assert 0 < longest <= 4


def paint(calls: list[tuple[list[int], list[str]]], *, terminal: bool = True) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system="standard" if terminal else None, width=12)
    made = Generation([1] * 7, [], [Step(4, 2, 3, 0.1, 0.1, 0.1)] * 2, [], 0.5, 1.5, "length")

    def speculate(*given: Any) -> Generation:
        for tokens, sources in calls:
            given[-1](tokens, sources)
        return made

    with patch("inference.api.speculate", speculate):
        answer(Mock(spec=Target, tokenizer=tokenizer()), Mock(spec=Drafter), [1], Settings(7, GREEDY), console)
    return file.getvalue()


def test_colours_are_the_writers() -> None:
    assert STYLES == {"draft": "green", "bonus": "magenta", "prefill": "magenta"}
    ids = tokenizer()("abcd").input_ids
    shown = paint([(ids[:1], ["prefill"]), (ids[1:], ["draft", "draft", "bonus"])])
    assert shown.startswith(
        f"{MAGENTA}a\x1b[0m{GREEN}b\x1b[0m{GREEN}c\x1b[0m{MAGENTA}d\x1b[0m\n{DIM}τ 3.00, 4.0 tokens/s"
    )


def test_a_character_of_two_writers_has_the_last_ones_colour() -> None:
    ids = tokenizer()("é").input_ids
    assert f"{GREEN}é\x1b[0m" in paint([([ids[0]], ["bonus"]), ([ids[1]], ["draft"])])


def test_text_is_not_wrapped_marked_up_or_obeyed() -> None:
    text = "a line that is longer than [bold]twelve[/bold]\nx"
    shown = paint([(tokenizer()(text).input_ids, ["draft"] * len(text))], terminal=False)
    assert shown.startswith(text + "\n")
    ids = tokenizer()("\x1b[31m\x07").input_ids
    shown = paint([(ids, ["draft"] * len(ids))], terminal=False)
    assert shown.startswith("\ufffd[31m\ufffd\n")


def test_the_summary_without_a_step() -> None:
    assert summary(Generation([1], ["prefill"], [], [], 0.1, 0.0, "eos")) == "1 token from the prefill alone (eos)"
