"""Parsing of raw records of many shapes into one type: a chat, or a plain text."""

import json
from typing import Any, NamedTuple

from data.text.exact import Pretokenized, exact_tokens
from data.text.parts import CUT, BadSampleError, LeftOutError, Message
from data.text.shapes import ANSWERS, QUESTIONS, SHAPES, Chat, chat_of

IDS = (
    *("id", "question_id", "task_id", "conversation_id", "prompt_id", "custom_id"),
    *("uid", "unique_id", "instance_id", "_id", "ID", "key", "request_id", "requestId"),
)
KNOWN = (
    '{"messages": [{role, content}]}, {"conversations": [{role, content} or {from, value}]}, {"prompt", "answer"}, '
    '{"question", "answer"}, {"instruction", "input", "output"}, {"turns" or "prompt": [...]}, {"text"}, tokens: '
    '{"input_ids", "loss_mask"} or {"prompt_token_ids", "token_ids"}, and logs of requests with their replies: '
    + ", ".join(name for name, request, reply in SHAPES if request and reply)
)
SHOWN = 300  # the most characters of a record in an error
SUMMARIZE = "Summarize: {}"  # Spec-Bench's prompt for CNN/DM's articles
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for text under others' licences


CHOICES = tuple(f"choice_{letter}" for letter in "ABCD")
SETS: tuple[
    tuple[tuple[str, ...], tuple[str, ...], str], ...
] = (  # keys of a set, keys of its prompt, the key of its answer
    (("problem", "solution"), ("problem",), "solution"),  # MATH-500, AIME
    (("Problem", "Solution"), ("Problem",), "Solution"),  # AIME
    (("text", "code", "test_list"), ("text",), "code"),  # MBPP
    (("question_content", "starter_code"), ("question_content", "starter_code"), ""),  # LiveCodeBench
    (("instance_id", "problem_statement", "text"), ("text",), "patch"),  # SWE-bench with the files to change
    (("instance_id", "problem_statement"), ("problem_statement",), "patch"),  # SWE-bench
    (("context", "input", "answers"), ("context", "input"), ""),  # LongBench
    (("context", "question", *CHOICES), ("context", "question", *CHOICES), ""),  # LongBench v2
)


class Record(NamedTuple):
    """One document."""

    id: str  # its own id, or its index in the source
    category: str  # its own, or empty
    messages: list[Message]  # a chat's, with OpenAI's keys and role names; empty for a plain text
    text: str  # a plain text, or a chat's text if the record has it
    tools: tuple[dict[str, Any], ...] = ()  # the functions that the assistant may call, as OpenAI has them
    source: str = ""  # the name of its source
    pretokenized: tuple[Pretokenized, ...] = ()  # its given tokens, which replace the text
    shape: str = ""  # the name of the shape it was read as
    model: str = ""  # the name of the model that wrote its last answer, where it is said
    notes: tuple[str, ...] = ()  # its counts
    ended: bool = True  # whether a plain text ends there, and was not cut off
    error: BadSampleError | None = None  # why it cannot be used


def parse(raw: dict[str, Any], index: int, path: str) -> Record:
    """Parse one raw record, whose shape is known by its keys.

    Records without an answer are chats of one user message: prompts.

    Raises:
        ValueError: it cannot be used, as `read` says.
    """
    record = read(raw, index, path)
    if record.error is not None:
        raise ValueError(f"{path}: record {record.id} {record.error.message}") from record.error
    return record


def read(raw: dict[str, Any], index: int, path: str) -> Record:
    """Parse one raw record; a record that cannot be used has an `error`.

    It is of unknown shape (then it is shown, abbreviated), or has no text or no answer.

    Raises:
        ValueError: its tokens are no numbers.
    """
    name = next((label(raw[key]) for key in IDS if raw.get(key) is not None), str(index))
    pretokenized = exact_tokens(raw, f"{path}: record {name}")
    text, error = raw.get("text") or "", None
    try:
        chat = chat_of(raw)
    except BadSampleError as caught:
        chat, error = None, caught
    except (TypeError, KeyError, AttributeError, IndexError, ValueError):
        chat, error = None, _unknown(raw)
    if chat is None and error is None and not (isinstance(raw.get("text"), str) or pretokenized):
        error = _unknown(raw)
    if not isinstance(text, str):
        text, error = "", error if chat else _unknown(raw)
    chat = chat or Chat("tokens" if pretokenized else "text", [])
    category = label(raw.get("category") or "")
    whole = chat.messages, text, chat.tools, path, pretokenized
    ended = str(raw.get("finish_reason")).lower() not in CUT
    fault = None if pretokenized and not isinstance(error, LeftOutError) else error
    return Record(name, category, *whole, chat.shape, chat.model, chat.notes, ended, fault)


def _unknown(raw: dict[str, Any]) -> BadSampleError:
    shown = json.dumps(raw, ensure_ascii=False, sort_keys=True, default=str)
    shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
    return BadSampleError("of no known shape", f"is of no known shape: {shown} The shapes read are {KNOWN}")


def label(value: Any) -> str:
    """Return an id or a category as text without lone surrogates."""
    return str(value).encode("utf-8", "replace").decode()


def readable(raw: dict[str, Any], index: int, path: str) -> dict[str, Any]:
    """Convert a published set's record to a shape that `parse` reads; return others unchanged.

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
    for keys, prompt_keys, answer in SETS:
        if raw.keys() >= {*keys} and all(isinstance(raw[key], str) for key in prompt_keys):
            names = {key: raw[key] for key in (*IDS, "category") if key in raw}
            prompt = "\n\n".join(raw[key] for key in prompt_keys if raw[key])
            return {**names, "prompt": prompt, "answer": raw.get(answer)}
    if any(isinstance(raw.get(key), str) for key in QUESTIONS):
        return {key: value for key, value in raw.items() if key not in ANSWERS or isinstance(value, str)}
    return raw
