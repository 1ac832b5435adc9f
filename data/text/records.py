"""Parsing of raw records, in all shapes that users and published prompt sets have, into one: a chat, or a text."""

import json
import re
from typing import Any, NamedTuple

from data.text.exact import Pretokenized, exact_tokens
from data.text.files import filled
from heads.common.untrusted import parse_json

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function", "tool"), "tool"),
}
QUESTIONS = ("prompt", "question", "instruction")
ANSWERS = ("answer", "output", "response", "completion")
REASONING = ("reasoning_content", "thinking", "reasoning")  # DeepSeek, Qwen and most servers; gpt-oss; newer servers
GIVEN = ("arguments", "parameters")  # of a call and of a function's definition: null is a value in them
IDS = (
    *("id", "question_id", "task_id", "conversation_id", "prompt_id", "custom_id"),
    *("uid", "unique_id", "instance_id", "_id", "ID", "key", "request_id"),
)
SHAPES = (
    '{"messages": [{role, content}]}, {"conversations": [{role, content} or {from, value}]}, {"prompt", "answer"}, '
    '{"question", "answer"}, {"instruction", "input", "output"}, {"turns" or "prompt": [...]}, '
    'an OpenAI batch line {"custom_id", "body": {"messages"}}, {"text"}, and tokens: {"input_ids", "loss_mask"} or '
    '{"prompt_token_ids", "token_ids"}'
)
MEDIA = re.compile(r"(input_)?(image|video|audio)s?(_url)?")  # keys and types of what is no text
SHOWN = 300  # characters of a record in an error
SUMMARIZE = "Summarize: {}"  # Spec-Bench's prompt for CNN/DM's articles
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for text under others' licences


class Shape(NamedTuple):
    """The keys that identify a set, those whose texts make up the prompt, in order, and the answer's key."""

    keys: tuple[str, ...]
    prompt: tuple[str, ...]
    answer: str = ""


CHOICES = tuple(f"choice_{letter}" for letter in "ABCD")
SETS = (
    Shape(("problem", "solution"), ("problem",), "solution"),  # MATH-500, AIME
    Shape(("Problem", "Solution"), ("Problem",), "Solution"),  # AIME
    Shape(("text", "code", "test_list"), ("text",), "code"),  # MBPP
    Shape(("question_content", "starter_code"), ("question_content", "starter_code")),  # LiveCodeBench
    Shape(("instance_id", "problem_statement", "text"), ("text",), "patch"),  # SWE-bench with the files to change
    Shape(("instance_id", "problem_statement"), ("problem_statement",), "patch"),  # SWE-bench
    Shape(("context", "input", "answers"), ("context", "input")),  # LongBench
    Shape(("context", "question", *CHOICES), ("context", "question", *CHOICES)),  # LongBench v2
)


class Record(NamedTuple):
    """One document."""

    id: str  # its own, or its index in its source
    category: str  # its own, or empty
    messages: list[Message]  # a chat's, with OpenAI's keys and role names; empty for a plain text
    text: str  # a plain text's; of a chat, the same as one text where the record has it
    tools: tuple[dict[str, Any], ...] = ()  # the functions that the assistant may call, as OpenAI has them
    source: str = ""  # the name of its source
    pretokenized: tuple[Pretokenized, ...] = ()  # its tokens, where it gives them: they then count, and not the text


def parse(raw: dict[str, Any], index: int, path: str) -> Record:
    """Parse one raw record, whose shape is known by its keys.

    A chat starts at its first user message (system messages before it stay): an assistant's message before that
    answers nothing. Records without an answer are chats of one user message: prompts.

    Raises:
        ValueError: the shape is unknown; the record is shown, cut to a readable length. Or its tokens are no numbers.
    """
    name = next((label(raw[key]) for key in IDS if raw.get(key) is not None), str(index))
    body = raw["body"] if isinstance(raw.get("body"), dict) else raw
    messages, text, tools = _messages(body), body.get("text") or "", _tools(body.get("tools"))
    pretokenized = exact_tokens(raw, f"{path}: record {name}")
    worded = messages is not None or isinstance(body.get("text"), str) or pretokenized
    if not worded or tools is None or not isinstance(text, str):
        shown = json.dumps(raw, ensure_ascii=False, sort_keys=True, default=str)
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
        raise ValueError(f"{path}: record {name} is of no known shape: {shown} The shapes read are {SHAPES}")
    chat, category = _with_media(messages or [], body), label(raw.get("category") or "")
    return Record(name, category, chat, text, tools, path, pretokenized)


def label(value: Any) -> str:
    """Return an id or a category as text that can be written: half a surrogate pair cannot."""
    return str(value).encode("utf-8", "replace").decode()


def content_text(message: Message) -> str:
    """Return a message's text; of content in parts, the text parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(item.get("text") or "" for item in content)


def media_in(messages: list[Message]) -> str:
    """Return what a chat calls the first thing in it that is no text, such as image_url; empty for none."""
    items = (item for message in messages if isinstance(message.get("content"), list) for item in message["content"])
    return next((name for item in items for name in (str(item.get("type")), *item) if MEDIA.fullmatch(name)), "")


def _with_media(messages: list[Message], raw: dict[str, Any]) -> list[Message]:
    """Return the messages, the first one with what the record holds beside them that is no text."""
    name = next((key for key in raw if MEDIA.fullmatch(key) and raw[key]), None)
    if name is None or not messages:
        return messages
    text = {"type": "text", "text": content_text(messages[0])}
    return [{**messages[0], "content": [text, {"type": name}]}, *messages[1:]]


def parsed(value: Any) -> Any:
    """Return the value of a JSON string; anything else, or one nested too deeply, as it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _messages(raw: dict[str, Any]) -> list[Message] | None:
    """Return a chat's messages, None where the record is no chat in a known shape."""
    instruction = raw.get("system") if isinstance(raw.get("system"), str) else ""
    system = [{"role": "system", "content": instruction}] if instruction else []
    for key in ("messages", "conversations"):
        if raw.get(key):
            chat = raw[key]
            if not (isinstance(chat, list) and all(_is_message(message) for message in chat)):
                return None
            given = [_message(message) for message in chat]
            messages = given if given[0]["role"] == "system" else system + given
            first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
            return [m for m in messages[:first] if m["role"] != "assistant"] + messages[first:]
    turns = raw.get("turns") or raw.get("prompt")
    if turns and isinstance(turns, list) and isinstance(turns[0], str):
        return [{"role": "user", "content": turns[0]}]
    question = next((key for key in QUESTIONS if isinstance(raw.get(key), str)), None)
    answer = next((raw[key] for key in ANSWERS if raw.get(key) is not None), None)
    if question is None or not isinstance(answer, str | None):
        return None
    prompt = raw[question]
    if question == "instruction" and (raw.get("input") or raw.get("context")):
        prompt = f"{prompt}\n\n{raw.get('input') or raw['context']}"
    answers = [] if answer is None else [{"role": "assistant", "content": answer}]
    return [*system, {"role": "user", "content": prompt}, *answers]


def _is_message(message: Any) -> bool:
    """Whether this is a message, with its role, content and tool calls of the types that are read."""
    if not isinstance(message, dict) or not isinstance(message.get("role") or message.get("from"), str):
        return False
    content = message.get("value") if message.get("content") is None else message["content"]
    if isinstance(content, list):
        right = all(isinstance(item, dict) and isinstance(item.get("text"), str | None) for item in content)
    else:
        right = isinstance(content, str | None)
    calls = parsed(message.get("tool_calls")) or []
    named = isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    return right and named and all(isinstance(call.get("function") or {}, dict) for call in calls)


def _message(message: Message) -> Message:
    """Give a message OpenAI's keys and roles, without empty fields: templates look for them."""
    role = message.get("role") or message.get("from") or ""
    fields = filled({key: value for key, value in message.items() if key not in ("from", "value")}, GIVEN)
    result = {**fields, "role": ROLES.get(role, role), "content": fields.get("content", message.get("value") or "")}
    value = parsed(result["content"]) if role == "function_call" else []
    calls = value if isinstance(value, list) else [value]
    if calls and all(isinstance(call, dict) and "name" in call for call in calls):
        result |= {"content": "", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    elif "tool_calls" in result:
        result["tool_calls"] = filled(parsed(result["tool_calls"]), GIVEN)
    for call in result.get("tool_calls") or []:
        function = call.get("function") or {}
        if "arguments" in function:  # OpenAI has them as a string of JSON, chat templates as its value
            function["arguments"] = parsed(function["arguments"])
    return result


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    """Return definitions in OpenAI's shape, which endpoints and many templates expect; ShareGPT has the functions."""
    tools = parsed(value or [])
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return None
    given = [filled(tool, GIVEN) for tool in tools]
    return tuple(
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if "name" in tool and "function" not in tool
        else tool
        for tool in given
    )


def readable(raw: dict[str, Any], index: int, path: str) -> dict[str, Any]:
    """Return a record of a published set in a shape that `parse` reads, and any other as it is.

    CNN/DM has an article and its highlights, question sets have lists of answers, dialogues without answers have turns.

    Raises:
        ValueError: it holds a placeholder for a text that must be fetched first, or tokens that are no numbers.
    """
    if exact_tokens(raw, f"{path}: record {index}"):
        return raw
    if isinstance(raw.get("article"), str) and "highlights" in raw:
        return {**raw, "prompt": SUMMARIZE.format(raw["article"])}
    turns = raw.get("turns") or raw.get("prompt")
    if isinstance(turns, list):
        turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]  # a dict in Arena-Hard
        if all(isinstance(turn, str) for turn in turns):
            if any(turn.startswith(UNFETCHED) for turn in turns):
                raise ValueError(
                    f"{path}: record {raw.get('question_id', index)} holds a placeholder in place of its text: fetch "
                    "the texts with SPEED-Bench's own prepare_data.py first"
                )
            messages = [{"role": "user", "content": turn} for turn in turns]
            return {key: value for key, value in raw.items() if key not in ("turns", "prompt")} | {"messages": messages}
    for shape in SETS:
        if raw.keys() >= {*shape.keys} and all(isinstance(raw[key], str) for key in shape.prompt):
            names = {key: raw[key] for key in (*IDS, "category") if key in raw}
            prompt = "\n\n".join(raw[key] for key in shape.prompt if raw[key])
            return {**names, "prompt": prompt, "answer": raw.get(shape.answer)}
    if any(isinstance(raw.get(key), str) for key in QUESTIONS):
        return {key: value for key, value in raw.items() if key not in ANSWERS or isinstance(value, str)}
    return raw
