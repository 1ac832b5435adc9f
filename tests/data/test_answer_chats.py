from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from data.answers.chats import CAUSES, Outcome, Reply, round_trips, start_chat, turns_of
from data.text.masks import split_reasoning
from data.text.parts import Message
from data.text.prompts import prompt_of
from data.text.records import Record, parse
from tests.data.answering import LENGTH, chat, settings, words
from tests.data.chatml import Tokens
from tests.refusals import refuses

CONTEXT = 96


def said(*roles: str) -> list[Message]:
    return [{"role": role, "content": f"w{i}"} for i, role in enumerate(roles)]


def talk(record: Record, tokenizer: Any = None, **changed: Any) -> Any:
    return start_chat(record, tokenizer or words(), settings(**changed), CONTEXT)


def tell(record: Record, *replies: Reply, **changed: Any) -> Outcome:
    made = talk(record, **changed)
    for reply in replies:
        assert made.ask() is not None
        made.take(reply)
    assert made.ask() is None
    return made.outcome()


@pytest.mark.parametrize(
    ("roles", "turns"),
    [
        ("user", [[0]]),
        ("user assistant user", [[0], [2]]),
        ("system user assistant user assistant", [[0, 1], [3]]),
        ("user assistant tool assistant user assistant", [[0], [4]]),
        ("user user assistant system user", [[0, 1], [3, 4]]),
        ("user assistant system", [[0]]),
        ("assistant system", []),
    ],
)
def test_turns_are_what_is_said_before_each_answer(roles: str, turns: list[list[int]]) -> None:
    messages = said(*roles.split())
    assert turns_of(messages) == [[messages[i] for i in turn] for turn in turns]


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("w1 w2", False, ("", "w1 w2")),
        ("w1 w2", True, ("", "w1 w2")),
        ("<think>\nw1\n</think>\n\nw2", False, ("w1", "w2")),
        ("w1 </think> w2", True, ("w1 ", " w2")),
        ("w1 </think> w2", False, ("", "w1 </think> w2")),  # a quotation
        ("<think>\n\n</think>\n\nw2", False, ("", "w2")),
        ("<think> w1 w2", False, (" w1 w2", "")),  # it never ended
    ],
)
def test_reasoning_is_what_stands_before_the_blocks_end(text: str, opened: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(text, opened) == parts


def test_the_template_gets_tools_system_prompts_and_switches() -> None:
    record = parse({"id": "a", "messages": said("system", "user"), "tools": [{"name": "w9"}]}, 0, "f")
    made = talk(record, thinking=True)
    assert words().decode(made.ask()) == (
        "<|system|> w1 <|end|> <|system|> w9 <|end|> <|system|> w0 <|end|> <|user|> w1 <|end|> <|assistant|>"
    )
    assert words().decode(prompt_of(record, words()).token) == words().decode(talk(record).ask())
    assert words().decode(talk(chat("a", "w5")).ask()) == "<|user|> w5 <|end|> <|assistant|>"
    switched = talk(chat("a", "w5"), thinking=False, template_args={"enable_thinking": True})
    assert words().decode(switched.ask()).startswith("<|system|> w1")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"thinking": True}, r"thinking: the chat template of toy reads no enable_thinking; leave it out, or name"),
        ({"template_args": {"effort": 1}}, r"template_args.effort: the chat template of toy reads no effort"),
        ({"template_args": {"messages": []}}, r"template_args.messages: .* reads no messages"),
    ],
)
def test_a_switch_that_the_template_does_not_have_is_refused(
    changed: dict[str, Any], message: str, chat: PreTrainedTokenizerFast
) -> None:
    refuses(message, settings(**changed).options, chat)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (Reply("w4", False), "unfinished"),
        (Reply(" ", True), "empty"),
        (Reply("<think> w1", True), "empty"),
        (Reply("w1 other", True), "round_trip"),
        (Reply("w1 <|user|> w2", True), "round_trip"),
        (Reply("w1", True, reasoning="<|end|>"), "round_trip"),
        (Reply("w\ud83d", True), "round_trip"),
        (Reply("", True, tool_calls=({"function": {"name": "f", "arguments": {"x": "\ud83d"}}},)), "round_trip"),
        (Reply("", True, tool_calls=({"function": {"name": "f", "arguments": {"x": "<|end|>"}}},)), "round_trip"),
    ],
)
def test_a_bad_answer_ends_the_chat_before_it(reply: Reply, cause: str) -> None:
    alone = tell(chat("a", "w1", "w2"), reply, keep_unfinished=False)
    assert alone == Outcome("a", None, 0, cause)
    later = tell(chat("a", "w1", "w2", "w3"), Reply("w7", True), reply, keep_unfinished=False)
    assert later.chat is not None
    assert [m["content"] for m in later.chat["messages"]] == ["w1", "w7"]
    assert (later.answers, later.cause, later.failed) == (1, cause, False)
    assert cause in CAUSES
    kept = tell(chat("a", "w1", "w2"), Reply("w4", False))
    assert kept.chat is not None
    assert (len(kept.chat["messages"]), kept.cause) == (2, "unfinished")


def test_what_is_cut_off_within_its_reasoning_is_kept_as_reasoning(tokenizer_with: Tokens) -> None:
    opening = tokenizer_with("{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}")
    made = talk(chat("a", "w1"), opening)
    made.ask()
    made.take(Reply("w2 w3", False))
    cut = {"role": "assistant", "content": "", "reasoning_content": "w2 w3", "finish_reason": "length"}
    assert (made.outcome().chat["messages"][1], made.outcome().cause) == (cut, "unfinished")
    made = talk(chat("a", "w1"), opening)
    made.ask()
    made.take(Reply("w2\n</think>\n\nw3", False))
    assert made.outcome().chat["messages"][1] == cut | {"content": "w3", "reasoning_content": "w2"}


def test_what_has_no_opening_is_counted(tokenizer_with: Tokens) -> None:
    strict = tokenizer_with("{{ raise_exception('no') if messages[0]['content'] == 'w1' }}{{ messages[0].content }}")
    for raw, tokenizer, cause in (
        ({"messages": chat("a", "w1").messages}, strict, "refused"),
        ({"messages": chat("a", "w\ud83d").messages}, words(), "refused"),
        ({"text": " "}, words(), "no_question"),
        ({"messages": said("assistant")}, words(), "no_question"),
        ({"messages": said("system")}, words(None), "no_question"),
        ({"text": "w\ud83d"}, words(), "refused"),
    ):
        made = talk(parse({"id": "a", **raw}, 0, "f"), tokenizer)
        assert made.ask() is None
        assert made.outcome() == Outcome("a", None, 0, cause)


def test_a_seed_belongs_to_the_chat_and_the_turn() -> None:
    first, other = talk(chat("a", "w1", "w2")), talk(chat("b", "w1"))
    assert first.ask() == other.ask()
    seeds = {first.seed(), other.seed(), talk(chat("a", "w1"), seed=1).seed()}
    assert first.seed() == talk(chat("a", "w9")).seed()
    first.take(Reply("w3", True))
    assert len(seeds | {first.seed()}) == 4
    assert other.seed() == talk(parse({"id": "b", "text": "w1 w2"}, 0, "f")).seed()


def test_an_answer_that_ends_exactly_at_the_context_fits() -> None:
    room = CONTEXT - LENGTH - 3  # three special tokens
    assert talk(chat("a", " ".join(["w1"] * room))).ask() is not None
    assert tell(chat("a", " ".join(["w1"] * (room + 1)))).cause == "context"
    fits, lacks = (parse({"id": "a", "text": "w1 " * 2 * count}, 0, "f") for count in (room + 3, room + 4))
    assert talk(fits).ask() is not None
    assert tell(lacks).cause == "context"


def test_plain_text_behind_a_chat_template_stays_plain(bare: PreTrainedTokenizerFast) -> None:
    assert round_trips("naïve\n  日本 😀", bare)
    record = parse({"id": "a", "text": "w1 w2 w3 w4"}, 0, "f")
    made = talk(record)
    made.ask()
    made.take(Reply("w5", True, token=(5,)))
    assert made.outcome().chat == {"id": "a", "text": "w1 w2 w5"}
    assert made.ask() is None
    made = talk(record, bare)
    made.ask()
    made.take(Reply("é", False, token=tuple(bare("éé")["input_ids"][:-1])))
    assert made.outcome().chat["text"] == made.prompt.text + "é"  # half a character was cut off
