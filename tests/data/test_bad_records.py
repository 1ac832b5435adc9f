"""What records may hold that is no text, no data or no name of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text import masks
from data.text.masks import is_empty, without
from data.text.prompts import (
    Prompt,
    held_out_prompts,
    load_prompts,
    load_samples,
    load_training,
    records_to_answer,
)
from data.text.records import parse
from data.text.sources import open_source

Write = Callable[..., str]
Config = Callable[..., DataConfig]


@pytest.mark.parametrize("raw", [{"text": "a \ud83d"}, {"prompt": "a \ud83d", "answer": "b"}])
def test_half_a_surrogate_pair_is_named_or_dropped(
    raw: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    path = write({"prompt": "a", "answer": "b"}, {"id": 7, **raw}, {"text": " "})
    with pytest.raises(ValueError, match=r"data.jsonl: sample 7: it holds half a surrogate pair, '\\ud83d'"):
        load_samples(config(path), chat)
    data = load_training(config(path, on_bad="drop"), chat, 0)
    assert +data.counts.chats == {"dropped, no text": 1, "dropped, no question and no text": 1}


@pytest.mark.parametrize("raw", [{"text": " "}, {"text": "\ud83d"}, {"prompt": "\ud83d"}])
def test_a_prompt_that_is_no_text_is_named(raw: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write) -> None:
    with pytest.raises(
        ValueError,
        match=r"data\.jsonl: prompt 7: (it holds half a surrogate pair|has no user message and no text).*remove it",
    ):
        load_prompts(write({"id": 7, **raw}), chat, None)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [({"text": " "}, "no question and no text"), ({"text": "\ud83d"}, "no text"), ({"prompt": "\ud83d"}, "no text")],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_bad_held_out_record_is_named_or_dropped(
    raw: dict[str, Any], cause: str, cached: bool, chat: PreTrainedTokenizerFast, write: Write, config: Config,
    tmp_path: Path,
) -> None:  # fmt: skip
    path = write({"prompt": "a", "answer": "b"}, {"id": 6, "prompt": "c", "answer": "d"}, {"id": 7, **raw})
    how = {"held_out": 2, "cache": str(tmp_path / "cache") if cached else None}
    for refused in (load_training, held_out_prompts):
        with pytest.raises(ValueError, match=r"data\.jsonl: prompt 7: "):
            refused(config(path, **how), chat, 9)
    data = load_training(config(path, on_bad="drop", **how), chat, 9)
    assert ([prompt.id for prompt in data.held_out], data.counts.held_out) == (["6"], 1)
    assert (len(data.samples), +data.counts.chats) == (1, {f"dropped, {cause}": 1})
    assert held_out_prompts(config(path, on_bad="drop", **how), chat, 9) == data.held_out


@pytest.mark.parametrize("cached", [False, True])
def test_a_prompt_without_room_in_the_context_is_named_or_dropped(
    cached: bool, chat: PreTrainedTokenizerFast, write: Write, config: Config, tmp_path: Path
) -> None:
    records = [
        {"id": number, "prompt": "c" * (200 if number == 7 else number), "answer": "d"} for number in range(5, 9)
    ]
    path, asked = write(*records), write(*records, name="asked.jsonl")
    how = {"held_out": 3, "cache": str(tmp_path / "cache") if cached else None}
    room = len(load_prompts(path, chat, None)[-1].token)
    for own, source in (({}, "data.jsonl, held out"), ({"prompts": asked, "on_bad": "drop"}, f"data.prompts={asked}")):
        with pytest.raises(ValueError, match=rf"{source}: prompt 7 has \d+ tokens, but .* room for {room}: shorten or"):
            load_training(config(path, **how, **own), chat, 9, None, room)
        assert load_training(config(path, **how, **own), chat, 1, None, room).held_out, "it is not measured on"
    data = load_training(config(path, on_bad="drop", **how), chat, 2, None, room)
    assert ([prompt.id for prompt in data.held_out], data.counts.held_out) == (["6", "8"], 2)
    assert +data.counts.chats == {"dropped, too long a prompt to measure on": 1}
    with pytest.raises(ValueError, match=r"data.jsonl, held out: no prompt has at most 1 tokens"):
        load_training(config(path, on_bad="drop", **how), chat, 2, None, 1)


ASKED = {"role": "user", "content": "a"}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]


@pytest.mark.parametrize(
    "answer",
    [{}, {"content": ""}, {"content": " \n"}, {"content": "<think>\n\n</think>\n\n"},
     {"content": None, "tool_calls": []}, {"tool_calls": "[]", "reasoning": ""}],
)  # fmt: skip
def test_an_empty_answer_trains_nothing(
    answer: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    empty = {"role": "assistant", **answer}
    path = write({"prompt": "a", "answer": "b"}, {"id": 7, "messages": [ASKED, empty]})
    with pytest.raises(ValueError, match=r"data\.jsonl: sample 7: .* no answer, or empty ones only; remove the"):
        load_samples(config(path), chat)
    data = load_training(config(path, on_bad="drop"), chat, 0)
    assert (len(data.samples), +data.counts.chats) == (1, {"dropped, no answer": 1})
    filled = {"role": "assistant", "content": "b"}
    data = load_training(config(write({"messages": [ASKED, empty, ASKED, filled]}), turns="last"), chat, 0)
    (after,), (both,) = data.samples, load_samples(config(write({"messages": [ASKED, empty, ASKED, filled]})), chat)
    assert +data.counts.chats == {"with an empty answer, which trains nothing": 1}
    assert (list(both.token), list(both.loss_mask)) == (list(after.token), list(after.loss_mask))


@pytest.mark.parametrize(
    ("answer", "kept"),
    [({"tool_calls": CALLS}, 1), ({"reasoning_content": "c"}, 0), ({"value": "b"}, 1),
     ({"content": "<think>c</think>"}, 0)],
)  # fmt: skip
def test_calls_and_reasoning_are_an_answer(answer: dict[str, Any], kept: int) -> None:
    message = parse({"messages": [ASKED, {"role": "assistant", **answer}]}, 0, "").messages[1]
    assert not is_empty(message)
    assert is_empty(without(message)) == (not kept)


IMAGE = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "x.png"}}]


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": "a cat"}]}, "image_url"),
        (
            {"messages": [{"role": "user", "content": [{"image": "x.png"}]}, {"role": "assistant", "content": "b"}]},
            "image",
        ),
        (
            {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "b"}], "image": "x"},
            "image",
        ),
        ({"prompt": "c", "answer": "b", "videos": ["x.mp4"], "image": None}, "videos"),
    ],
)
def test_what_is_more_than_text_is_refused_by_name(
    raw: dict[str, Any], name: str, chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    path = write({"prompt": "a", "answer": "b", "image": ""}, {"id": 7, **raw})
    with pytest.raises(
        ValueError, match=rf"data.jsonl: sample 7: it holds more than text \({name}\), and text"
    ) as error:
        load_samples(config(path), chat)
    assert "\n" not in str(error.value)
    assert [sample.id for sample in load_samples(config(path, on_bad="drop"), chat)] == ["0"]
    for template in (chat.chat_template, None):
        chat.chat_template = template
        with pytest.raises(ValueError, match=rf"prompt 7: it holds more than text \({name}\).*remove the record"):
            load_prompts(path, chat, None)


def test_tokens_that_stand_for_an_image_are_refused_by_name(
    chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    chat.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    path = write({"id": 7, "prompt_token_ids": [5, len(chat) - 1], "token_ids": [6]})
    with pytest.raises(ValueError, match=r"sample 7: token \d+ \(<\|image_pad\|>\) stands for more than text"):
        load_samples(config(path), chat)


@pytest.mark.parametrize(
    "changed",
    [{"id": 5}, {"category": ["a"]}, {"text": None}, {"token": "ab"}, {"token": [True]}, {"token": [1e999]}, {"x": 1}],
)
def test_a_saved_prompt_that_is_none_is_named(
    changed: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write
) -> None:
    saved = Prompt("a", [1], "b")._asdict()
    with pytest.raises(ValueError, match=r"data.jsonl: record 1 is no prompt as they are saved"):
        load_prompts(write(saved, saved | changed), chat, None)


def test_a_name_that_is_no_text_becomes_one(chat: PreTrainedTokenizerFast, write: Write, tmp_path: Path) -> None:
    named = {"id": "a\ud800", "category": "b\ud800"}
    for raw in (named | {"prompt": "c"}, named | {"token": [1], "text": "", "system": ""}):
        (prompt,) = load_prompts(write(raw), chat, None)
        assert (prompt.id, prompt.category) == ("a?", "b?")


def test_the_smaller_limit_bounds_what_is_answered(write: Write, config: Config) -> None:
    path = write(*({"text": str(i)} for i in range(9)))
    limits: list[tuple[int | None, int | None]] = [(None, None), (3, None), (None, 4), (5, 2), (2, 5)]
    found = [len(records_to_answer(config(path, limit=own), limit)) for own, limit in limits]
    assert found == [9, 3, 4, 2, 2]
    assert len(records_to_answer(config(path, limit=3, streaming=True), None)) == 3


def test_a_name_that_was_made_unique_stays_unique(write: Write, config: Config) -> None:
    path = write(*({"id": name, "text": name} for name in ("5", "5@2", "5", "5")))
    assert [record.id for record in records_to_answer(config(path), None)] == ["5", "5@2", "5@2@2", "5@3"]


def test_what_stands_beside_answers_is_no_data(tmp_path: Path) -> None:
    names = ("a.jsonl", "a.jsonl.meta.json", "b.jsonl.parts/settings.json", "b.jsonl.parts/00000-of-00001.jsonl")
    for name in (*names, "other.meta.json", "c.parts/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    for pattern in ("", "**/*.json*"):
        texts = [record["text"] for record in open_source(str(tmp_path / pattern), "")]
        assert texts == ["a.jsonl", "c.parts/d.jsonl", "other.meta.json"]


@pytest.mark.parametrize(("name", "content"), [("a.txt", "why\n"), ("a.jsonl", '{"text": "why"}\n')])
def test_a_byte_order_mark_is_no_text(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(open_source(str(tmp_path / name), "")) == [{"text": "why"}]


def test_a_chat_of_more_answers_than_are_read_is_named_or_dropped(
    chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    """It is rendered again for each, so that a short file would take hours."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write({"id": 1, "messages": turns}, {"id": 7, "messages": turns * 10_000})
    with pytest.raises(ValueError, match=r"sample 7: it has 10000 answers, at most 1000 are read; cut it"):
        load_samples(config(path), chat)
    assert len(load_samples(config(path, on_bad="drop"), chat)) == 1


def test_a_text_longer_than_is_read_is_named_or_dropped(
    chat: PreTrainedTokenizerFast, write: Write, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "HEAD", 10)
    path = write({"id": 1, "text": "a b"}, {"id": 7, "text": "a" * 11})
    with pytest.raises(ValueError, match=r"sample 7: its text has 11 characters, at most 10 are read; cut it"):
        load_samples(config(path), chat)
    assert len(load_samples(config(path, on_bad="drop"), chat)) == 1
