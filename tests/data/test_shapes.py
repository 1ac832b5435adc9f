"""Logs of proxies, tracers, batches and agents: what each becomes, and that every shape tells the same chat."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from data.config import DataConfig
from data.text.parts import BadSampleError, LeftOutError, messages_of
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
METALS = [{"role": "user", "content": "Name two metals that rust slowly."},
          {"role": "assistant", "content": "Copper and zinc both corrode slowly."}]  # fmt: skip
SPIDERS = [{"role": "user", "content": "How many legs do three spiders have?"},
           {"role": "assistant", "content": "Three spiders have twenty-four legs in total."}]  # fmt: skip
THOUGHT = {**ANSWER, "reasoning_content": "Ships need it."}


def called(name: str, arguments: dict[str, Any], *ids: str, **fields: Any) -> dict[str, Any]:
    calls = [{"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}} for id_ in ids]
    return {"role": "assistant", "content": "", **fields, "tool_calls": calls}


def returned(content: str, id_: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id_}


def shell(number: int) -> list[dict[str, Any]]:
    return [called("shell", {"command": ["ls"]}, f"call_{number}"), returned("README.md", f"call_{number}")]


LEGS = {"name": "count_legs", "description": "Count legs",
        "parameters": {"type": "object", "properties": {"animal": {"type": "string"}}}}  # fmt: skip
LOOK = {"name": "look", "description": "Look", "parameters": {"type": "object", "properties": {}}}
LOOKED = called("count_legs", {"animal": "spider"}, "toolu_0", content="I look it up.",
                reasoning_content="I need the tool.")  # fmt: skip
BAD = {"role": "assistant", "content": "Bad answer.", "weight": 0}
# File, or folder's files; its shape; the first record's messages, tools, and the texts in it that are trained.
FILES: list[tuple[str, str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("anthropic_pair", "request and response", CHAT, []),
    ("anthropic_sysblocks", "chat", CHAT, []),
    ("anthropic_toolonly", "chat", [{"role": "system", "content": "Be brief."}, QUESTION,
     called("lookup", {"word": "x"}, "toolu_0"), returned("8", "toolu_0"), BRIEF], []),
    ("anthropic_tools", "chat", [SYSTEM, QUESTION, LOOKED, returned("8", "toolu_0"), ANSWER], [LEGS]),
    ("batch_input", "OpenAI Batch input", CHAT[:2], []),
    ("batch_*", "OpenAI Batch", CHAT, []),
    ("bedrock_converse", "Bedrock invocation log", CHAT, []),
    ("bedrock_invoke", "Bedrock invocation log", CHAT, []),
    ("claude_code", "Claude Code transcript", [QUESTION, ANSWER, *METALS, *SPIDERS], []),
    ("codex_rollout", "Codex transcript",
     [QUESTION, *shell(0), ANSWER, METALS[0], *shell(1), METALS[1], SPIDERS[0], *shell(2), SPIDERS[1]], []),
    ("dpo", "chat and chosen", CHAT[1:], []),
    ("flat_choices", "chat and choices", CHAT[1:], []),
    ("gemini", "request and response", [SYSTEM, QUESTION, THOUGHT], [LOOK]),
    ("helicone", "Helicone", CHAT, []),
    ("langfuse", "chat and output", CHAT, []),
    ("langfuse_forms", "chat and output", CHAT, []),
    ("langsmith_openai", "LangSmith run", CHAT, []),
    ("langsmith_langchain", "LangSmith run", CHAT, []),
    ("litellm_spend", "LiteLLM spend log", CHAT, []),
    ("messages_response", "chat and response", [QUESTION, BRIEF], []),
    ("openai_pair", "request and response", CHAT, []),
    ("openai_weight", "chat", [QUESTION, BAD, {"role": "user", "content": "Try again."}, BRIEF], []),
    ("otel_attributes", "OpenTelemetry gen_ai span", [SYSTEM, QUESTION, THOUGHT], []),
    ("otel_otlp", "OpenTelemetry gen_ai span", CHAT, []),
    ("responses_pair", "request and response", CHAT, []),
    ("streams", "request and response", CHAT, []),
    ("trl_prompt_completion", "chat and completion", CHAT[1:], []),
]  # fmt: skip


def records(name: str) -> list[Record]:
    source = open_source(str(LOGS / f"{name}.jsonl"), "")
    return [read(raw, index, "f") for index, raw in enumerate(source)]


@pytest.mark.parametrize(("name", "shape", "messages", "tools"), FILES, ids=[name for name, *_ in FILES])
def test_a_log_is_the_chat_that_its_server_saw_and_wrote(
    name: str, shape: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    first, *others = records(name)
    assert (first.error, first.shape, first.messages) == (None, shape, messages)
    assert [tool["function"] for tool in first.tools] == tools
    answered = [message for message in messages if message["role"] == "assistant" and message is not BAD]
    for other in others:
        assert other.error is None
        assert [m["role"] for m in other.messages][-len(messages) :] == [m["role"] for m in messages][1:] or (
            [m["role"] for m in other.messages] == [m["role"] for m in messages]
        )
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
        context = [m["content"] for m in messages if m["role"] in ("user", "system") or m is BAD]
        assert not any(words in text for words in [*context, "README.md"])


VARIANTS = [json.loads(line) for line in (LOGS.parent / "golden" / "shapes.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", VARIANTS, ids=[case["name"] for case in VARIANTS])
def test_a_shape_is_read_as_other_exporters_write_it(case: dict[str, Any]) -> None:
    (record,) = [read(raw, 0, "f") for raw in records_in([case["raw"]])]
    if case["messages"] is None:
        assert (record.error and record.error.cause) == case["error"]
        return
    assert (record.error, record.messages, list(record.notes)) == (None, case["messages"], case["notes"])
    assert not case["tools"] or record.tools[0]["function"]["name"] == "look"


def test_what_a_log_says_in_place_of_an_answer_is_left_out_and_counted(
    chat: PreTrainedTokenizerFast, config: Callable[..., DataConfig]
) -> None:
    causes = [record.error.cause if record.error else "" for record in records("failures")]
    assert causes == ["an error in place of an answer"] * 7 + ["a refusal"] * 4
    both = [str(LOGS / "failures.jsonl"), str(LOGS / "responses_pair.jsonl")]
    counts = load_training(config(both, on_bad="fail"), chat, 0).counts
    assert +counts.chats == {
        "left out, an error in place of an answer": 7, "left out, a refusal": 4,
        "whose reasoning the record does not hold": 2,
        "answered by demo, which is not toy by name: answers=FILE writes the target's own": 2,
    }  # fmt: skip
    assert counts.shapes == {"none": 11, "request and response": 2}


def test_a_transcript_is_every_branch_with_every_result_behind_its_call() -> None:
    first, second = records("claude_code_branches")
    turn = called("look", {"at": "a"}, "t1", "t2", reasoning_content="Two calls.")
    turn["tool_calls"][1]["function"] = {"name": "look", "arguments": {"at": "b"}}
    ends = [[{"role": "user", "content": f"{asked}?"}, {"role": "assistant", "content": f"{said}."}]
            for asked, said in (("Sure", "Quite"), ("Really", "Yes"))]  # fmt: skip
    results = [returned("8", "t1"), returned("9", "t2")]
    assert first.messages == [QUESTION, turn, *results, ANSWER, *ends[0]]
    context = [{**message, "weight": 0} for message in (turn, ANSWER)]
    assert second.messages == [QUESTION, context[0], *results, context[1], *ends[1]]
    assert second.notes == (
        "with lines that its client wrote, which are left out", "with turns of another branch as context"
    )  # fmt: skip


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
        "behind a summary of earlier turns", "of a subagent", "with a summary for its client, which is left out",
        "with turns of another branch as context",
    ]  # fmt: skip


def test_an_answer_whose_calls_the_template_leaves_out_does_not_end() -> None:
    tokenizer = family_tokenizer("chatml", False)
    for name, texts in (("anthropic_toolonly", []), ("anthropic_tools", ["I look it up."])):
        first = records(name)[0]
        answer = first.messages[-1]["content"]
        (sample,) = masked(first, tokenizer)
        assert trained(sample, tokenizer) == [*texts, f"{answer}<|im_end|>"]


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


@pytest.mark.parametrize("answer", ['{"error": "x"}', '[1, {"a": 2}]', '{"message": {"role": "x"}}', "data: none"])
def test_an_answer_in_json_is_a_text(answer: str) -> None:
    reply, request = {"role": "assistant", "content": answer}, {"messages": [QUESTION]}
    for raw in (
        {**request, "response": answer},
        {"input": "why", "output": answer},
        {"request": request, "response": reply},
    ):
        assert parse(raw, 0, "f").messages[-1] == reply


@pytest.mark.parametrize(
    ("where", "picked"),
    [
        ({"model": "a"}, [0, 1]),
        ({"model": ["a", "b"], "status": 200}, [0, 2]),
        ({"meta.user": "x"}, [1]),
        ({"time": [">=2026-11-02", "<2026-11-04"]}, [1, 2]),
        ({"status": "<400"}, [0, 2]),
        ({"model": "!=a"}, [2]),
    ],
)
def test_records_are_picked_by_their_fields(where: dict[str, Any], picked: list[int]) -> None:
    raws = [{"model": "a", "status": 200, "time": "2026-11-01"},
            {"model": "a", "status": 429, "time": "2026-11-02", "meta": {"user": "x"}},
            {"model": "b", "status": 200, "time": "2026-11-03"}]  # fmt: skip
    assert [index for index, raw in enumerate(raws) if is_wanted(raw, where)] == picked


def test_picked_records_are_held_out_and_the_others_counted(
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


THINKS = called("look", {"at": "a"}, "t0", content="I look.", reasoning_content="Why?")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": [  # Bedrock's Converse
            {"reasoningContent": {"reasoningText": {"text": "Why?"}}}, {"text": "I look."},
            {"toolUse": {"toolUseId": "t0", "name": "look", "input": {"at": "a"}}}]},
         {"role": "user", "content": [{"toolResult": {"toolUseId": "t0", "content": [{"text": "8"}]}}]}],
        [{"role": "assistant", "parts": [  # OpenTelemetry
            {"type": "reasoning", "content": "Why?"}, {"type": "text", "content": "I look."},
            {"type": "tool_call", "id": "t0", "name": "look", "arguments": {"at": "a"}}]},
         {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t0", "response": "8"}]}],
        [{"role": "assistant", "content": [  # Vercel's AI SDK
            {"type": "reasoning", "text": "Why?"}, {"type": "text", "text": "I look."},
            {"type": "tool-call", "toolCallId": "t0", "toolName": "look", "input": {"at": "a"}}]},
         {"role": "tool", "content": [
             {"type": "tool-result", "toolCallId": "t0", "output": {"type": "text", "value": "8"}}]}],
        [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Why?"}]},  # Responses
         {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
         {"type": "function_call", "id": "fc", "call_id": "t0", "name": "look", "arguments": '{"at": "a"}'},
         {"type": "function_call_output", "call_id": "t0", "output": "8"}],
        [{"lc": 1, "id": ["langchain", "AIMessage"], "kwargs": {  # LangChain
            "content": "I look.", "reasoning_content": "Why?",
            "tool_calls": [{"name": "look", "args": {"at": "a"}, "id": "t0"}]}},
         {"lc": 1, "id": ["langchain", "ToolMessage"], "kwargs": {"content": "8", "tool_call_id": "t0"}}],
        [{"role": "assistant", "content": "I look.", "reasoning_content": "Why?", "tool_calls": [  # OpenAI
            {"type": "function", "id": "t0", "function": {"name": "look", "arguments": '{"at": "a"}'}}]},
         {"role": "tool", "content": "8", "tool_call_id": "t0"}],
    ],
)  # fmt: skip
def test_thoughts_calls_and_results_of_every_sdk_are_openais(messages: list[dict[str, Any]]) -> None:
    assert messages_of(messages) == [THINKS, returned("8", "t0")]


def test_a_streams_thoughts_texts_and_calls_are_joined() -> None:
    call = {"index": 0, "id": "t0", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "Why?"}, {"content": "I "}, {"content": "look."},
        {"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": '"a"}'}}]}, {},
    ]  # fmt: skip
    openai = [
        {"choices": [{"index": 1, "delta": {"content": "Other."}}, {"index": 0, "delta": delta}]} for delta in deltas
    ]
    blocks = [
        ({"type": "thinking", "thinking": ""}, [{"type": "thinking_delta", "thinking": "Why?"}]),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": text} for text in ("I ", "look.")]),
        ({"type": "tool_use", "id": "t0", "name": "look", "input": {}},
         [{"type": "input_json_delta", "partial_json": text} for text in ('{"at": ', '"a"}')]),
    ]  # fmt: skip
    anthropic: list[dict[str, Any]] = [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}}]
    for index, (block, deltas) in enumerate(blocks):
        anthropic += [{"type": "content_block_start", "index": index, "content_block": block}]
        anthropic += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
    for events in (openai, anthropic):
        assert parse({"request": {"messages": [QUESTION]}, "response": events}, 0, "f").messages == [QUESTION, THINKS]


LINES = [json.loads(line) for file in sorted(LOGS.iterdir()) for line in file.read_text(encoding="utf-8").splitlines()]
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


def test_a_refusal_and_a_hidden_thought_are_told_apart_from_text() -> None:
    with pytest.raises(LeftOutError, match="a refusal"):
        messages_of([{"role": "assistant", "content": "", "refusal": "I cannot."}])
    choices = [{"role": "assistant", "parts": [{"type": "text", "content": text}]} for text in "ab"]
    span = {"gen_ai.input.messages": [QUESTION], "gen_ai.output.messages": choices}
    record = parse({"attributes": span}, 0, "f")
    assert record.messages == [QUESTION, {"role": "assistant", "content": "a"}]
    assert record.notes == ("with further choices, which are left out",)
    hidden = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}],
    }
    assert messages_of([hidden]) == [{"role": "assistant", "content": "a", "hidden": True}]
    with pytest.raises(BadSampleError, match="video"):
        messages_of([{"role": "user", "content": [{"type": "video", "video": "x"}]}])
