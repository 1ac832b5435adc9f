"""Client of a served model under measurement: streamed answers with their times, counters."""

import copy
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from data.answers.client import API, FINISH_REASONS, Client, EndpointConfig, EndpointError, base_url
from eval.measures.counters import SGLANG, Counters, between, of_reply, read_counters, restarted, verified
from eval.measures.metrics import Passes, together
from heads.common.progress import tick
from heads.common.ranges import Positive
from ops.served.exchange import Question, read_replies

POLL_S, LAG_S = 0.02, 5.0  # between two readings of counters that lag behind the answers, and for how long at most
BASELINE = "baseline"  # the option of a server without a draft source
PAGE_S = 30.0  # seconds for a page of a server's own, at most
WITHOUT_TEMPLATE = "client.chat=false asks a model without a chat template"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Answer(NamedTuple):
    """An answer: text, tokens as the server counts them, seconds to the last and to the first token, its passes.

    `ttft_s` is None where the answer came at once, `passes` where the server does not count those of each request.
    `weight` is the share of its seconds that count, below 1 where requests are concurrent. Of requests that arrive at a
    rate, `latency_s` and `ttft_s` count from the arrival: `arrived`, from the round's first one, and `queue_s` until it
    was sent.
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
        """Seconds from the sending to the last token."""
        return (self.latency_s - self.queue_s) * self.weight

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None where it came at once."""
        return None if self.ttft_s is None else (self.latency_s - self.ttft_s) * self.weight


@dataclass(frozen=True)
class ClientConfig:
    """How a server is asked; conf/ops/endpoint.yaml says what each key means."""

    model: str | None
    chat: bool
    timeout: Positive
    api_key_env: str
    extra: dict[str, Any]


class Metrics:
    """A server's own pages, at its URL without the API's path; `key` is the option that holds it."""

    def __init__(self, url: str, api_key_env: str, key: str = "url") -> None:
        self.url = base_url(url)
        self.root = Client(self.url, once(api_key_env, PAGE_S), os.environ.get(api_key_env), key, "client")

    def alive(self) -> bool:
        """Whether the server still answers."""
        try:
            return self.root.page(f"{API}/models")[0] == 200
        except EndpointError:
            return False

    def counters(self) -> Counters | None:
        """Read the server's counters, None without metrics of a known engine; refuse a server that does not answer."""
        try:
            status, page = self.root.page("/metrics")
        except EndpointError as failure:
            raise ValueError(f"{self.url}/metrics: {failure}; start the endpoint again") from failure
        return read_counters(page) if status == 200 else None

    def reading(self) -> Counters | None:
        """Read the counters of a server that need not answer: None then too."""
        try:
            return self.counters()
        except ValueError:
            return None


class Server(Metrics):
    """A served model; `engine` names the engine of its metrics, and is empty without metrics."""

    def __init__(self, url: str, config: ClientConfig, key: str) -> None:
        super().__init__(url, config.api_key_env, key)
        self.config, self.is_baseline = config, key == BASELINE
        how = replace(once(config.api_key_env, config.timeout), model=config.model, extra=config.extra)
        secret = os.environ.get(config.api_key_env)
        self.client = Client(self.url + API, how, secret, key, "client", WITHOUT_TEMPLATE)
        self.model, _ = within(self.client, PAGE_S).served()
        reading = self.reading()
        self.engine = reading.engine if reading is not None else ""

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

    def send(self, request: Question, settings: Mapping[str, Any]) -> Answer:
        """Send a request, once, and return the answer; refuse a missing or malformed one."""
        more = {"return_meta_info": True} if self.engine == SGLANG else {}
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
        self, requests: Sequence[Question], settings: Mapping[str, Any], in_flight: int, when: Sequence[float] | None
    ) -> tuple[list[Answer], Passes]:
        """Send requests, `in_flight` at a time, with the fields that their bodies share; return answers and all passes.

        They arrive `when` seconds from now, ascending, and wait while as many are in flight; None: all are there.
        The baseline does not speculate, and a forward pass of it commits one token.

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
            first = None if answer.ttft_s is None else answer.ttft_s + queue_s
            latency_s = answer.latency_s + queue_s
            return answer._replace(arrived=arrived, queue_s=queue_s, ttft_s=first, latency_s=latency_s)

        with ThreadPoolExecutor(in_flight) as pool:
            arrivals = when if when is not None else [None] * len(requests)
            answers = []
            for answer in pool.map(send, requests, arrivals):  # a failure cancels others
                answers.append(answer)
                tick()
        wall = time.perf_counter() - begin
        if in_flight > 1:
            weight = (wall if when is None else busy_s(answers)) / sum(answer.seconds for answer in answers)
            answers = [answer._replace(weight=weight) for answer in answers]
        if self.is_baseline:
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

    def check_baseline_of(self, server: "Server") -> None:
        """Refuse to be the baseline of a server of another model, or to speculate, unless it is the same server."""
        if self.model != server.model:
            raise ValueError(
                f"{self.url} serves {self.model} and {server.url} {server.model}: the baseline is the same model, "
                "served under the same name (--served-model-name)"
            )
        if self.url != server.url:
            self.refuse_drafts()

    def refuse_drafts(self) -> None:
        """Refuse a baseline that counts drafts: it speculates."""
        counters = self.reading()
        if counters is not None and counters.drafts is not None:
            raise ValueError(self._speculates())

    def _speculates(self) -> str:
        return f"{self.url} speculates: {BASELINE} is for the same model served without a draft source"

    def _counters_after(self, before: Counters, count: int, decoded: int) -> Counters:
        """Wait until the counters include `count` further requests, and return them if they have no others."""
        deadline = time.monotonic() + LAG_S
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


def busy_s(answers: Iterable[Answer]) -> float:
    """Return the seconds in which any of the requests that arrived at a rate was under way."""
    total = until = 0.0
    for begin, end in sorted(
        (answer.arrived + answer.queue_s, answer.arrived + answer.latency_s) for answer in answers
    ):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def once(api_key_env: str, timeout: float) -> EndpointConfig:
    """Return how a request is sent without retries: a repeated one would be timed and counted twice."""
    return EndpointConfig(None, 1, timeout, 0, 0.0, 0.0, 1, api_key_env, {})


def within(client: Client, seconds: float) -> Client:
    """Return the same client with no more than so many seconds for a reply."""
    bounded = copy.copy(client)
    bounded.config = replace(client.config, timeout=min(client.config.timeout, seconds))
    return bounded


def read_answer(events: Iterable[tuple[float, Mapping[str, Any]]], model: str) -> Answer:
    """Assemble the answer from a reply's events, as `read_replies` does.

    Raises:
        EndpointError: what that raises, several choices, no finish reason, or no count of tokens.
    """
    arrived = list(events)
    reply, *others = read_replies(arrived, model)
    if others:
        raise EndpointError("choices", f"the reply has {1 + len(others)}")
    if reply.finish not in FINISH_REASONS:
        raise EndpointError("finish_reason", f"it is {reply.finish!r}")
    if (tokens := reply.completion_tokens) is None:
        raise EndpointError("usage", "the reply does not count its tokens")
    text = reply.text + "".join(name + arguments for name, arguments in reply.calls)
    passes = [counted for _, event in arrived if (counted := of_reply(event, max(tokens - 1, 0))) is not None]
    return Answer(text, tokens, reply.latency_s, reply.ttft_s, passes[-1] if passes else None)
