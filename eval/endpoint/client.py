"""A served model as one asks it: a workload's prompts as requests, streamed answers with their times, its counters."""

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.answers.client import Client, EndpointConfig, EndpointError
from data.text.prompts import OPENING, Prompt
from data.text.records import Message, Record, content_text
from eval.config import ClientConfig
from eval.endpoint.counters import (
    EXACT,
    SGLANG,
    Counters,
    Verified,
    between,
    of_reply,
    read_counters,
    restarted,
    together,
)
from eval.inputs.texts import TokenLog

API = "/v1"
POLL_S = 0.02  # between two looks at metrics that lag behind
FINISHES = ("stop", "length", "tool_calls")


@dataclass(frozen=True)
class Asked:
    """A request: its id and category, the place of its conversation, and what of the body is its own."""

    id: str
    category: str
    conversation: int
    path: str
    body: Mapping[str, Any]


class Answer(NamedTuple):
    """What came back: text, tokens by the server's count, seconds to the last and to the first of them, drafts.

    `ttft_s` is None where the server does not stream, `verified` where the reply says nothing of its drafts.
    """

    text: str
    tokens: int
    latency_s: float
    ttft_s: float | None
    verified: Verified | None

    @property
    def decoded(self) -> int:
        """Tokens after the prefill's."""
        return max(self.tokens - 1, 0)


class Round(NamedTuple):
    """Requests that were answered side by side: answers, seconds for all, and what became of all drafts."""

    answers: list[Answer]
    wall_s: float
    verified: Verified


def requests_of(record: Record | Prompt | TokenLog, place: int, turns: str, chat: bool) -> Iterator[Asked]:
    """Yield a record's requests: its first question, or every one after all that was said before it.

    Of a plain text it is the end of the first half, up to so many words as a prompt has tokens elsewhere.

    Raises:
        ValueError: there is nothing to ask, or nobody recorded the answers before a question.
    """
    if not isinstance(record, Record):
        token = record.token if isinstance(record, Prompt) else record.prompt
        yield Asked(record.id, record.category, place, "/completions", {"prompt": list(token)})
        return
    questions = [i for i, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        words = record.text.split()
        if not words:
            raise ValueError(f"prompt {record.id}: has no user message and no text; remove it")
        half = max(1, len(words) // 2)
        text = " ".join(words[max(0, half - OPENING) : half])
        yield Asked(record.id, record.category, place, "/completions", {"prompt": text})
        return
    for turn, at in enumerate(questions if turns == "all" else questions[:1], 1):
        said = record.messages[: at + 1]
        if any(first["role"] == second["role"] == "user" for first, second in itertools.pairwise(said)):
            raise ValueError(
                f"prompt {record.id}: nobody recorded the answer before question {turn}; give a log with answers, or "
                "turns=first"
            )
        name = f"{record.id}.{turn}" if turns == "all" and len(questions) > 1 else record.id
        path, body = _chat(said, record) if chat else _text(said)
        yield Asked(name, record.category, place, path, body)


def _chat(said: Sequence[Message], record: Record) -> tuple[str, dict[str, Any]]:
    return "/chat/completions", {"messages": list(said), **({"tools": list(record.tools)} if record.tools else {})}


def _text(said: Sequence[Message]) -> tuple[str, dict[str, Any]]:
    """Return the words of a chat as one text, as for a tokenizer without a chat template."""
    texts = said if sum(message["role"] == "user" for message in said) > 1 else said[-1:]
    return "/completions", {"prompt": "\n\n".join(content_text(message) for message in texts)}


class Server:
    """A served model: `engine` is whose metrics it has, empty where it has none."""

    def __init__(self, url: str, config: ClientConfig, key: str) -> None:
        self.url, self.config, self.key = url.rstrip("/").removesuffix(API), config, key
        # A request that was sent again would be timed twice and counted twice: none is.
        once = EndpointConfig(
            model=config.model, concurrency=1, timeout=config.timeout, retries=0, backoff=0.0, max_wait=0.0,
            max_failures=1, api_key_env=config.api_key_env, extra=config.extra,
        )  # fmt: skip
        secret = os.environ.get(config.api_key_env)
        self.root = Client(self.url, once, secret, key, "client")
        self.client = Client(self.url + API, once, secret, key, "client")
        self.model, self.context = self.client.served()
        counters = self.counters()
        self.engine = counters.engine if counters is not None else ""

    def counters(self) -> Counters | None:
        """Return what the server has counted so far; None: it has no metrics of an engine that is known here."""
        try:
            status, page = self.root.page("/metrics")
        except EndpointError as failure:
            raise ValueError(f"{self.url}/metrics: {failure}; start the endpoint again") from failure
        return read_counters(page) if status == 200 else None

    def says(self) -> dict[str, str]:
        """Return what the server says of itself: version, and SGLang's algorithm; nothing where it says nothing.

        Of SGLang's many settings, keys among them, these alone are read.
        """
        try:
            status, page = self.root.page("/server_info" if self.engine == SGLANG else "/version")
            told = json.loads(page) if status == 200 else {}
        except (EndpointError, ValueError, RecursionError):
            return {}
        wanted = ("version", "speculative_algorithm")
        return {key: told[key] for key in wanted if isinstance(told, dict) and isinstance(told.get(key), str)}

    def ask(self, asked: Asked, settings: Mapping[str, Any]) -> Answer:
        """Send a request, once, and return the answer.

        Raises:
            ValueError: no answer came, or what came is none.
        """
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        more = {"return_meta_info": True} if self.engine == SGLANG else {}
        body = {"model": self.model, **asked.body, **settings, "n": 1, **stream, **more, **self.config.extra}
        begin = time.perf_counter()
        try:
            came = ((time.perf_counter() - begin, event) for event in self.client.events(asked.path, body))
            return read_answer(came, self.model)
        except EndpointError as failure:
            raise ValueError(
                f"{self.url}, prompt {asked.id}: {failure.cause} ({failure.detail}); nothing is written: mend the "
                "endpoint or leave the prompt out, and run the same command again"
            ) from failure

    def round(self, asked: Sequence[Asked], settings: Mapping[str, Any], in_flight: int, drafts: bool) -> Round:
        """Ask several requests, so many at a time, and count what became of their drafts.

        Args:
            asked: the requests.
            settings: of all of them.
            in_flight: how many at a time.
            drafts: whether the server speculates; without, a pass commits one token.

        Raises:
            ValueError: a request failed; or the counters say that the server was started anew, that others asked it
                too, that they are not of the server that answered, or that it does not speculate.
        """
        before = self.counters() if drafts else None
        begin = time.perf_counter()
        with ThreadPoolExecutor(in_flight) as pool:
            futures = [pool.submit(self.ask, each, settings) for each in asked]
            try:
                answers = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        wall = time.perf_counter() - begin
        told = [each.verified for each in answers if each.verified is not None]
        decoded = sum(each.decoded for each in answers)
        if not drafts:
            if told:
                raise ValueError(self._speculates())
            plain = [each._replace(verified=Verified(each.decoded, 0, 0, ())) for each in answers]
            return Round(plain, wall, Verified(decoded, 0, 0, ()))
        if len(told) == len(answers):
            return Round(answers, wall, together(told))
        if before is None:
            raise ValueError(
                f"{self.url}/metrics has no counters of vLLM's or SGLang's: start vLLM without --disable-log-stats, "
                "SGLang with --enable-metrics"
            )
        return Round(answers, wall, between(before, self._settled(before, len(answers), decoded), decoded))

    def refuse_drafts(self) -> None:
        """Refuse to be the baseline with counters of drafts.

        Raises:
            ValueError: the server speculates.
        """
        counters = self.counters()
        if counters is not None and counters.drafts is not None:
            raise ValueError(self._speculates())

    def _speculates(self) -> str:
        return f"{self.url} speculates: {self.key} is for the same model served without a draft source"

    def _settled(self, before: Counters, count: int, decoded: int) -> Counters:
        """Return the counters as soon as they hold so many requests more than before."""
        deadline = time.monotonic() + self.config.patience
        while True:
            after = self.counters()
            if after is None or restarted(before, after):
                raise ValueError(
                    f"{self.url}/metrics: its counters began anew while it was measured: the server was started again, "
                    "or several stand behind this URL; measure one, from its start on, again"
                )
            ended = count if after.finished is None else round(after.finished - (before.finished or 0))
            if ended >= count or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if ended != count:
            raise ValueError(
                f"{self.url}/metrics counted {ended} requests where {count} were sent: give a server that nobody else "
                "asks, and not one of several behind a URL"
            )
        if after.drafts is None or (after.engine == SGLANG and after.drafts == (before.drafts or 0) and decoded):
            raise ValueError(
                f"{self.url} does not speculate: it counts no drafts; start it with a draft source (vLLM: "
                "--speculative-config, SGLang: --speculative-algorithm), or give it as baseline"
            )
        return after


def read_answer(came: Iterable[tuple[float, Mapping[str, Any]]], model: str) -> Answer:
    """Return the answer that a reply's objects make up, one object where nothing was streamed.

    Args:
        came: the objects as they come, each with the seconds from the request to it.
        model: the name that was asked.

    Raises:
        EndpointError: an error, another model's reply, several answers, no end, or no count of its tokens.
    """
    texts: list[str] = []
    first, finish, tokens, told = None, None, None, None
    end, pieces = 0.0, 0
    for end, event in came:
        pieces += 1
        if event.get("error") is not None:
            raise EndpointError("error", json.dumps(event["error"]))
        if event.get("model") != model:
            raise EndpointError("wrong_model", f"the reply is {event.get('model')!r}'s")
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            tokens = usage["completion_tokens"]
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(each, dict) for each in choices):
            raise EndpointError("choices", json.dumps(event))
        for choice in choices:
            text = said_in(choice)
            first = end if first is None and text else first
            texts.append(text)
            finish = choice.get("finish_reason") or finish
        told = event if of_reply(event, 0) is not None else told
    if finish not in FINISHES:
        raise EndpointError("finish_reason", f"it is {finish!r}")
    if tokens is None or not 0 <= tokens < EXACT:
        raise EndpointError("usage", "the reply does not count its tokens")
    verified = None if told is None else of_reply(told, max(tokens - 1, 0))
    return Answer("".join(texts), tokens, end, (first or end) if pieces > 1 else None, verified)


def said_in(choice: Mapping[str, Any]) -> str:
    """Return the text in a choice, of a whole reply or of a piece: reasoning, content and tool calls."""
    message = choice.get("delta") or choice.get("message")
    message = message if isinstance(message, dict) else {}
    calls = message.get("tool_calls")
    named = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [function for function in named if isinstance(function, dict)]
    parts = [message.get("reasoning_content") or message.get("reasoning"), message.get("content"), choice.get("text")]
    parts += [function.get(key) for function in functions for key in ("name", "arguments")]
    return "".join(part for part in parts if isinstance(part, str))
