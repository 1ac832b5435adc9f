"""Parsing of raw records of many shapes into one type: a chat, a plain text, or a document with given tokens."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from data.text.files import Raw
from data.text.parts import REASONS, BadSampleError, LeftOutError, Messages, first
from data.text.shapes import ANSWERS, QUESTIONS, SHAPES, TURNS, Chat, chat_of
from data.text.streams import at

IDS = (
    "id", "question_id", "task_id", "conversation_id", "prompt_id", "custom_id",
    "uid", "unique_id", "instance_id", "_id", "ID", "key", "request_id", "requestId",
)  # fmt: skip
KNOWN = (
    '{"messages": [{role, content}]}, {"conversations": [{role, content} or {from, value}]}, {"prompt", "answer"}, '
    '{"question", "answer"}, {"instruction", "input", "output"}, {"turns" or "prompt": [...]}, {"text"}, tokens: '
    '{"input_ids", "loss_mask"} or {"prompt_token_ids", "token_ids"}, and logs of requests with their replies: '
    + ", ".join(dict.fromkeys(name for name, request, reply in SHAPES if request and reply))
)
SHOWN = 300  # maximum characters of a record in an error
SUMMARIZE = "Summarize: {}"  # Spec-Bench's prompt for CNN/DailyMail articles
UNFETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench's placeholder for text under another licence
QUIZ = "context question choice_A choice_B choice_C choice_D"
# Published sets: the keys of a set, the keys of its prompt, the key of its answer (empty: none).
SETS = [
    ({*keys.split()}, prompt.split(), answer)
    for keys, prompt, answer in (
        ("problem solution", "problem", "solution"),  # MATH-500, AIME
        ("Problem Solution", "Problem", "Solution"),  # AIME
        ("text code test_list", "text", "code"),  # MBPP
        ("question_content starter_code", "question_content starter_code", ""),  # LiveCodeBench
        ("instance_id problem_statement text", "text", "patch"),  # SWE-bench, with the files to change
        ("instance_id problem_statement", "problem_statement", "patch"),  # SWE-bench
        ("context input answers", "context input", ""),  # LongBench
        (QUIZ, QUIZ, ""),  # LongBench v2
    )
]
# Given tokens. vLLM and SGLang return them if `return_token_ids` is set; SGLang names the answer's `output_ids`.
PROMPT = ("prompt_token_ids", "input_ids")  # the second is the key of SGLang's requests
ANSWER = ("token_ids", "response_token_ids", "output_ids")
MASKED = ("input_ids", "loss_mask")
CHOICES = ("choices", "outputs", "tokens")  # keys of choices: in a reply, in vLLM's RequestOutput, in our own answers


class LoggedAnswer(NamedTuple):
    """The tokens of a prompt and of its answer in a log, and their keys."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class Pretokenized(NamedTuple):
    """A document with given tokens and loss mask."""

    token: list[int]
    mask: list[int]

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each run of tokens to train on."""
        start = 0
        for trained, run in groupby(self.mask):
            end = start + len(list(run))
            if trained:
                yield start, end
            start = end


def exact_tokens(raw: Raw, where: str) -> tuple[Pretokenized, ...]:
    """Return the documents whose tokens a record gives, empty for text; refuse anything but lists of numbers."""
    if all(raw.get(key) is not None for key in MASKED):
        token, mask = (_ids(raw, key, where) for key in MASKED)
        return (Pretokenized(token, mask),)
    documents: list[Pretokenized] = []
    for prompt, answer in logged_answers(raw, where):
        before = documents[-1] if documents else Pretokenized([], [])
        if before.token and prompt[: len(before.token)] == before.token:  # the next turn of the same text
            documents.pop()
        else:
            before = Pretokenized([], [])
        context = [0] * (len(prompt) - len(before.token))
        documents.append(Pretokenized(prompt + answer, before.mask + context + [1] * len(answer)))
    return tuple(documents)


def logged_answers(raw: Raw, where: str) -> Iterator[LoggedAnswer]:
    """Yield the tokens of each prompt and answer in a log's record or a reply; refuse anything but lists of numbers."""
    reply = reply_in(raw)
    choices = [choice for key in CHOICES if isinstance(reply.get(key), list) for choice in reply[key]]
    for answer in [reply, *(choice for choice in choices if isinstance(choice, dict))]:
        key = next((key for key in ANSWER if answer.get(key) is not None), None)
        holders = [holder for holder in (answer, reply, raw, raw.get("request")) if isinstance(holder, dict) and key]
        asking = next(((holder, name) for holder in holders for name in PROMPT if holder.get(name) is not None), None)
        if key is not None and asking is not None:
            count, answered = at(answer, "meta_info/completion_tokens"), _ids(answer, key, where)
            if type(count) is int and count > 0:
                answered = answered[-count:]  # SGLang's answers may begin with the end of the prompt
            yield LoggedAnswer(_ids(*asking, where), answered)


def reply_in(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reply in a log's record; in batches it is next to the request."""
    reply: Mapping[str, Any] = raw["response"] if isinstance(raw.get("response"), dict) else raw
    return reply["body"] if isinstance(reply.get("body"), dict) else reply


def _ids(holder: Mapping[str, Any], key: str, where: str) -> list[int]:
    value = holder[key]
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"{where}: {key} is no list of token numbers: fix or remove the record")
    return list(value)


class Record(NamedTuple):
    """One document."""

    id: str  # its own id, or its index in the source
    category: str  # its own, or empty
    messages: Messages  # a chat's, with OpenAI's keys and role names; empty for a plain text
    text: str  # a plain text, or a chat's text if the record has it
    tools: tuple[Raw, ...] = ()  # the functions that the assistant may call, as OpenAI has them
    source: str = ""  # the name of its source
    pretokenized: tuple[Pretokenized, ...] = ()  # its given tokens, which replace the text
    shape: str = ""  # the name of the shape it was read as
    model: str = ""  # the name of the model that wrote its last answer, where it is said
    notes: tuple[str, ...] = ()  # its counts
    ended: bool = True  # whether a plain text ends there, and was not cut off
    error: BadSampleError | None = None  # why it cannot be used


def parse(raw: Raw, index: int, path: str) -> Record:
    """Parse one raw record, whose keys determine the shape, or refuse it; without an answer it is a prompt."""
    record = read(raw, index, path)
    if record.error is not None:
        raise ValueError(f"{path}: record {record.id} {record.error.message}") from record.error
    return record


def read(raw: Raw, index: int, path: str) -> Record:
    """Parse one raw record; one of unknown shape, or without text or answer, has an `error`; refuse tokens of text."""
    name = next((label(raw[key]) for key in IDS if raw.get(key) is not None), str(index))
    pretokenized = exact_tokens(raw, f"{path}: record {name}")
    text, error = raw.get("text") or "", None
    try:
        chat = chat_of(raw)
    except BadSampleError as caught:
        chat, error = None, caught
    except (TypeError, KeyError, AttributeError, IndexError, ValueError):
        chat, error = None, _unknown(raw)
    if chat is None and error is None and not pretokenized and ("role" in raw or not isinstance(raw.get("text"), str)):
        error = _unknown(raw)
    if not isinstance(text, str):
        text, error = "", error if chat else _unknown(raw)
    chat = chat or Chat("tokens" if pretokenized else "text", [])
    category = label(raw.get("category") or "")
    whole = chat.messages, text, chat.tools, path, pretokenized
    ended = REASONS.get(str(raw.get("finish_reason")).lower()) != "length"
    fault = None if pretokenized and not isinstance(error, LeftOutError) else error
    return Record(name, category, *whole, chat.shape, chat.model, chat.notes, ended, fault)


def _unknown(raw: Raw) -> BadSampleError:
    shown = json.dumps(raw, ensure_ascii=False, sort_keys=True, default=str)
    shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
    return BadSampleError("of no known shape", f"is of no known shape: {shown} The shapes read are {KNOWN}")


def label(value: Any) -> str:
    """Return an id or a category as text without lone surrogates."""
    return str(value).encode("utf-8", "replace").decode()


def to_known_shape(raw: Raw, index: int, path: str) -> Raw:
    """Convert a published set's record to a shape that `parse` reads; return other records unchanged.

    CNN/DM has article and highlights, question sets have lists of answers, dialogues without answers have turns. Tokens
    that are not numbers are refused, and a placeholder for a text that must be fetched.
    """
    if exact_tokens(raw, f"{path}: record {index}"):
        return raw
    if isinstance(raw.get("article"), str) and "highlights" in raw:
        return {**raw, "prompt": SUMMARIZE.format(raw["article"])}
    turns = first(raw, TURNS)
    if isinstance(turns, list):
        turns = [turn.get("content") if isinstance(turn, dict) else turn for turn in turns]  # Arena-Hard has dicts
        if all(isinstance(turn, str) for turn in turns):
            if any(turn.startswith(UNFETCHED) for turn in turns):
                raise ValueError(
                    f"{path}: record {raw.get('question_id', index)} holds a placeholder in place of its text: fetch "
                    "the texts with SPEED-Bench's own prepare_data.py first"
                )
            messages = [{"role": "user", "content": turn} for turn in turns]
            return {key: value for key, value in raw.items() if key not in ("turns", "prompt")} | {"messages": messages}
    for keys, prompt_keys, answer in SETS:
        if raw.keys() >= keys and all(isinstance(raw[key], str) for key in prompt_keys):
            names = {key: raw[key] for key in (*IDS, "category") if key in raw}
            prompt = "\n\n".join(raw[key] for key in prompt_keys if raw[key])
            return {**names, "prompt": prompt, "answer": raw.get(answer)}
    if any(isinstance(raw.get(key), str) for key in QUESTIONS):
        return {key: value for key, value in raw.items() if key not in ANSWERS or isinstance(value, str)}
    return raw
