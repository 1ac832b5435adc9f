"""Copies, the evaluation's text, and samples that are too short: dropped and counted."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast as Tokenizer

from data.config import DataConfig
from data.text.filters import WORD, Counts, Filters
from data.text.prompts import load_training
from data.text.records import parse

Config = Callable[..., DataConfig]
Write = Callable[..., str]

LONG = "one two three four five six seven eight"


def kept(config: DataConfig, records: list[dict[str, Any]], *evaluation: str) -> tuple[list[str], Counts]:
    """Return the ids of the records that stay, and the counts."""
    filters = Filters(config, [], evaluation)
    parsed = [parse(raw, i, "f") for i, raw in enumerate(records)]
    return [record.id for record in filters(parsed)], filters.counts


ANSWERED = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ({"text": "Once upon\n a  time"}, {"text": " once UPON a time "}, True),
        ({"text": "once"}, {"text": "once."}, False),
        ({"prompt": "Why", "answer": "so"}, {"question": "why", "answer": "So\n"}, True),
        ({"prompt": "why so", "answer": ""}, {"prompt": "why", "answer": "so"}, False),
        ({"prompt": "why", "answer": "so"}, {"prompt": "why", "answer": "so", "system": "be brief"}, False),
        ({"prompt": "why", "answer": "so"}, {"text": "why so"}, False),
        ({"messages": [{"role": "user", "content": "why", "name": "a"}]}, {"prompt": "why"}, False),
        ({**ANSWERED, "tools": [TOOL]}, {**ANSWERED, "tools": [TOOL]}, True),
        ({**ANSWERED, "tools": [TOOL]}, ANSWERED, False),
    ],
)
def test_copies_differ_in_case_and_white_space_alone(
    config: Config, first: dict[str, Any], second: dict[str, Any], equal: bool
) -> None:
    assert kept(config("f"), [first, second])[1].duplicates == equal
    assert kept(config("f"), [first, second])[0] == (["0"] if equal else ["0", "1"])
    assert kept(config("f", dedup=False), [first, first])[0] == ["0", "1"]


@pytest.mark.parametrize("thoughts", [{"reasoning": "hm"}, {"content": "<think>hm</think>so"}])
def test_an_answer_that_later_requests_repeat_is_trained_once(config: Config, thoughts: dict[str, str]) -> None:
    """Also where they leave its reasoning out; not with data.turns=last, which trains a chat's last answer alone."""
    asked, answer = ANSWERED["messages"]
    thought, other = {**answer, **thoughts}, {**answer, "content": "no"}
    chats = [asked, thought], [asked, answer, asked, other], [asked, other], [asked, answer, asked, other]
    parsed = [parse({"messages": chat}, i, "f") for i, chat in enumerate(chats)]
    first, longer, again = Filters(config("f"), [], [])(parsed)
    assert [message.get("weight") for message in longer.messages] == [None, 0, None, None]
    assert (first, again) == (parsed[0], parsed[2])
    assert [*Filters(config("f", turns="last"), [], [])(parsed)] == parsed[:3]
    assert [*Filters(config("f"), [parsed[1]], [])(parsed)] == [parsed[0], parsed[2]]


@pytest.mark.parametrize(
    ("raw", "contaminated"),
    [
        ({"text": f"so {LONG} nine"}, True),
        ({"text": LONG.replace(" ", ", ").upper()}, True),
        ({"text": LONG.rpartition(" ")[0]}, False),
        ({"text": "two one three four five six seven eight"}, False),
        ({"prompt": "x", "answer": LONG}, True),
        ({"prompt": "one two three four", "answer": "five six seven eight"}, False),
        ({"prompt": "x", "answer": "y", "system": LONG}, False),
        ({"prompt": "x", "answer": "y", "text": LONG}, True),
    ],
)
def test_contamination_is_so_many_words_in_a_row(config: Config, raw: dict[str, Any], contaminated: bool) -> None:
    ids, counts = kept(config("f", contamination=8), [raw], LONG, "too short")
    assert (counts.contaminated, counts.checked, counts.unchecked) == (int(contaminated), 1, 1)
    assert ids == [] if contaminated else ["0"]
    assert kept(config("f", contamination=None), [raw], LONG)[0] == ["0"]
    assert kept(config("f", contamination=9), [raw], LONG)[1].unchecked == 1


def test_vowel_signs_and_accents_are_part_of_their_word() -> None:
    for text in ("मूल्यांकन के लिए", "cafe\u0301 au lait", "שָׁלוֹם רב לך"):
        assert WORD.findall(text) == text.split()
    for text in ("ที่นี่", "មិនត្រូវ", "မြန်မာ", "ﾊﾝｶｸ", "𠀀𠀁"):
        assert WORD.findall(text) == list(text)


def test_scripts_without_spaces_have_a_word_a_character(config: Config) -> None:
    prompt = "请用一句话解释什么是推测解码"
    records = [{"text": f"好的{prompt}。"}, {"text": prompt[:9]}]
    assert kept(config("f", contamination=10), records, prompt)[0] == ["1"]
    assert kept(config("f", contamination=2), [{"text": "die STRASSE"}], "die straße")[0] == []


@pytest.mark.parametrize("where", ["prompts", "held out", "workload"])
def test_contamination_is_looked_for_in_all_evaluation_prompts(
    write: Write, config: Config, chat: Tokenizer, where: str
) -> None:
    told = {"id": "p", "question": f"please {LONG}"}
    records = [{"id": "a", "prompt": f"now {LONG}", "answer": "so"}, {"id": "b", "prompt": "why", "answer": "so"}]
    asked = write(told, {"id": "q", "question": "short"}, name="asked.jsonl")
    path = write(*records, *([{**told, "answer": "it is"}] if where == "held out" else []))
    others = write({"id": "p", "question": "another"}, name="others.jsonl")
    changed = {"held out": {"held_out": 1}, "prompts": {"prompts": asked}, "workload": {"prompts": others}}[where]
    data = load_training(config(path, contamination=8, **changed), chat, 1, asked if where == "workload" else "")
    assert [sample.id for sample in data.samples] == ["b"]
    assert (data.counts.contaminated, data.counts.checked) == (1, 1)
    assert [prompt.id for prompt in data.held_out] == ["p"]


def test_everything_dropped_is_counted_and_told(write: Write, config: Config, chat: Tokenizer) -> None:
    records = [{"prompt": f"q{i}", "answer": "a" * (i + 1)} for i in range(8)]
    first = write(*records, records[0], name="first.jsonl")
    second = write({"prompt": LONG, "answer": "x"}, {"prompt": "q" * 200, "answer": "x"}, name="second.jsonl")
    asked = write({"prompt": LONG}, {"prompt": "short"}, name="asked.jsonl")
    sizes = {"min_tokens": 28, "max_tokens": 120, "on_bad": "drop"}
    filtered = config([first, second], prompts=asked, contamination=8, **sizes)
    samples, _, counts = load_training(filtered, chat, 1)
    assert counts.records == {first: 9, second: 2}
    assert counts.kept == {first: 8, second: 1}
    assert (counts.duplicates, counts.contaminated) == (1, 1)
    assert +counts.chats == {"dropped, answers beyond data.max_tokens": 1}
    assert counts.short == sum(len(s.token) < 28 for s in load_training(config(first), chat, 0).samples) > 0
    assert (counts.samples, counts.tokens) == (len(samples), sum(len(sample.token) for sample in samples))
    assert counts.samples == 8 - counts.short > 0
    assert counts.trained == sum(sum(sample.loss_mask) for sample in samples)
    line = counts.line(filtered)
    assert "second.jsonl 1 of 2 records" in line
    assert "1 duplicates, 1 with 8 words of one of 2 evaluation prompts (1 of them too short to look for), " in line
    assert f"{counts.short} under 28 tokens; kept: " in line
    assert line.endswith(f" tokens, {counts.trained / counts.tokens:.0%} trained on"), "the warning has said the rest"
    assert Counts.read(json.loads(json.dumps(counts.report()))) == counts
    path = write({"text": "A tale"}, {"text": "other"}, {"text": "a  tale"})
    data = load_training(config(path, held_out=1), chat, 9)  # a copy of a held-out record is dropped
    assert [chat.decode(sample.token[:-1]) for sample in data.samples] == ["other"]
    assert ([prompt.id for prompt in data.held_out], data.counts.duplicates, data.counts.held_out) == (["2"], 1, 1)
    with pytest.raises(ValueError, match=r"nothing is left to train on .* 1 under 99 tokens") as caught:
        load_training(config(write({"prompt": "q", "answer": "a"}), min_tokens=99), chat, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "changed", "said"),
    [
        (Counts(Counter({"f": 75}), Counter({"f": 75}), 25), {}, "data: 25 held out; of the others f 75 of 75"),
        (Counts(Counter({"f": 75}), Counter({"f": 75}), 0), {"prompts": "my"}, "data: measured on my; f 75 of 75 rec"),
    ],
)
def test_the_line_says_what_is_held_out(counts: Counts, changed: dict[str, Any], said: str, config: Config) -> None:
    assert said in counts.line(config("f.jsonl", **changed))
