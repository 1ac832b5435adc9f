"""Served models: questions, streamed replies with their times, and the counters of vLLM, SGLang and llama.cpp."""

import copy
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from data.answers.client import API, FINISH_REASONS, Client, EndpointConfig, EndpointError, base_url, check_url
from data.text.parts import content_text
from data.text.prompts import OPENING, Prompt, before_answers
from eval.config import Selection
from eval.inputs.workloads import Readable, Workload, collect_prompts
from eval.measures.counters import SGLANG, Counters, between, of_reply, read_counters, restarted, verified
from eval.measures.metrics import Pair, SpecDecodingStats, sum_counts
from eval.measures.results import UNTIMED, MeasuredRequest, known
from heads.common.progress import update_bar
from heads.common.typed import Count, Json, NewTokens, Number, Positive

Record = Mapping[str, Any]  # a JSON object, read-only
BASELINE_KEY = "baseline"  # option name of a server without a drafter
POLL_S, LAG_S = 0.02, 5.0  # seconds between readings of counters that lag, and the maximum lag
PAGE_S = 30.0  # timeout of a server's own pages
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
LEAST = -9999.0  # vLLM's logprob for an impossible token
# A stream of N tokens or more was buffered by a gateway if the tokens after the first took less than either:
AT_ONCE, AT_ONCE_SHARE, AT_ONCE_S = 16, 0.01, 0.0005  # tokens; share of the latency; seconds per token


class Token(NamedTuple):
    """A token of an answer: its bytes and logprob, and the most probable tokens' logprobs by their bytes."""

    text: bytes
    logprob: float
    top: dict[bytes, float]


class Reply(NamedTuple):
    """An answer, or the server's `error` in one line."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names and arguments of tool calls, as sent
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens: tuple[Token, ...] = ()  # empty without logprobs
    latency_s: float = 0.0  # seconds from the request; so is `ttft_s`
    ttft_s: float | None = None  # None for a reply that came at once, streamed or not
    error: str = ""

    @property
    def content(self) -> str:
        """Return text and tool calls as one text for comparisons; for an error, its line."""
        calls = "".join(f"\n{name}({arguments})" for name, arguments in self.calls)
        return f"[{self.error}]" if self.error else self.text + calls


Replies = list[Reply]  # the choices of one reply, or several replies
Events = Iterable[tuple[float, Record]]  # (seconds from the request to the arrival, event)


def joined(reply: Reply, choice: Record, seconds: float) -> Reply:
    """Return a reply extended by an event that came `seconds` after the request."""
    message = choice.get("delta") or choice.get("message") or {}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    text = "".join(filter(None, (reasoning, message.get("content"), choice.get("text"))))
    calls = dict(enumerate(reply.calls))
    for position, call in enumerate(message.get("tool_calls") or []):
        index = call.get("index", position)
        function = call.get("function") or {}
        name, arguments = calls.get(index, ("", ""))
        calls[index] = name + (function.get("name") or ""), arguments + (function.get("arguments") or "")
    return reply._replace(
        text=reply.text + text.encode(errors="replace").decode(),  # files cannot hold lone surrogates
        calls=tuple(calls.values()),
        finish_reason=choice.get("finish_reason") or reply.finish_reason,
        tokens=(*reply.tokens, *read_tokens(choice.get("logprobs"))),
        ttft_s=seconds if reply.ttft_s is None and (text or calls) else reply.ttft_s,
    )


def read_replies(events: Events, model: str) -> Replies:
    """Assemble choices from events, each with its seconds; an EndpointError says what is wrong with them."""
    choices: dict[int, Reply] = {}
    usage: Record = {}
    end, count = 0.0, 0
    for end, event in events:
        count += 1
        if (message := event.get("message" if event.get("object") == "error" else "error")) is not None:
            raise EndpointError("error", str(message))
        if event.get("model") != model:
            raise EndpointError("wrong_model", f"the reply is {event.get('model')!r}'s")
        if isinstance(counts := event.get("usage"), dict):
            usage = counts or usage
        try:
            for position, choice in enumerate(event.get("choices") or []):
                index = int(choice.get("index", position))
                choices[index] = joined(choices.get(index, Reply()), choice, end)
        except (AttributeError, TypeError, ValueError) as error:
            raise EndpointError("choices", str(event["choices"])) from error
    if not choices:
        raise EndpointError("choices", "the reply has no choice")
    prompt, completion = (
        n if type(n := usage.get(f"{key}_tokens")) is int else None for key in ("prompt", "completion")
    )
    replies, tokens = [], completion or 0
    for _, reply in sorted(choices.items()):
        first = reply.ttft_s or end
        at_once = count == 1 or (tokens >= AT_ONCE and end - first < min(AT_ONCE_SHARE * end, AT_ONCE_S * tokens))
        ttft_s = None if at_once else first
        replies.append(reply._replace(prompt_tokens=prompt, completion_tokens=completion, latency_s=end, ttft_s=ttft_s))
    return replies


def read_tokens(logprobs: Any) -> list[Token]:
    """Return the tokens in a choice's logprobs, of chats or completions; empty if malformed."""

    def entry(one: Record) -> tuple[bytes, float]:
        """Return a token's bytes, which are listed for part of a character, and its logprob."""
        listed = one.get("bytes")
        text = bytes(listed) if isinstance(listed, list) else str(one["token"]).encode()
        return text, max(LEAST, one["logprob"])  # in this order NaN is LEAST too

    try:
        content = logprobs.get("content")
        if not isinstance(content, list):  # completions have one column per field, converted to chats' entries
            tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
            content = [
                {"token": token, "logprob": value,
                 "top_logprobs": [{"token": other, "logprob": least} for other, least in (top or {}).items()]}
                for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
            ]  # fmt: skip
        return [Token(*entry(one), dict(map(entry, one.get("top_logprobs") or []))) for one in content]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []


class Question(NamedTuple):
    """A request: its id, its path, its own fields, and its category."""

    id: str
    path: str
    body: Record
    category: str = ""

    @property
    def prompt(self) -> str:
        """Return the prompt as text."""
        messages = self.body.get("messages")
        return "\n".join(str(m.get("content")) for m in messages) if messages else str(self.body.get("prompt"))

    @property
    def content(self) -> tuple[str, str]:
        """Return path and fields as JSON, equal for questions that differ only in their ids."""
        return self.path, json.dumps(self.body, sort_keys=True)

    def having(self, suffix: str, **fields: Any) -> "Question":
        """Return the same question with more fields, under its own id."""
        return self._replace(id=f"{self.id} {suffix}", body={**self.body, **fields})


Questions = Sequence[Question]


def read_questions(name: str, selection: Selection, chat: bool) -> Workload[Question]:
    """Read a workload's questions; without more prompts for the warm-up, its last ones are repeated."""
    return collect_prompts(name, selection, partial(questions_of, chat=chat), lambda question: question.content)


def questions_of(record: Readable, turns: str, chat: bool) -> Iterator[Question]:
    """Yield a record's questions: its first question, or every question after the messages before it.

    A plain text's prompt is the end of its first half, at most OPENING words. Without `chat`, messages are sent as one
    text. Refuse a record without a prompt, or without a recorded answer before a question.
    """

    def completion(id_: str, prompt: Any) -> Question:
        return Question(id_, "/completions", {"prompt": prompt}, record.category)

    if isinstance(record, Prompt) or record.pretokenized:
        prompts = [record] if isinstance(record, Prompt) else before_answers(record, turns)
        yield from (completion(prompt.id, list(prompt.token)) for prompt in prompts)
        return
    questions = [i for i, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        words = record.text.split()
        if not words:
            raise ValueError(f"prompt {record.id}: has no user message and no text; remove it")
        half = max(1, len(words) // 2)
        yield completion(record.id, " ".join(words[max(0, half - OPENING) : half]))
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
            yield completion(name, "\n\n".join(map(content_text, messages if turn > 1 else messages[-1:])))


@dataclass(frozen=True)
class Answer(MeasuredRequest):
    """A measured request with its text; tokens are counted by the server, seconds from the sending."""

    end_to_end: Pair = (0, 0.0)
    text: str = ""

    def weighted(self, weight: float) -> "Answer":
        """Return the answer with the share of its seconds that counts for concurrent requests."""
        decoding = self.decoding and (self.decoding[0], self.decoding[1] * weight)
        end_to_end = self.end_to_end[0], self.end_to_end[1] * weight
        seconds = {key: spent * weight for key, spent in self.seconds.items()}
        prefill_s = self.prefill_s and self.prefill_s * weight
        return replace(self, decoding=decoding, end_to_end=end_to_end, prefill_s=prefill_s, seconds=seconds)


def answer_of(
    text: str, tokens: int, latency_s: float, ttft_s: float | None, passes: SpecDecodingStats | None
) -> Answer:
    """Return an answer with seconds to its last and first token; the latter is None if it came at once."""
    latencies = {"latency_s": latency_s, "ttft_s": ttft_s}
    decode_s = None if ttft_s is None else latency_s - ttft_s
    decoding = None if decode_s is None else (max(tokens - 1, 0), decode_s)
    seconds = UNTIMED | {"other": decode_s or 0.0}
    return Answer(passes, decoding, (tokens, latency_s), ttft_s, seconds, latencies, text=text)


def read_answer(events: Events, model: str) -> Answer:
    """Assemble the answer from a reply's events; an EndpointError says what is wrong or missing."""
    arrived = list(events)
    reply, *others = read_replies(arrived, model)
    if others:
        raise EndpointError("choices", f"the reply has {1 + len(others)}")
    if reply.finish_reason not in FINISH_REASONS:
        raise EndpointError("finish_reason", f"it is {reply.finish_reason!r}")
    if (tokens := reply.completion_tokens) is None:
        raise EndpointError("usage", "the reply does not count its tokens")
    text = reply.text + "".join(name + arguments for name, arguments in reply.calls)
    passes = [counted for _, event in arrived if (counted := of_reply(event, max(tokens - 1, 0))) is not None]
    return answer_of(text, tokens, reply.latency_s, reply.ttft_s, passes[-1] if passes else None)


@dataclass(frozen=True)
class ClientConfig:
    """The configuration of requests to a server; conf/ops/endpoint.yaml explains the keys."""

    model: str | None
    chat: bool
    timeout: Positive
    api_key_env: str
    extra: Json


@dataclass(frozen=True)
class ServersConfig:
    """A served model, its baseline, and the requests to both."""

    url: str
    baseline: str | None
    client: ClientConfig
    out: str
    workload: Any  # a name, a list of names, or None
    prompts: Count
    max_new_tokens: NewTokens
    seed: Number

    def __post_init__(self) -> None:
        check_url("url", self.url)
        check_url("baseline", self.baseline or self.url)


class Metrics:
    """A server's own pages, at its URL without the API's path; `key` is the option of the URL."""

    def __init__(self, url: str, api_key_env: str, key: str = "url", timeout: float = PAGE_S) -> None:
        self.url, self.secret = base_url(url), os.environ.get(api_key_env)
        # No retries: a repeated request would be timed and counted twice.
        self.once = EndpointConfig(None, 1, timeout, 0, 0.0, 0.0, api_key_env, {})
        self.root = Client(self.url, replace(self.once, timeout=PAGE_S), self.secret, key, "client")

    def alive(self) -> bool:
        """Return whether the server still answers."""
        try:
            return self.root.page(f"{API}/models")[0] == 200
        except EndpointError:
            return False

    def counters(self) -> Counters | None:
        """Read the server's counters, None without a known engine's metrics; refuse a server that does not answer."""
        try:
            status, page = self.root.page("/metrics")
        except EndpointError as failure:
            raise ValueError(f"{self.url}/metrics: {failure}; start the endpoint again") from failure
        return read_counters(page) if status == 200 else None

    def reading(self) -> Counters | None:
        """Read the counters of a server that need not answer: None in that case too."""
        try:
            return self.counters()
        except ValueError:
            return None


class Server(Metrics):
    """A served model; `engine` is the engine of its metrics, empty without metrics."""

    def __init__(self, url: str, config: ClientConfig, key: str) -> None:
        super().__init__(url, config.api_key_env, key, config.timeout)
        self.config, self.is_baseline = config, key == BASELINE_KEY
        how = replace(self.once, model=config.model, extra=config.extra)
        advice = "client.chat=false asks a model without a chat template"
        self.client = Client(self.url + API, how, self.secret, key, "client", advice)
        self.model, _ = within(self.client, PAGE_S).served()
        self.engine = getattr(self.reading(), "engine", "")

    def send(self, request: Question, settings: Record) -> Answer:
        """Send a request once and return the answer; refuse a missing or malformed answer."""
        more = {"return_spec_tokens_details": True} if self.engine == SGLANG else {}
        body = {"model": self.model, **request.body, **settings, "n": 1, **STREAMED, **more, **self.config.extra}
        begin = time.perf_counter()
        try:
            events = ((time.perf_counter() - begin, event) for event in self.client.events(request.path, body))
            return read_answer(events, self.model)
        except EndpointError as failure:
            raise ValueError(
                f"{self.url}, prompt {request.id}: {failure.cause} ({failure.detail}); nothing is written: fix the "
                "endpoint or leave the prompt out, and run the same command again"
            ) from failure

    def send_all(
        self, requests: Questions, settings: Record, in_flight: int, when: Sequence[float] | None
    ) -> tuple[list[Answer], SpecDecodingStats]:
        """Send requests, `in_flight` at a time, with shared fields `settings`; return answers and counts of all passes.

        Request i arrives `when[i]` seconds from now, ascending, and waits while `in_flight` others run; None: all
        arrive now. The baseline does not speculate, so each of its forward passes commits one token.

        Raises:
            ValueError: a request failed; or the counters show that the server restarted, that it served other clients
                too, that another server answered, or that it does not speculate.
        """
        before = None if self.is_baseline else self.counters()
        begin = time.perf_counter()

        def send(request: Question, arrived: float | None) -> Answer:
            if arrived is None:
                return self.send(request, settings)
            time.sleep(max(0.0, begin + arrived - time.perf_counter()))
            queue_s = time.perf_counter() - begin - arrived
            answer = self.send(request, settings)
            latencies = {name: None if wait is None else wait + queue_s for name, wait in answer.latencies.items()}
            return replace(answer, arrived=arrived, latencies={**latencies, "queue_s": queue_s})

        with ThreadPoolExecutor(in_flight) as pool:
            answers = []
            for answer in pool.map(send, requests, when or itertools.repeat(None)):  # a failure cancels the others
                answers.append(answer)
                update_bar()
        wall = time.perf_counter() - begin
        if in_flight > 1:
            weight = wall / sum(answer.end_to_end[1] for answer in answers)
            answers = [answer.weighted(weight) for answer in answers]
        if self.is_baseline:
            if any(answer.passes is not None for answer in answers):
                self.refuse_drafts(drafts=True)
            answers = [replace(answer, passes=verified(int(answer.decoded), 0, 0, ())) for answer in answers]
        passes = known(answers, "passes")
        if len(passes) == len(answers):
            return answers, sum_counts(passes)
        if before is None:
            raise ValueError(
                f"{self.url}/metrics has no counters of vLLM's, SGLang's or llama.cpp's: start vLLM without "
                "--disable-log-stats, SGLang with --enable-metrics, llama.cpp with --metrics"
            )
        decoded = sum(int(answer.decoded) for answer in answers)
        deadline, count = time.monotonic() + LAG_S, len(answers)
        while True:  # counters lag after the answers
            after = self.counters()
            if after is None or restarted(before, after):
                raise ValueError(
                    f"{self.url}/metrics: its counters began again while it was measured: the server restarted, or "
                    "several share this URL; measure one server, again from the start"
                )
            ended = count if after.finished is None else round(after.finished - (before.finished or 0))
            if ended >= count or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if ended != count:
            raise ValueError(
                f"{self.url}/metrics counted {ended} requests where {count} were sent: give a server without other "
                "clients, and not one of several behind a URL"
            )
        if after.drafts is None or (after.engine == SGLANG and after.drafts == (before.drafts or 0) and decoded):
            raise ValueError(
                f"{self.url} does not speculate: it counts no drafts; start it with a drafter (vLLM: "
                "--speculative-config, SGLang: --speculative-algorithm, llama.cpp: --spec-type), or give it as baseline"
            )
        total = between(before, after, decoded)
        return ([replace(answers[0], passes=total)] if len(answers) == 1 else answers), total

    def check_baseline_of(self, server: "Server") -> None:
        """Refuse a baseline that serves another model or speculates, unless it is the same server."""
        if self.model != server.model:
            raise ValueError(
                f"{self.url} serves {self.model} and {server.url} {server.model}: the baseline is the same model, "
                "served under the same name (--served-model-name)"
            )
        if self.url != server.url:
            self.refuse_drafts()

    def refuse_drafts(self, *, drafts: bool = False) -> None:
        """Refuse a baseline with `drafts`, or whose counters count drafts, since it speculates."""
        counters = self.reading()
        if drafts or (counters is not None and counters.drafts is not None):
            raise ValueError(f"{self.url} speculates: {BASELINE_KEY} is for the same model served without a drafter")


def within(client: Client, seconds: float) -> Client:
    """Return the same client with a timeout of `seconds` at most."""
    bounded = copy.copy(client)
    bounded.config = replace(client.config, timeout=min(client.config.timeout, seconds))
    return bounded
