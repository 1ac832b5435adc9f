from typing import Any

import pytest

from data.text.records import SHOWN, Record, parse
from tests.refusals import refuses

QUESTION = {"role": "user", "content": "why"}
ANSWER = {"role": "assistant", "content": "so"}
NO_CALL = {"role": "user", "content": '{"name": "weather"}'}
SYSTEM = {"role": "system", "content": "be brief"}
SHAREGPT = [{"from": "system", "value": "be brief"}, {"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]


@pytest.mark.parametrize(
    ("raw", "messages", "text"),
    [
        ({"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"conversations": SHAREGPT}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"prompt": "why", "answer": "so", "system": "be brief"}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"question": "why", "answer": "so"}, [QUESTION, ANSWER], ""),
        ({"instruction": "why", "input": "", "output": "so"}, [QUESTION, ANSWER], ""),
        ({"instruction": "why", "input": "x", "output": "so"}, [{"role": "user", "content": "why\n\nx"}, ANSWER], ""),
        ({"prompt": "the first turn", "messages": [QUESTION, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"turns": ["why", "really"]}, [QUESTION], ""),
        ({"prompt": ["why", "really"]}, [QUESTION], ""),
        ({"prompt": "why", "answer": None}, [QUESTION], ""),
        ({"prompt": "why"}, [QUESTION], ""),
        ({"text": "a story", "body": "of it"}, [], "a story"),
        ({"prompt": "why", "answer": "so", "text": "whyso"}, [QUESTION, ANSWER], "whyso"),
        ({"messages": [{**QUESTION, "tool_calls": None}, ANSWER]}, [QUESTION, ANSWER], ""),
        ({"messages": [SYSTEM, ANSWER, QUESTION, ANSWER]}, [SYSTEM, ANSWER, QUESTION, ANSWER], ""),
        ({"messages": [NO_CALL, ANSWER]}, [NO_CALL, ANSWER], ""),
        ({"system": "be brief", "conversations": SHAREGPT[1:]}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"system": "be long", "conversations": SHAREGPT}, [SYSTEM, QUESTION, ANSWER], ""),
        ({"method": "POST", "url": "/v1/chat", "body": {"messages": [QUESTION]}}, [QUESTION], ""),
    ],
)
def test_every_shape_is_recognised(raw: dict[str, Any], messages: list[dict[str, Any]], text: str) -> None:
    assert parse({**raw, "id": 0, "category": "c"}, 7, "f")[:6] == Record("0", "c", messages, text, source="f")[:6]


CALL = {"name": "weather", "arguments": {"town": "Bern"}}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT = {"role": "tool", "content": "rain"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "key",
    ["id", "question_id", "task_id", "conversation_id", "prompt_id", "custom_id", "uid", "unique_id", "instance_id",
     "_id", "ID", "key", "request_id"],
)  # fmt: skip
def test_a_record_has_its_own_name(key: str) -> None:
    assert parse({"prompt": "why", key: "a"}, 7, "f").id == "a"
    assert parse({"prompt": "why", key: None}, 7, "f").id == "7"


DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize("arguments", [{"town": "Bern"}, '{"town": "Bern"}'])
@pytest.mark.parametrize("tools", [[TOOL], '[{"type": "function", "function": {"name": "weather", '
                                           '"parameters": {"type": "object"}}}]'])  # fmt: skip
def test_tool_calls_of_openai_become_what_templates_read(arguments: Any, tools: Any) -> None:
    function = {"name": "weather", "arguments": arguments, "strict": None}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": None, "function": function}],
    }
    record = parse({"messages": [QUESTION, called, RESULT, ANSWER], "tools": tools}, 0, "f")
    assert record.messages == [QUESTION, CALLED, RESULT, ANSWER]
    assert record.tools == (TOOL,)


@pytest.mark.parametrize("returns", ["observation", "function", "tool"])
@pytest.mark.parametrize("answers", ["gpt", "chatgpt", "bing", "bard", "model", "assistant"])
def test_tool_calls_of_sharegpt(answers: str, returns: str) -> None:
    turns = [("human", "why"), ("function_call", '{"name": "weather", "arguments": {"town": "Bern"}}'),
             (returns, "rain"), (answers, "so")]  # fmt: skip
    record = parse({"conversations": [{"from": role, "value": text} for role, text in turns]}, 0, "f")
    assert record.messages == [QUESTION, CALLED, RESULT, ANSWER]


@pytest.mark.parametrize(
    "raw",
    [
        {"rejected": "a", "chosen": "b"},
        {"messages": [{"speaker": "a", "says": "b"}]},
        {"conversations": "a: b"},
        {"question": "a", "answer": ["b"]},
        {"messages": [QUESTION], "tools": "no JSON"},
        {"messages": [{"role": None, "content": "why"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": ["why"]}]},
        {"conversations": [{"from": "human", "value": ["why"]}]},
        {"messages": [{**QUESTION, "tool_calls": ["weather"]}]},
        {"messages": [{**QUESTION, "tool_calls": "weather"}]},
        {"messages": [{**QUESTION, "tool_calls": [{"function": "weather"}]}]},
        {"messages": [QUESTION], "tools": DEEP},
    ],
)
def test_an_unknown_shape_shows_the_record(raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"f: record 3 is of no known shape: \{.* The shapes read are") as caught:
        parse(raw, 3, "f")
    assert next(iter(raw)) in str(caught.value)
    line = refuses("of no known shape", parse, {**raw, "other": "x" * 9999}, 3, "f")
    assert len(line) < 3 * SHOWN
