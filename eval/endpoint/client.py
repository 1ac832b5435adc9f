"""Client of a served model under measurement: prompts as requests, streamed answers with their times, counters."""

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from data.answers.client import FINISH_REASONS, Client, EndpointConfig, EndpointError
from data.text.prompts import OPENING, Prompt, before_answers
from data.text.records import Record, content_text
from eval.config import API, ClientConfig, base_url
from eval.endpoint.counters import EXACT, SGLANG, Counters, between, of_reply, read_counters, restarted, verified
from eval.measures.metrics import Passes, together

POLL_S = 0.02  # between two readings of counters that lag behind
WITHOUT_TEMPLATE = "client.chat=false asks a model without a chat template"


class Request(NamedTuple):
    """A request: its id and category, its path, and its fields of the body."""

    id: str
    category: str
    path: str
    body: Mapping[str, Any]


class Answer(NamedTuple):
    """An answer: text, tokens as the server counts them, seconds to the last and to the first token, its passes.

    `ttft_s` is None where the server does not stream, `passes` where the server does not count those of each request.
    `weight` is the share of its seconds that count, below 1 where requests are concurrent. Of requests that arrive at a
    rate, seconds count from the arrival: `arrived`, from the round's first one, and `queue_s` until it was sent.
    """

    text: str
    tokens: int
    latency_s: float
    ttft_s: float | None
    passes: Passes | None
    weight: float = 1.0
    arrived: float = 0.0
    queue_s: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens after the prefill's one."""
        return max(self.tokens - 1, 0)

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last token."""
        return self.latency_s * self.weight

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None without streaming."""
        return None if self.ttft_s is None else (self.latency_s - self.ttft_s) * self.weight


def requests_of(record: Record | Prompt, turns: str, chat: bool) -> Iterator[Request]:
    """Yield a record's requests: its first question, or every question behind the messages before it.

    A plain text's prompt is the end of its first half, at most OPENING words. Without `chat`, messages are sent as one
    text.

    Raises:
        ValueError: the record has no prompt, or no recorded answer before a question.
    """
    if isinstance(record, Record) and record.exact:
        for prompt in before_answers(record, turns):
            yield Request(prompt.id, prompt.category, "/completions", {"prompt": prompt.token})
        return
    if isinstance(record, Prompt):
        yield Request(record.id, record.category, "/completions", {"prompt": list(record.token)})
        return
    questions = [i for i, message in enumerate(record.messages) if message["role"] == "user"]
    if not questions:
        words = record.text.split()
        if not words:
            raise ValueError(f"prompt {record.id}: has no user message and no text; remove it")
        half = max(1, len(words) // 2)
        text = " ".join(words[max(0, half - OPENING) : half])
        yield Request(record.id, record.category, "/completions", {"prompt": text})
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
            yield Request(name, record.category, "/chat/completions", body)
        else:  # the prompt of a tokenizer without a chat template
            text = "\n\n".join(map(content_text, messages if turn > 1 else messages[-1:]))
            yield Request(name, record.category, "/completions", {"prompt": text})


class Server:
    """A served model; `engine` names the engine of its metrics, and is empty without metrics."""

    def __init__(self, url: str, config: ClientConfig, key: str) -> None:
        self.url, self.config, self.key = base_url(url), config, key
        # No retries: a repeated request would be timed and counted twice.
        once = EndpointConfig(
            model=config.model, concurrency=1, timeout=config.timeout, retries=0, backoff=0.0, max_wait=0.0,
            max_failures=1, api_key_env=config.api_key_env, extra=config.extra,
        )  # fmt: skip
        secret = os.environ.get(config.api_key_env)
        self.root = Client(self.url, once, secret, key, "client")
        self.client = Client(self.url + API, once, secret, key, "client", WITHOUT_TEMPLATE)
        self.model, _ = self.client.served()
        counters = self.counters()
        self.engine = counters.engine if counters is not None else ""

    def counters(self) -> Counters | None:
        """Read the server's counters, None without metrics of a known engine; refuse a server that does not answer."""
        try:
            status, page = self.root.page("/metrics")
        except EndpointError as failure:
            raise ValueError(f"{self.url}/metrics: {failure}; start the endpoint again") from failure
        return read_counters(page) if status == 200 else None

    def describe(self) -> dict[str, str]:
        """Return the server's version and SGLang's algorithm, as far as it reports them.

        Of SGLang's many settings, API keys among them, no others are read.
        """
        try:
            status, page = self.root.page("/server_info" if self.engine == SGLANG else "/version")
            info = json.loads(page) if status == 200 else {}
        except (EndpointError, ValueError, RecursionError):
            return {}
        keys = ("version", "speculative_algorithm")
        return {key: info[key] for key in keys if isinstance(info, dict) and isinstance(info.get(key), str)}

    def send(self, request: Request, settings: Mapping[str, Any]) -> Answer:
        """Send a request, once, and return the answer; refuse a missing or malformed one."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        more = {"return_meta_info": True} if self.engine == SGLANG else {}
        body = {"model": self.model, **request.body, **settings, "n": 1, **stream, **more, **self.config.extra}
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
        self,
        requests: Sequence[Request],
        settings: Mapping[str, Any],
        in_flight: int,
        drafts: bool,
        when: Sequence[float] | None = None,
    ) -> tuple[list[Answer], Passes]:
        """Send requests, `in_flight` at a time, with the fields that their bodies share; return answers and all passes.

        They arrive `when` seconds from now, ascending, and wait while as many are in flight; None: all are there.
        Without `drafts` the server does not speculate, and a forward pass commits one token.

        Raises:
            ValueError: a request failed; or the counters show that the server restarted, that it served other clients
                too, that another server answered, or that it does not speculate.
        """
        before = self.counters() if drafts else None
        begin = time.perf_counter()

        def send(request: Request, arrived: float | None) -> Answer:
            if arrived is None:
                return self.send(request, settings)
            time.sleep(max(0.0, begin + arrived - time.perf_counter()))
            queue_s = time.perf_counter() - begin - arrived
            answer = self.send(request, settings)
            first = None if answer.ttft_s is None else answer.ttft_s + queue_s
            latency_s = answer.latency_s + queue_s
            return answer._replace(arrived=arrived, queue_s=queue_s, ttft_s=first, latency_s=latency_s)

        with ThreadPoolExecutor(in_flight) as pool:
            arrivals = when if when is not None else [None] * len(requests)
            answers = list(pool.map(send, requests, arrivals))  # a failure cancels others
        wall = time.perf_counter() - begin
        weight = wall / sum(answer.latency_s for answer in answers) if in_flight > 1 else 1.0
        answers = [answer._replace(weight=weight) for answer in answers]
        if not drafts:
            if any(answer.passes is not None for answer in answers):
                raise ValueError(self._speculates())
            answers = [answer._replace(passes=verified(answer.decoded, 0, 0, ())) for answer in answers]
        passes = [answer.passes for answer in answers if answer.passes is not None]
        if len(passes) == len(answers):
            return answers, together(passes)
        if before is None:
            raise ValueError(
                f"{self.url}/metrics has no counters of vLLM's, SGLang's or llama.cpp's: start vLLM without "
                "--disable-log-stats, SGLang with --enable-metrics, llama.cpp with --metrics"
            )
        decoded = sum(answer.decoded for answer in answers)
        total = between(before, self._counters_after(before, len(answers), decoded), decoded)
        return ([answers[0]._replace(passes=total)] if len(answers) == 1 else answers), total

    def refuse_drafts(self) -> None:
        """Refuse a baseline that counts drafts: it speculates."""
        counters = self.counters()
        if counters is not None and counters.drafts is not None:
            raise ValueError(self._speculates())

    def _speculates(self) -> str:
        return f"{self.url} speculates: {self.key} is for the same model served without a draft source"

    def _counters_after(self, before: Counters, count: int, decoded: int) -> Counters:
        """Wait until the counters include `count` further requests, and return them if they have no others."""
        deadline = time.monotonic() + self.config.patience
        while True:
            after = self.counters()
            if after is None or restarted(before, after):
                raise ValueError(
                    f"{self.url}/metrics: its counters began anew while it was measured: the server restarted, or "
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
                f"{self.url} does not speculate: it counts no drafts; start it with a draft source (vLLM: "
                "--speculative-config, SGLang: --speculative-algorithm, llama.cpp: --spec-type), or give it as baseline"
            )
        return after


def read_answer(events: Iterable[tuple[float, Mapping[str, Any]]], model: str) -> Answer:
    """Assemble the answer from a reply's events; a reply that is not streamed is a single one.

    Each comes with the seconds from the request to its arrival. `model` is the model's served name.

    Raises:
        EndpointError: an error, another model's reply, several choices, no finish reason, or no count of tokens.
    """
    texts: list[str] = []
    first, finish, tokens, counted = None, None, None, None
    end, count = 0.0, 0
    for end, event in events:
        count += 1
        if event.get("error") is not None:
            raise EndpointError("error", json.dumps(event["error"]))
        if event.get("model") != model:
            raise EndpointError("wrong_model", f"the reply is {event.get('model')!r}'s")
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            tokens = usage["completion_tokens"]
        if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(item, dict) for item in choices):
            raise EndpointError("choices", json.dumps(event))
        for choice in choices:
            text = text_in(choice)
            first = end if first is None and text else first
            texts.append(text)
            finish = choice.get("finish_reason") or finish
        counted = event if of_reply(event, 0) is not None else counted
    if finish not in FINISH_REASONS:
        raise EndpointError("finish_reason", f"it is {finish!r}")
    if tokens is None or not 0 <= tokens < EXACT:
        raise EndpointError("usage", "the reply does not count its tokens")
    passes = None if counted is None else of_reply(counted, max(tokens - 1, 0))
    return Answer("".join(texts), tokens, end, (first or end) if count > 1 else None, passes)


def text_in(choice: Mapping[str, Any]) -> str:
    """Return the text in a choice, of a whole reply or of an event: reasoning, content and tool calls."""
    message = choice.get("delta") or choice.get("message")
    message = message if isinstance(message, dict) else {}
    calls = message.get("tool_calls")
    entries = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    functions = [function for function in entries if isinstance(function, dict)]
    texts = [message.get("reasoning_content") or message.get("reasoning"), message.get("content"), choice.get("text")]
    texts += [function.get(key) for function in functions for key in ("name", "arguments")]
    return "".join(text for text in texts if isinstance(text, str))
