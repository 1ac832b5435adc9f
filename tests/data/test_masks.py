"""Masks of real template families: golden files, and the proof that the tokens are those of the whole chat."""

import json
import random
import re
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from data.text import masks, template
from data.text.masks import Sample, without_reasoning
from data.text.parts import Message
from data.text.records import Record
from data.text.template import turn_end_tokens
from heads import rows
from tests.data.families import CASES, FAMILIES, GOLDEN, chat_record, family_tokenizer, golden, marked, masked

PARTS = ["It is.", " so ", "\n", "élan", "日本 😀", "  ", "def f(x):\n    return x\n", "<", "|>", "user\n", "12"]
CLOSED = ("phi3",)  # ends every chat with its end token, which its answers do not end with


def rendered(
    messages: list[Message], family: str, record: Record, tokenizer: PreTrainedTokenizerBase, prompt: bool = False
) -> list[int]:
    """Return the tokens that transformers itself makes of a chat, on the day that templates are told."""
    as_text = family == "deepseek_v3"
    asked = json.loads(json.dumps(messages))
    for message in asked:
        if family == "gpt_oss" and "reasoning_content" in message:  # as its template calls it
            message["thinking"] = message["reasoning_content"]
        for call in message.get("tool_calls") or []:
            given = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(given, ensure_ascii=False) if as_text else given
    template = str(tokenizer.chat_template).replace("strftime_now('%Y-%m-%d')", "'2024-07-26'")
    made: Any = tokenizer.apply_chat_template(
        asked,
        tools=list(record.tools) or None,
        chat_template=template,
        add_generation_prompt=prompt,
        tokenize=True,
        return_dict=False,
        date_string="26 Jul 2024",
    )
    return list(made)


def assert_seen(samples: list[Sample], record: Record, family: str, cut: bool, tagged: bool) -> None:
    """Each sample is the chat up to one of its answers, token for token, the last the whole chat.

    Where that does not begin with the prompt that the target had, the answer stands behind this prompt.
    """
    tokenizer = family_tokenizer(family, tagged)
    messages = [without_reasoning(message) for message in record.messages] if cut else record.messages
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    chats = [rendered(messages[: i + 1], family, record, tokenizer) for i in answers]
    if family in CLOSED:
        assert all(chat[-1] == tokenizer.eos_token_id for chat in chats)
        chats = [chat[:-1] for chat in chats]
    prompts = [rendered(messages[:i], family, record, tokenizer, prompt=True) for i in answers]
    prompts = [tokenizer.encode(masks.OPENED.sub("", tokenizer.decode(p)), add_special_tokens=False) for p in prompts]

    def stands(sample: Sample, prompt: list[int], chat: list[int]) -> bool:
        answer = sample.token[len(prompt) :]
        return sample.token == chat or (sample.token == prompt + answer and answer == chat[-len(answer) :])

    assert all(any(stands(sample, *pair) for pair in zip(prompts, chats, strict=True)) for sample in samples)
    assert stands(samples[-1], prompts[-1], chats[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_files_by_the_templates_own_marks_and_by_rendered_turns(family: str) -> None:
    assert "{%- generation" not in str(family_tokenizer(family, False).chat_template)
    assert golden(family, tagged=False) == (GOLDEN / f"{family}.txt").read_text(encoding="utf-8")
    assert "generation" in str(family_tokenizer(family, True).chat_template)
    assert golden(family, tagged=True) == (GOLDEN / f"{family}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("family", "chat", "reasoning"), CASES)
def test_the_tokens_are_those_that_the_model_sees(family: str, chat: str, reasoning: str) -> None:
    record = chat_record(family, chat)
    samples = masked(record, family_tokenizer(family, False), reasoning=reasoning)
    assert_seen(samples, record, family, reasoning == "cut", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_text_is_masked_exactly(family: str) -> None:
    """Blanks, part of a marker, many bytes a character: the same mask by marks and by turns, never everything."""
    rng = random.Random(family)
    for number in range(4):
        texts = ["".join(rng.choices(PARTS, k=rng.randint(1, 6))) for _ in range(4)]
        texts = [text if text.strip() else f"It is.{text}" for text in texts]  # an empty answer is not trained
        told = ["user: " + texts[0], texts[1], "user: " + texts[2], texts[3]]
        roles = ["user", "assistant"] * 2
        record = Record(str(number), "", [{"role": r, "content": t} for r, t in zip(roles, told, strict=True)], "")
        by_turns = masked(record, family_tokenizer(family, False))
        assert [(s.token, s.loss_mask) for s in by_turns] == [
            (s.token, s.loss_mask) for s in masked(record, family_tokenizer(family, True))
        ]
        assert_seen(by_turns, record, family, False, False)
        for sample in by_turns:
            assert set(sample.loss_mask) == {0, 1}
            shown = marked(sample, family_tokenizer(family, False))
            assert len(re.findall("⟦", shown)) <= 2
            assert texts[3].strip() in shown[shown.rfind("⟦") :] or len(by_turns) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_text_and_of_every_answer_is_trained_at_each_depth(family: str) -> None:
    """Else a head never drafts it, and each answer costs a pass that drafts in vain."""
    tokenizer = family_tokenizer(family, False)
    (text,) = masked(Record("a", "", [], "It is so, and it stays so."), tokenizer)
    assert (text.token[-1], text.loss_mask) == (tokenizer.eos_token_id, [1] * len(text.token))
    (ended,) = masked(Record("b", "", [], f"It is so.{tokenizer.eos_token}"), tokenizer)
    assert ended.token.count(tokenizer.eos_token_id) == 1, "the text's own end is its end"
    for sample in (text, *masked(chat_record(family, "plain"), tokenizer)):
        token, mask = torch.tensor([sample.token]), torch.tensor([sample.loss_mask])
        ends = [i for i, on in enumerate(sample.loss_mask) if on and not any(sample.loss_mask[i + 1 : i + 2])]
        assert all(sample.token[end] in turn_end_tokens(tokenizer) for end in ends)
        for depth in (1, 2):
            trained = rows.valid(torch.zeros_like(token), mask, depth)[0]
            assert ends
            assert all(trained[end - 1 - depth] for end in ends)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tagged", [False, True])
def test_markers_within_texts_move_no_edge(family: str, tagged: bool) -> None:
    """A user who writes an answer of the assistant's, and an assistant who writes a turn of the user's."""
    tokenizer = family_tokenizer(family, tagged)
    shown = marked(masked(chat_record(family, "plain"), tokenizer)[-1], tokenizer)
    header = shown[: shown.rfind("⟦")].rpartition("And now?")[2].replace("<think>\n\n</think>\n\n", "")
    end = shown[shown.rfind("élan.") + 5 :].split("⟧")[0].strip()
    forged, quoted = f"Go.{end}{header} Faked.{end} Yes?", f"Write{end}{header} this."
    messages = [{"role": "user", "content": forged}, {"role": "assistant", "content": quoted}]
    (sample,) = masked(Record("a", "", messages, ""), tokenizer)
    shown = marked(sample, tokenizer)
    assert (shown.count("⟦"), shown.count("⟧")) == (1, 1)
    assert "Faked" in shown[: shown.index("⟦")]
    assert shown[shown.index("⟦") :].split("⟦")[1].strip().startswith(quoted) or family == "gpt_oss"
    assert "this." in shown[shown.index("⟦") : shown.index("⟧")]


@pytest.mark.parametrize("spelling", ["{%-#-%}", "{%  #  %}", "{%- # %}", "{% # -%}"])
def test_every_spelling_of_the_mark_is_seen_but_one_in_a_comment(
    spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = family_tokenizer("gemma", True)
    template = str(tokenizer.chat_template)
    spelled = re.sub(r"\{%- ((?:end)?generation) -%\}", lambda mark: spelling.replace("#", mark[1]), template)
    monkeypatch.setattr(tokenizer, "chat_template", spelled)
    assert spelled.count(spelling.replace("#", "generation")) == 1
    assert golden("gemma", tagged=True) == (GOLDEN / "gemma.txt").read_text(encoding="utf-8")
    tokenizer = family_tokenizer("chatml", False)
    commented = "{# no {% generation %} here #}" + str(tokenizer.chat_template)
    monkeypatch.setattr(tokenizer, "chat_template", commented)
    assert golden("chatml", tagged=False) == (GOLDEN / "chatml.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("family", "wide", "narrow"),
    [
        ("gemma", "{{ ANSWER + '<end_of_turn>' }}", ("", "{{ '<end_of_turn>' }}")),
        ("llama2", "{{ ' ' + ANSWER + ' ' + eos_token }}", ("{{ ' ' }}", "{{ ' ' + eos_token }}")),
    ],
)
def test_marks_around_the_words_alone_train_the_blanks_and_the_end_too(
    family: str, wide: str, narrow: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, answer = family_tokenizer(family, True), "message.content | trim"
    before = "{%- generation -%}" + wide.replace("ANSWER", answer) + "{%- endgeneration -%}"
    after = narrow[0] + "{% generation %}{{ " + answer + " }}{% endgeneration %}" + narrow[1]
    assert before in str(tokenizer.chat_template)
    monkeypatch.setattr(tokenizer, "chat_template", str(tokenizer.chat_template).replace(before, after))
    assert golden(family, tagged=True) == (GOLDEN / f"{family}.txt").read_text(encoding="utf-8")


def test_a_token_is_trained_with_all_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an answer at 3 to 7: neither one that begins before it nor one that ends behind it."""
    edges = [(0, 3), (2, 4), (3, 5), (5, 7), (6, 8), (8, 9)]
    having = [next((i for i, (start, end) in enumerate(edges) if start <= place < end), None) for place in range(10)]
    encoded = MagicMock(ids=[*range(6)], token_to_chars=edges.__getitem__, char_to_token=having.__getitem__)
    encoded.__len__.return_value = len(edges)
    monkeypatch.setattr(masks, "encode_one", lambda *_: encoded)
    monkeypatch.setattr(template, "encode", lambda texts, _: [[9], *([8] for _ in texts[1:])])  # no pieces of the whole
    token, mask = masks._mask("0123456789", [(3, 7)], family_tokenizer("chatml", False))
    assert (token, mask) == ([*range(6)], [0, 0, 1, 1, 0, 0])
