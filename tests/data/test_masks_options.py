"""What the options leave of a chat, what becomes of bad ones, and tokens that span the edge of an answer."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text import masks, template
from data.text.masks import samples_of, skip, without_reasoning
from data.text.records import Record
from tests.data.chatml import Tokens, load_samples
from tests.data.families import CHATS, chat_record, family_tokenizer, marked, masked
from tests.tokenizers import trained

Write = Callable[..., str]
Config = Callable[..., DataConfig]
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'the cat: ' + m.content + ' the dog: ' }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
SPACED_TAGGED = SPACED.replace("{{ m.content + '\n' }}", "{% generation %}{{ m.content + '\n' }}{% endgeneration %}")


def told(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("family", "chat", "tagged", "texts"),
    [
        ("llama3", "tools", False, ["Welcome.<|eot_id|>"]),
        ("qwen3", "reasoning", True, ["<think>\n4 * 3 = 12.\n</think>\n\n12<|im_end|>"]),
        ("gpt_oss", "plain", False, ["<|channel|>final<|message|>Now too, élan.<|return|>"]),
    ],
)
def test_the_last_turn_alone(family: str, chat: str, texts: list[str], tagged: bool) -> None:
    tokenizer = family_tokenizer(family, tagged)
    whole = masked(chat_record(family, chat), tokenizer)[-1]
    (sample,) = masked(chat_record(family, chat), tokenizer, turns="last")
    assert sample.token == whole.token
    assert [part.split("⟧")[0] for part in marked(sample, tokenizer).split("⟦")[1:]] == texts


def test_the_text_trains_all_tokens_and_a_last_turn_has_its_tool_calls() -> None:
    tokenizer = family_tokenizer("chatml", False)
    (answers,) = masked(chat_record("chatml", "plain"), tokenizer)
    (text,) = masked(chat_record("chatml", "plain"), tokenizer, turns="text")
    assert text.token == answers.token
    assert 0 < sum(answers.loss_mask) < sum(text.loss_mask) == len(text.token)
    messages = [{"role": "system", "content": "Greet."}, {"role": "assistant", "content": "So."}]
    (sample,) = masked(Record("a", "", messages, ""), tokenizer, turns="last")  # nobody asked
    assert marked(sample, tokenizer).count("⟦") == 1
    tokenizer = family_tokenizer("qwen25", False)
    record = chat_record("qwen25", "tools")
    (sample,) = masked(record._replace(messages=record.messages[:-1]), tokenizer, turns="last")
    shown = marked(sample, tokenizer)
    assert shown.count("⟦") == 2
    assert "⟦<tool_call>" in shown
    assert shown.endswith("⟦Mild: 18 °C.<|im_end|>⟧\n")


def test_reasoning_that_is_quoted_is_no_reasoning() -> None:
    tokenizer = family_tokenizer("chatml", False)
    record = Record("a", "", told("Why?", "<think>a</think>Use <think>b</think>."), "")
    (sample,) = masked(record, tokenizer, reasoning="cut")
    assert marked(sample, tokenizer).endswith("⟦Use <think>b</think>.<|im_end|>⟧\n")
    user = {"role": "user", "content": "<think>a</think>b"}
    assert without_reasoning(user) == user


@pytest.mark.parametrize(
    ("text", "cut", "left"),
    [
        ("A:|<think>\n\n</think>\n\nyes", False, "yes"),
        ("A:|<think>so</think>yes", False, "<think>so</think>yes"),
        ("A:|<think>so</think>yes", True, "yes"),
        ("A:<think>\n|\n</think>\n\nyes", False, "yes"),
        ("A:<think>\n|so\n</think>\n\nyes", True, "yes"),
        ("A:<think>\n|so\n</think>\n\nyes", False, "so\n</think>\n\nyes"),
        ("A:|<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final", True, "<|channel|>final"),
        ("A:|yes <think>so</think>", True, "yes <think>so</think>"),
    ],
)
def test_where_training_starts_in_an_answer(text: str, cut: bool, left: str) -> None:
    given, answer = text.split("|", 1)
    whole = given + answer
    assert whole[skip(whole, len(given), len(whole), cut) :] == left
    assert skip(whole, len(given), len(given) + 1, cut) == len(given), "the answer ends before the block does"


def test_what_a_template_does_to_a_chat_is_counted(
    caplog: pytest.LogCaptureFixture, write: Write, config: Config
) -> None:
    path = write({"id": "a", **CHATS["think"]}, {"id": "b", **CHATS["plain"]})
    load_samples(config(path), family_tokenizer("deepseek_r1", False))
    assert "of its chats, 1 whose reasoning the chat template leaves out" in caplog.text
    caplog.clear()
    load_samples(config(path, reasoning="cut"), family_tokenizer("deepseek_r1", False))
    assert caplog.text == ""
    asked = write({"id": "c", **CHATS["tools"]})
    for family, lost in (("qwen25", False), ("chatml", True)):  # of which the second writes contents alone
        load_samples(config(asked), family_tokenizer(family, False))
        assert ("of its chats, 1 whose tool calls the chat template leaves out" in caplog.text) == lost


def test_chats_whose_later_samples_are_too_long_keep_the_others(config: Config) -> None:
    tokenizer, record, seen = family_tokenizer("qwen3", False), chat_record("qwen3", "plain"), Counter[str]()
    first, second = masked(record, tokenizer)
    assert len(first.token) < 70 < len(second.token)
    (kept,) = samples_of(record, tokenizer, "f", config("f", max_tokens=len(first.token)), seen)
    assert kept == first
    assert seen["truncated at data.max_tokens"] == 1


IN_TWO = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'ask: ' + m.content + '\n' }}{% else %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{{ ' by me ' }}{% generation %}{{ 'end<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% endif %}{% endfor %}"
)


def test_every_block_of_every_answer_is_trained(tokenizer_with: Tokens, config: Config) -> None:
    tokenizer, record = tokenizer_with(IN_TWO), Record("a", "", told("Why?", "So.", "How?", "It is."), "")
    (sample,) = samples_of(record, tokenizer, "f", config("f"), Counter())
    first, second = (f"⟦{text}⟧ by me ⟦end<|im_end|>⟧\n" for text in ("So.", "It is."))
    assert marked(sample, tokenizer) == f"ask: Why?\n{first}ask: How?\n{second}"


ASK = "{% for m in messages %}{% if m.role == 'user' %}{{ 'ask: ' + m.content + '<|im_end|>\n' }}{% else %}"
SAY = "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'say: ' }}{% endif %}"
REPLY, TAGS = "{{ 'say: ' + m.content + '<|im_end|>\n' }}", ("{% generation %}", "{% endgeneration %}")
TAGGED = REPLY.replace("'say: ' + ", "").join(TAGS)
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "before"),
    [
        # Of TRL: Phi-3's, whose end of the text is a block, and those whose blocks hold the header.
        (ASK + "say: " + TAGGED + SAY[:-11] + "{% else %}" + "{{ eos_token }}".join(TAGS) + "{% endif %}", ""),
        (ASK + REPLY.join(TAGS) + SAY, ""),
        (ASK + REPLY + SAY.replace("say: ", "say: <|channel>thought\n<channel|>"), ""),  # Gemma 4
        (ASK + REPLY + "{% endif %}{% endfor %}say: ", ""),  # Command R7B
        (ASK + REPLY.replace("say: ", "say: </think>") + SAY, "</think>"),  # GLM 4.7
        (ASK + REPLY.replace("say: ", f"say: {EMPTY}") + SAY, EMPTY),  # Qwen3
    ],
    ids=["phi3", "trl", "gemma4", "r7b", "glm", "qwen3"],
)
def test_what_a_template_writes_around_an_answer_is_not_trained(
    template: str, before: str, tokenizer_with: Tokens, config: Config
) -> None:
    tokenizer, record = tokenizer_with(template), Record("a", "", told("Why?", " So.", "How?", "It is."), "")
    (sample,) = samples_of(record, tokenizer, "f", config("f"), Counter())
    first, second = (f"say: {before}⟦{text}<|im_end|>⟧" for text in (" So.", "It is."))
    assert marked(sample, tokenizer).strip() == f"ask: Why?<|im_end|>\n{first}\nask: How?<|im_end|>\n{second}"


def test_a_finished_answer_behind_one_that_was_cut_off_keeps_its_end(tokenizer_with: Tokens, config: Config) -> None:
    tokenizer, messages = tokenizer_with(ASK + "{{ 'say: ' + m.content }}" + SAY), told("Why?", "So", "How?", "It is.")
    messages[1]["finish_reason"] = "length"
    (sample,) = samples_of(Record("a", "", messages, ""), tokenizer, "f", config("f"), Counter())
    assert marked(sample, tokenizer) == "ask: Why?<|im_end|>\nsay: ⟦So⟧ask: How?<|im_end|>\nsay: ⟦It is.<|im_end|>⟧"


REWRITTEN = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'ask: ' + (m.content if loop.last else 'x') + '\n' }}"
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'say: ' }}{% endif %}"
)


def test_where_a_template_rewrites_the_question_the_answer_stands_behind_its_prompt(
    tokenizer_with: Tokens, config: Config
) -> None:
    tokenizer, record = tokenizer_with(REWRITTEN), Record("a", "", told("Why?", "So.", "How?", "It is."), "")
    first, last = samples_of(record, tokenizer, "f", config("f"), Counter())
    assert marked(first, tokenizer) == "ask: Why?\nsay: ⟦So.<|im_end|>⟧"
    assert marked(last, tokenizer) == "ask: x\nSo.ask: How?\nsay: ⟦It is.<|im_end|>⟧"
    (alone,) = samples_of(record, tokenizer, "f", config("f", turns="last"), Counter())
    assert (alone.token, alone.loss_mask) == (last.token, last.loss_mask)


def test_an_answer_stands_behind_what_the_target_had_before_it() -> None:
    """gpt-oss's template leaves the analysis of a call out once there is an answer, and its server had it."""
    tokenizer = family_tokenizer("gpt_oss", False)
    (sample,) = masked(chat_record("gpt_oss", "tools_and_reasoning"), tokenizer)
    call, answer = re.findall("⟦(.*?)⟧", marked(sample, tokenizer))
    assert call.startswith("<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=")
    assert answer.endswith("<|channel|>final<|message|>Mild: 18 °C.<|return|>")


@pytest.mark.parametrize(
    ("kind", "template"), [("bytes", SPACED), ("metaspace", SPACED_TAGGED), ("sentencepiece", SPACED)]
)
def test_a_token_across_the_edge_of_an_answer_is_not_trained(
    kind: str, template: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt ends with a blank that the whole's tokens have in the answer's first word."""
    tokenizer = trained(kind)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    record = Record("a", "", told("a mat", "the other cat", "a cat", "the old mat"), "")
    (sample,) = samples_of(record, tokenizer, "f", config("f"), Counter())
    text = "the cat: a mat the dog: the other cat\nthe cat: a cat the dog: the old mat\n"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.token[: len(whole)] == whole
    assert sample.loss_mask[: len(whole)] != [1] * len(whole)
    runs = [part.split("⟧")[0] for part in marked(sample, tokenizer).replace("</s>", "").split("⟦")[1:]]
    assert [run.strip() for run in runs] == ["other cat", "old mat"]


def test_a_tokenizer_that_tells_no_characters_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained("bytes")
    monkeypatch.setattr(tokenizer, "chat_template", SPACED)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    with pytest.raises(ValueError, match=r"sample a: its tokens span the edge of an answer, .*use the model's fast"):
        samples_of(Record("a", "", told("a mat", "the other cat"), ""), tokenizer, "f", config("f"), Counter())


@pytest.mark.parametrize("tagged", [False, True])
def test_reasoning_that_a_template_makes_of_content_is_masked(tagged: bool) -> None:
    """gpt-oss writes what comes with a tool call as its analysis, which a chat that ends there still has."""
    tokenizer = family_tokenizer("gpt_oss", tagged)
    record = chat_record("gpt_oss", "tools")
    calling = [*record.messages[:2], {**record.messages[2], "content": "Look it up."}]
    (kept,) = masked(record._replace(messages=calling), tokenizer)
    (cut,) = masked(record._replace(messages=calling), tokenizer, reasoning="cut")
    assert kept.token == cut.token
    assert "⟦<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant to=" in marked(kept, tokenizer)
    assert "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant⟦ to=" in marked(cut, tokenizer)


def test_a_slow_tokenizer_shows_edges_by_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = trained("sentencepiece")
    text, spans = "the cat:the old\nmat", [(8, 15)]
    expected = masks._mask(text, spans, tokenizer)
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", False)
    assert masks._mask(text, spans, tokenizer) == expected
    assert 0 < sum(expected[1]) < len(expected[1])


EOS, BLANK, A, B = 1, 10, 11, 12


@pytest.mark.parametrize(
    ("token", "mask", "eos", "ended", "trained"),
    [
        ([A, B], [0, 1], EOS, [A, B, EOS], [0, 1, 1]),
        ([A, B], [0, 1], None, [A, B], [0, 1]),
        ([A, B, EOS, A], [0, 1, 0, 0], EOS, [A, B, EOS, A], [0, 1, 1, 0]),
        ([A, B, A], [0, 1, 0], EOS, [A, B, A], [0, 1, 0]),
        ([A, B, EOS, BLANK], [0, 1, 1, 1], EOS, [A, B, EOS, BLANK], [0, 1, 1, 0]),
        ([EOS, BLANK, BLANK, A], [1, 1, 1, 0], EOS, [EOS, BLANK, BLANK, A], [1, 0, 0, 0]),
        ([BLANK, BLANK], [1, 1], EOS, [BLANK, BLANK, EOS], [1, 1, 1]),
    ],
)
def test_an_answer_ends_with_the_token_that_ends_a_turn(
    token: list[int], mask: list[int], eos: int | None, ended: list[int], trained: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(template, "turn_end_tokens", lambda _: {EOS})
    tokenizer: Any = Mock(eos_token_id=eos, decode=lambda one: "\n" if one == BLANK else "a")
    assert masks._end_turns(token, mask, tokenizer) == (ended, trained)
