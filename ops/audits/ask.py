"""Requests to both servers within a budget, and their questions."""

import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, cast

from data.answers.client import EndpointError, base_url, check_url
from heads.common.progress import Bar
from heads.common.ranges import Amount, Count, NewTokens, Number, Positive, Within
from heads.common.untrusted import visible
from ops.served import STREAMED, ClientConfig, Question, Reply, Server, read_replies, within

AUDITED, BASELINE = SIDES = ("audited", "baseline")
LOGPROBS = 5  # most probable tokens per position
CANCEL_AFTER = 2  # events of a cancelled stream


@dataclass(frozen=True)
class AuditConfig:
    """The servers, the requests and their budget; conf/ops/audit.yaml explains the keys."""

    url: str
    baseline: str | None
    client: ClientConfig
    out: str
    workload: Any  # a name, a list of them, or None
    questions: list[str]
    prompts: Count
    max_new_tokens: NewTokens
    seed: Number
    requests: Count
    minutes: Positive
    concurrency: list[Count]
    borders: list[Count]
    samples: Annotated[int, Within(8, 500)]
    sample_tokens: NewTokens
    near_tie: Amount
    alpha: Annotated[float, Within(1e-4, 0.5)]
    plain: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse an audit without a baseline."""
        for key, url in (("url", self.url), ("baseline", self.baseline or self.url)):
            check_url(key, url)
        if not self.plain and base_url(self.baseline or self.url) == base_url(self.url):
            raise ValueError(
                "audit needs a baseline: the same model served without speculation at another URL (baseline=URL), or "
                "the fields of a request that turn speculation off (plain={...})"
            )


class EndedError(Exception):
    """The budget of requests or minutes is used up, or a server stopped answering."""


def ask_text(id_: str, text: str, chat: bool, *before: str, **fields: Any) -> Question:
    """Return a question with a user's text; `before` holds the conversation's earlier messages, the user's first."""
    if not chat:
        return Question(id_, "/completions", {"prompt": "\n\n".join([*before, text]), **fields})
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate([*before, text])]
    return Question(id_, "/chat/completions", {"messages": messages, **fields})


class Asker:
    """Client of both servers; its methods may be called from several threads.

    Attributes:
        ended: the reason why the audit ended early, empty until then.
        crash: the question under which the audited server ended and the requests in flight, if those were several.

    Raises:
        EndedError: before a request beyond the budget, and where a server stopped answering. An error that a server
            answers with is a reply.
    """

    def __init__(self, sides: Mapping[str, Server], config: AuditConfig, settings: Mapping[str, Any], bar: Bar) -> None:
        self.sides, self.config, self.settings, self.bar = sides, config, settings, bar
        self.requests, self.in_flight, self.ended = 0, 1, ""
        self.crash: tuple[Question, int] | None = None
        self.begun = time.monotonic()
        self.lock = threading.Lock()

    @property
    def minutes(self) -> float:
        """Minutes since the first request."""
        return (time.monotonic() - self.begun) / 60

    def body(self, side: str, question: Question) -> dict[str, Any]:
        """Return the fields of a request, without server-specific ones; streamed unless the question says otherwise."""
        streamed = STREAMED if question.body.get("stream", True) else {}
        return {"model": self.sides[side].model, **self.settings, **streamed, **question.body}

    def ask(self, side: str, question: Question, cancel: bool = False) -> list[Reply]:
        """Return the choices of a reply; with `cancel` the stream is aborted early."""
        with self.lock:
            if self.requests >= self.config.requests:
                self._end(f"the budget of {self.config.requests} requests is used up")
            seconds = self._seconds_left()
            self.requests += 1
            self.bar.show(self.requests)
        server = self.sides[side]
        body = {**self.body(side, question), **server.config.extra}
        begin = time.perf_counter()
        try:
            events = within(server.client, seconds).events(question.path, body)
            if cancel:
                with closing(cast(Generator[Any, None, None], events)) as begun:
                    list(islice(begun, CANCEL_AFTER))
                return [Reply(error="cancelled")]
            return read_replies(((time.perf_counter() - begin, event) for event in events), server.model)
        except EndpointError as failure:
            if failure.cause == "timeout":
                self._seconds_left()
            if failure.cause in ("unreachable", "timeout") and not server.alive():
                detail = f"a server went away: {server.url}: {failure.cause} ({failure.detail})"
                if side == AUDITED and self.in_flight > 1 and self.sides[BASELINE].alive():
                    self.crash = self.crash or (question, self.in_flight)
                self._end(detail)
            return [Reply(error=visible(f"{failure.cause}: {failure.detail}"))]
        except ValueError as refusal:  # the server refuses the key, or lacks the path of this feature
            return [Reply(error=visible(" ".join(str(refusal).split())))]

    def one(self, side: str, question: Question, cancel: bool = False) -> Reply:
        """Return the only choice of a reply."""
        return self.ask(side, question, cancel)[0]

    def all(
        self, side: str, questions: Sequence[Question], in_flight: int, cancelled: Collection[int] = ()
    ) -> list[Reply]:
        """Return a server's replies, `in_flight` at a time; streams at the `cancelled` indices are aborted early."""
        self.in_flight = min(in_flight, len(questions))
        with ThreadPoolExecutor(in_flight) as pool:
            futures = [pool.submit(self.one, side, question, i in cancelled) for i, question in enumerate(questions)]
            try:
                return [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
                self.in_flight = 1

    def _end(self, reason: str) -> None:
        self.ended = self.ended or reason
        raise EndedError(self.ended)

    def _seconds_left(self) -> float:
        seconds = 60 * (self.config.minutes - self.minutes)
        if self.ended or seconds <= 0:
            self._end(f"the budget of {self.config.minutes:g} minutes is used up")
        return seconds
