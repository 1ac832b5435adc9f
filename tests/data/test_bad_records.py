"""What records may hold that is no text, no data or no name of its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text.masks import is_empty
from data.text.prompts import Prompt, load_prompts, load_training, records_to_answer
from data.text.records import parse
from data.text.sources import open_source
from tests.data.chatml import load_samples

Write = Callable[..., str]
Config = Callable[..., DataConfig]


@pytest.mark.usefixtures("tolerant")
@pytest.mark.parametrize("raw", [{"text": "a \ud83d"}, {"prompt": "a \ud83d", "answer": "b"}])
def test_half_a_surrogate_pair_is_named_or_dropped(
    raw: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    path = write({"prompt": "a", "answer": "b"}, {"id": 7, **raw}, {"text": " "})
    with pytest.raises(ValueError, match=r"data.jsonl: sample 7: it holds half a surrogate pair, '\\ud83d'"):
        load_samples(config(path), chat)
    data = load_training(config(path, on_bad="drop"), chat, 0)
    assert +data.counts.chats == {"dropped, no text": 1, "dropped, no question and no text": 1}


@pytest.mark.usefixtures("tolerant")
@pytest.mark.parametrize(
    ("raw", "cause"),
    [({"text": " "}, "no question and no text"), ({"text": "\ud83d"}, "no text"), ({"prompt": "\ud83d"}, "no text")],
)
def test_a_bad_held_out_record_is_named_or_dropped(
    raw: dict[str, Any], cause: str, chat: PreTrainedTokenizerFast, write: Write, config: Config, tmp_path: Path
) -> None:
    first = ({"prompt": name, "answer": "b"} for name in "ab")
    path = write(*first, {"id": 6, "prompt": "c", "answer": "d"}, {"id": 7, **raw})
    how = {"held_out": 2, "cache": str(tmp_path / "cache")}
    told = r"data\.jsonl: prompt 7: (it holds half a surrogate pair|has no user message and no text).*remove it"
    with pytest.raises(ValueError, match=told):
        load_training(config(path, **how), chat, 9)
    with pytest.raises(ValueError, match=told):
        load_prompts(path, chat, None)
    data = load_training(config(path, on_bad="drop", **how), chat, 9)
    assert ([prompt.id for prompt in data.held_out], data.counts.held_out) == (["6"], 1)
    assert (len(data.samples), +data.counts.chats) == (2, {f"dropped, {cause}": 1})


def test_a_prompt_without_room_in_the_context_is_named_or_dropped(
    chat: PreTrainedTokenizerFast, write: Write, config: Config, tmp_path: Path
) -> None:
    records = [
        {"id": number, "prompt": "c" * (200 if number == 7 else number), "answer": "d"} for number in range(3, 9)
    ]
    path, asked = write(*records), write(*records, name="asked.jsonl")
    how = {"held_out": 3, "cache": str(tmp_path / "cache")}
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


@pytest.mark.usefixtures("tolerant")
@pytest.mark.parametrize(
    "answer", [{"content": " \n"}, {"content": "<think>\n\n</think>\n\n"}, {"tool_calls": "[]", "reasoning": ""}]
)
def test_an_empty_answer_trains_nothing(
    answer: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    thought, empty = {"role": "assistant", "reasoning_content": "c"}, {"role": "assistant", **answer}
    assert not is_empty(parse({"messages": [ASKED, thought]}, 0, "").messages[1])
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


IMAGE = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "x.png"}}]


@pytest.mark.usefixtures("tolerant")
@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"messages": [{"role": "user", "content": IMAGE}, {"role": "assistant", "content": "a cat"}]}, "image_url"),
        ({"prompt": "c", "answer": "b", "videos": ["x.mp4"], "image": None}, "videos"),
    ],
)
def test_what_is_more_than_text_is_refused_by_name(
    raw: dict[str, Any], name: str, chat: PreTrainedTokenizerFast, write: Write, config: Config
) -> None:
    path = write({"prompt": "a", "answer": "b", "image": ""}, {"id": 7, **raw})
    with pytest.raises(
        ValueError, match=rf"data.jsonl: sample 7: it holds more than text \({name}\), and only text"
    ) as error:
        load_samples(config(path), chat)
    assert "\n" not in str(error.value)
    assert [sample.id for sample in load_samples(config(path, on_bad="drop"), chat)] == ["0"]
    for template in (chat.chat_template, None):
        chat.chat_template = template
        with pytest.raises(ValueError, match=rf"prompt 7: it holds more than text \({name}\).*remove the record"):
            load_prompts(path, chat, None)
    chat.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    path = write({"id": 7, "prompt_token_ids": [5, len(chat) - 1], "token_ids": [6]})
    with pytest.raises(ValueError, match=r"sample 7: token \d+ \(<\|image_pad\|>\) is more than text"):
        load_samples(config(path), chat)


@pytest.mark.parametrize("changed", [{"token": "ab"}, {"token": ["a"]}, {"x": 1}])
def test_a_saved_prompt_that_is_none_is_named(
    changed: dict[str, Any], chat: PreTrainedTokenizerFast, write: Write
) -> None:
    saved = Prompt("a", [1], "b")._asdict()
    with pytest.raises(ValueError, match=r"data.jsonl: record 1 is not a saved prompt"):
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
