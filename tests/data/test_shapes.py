"""Logs of proxies, tracers, batches and agents: what each becomes, and that every shape tells the same chat."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text.prompts import load_training
from data.text.records import Record, parse, read
from data.text.sources import open_source
from data.text.template import render
from data.text.transcripts import is_wanted, records_in
from tests.data.families import family_tokenizer, masked, trained

LOGS = Path(__file__).parent / "logs"
SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
QUESTION = {"role": "user", "content": "What is a lighthouse for?"}
REPLY = "A lighthouse warns ships of rocks and shows them the way into harbour."
ANSWER = {"role": "assistant", "content": REPLY}
CHAT = [SYSTEM, QUESTION, ANSWER]
BRIEF = {"role": "assistant", "content": "It warns ships of rocks."}


def called(name: str, arguments: dict[str, Any], *ids: str, **fields: Any) -> dict[str, Any]:
    calls = [{"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}} for id_ in ids]
    return {"role": "assistant", "content": "", **fields, "tool_calls": calls}


def returned(content: str, id_: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id_}


# Files, or globs of files, each with its shape and the first record's messages and tools.
GOLDEN = LOGS.parent / "golden"
FILES = [json.loads(line) for line in (GOLDEN / "logs.jsonl").read_text("utf-8").splitlines()]


def records(name: str) -> list[Record]:
    source = open_source(str(LOGS / f"{name}.jsonl"), "")
    return [read(raw, index, "f") for index, raw in enumerate(source)]


@pytest.mark.parametrize("file", FILES, ids=[file["name"] for file in FILES])
def test_a_log_is_the_chat_that_its_server_saw_and_wrote(file: dict[str, Any]) -> None:
    name, messages = file["name"], file["messages"]
    first, *others = records(name)
    assert (first.error, first.shape, first.messages) == (None, file["shape"], messages)
    assert [tool["function"] for tool in first.tools] == file["tools"]
    answered = [message for message in messages if message["role"] == "assistant" and message.get("weight") != 0]
    roles = [message["role"] for message in messages]
    for other in others:
        seen = [message["role"] for message in other.messages]
        assert (other.error, seen == roles or seen[-len(roles) :] == roles[1:]) == (None, True)
    # gpt-oss's own template refuses a call that has both a text and a thought.
    families = ("qwen3", "llama3") if name == "anthropic_tools" else ("qwen3", "llama3", "gpt_oss")
    for family in families if answered else ():
        tokenizer = family_tokenizer(family, False)
        samples = masked(first, tokenizer)
        prompt = render(messages[: messages.index(answered[0])], tokenizer, True, first.tools)
        assert str(tokenizer.decode(samples[0].token)).startswith(prompt)
        text = "".join(text for sample in samples for text in trained(sample, tokenizer))
        for message in answered:
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]  # Llama's writes no text then
            assert all(words in text for words in calls or [message["content"]])
        context = [m["content"] for m in messages if m["role"] in ("user", "system") or m.get("weight") == 0]
        assert not any(words in text for words in [*context, "README.md"])


VARIANTS = [json.loads(line) for line in (GOLDEN / "shapes.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", VARIANTS, ids=[case["name"] for case in VARIANTS])
def test_a_shape_is_read_as_other_exporters_write_it(case: dict[str, Any]) -> None:
    lines = case["raw"] if isinstance(case["raw"], list) else [case["raw"]]
    record = [read(raw, 0, "f") for raw in records_in(lines)][-1]
    if case["messages"] is None:
        assert (record.error and record.error.cause) == case["error"]
        return
    assert (record.error, record.messages, list(record.notes)) == (None, case["messages"], case["notes"])
    assert not case["tools"] or record.tools[0]["function"]["name"] == "look"
    assert "JsonSchema" not in str(record.tools)


def test_what_a_log_says_in_place_of_an_answer_is_left_out_and_counted(
    chat: PreTrainedTokenizerFast, config: Callable[..., DataConfig]
) -> None:
    causes = [record.error.cause if record.error else "" for record in records("failures*")]
    assert sorted(causes) == ["a refusal"] * 4 + ["an error in place of an answer"] * 8
    both = [str(LOGS / "failures.jsonl"), str(LOGS / "responses_pair.jsonl")]
    counts = load_training(config(both, on_bad="fail"), chat, 0).counts
    assert +counts.chats == {
        "left out, an error in place of an answer": 7, "left out, a refusal": 4,
        "whose reasoning the record does not hold": 2,
        "answered by demo, which is not toy by name: answers=FILE writes the target's own": 2,
    }  # fmt: skip
    assert counts.shapes == {"unused": 11, "request and response": 2}


CLIENT = "with lines of its client, which are left out"


def test_a_transcript_is_every_branch_with_every_result_behind_its_call() -> None:
    first, second = records("claude_code_branches")
    turn = called("look", {"at": "a"}, "t1", "t2", reasoning_content="Two calls.")
    turn["tool_calls"][1]["function"] = {"name": "look", "arguments": {"at": "b"}}
    ends = [[{"role": "user", "content": f"{asked}?"}, {"role": "assistant", "content": f"{said}."}]
            for asked, said in (("Really", "Yes"), ("Sure", "Quite"))]  # fmt: skip
    results = [returned("8", "t1"), returned("9", "t2")]
    assert first.messages == [QUESTION, turn, *results, ANSWER, *ends[0]]
    context = [{**message, "weight": 0} for message in (turn, ANSWER)]
    assert second.messages == [QUESTION, context[0], *results, context[1], *ends[1]]
    assert (first.notes, second.notes) == ((CLIENT,), ("with turns of another branch as context",))


@pytest.mark.parametrize("backwards", [False, True])
def test_a_transcripts_turns_are_trained_once(backwards: bool) -> None:
    """Subagents, a summary in place of earlier turns, a turn that was asked again, and calls with results between."""

    def line(uuid: str, parent: str | None, said: Any, **fields: Any) -> dict[str, Any]:
        role = "assistant" if uuid[0] == "a" else "user"
        message = {"role": role, "content": said} | ({"id": fields.pop("id", uuid)} if role == "assistant" else {})
        return {"type": role, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **fields}

    def call(id_: str) -> list[dict[str, Any]]:
        return [{"type": "tool_use", "id": id_, "name": "look", "input": {}}]

    def result(id_: str) -> list[dict[str, Any]]:
        return [{"type": "tool_result", "tool_use_id": id_, "content": id_}]

    lines = [
        {"type": "summary", "summary": "Ships", "leafUuid": "a2"}, line("u0", None, "Why?"),
        line("a0", "u0", call("t0"), id="m"), line("r0", "a0", result("t0")),
        line("a1", "r0", call("t1"), id="m"), line("r1", "a1", result("t1")), line("a2", "r1", "So."),
        line("u1", "r1", "Again."), line("a3", "u1", "Thus."),
        line("u2", "a0", "Task.", isSidechain=True), line("a4", "u2", "Done.", isSidechain=True),
        line("u3", None, "Earlier: ships.", isCompactSummary=True), line("a5", "u3", "Go on."),
    ]  # fmt: skip
    chats = [read(raw, 0, "f") for raw in records_in(lines[::-1] if backwards else lines)]
    said = {tuple((m["content"], len(m.get("tool_calls", ()))) for m in chat.messages) for chat in chats}
    start = ("Why?", 0), ("", 2), ("t0", 0), ("t1", 0)
    assert said == {(*start, ("So.", 0)), (*start, ("Again.", 0), ("Thus.", 0)), (("Task.", 0), ("Done.", 0)),
                    (("Earlier: ships.", 0), ("Go on.", 0))}  # fmt: skip
    answers = [m for chat in chats for m in chat.messages if m["role"] == "assistant" and m.get("weight") != 0]
    assert sorted(answer["content"] for answer in answers) == ["", "Done.", "Go on.", "So.", "Thus."]
    assert sorted(note for chat in chats for note in chat.notes) == [
        "behind a summary of earlier turns", "of a subagent", CLIENT, "with turns of another branch as context",
    ]  # fmt: skip


def test_an_answer_whose_calls_the_template_leaves_out_does_not_end() -> None:
    tokenizer = family_tokenizer("chatml", False)
    for name, texts in (("anthropic_toolonly", []), ("anthropic_tools", ["I look it up."])):
        first = records(name)[0]
        answer = first.messages[-1]["content"]
        (sample,) = masked(first, tokenizer)
        assert trained(sample, tokenizer) == [*texts, f"{answer}<|im_end|>"]
    (sample,) = masked(parse({"messages": [QUESTION, called("look", {}, "t", content="I look.")]}, 0, "f"), tokenizer)
    assert trained(sample, tokenizer) == ["I look."]
    with pytest.raises(ValueError, match="the chat template writes nothing of its answer"):
        masked(parse({"messages": [QUESTION, called("look", {}, "t")]}, 0, "f"), tokenizer)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "a part of type file"),
        ({"input": [{"type": "web_search_call", "id": "w"}], "output": "so"}, "a part of type web_search_call"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content":
          [{"type": "image", "source": {}}]}]}]}, "more than text .image"),
        ({"messages": [QUESTION, {"role": "assistant", "audio": {"data": "x"}}]}, "more than text .audio"),
        ({"request": {"messages": [QUESTION]}}, "nearly of the shape request and response, but has no response"),
        ({"custom_id": "a", "response": {"body": {}}}, "nearly of the shape OpenAI Batch, but has no body"),
        ({"request": {"messages": [QUESTION, BRIEF]}, "response": "so"}, "continues one that the request begins"),
        ({"prompt": "why", "choices": [{"text": "so", "finish_reason": "stop"}]}, "no known shape"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(raw: dict[str, Any], message: str) -> None:
    if "prompt" in raw:
        raw = {"request": {"prompt": "why"}, "response": {"choices": raw["choices"]}}
    with pytest.raises(ValueError, match=message):
        parse(raw, 0, "f")


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ({"model": "a"}, [0, 1]),
        ({"model": ["a", "b"], "status": 200}, [0, 2]),
        ({"meta.user": "x"}, [1]),
        ({"time": [">=2026-11-02", "<2026-11-04"]}, [1, 2]),
        ({"status": "<400"}, [0, 2]),
        ({"model": "!=a"}, [2]),
    ],
)
def test_records_are_selected_by_their_fields(where: dict[str, Any], selected: list[int]) -> None:
    raws = [{"model": "a", "status": 200, "time": "2026-11-01"},
            {"model": "a", "status": 429, "time": "2026-11-02", "meta": {"user": "x"}},
            {"model": "b", "status": 200, "time": "2026-11-03"}]  # fmt: skip
    assert [index for index, raw in enumerate(raws) if is_wanted(raw, where)] == selected


def test_selected_records_are_held_out_and_the_others_counted(
    chat: PreTrainedTokenizerFast, config: Callable[..., DataConfig], write: Callable[..., str]
) -> None:
    path = write(*({"id": i, "prompt": f"why {i}", "answer": "so", "by": "ab"[i % 2]} for i in range(10)))
    data = load_training(config(path, where={"by": "a"}, held_out=2), chat, 9)
    assert [prompt.id for prompt in data.held_out] == ["6", "8"]
    assert ([sample.id for sample in data.samples], data.counts.chats["left out by data.where"]) == (["0", "2", "4"], 5)


def test_data_that_loses_more_than_a_fifth_ends(
    chat: PreTrainedTokenizerFast, config: Callable[..., DataConfig], write: Callable[..., str]
) -> None:
    good, bad = [{"prompt": f"why {i}", "answer": "so"} for i in range(8)], {"prompt": "why"}
    assert load_training(config(write(*good, bad, {**bad, "id": 1}), on_bad="drop"), chat, 0).counts.samples == 8
    with pytest.raises(ValueError, match=r"3 of 11 records cannot be used \(3 dropped, no answer\): more than a fifth"):
        load_training(config(write(*good, *({**bad, "prompt": str(i)} for i in range(3))), on_bad="drop"), chat, 0)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "chatml", "gpt_oss"])
def test_an_answer_that_was_cut_off_is_trained_without_an_end(family: str) -> None:
    tokenizer = family_tokenizer(family, False)
    choice = {"message": {"role": "assistant", "content": "It warns"}, "finish_reason": "length"}
    for reply in ({"choices": [choice]}, {"role": "assistant", "content": "It warns", "stop_reason": "max_tokens"}):
        (sample,) = masked(parse({"request": {"messages": [QUESTION]}, "response": reply}, 0, "f"), tokenizer)
        assert trained(sample, tokenizer)[-1].endswith("It warns")
    (text,) = masked(parse({"text": "It warns", "finish_reason": "length"}, 0, "f"), tokenizer)
    assert trained(text, tokenizer)[0].endswith("It warns")


@pytest.mark.parametrize(("family", "holds"), [("chatml", True), ("gemma", False)])
def test_a_greeting_is_context_where_the_template_takes_it(family: str, holds: bool) -> None:
    tokenizer = family_tokenizer(family, False)
    record = parse({"messages": [{"role": "assistant", "content": "Good day."}, QUESTION, ANSWER]}, 0, "f")
    (sample,) = masked(record, tokenizer)
    assert ("Good day." in str(tokenizer.decode(sample.token))) is holds
    assert "Good day." not in "".join(trained(sample, tokenizer))


def parts_of(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def gemini_of(turn: dict[str, Any]) -> dict[str, Any]:
    return {"role": {"assistant": "model"}.get(turn["role"], "user"), "parts": [{"text": turn["content"]}]}


def written(system: str, turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield records of a chat, in the shapes whose reply is apart from the request and in those where it is not."""
    whole, reply = [{"role": "system", "content": system}, *turns], turns[-1]
    blocks = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    converse = [{**turn, "content": [{"text": turn["content"]}]} for turn in turns]
    request, completion = {"messages": whole[:-1]}, {"choices": [{"message": reply, "finish_reason": "stop"}]}
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply["content"]}]}]
    yield {"messages": whole}
    yield {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in turns], "system": system}
    yield {**request, **completion}
    yield {"prompt": whole[:-1], "completion": [reply]}
    yield {"custom_id": "a", "body": request, "response": {"status_code": 200, "body": completion}, "error": None}
    yield {"request": {"instructions": system, "input": turns[:-1]}, "response": {"output": output}}
    yield {"request": {"system": system, "messages": blocks[:-1]}, "response": {**blocks[-1], "stop_reason": None}}
    yield {"input": {"inputBodyJson": {"system": [{"text": system}], "messages": converse[:-1]}},
           "output": {"outputBodyJson": {"output": {"message": converse[-1]}, "stopReason": "end_turn"}}}  # fmt: skip
    yield {"request": {"systemInstruction": {"parts": [{"text": system}]}, "contents": [*map(gemini_of, turns[:-1])]},
           "response": {"candidates": [{"content": gemini_of(reply), "finishReason": "STOP"}]}}  # fmt: skip
    for names in (("request_body", "response_body"), ("inputs", "outputs"), ("proxy_server_request", "response")):
        yield dict(zip(names, (request, completion), strict=True))
    yield {"input": whole[:-1], "output": reply, "type": "GENERATION"}
    spans = {"gen_ai.input.messages": [parts_of(**turn) for turn in turns[:-1]],
             "gen_ai.output.messages": [parts_of(**reply)],
             "gen_ai.system_instructions": [{"type": "text", "content": system}]}  # fmt: skip
    yield {"attributes": spans}
    texts = {name: {"stringValue": json.dumps(value)} for name, value in spans.items()}
    span = {"attributes": [{"key": name, "value": value} for name, value in texts.items()]}
    yield {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


TEXTS = st.text(min_size=1).filter(lambda text: text.strip())


@settings(max_examples=60, deadline=None)
@given(system=TEXTS, said=st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: [*texts, *texts]))
def test_a_chat_is_the_same_in_every_shape(system: str, said: list[str]) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    expected = [{"role": "system", "content": system}, *turns]
    for raw in written(system, turns):
        (record,) = [read(found, 0, "f") for found in records_in([json.loads(json.dumps(raw))])]
        assert (record.error, record.messages) == (None, expected), raw


LINES = [json.loads(line) for file in sorted(LOGS.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()]
LINES += [case["raw"] for case in VARIANTS if isinstance(case["raw"], dict)]
VALUES = [None, 5, -1.5, True, "x", "", [], {}, [5], ["x"], {"a": 1}, [[]], [{}], "[1]"]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_broken_record_is_of_no_known_shape_or_read(data: st.DataObject) -> None:
    raw = json.loads(json.dumps(data.draw(st.sampled_from(LINES))))
    holder: Any = raw
    while True:
        key = data.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if not (isinstance(holder[key], dict | list) and holder[key]) or data.draw(st.integers(0, 3)) == 0:
            break
        holder = holder[key]
    holder[key] = data.draw(st.sampled_from(VALUES))
    for found in records_in([raw]):
        record = read(found, 0, "f")
        assert record.error is not None or all(isinstance(message["content"], str) for message in record.messages)
        assert all(message["role"] for message in record.messages)
