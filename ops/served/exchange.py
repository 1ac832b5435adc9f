"""Replies of OpenAI-compatible servers, streamed or whole: pure functions of their events."""

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from data.answers.client import EndpointError
from data.text.prompts import OPENING, Prompt, before_answers
from data.text.records import Record, content_text
from eval.config import Selection
from eval.inputs.workloads import Readable, Workload, gathered

LONGEST = 2**20  # characters of a reply
LEAST = -9999.0  # of a logprob, as vLLM writes that of a token that cannot come
MOST = 2**31  # tokens that a server counts
# A stream came at once if so many tokens or more took less than either after the first: a gateway held it back.
AT_ONCE, AT_ONCE_SHARE, AT_ONCE_S = 16, 0.01, 0.0005  # of the latency, and seconds a token


class Token(NamedTuple):
    """A token of an answer: its bytes, its logprob, and those of the most probable tokens there by their bytes."""

    text: bytes
    logprob: float
    top: dict[bytes, float]


class Reply(NamedTuple):
    """An answer; `error` is the server's, in one line, where there is none.

    `calls` are tool calls, name and arguments as they were sent; `tokens` is empty without logprobs; `steps` are the
    tokens of each event of a stream, as far as it has logprobs. Seconds are from the request on; `ttft_s` is None of a
    reply that came at once, streamed or not.
    """

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    tokens: tuple[Token, ...] = ()
    steps: tuple[int, ...] = ()
    latency_s: float = 0.0
    ttft_s: float | None = None
    error: str = ""

    @property
    def content(self) -> str:
        """Its text and tool calls as one text, to be compared; of an error, its line."""
        calls = "".join(f"\n{name}({arguments})" for name, arguments in self.calls)
        return f"[{self.error}]" if self.error else self.text + calls


class _Choice:
    """A choice under assembly."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[int, list[str]] = {}
        self.tokens: list[Token] = []
        self.steps: list[int] = []
        self.finish: str | None = None
        self.first: float | None = None

    def add(self, seconds: float, choice: Mapping[str, Any]) -> None:
        """Take an event's part of the choice."""
        message = choice.get("delta") or choice.get("message") or {}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        self.text += _encodable("".join(filter(None, (reasoning, message.get("content"), choice.get("text")))))
        for position, call in enumerate(message.get("tool_calls") or []):
            index, function = call.get("index"), call.get("function") or {}
            name_arguments = self.calls.setdefault(position if index is None else index, ["", ""])
            for i, key in enumerate(("name", "arguments")):
                name_arguments[i] += _encodable(function.get(key) or "")
        if self.first is None and (self.text or self.calls):
            self.first = seconds
        if tokens := read_tokens(choice.get("logprobs")):
            self.tokens += tokens
            self.steps.append(len(tokens))
        self.finish = choice.get("finish_reason") or self.finish


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON may hold and no file."""
    return text.encode(errors="replace").decode()


def read_replies(events: Iterable[tuple[float, Mapping[str, Any]]], model: str) -> list[Reply]:
    """Assemble a reply's choices from its events, each with the seconds from the request to its arrival.

    Raises:
        EndpointError: an error, another model's reply, or no choice, or one of another shape.
    """
    choices: dict[int, _Choice] = {}
    usage: Mapping[str, Any] = {}
    end, count = 0.0, 0
    for end, event in events:
        count += 1
        if (message := event.get("message" if event.get("object") == "error" else "error")) is not None:
            raise EndpointError("error", str(message))
        if event.get("model") != model:
            raise EndpointError("wrong_model", f"the reply is {event.get('model')!r}'s")
        usage = event.get("usage") or usage
        try:
            for position, choice in enumerate(event.get("choices") or []):
                choices.setdefault(choice.get("index", position), _Choice()).add(end, choice)
        except (AttributeError, TypeError) as error:
            raise EndpointError("choices", str(event["choices"])) from error
        if sum(len(choice.text) for choice in choices.values()) > LONGEST:  # a server that does not end its answer
            raise EndpointError("too_large", f"the reply has more than {LONGEST} characters")
    if not choices:
        raise EndpointError("choices", "the reply has no choice")
    prompt, completion, total = (_count(usage, key) for key in ("prompt_tokens", "completion_tokens", "total_tokens"))
    return [
        Reply(
            choice.text,
            tuple((name, arguments) for name, arguments in choice.calls.values()),
            choice.finish,
            prompt,
            completion,
            total,
            tuple(choice.tokens),
            tuple(choice.steps),
            end,
            None if count == 1 or _at_once(choice.first or end, end, completion or 0) else choice.first or end,
        )
        for _, choice in sorted(choices.items())
    ]


def _at_once(first: float, end: float, tokens: int) -> bool:
    """Whether a stream's events came faster than any server writes them, given the seconds of its first text."""
    return tokens >= AT_ONCE and end - first < min(AT_ONCE_SHARE * end, AT_ONCE_S * tokens)


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    count = usage.get(key)
    return count if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST else None


def read_tokens(logprobs: Any) -> list[Token]:
    """Return the tokens in a choice's logprobs, in the form of chats or of completions; none of a malformed one."""
    if not isinstance(logprobs, dict):
        return []
    try:
        if isinstance(logprobs.get("content"), list):
            return [
                Token(_bytes(entry), _number(entry["logprob"]), _top(entry.get("top_logprobs")))
                for entry in logprobs["content"]
            ]
        tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
        columns = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        return [
            Token(text.encode(), _number(value), {key.encode(): _number(lp) for key, lp in (top or {}).items()})
            for text, value, top in columns
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


def _top(entries: Any) -> dict[bytes, float]:
    return {_bytes(entry): _number(entry["logprob"]) for entry in entries or []}


def _bytes(entry: Mapping[str, Any]) -> bytes:
    """Return a token's bytes, which a token of half a character has beside its text."""
    return bytes(entry["bytes"]) if isinstance(entry.get("bytes"), list) else str(entry["token"]).encode()


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{value!r} is no logprob")
    return float(min(max(value, LEAST), -LEAST))


class Question(NamedTuple):
    """A request: its id, its path, its fields besides those that all share, and its category."""

    id: str
    path: str
    body: Mapping[str, Any]
    category: str = ""

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return "messages" in self.body

    @property
    def prompt(self) -> str:
        """Its prompt as a text."""
        messages = self.body.get("messages")
        return "\n".join(str(m.get("content")) for m in messages) if messages else str(self.body.get("prompt"))

    @property
    def content(self) -> tuple[str, str]:
        """What it asks: the same of two questions that differ in their ids alone."""
        return self.path, json.dumps(self.body, sort_keys=True)

    def having(self, suffix: str, **fields: Any) -> "Question":
        """Return the same question with further fields, under an id of its own."""
        return self._replace(id=f"{self.id} {suffix}", body={**self.body, **fields})


def read_questions(name: str, selection: Selection, chat: bool) -> Workload[Question]:
    """Read a workload's questions; one without further prompts for the warm-up repeats its last ones."""

    def read(record: Readable, turns: str) -> Iterator[Question]:
        return questions_of(record, turns, chat)

    return gathered(name, selection, read, lambda question: question.content, lambda question: question)


def questions_of(record: Readable, turns: str, chat: bool) -> Iterator[Question]:
    """Yield a record's questions: its first question, or every question behind the messages before it.

    A plain text's prompt is the end of its first half, at most OPENING words. Without `chat`, messages are sent as one
    text.

    Raises:
        ValueError: the record has no prompt, or no recorded answer before a question.
    """
    if isinstance(record, Record) and record.exact:
        for prompt in before_answers(record, turns):
            yield Question(prompt.id, "/completions", {"prompt": prompt.token}, prompt.category)
        return
    if isinstance(record, Prompt):
        yield Question(record.id, "/completions", {"prompt": list(record.token)}, record.category)
        return
    questions = [i for i, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        words = record.text.split()
        if not words:
            raise ValueError(f"prompt {record.id}: has no user message and no text; remove it")
        half = max(1, len(words) // 2)
        text = " ".join(words[max(0, half - OPENING) : half])
        yield Question(record.id, "/completions", {"prompt": text}, record.category)
        return
    for turn, index in enumerate(questions if turns == "all" else questions[:1], 1):
        messages = record.messages[: index + 1]
        if any(first["role"] == second["role"] == "user" for first, second in itertools.pairwise(messages)):
            raise ValueError(
                f"prompt {record.id}: nobody recorded the answer before question {turn}; give a log with answers, or "
                "turns=first"
            )
        name = f"{record.id}.{turn}" if turns == "all" and len(questions) > 1 else record.id
        if chat:
            body = {"messages": list(messages), **({"tools": list(record.tools)} if record.tools else {})}
            yield Question(name, "/chat/completions", body, record.category)
        else:  # the prompt of a tokenizer without a chat template
            text = "\n\n".join(map(content_text, messages if turn > 1 else messages[-1:]))
            yield Question(name, "/completions", {"prompt": text}, record.category)
