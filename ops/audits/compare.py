"""Requests to both servers within a budget, and greedy answers compared with the baseline's.

A server may choose another token where two are nearly as likely, because batches of other shapes round differently. So
a difference is a fault only if the baseline's logprobs put the audited server's token more than `near_tie` below the
baseline's choice. Every answer that the baseline itself gave to the question, in any order or batch, is right.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, cast

from data.answers.client import EndpointError, base_url
from eval.measures.losslessness import shared_length
from heads.common.errors import one_line
from heads.common.progress import Bar
from heads.common.typed import SEVERAL, Amount, Count, Json, NewTokens, Positive, Within
from heads.common.untrusted import visible
from ops.served import (
    STREAMED,
    Question,
    Questions,
    Record,
    Replies,
    Reply,
    Server,
    ServersConfig,
    Token,
    read_replies,
    within,
)

AUDITED, BASELINE = SIDES = ("audited", "baseline")
LOGPROBS = 5  # most probable tokens per position
CANCEL_AFTER = 2  # events of a cancelled stream
Status = Literal["passed", "failed", "undecided", "not_offered", "not_run"]
Asked = tuple[Question, Reply]
Kind = Literal["fault", "near_tie", "unexplained"]
VERBS: dict[Kind, str] = {
    "fault": "differ",
    "near_tie": "differ at a near tie",
    "unexplained": "differ, and nothing says how nearly",
}
ALONE = ("crash", "leak")  # faults that a single difference proves
EXPLAINED = 2  # answers of the baseline with logprobs per question in doubt
COPIED = 24  # characters that a leaked answer shares with the answer to another request
RESUMED = 12  # characters that match again after a lost token
LONGEST_TOKEN = 24  # characters
SHOWN = 400  # characters of a note
MANY = 12  # prompts of most checks


@dataclass(frozen=True)
class AuditConfig(ServersConfig):
    """The servers, the requests and their budget; conf/ops/audit.yaml explains the keys."""

    questions: list[str]
    requests: Count
    minutes: Positive
    concurrency: Annotated[list[Count], SEVERAL]
    borders: Annotated[list[Count], SEVERAL]
    samples: Annotated[int, Within(8, 500)]
    sample_tokens: NewTokens
    near_tie: Amount
    alpha: Annotated[float, Within(1e-4, 0.5)]
    plain: Json

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.plain and base_url(self.baseline or self.url) == base_url(self.url):
            raise ValueError(
                "audit needs a baseline: the same model served without speculation at another URL (baseline=URL), or "
                "the fields of a request that turn speculation off (plain={...})"
            )


class EndedError(Exception):
    """The audit ended early: the budget of requests or minutes is used up, or a server stopped answering."""


@dataclass
class Asker:
    """Client of both servers; its methods may be called from several threads.

    `ended` is the reason why the audit ended early, empty until then; `crash` the question under which the audited
    server ended and the requests in flight, if those were several. An EndedError comes before a request beyond the
    budget, and where a server stopped answering; an error that a server answers with is a reply.
    """

    sides: Mapping[str, Server]
    config: AuditConfig
    settings: Record
    bar: Bar
    requests: int = 0
    in_flight: int = 1
    ended: str = ""
    crash: tuple[Question, int] | None = None
    begun: float = field(default_factory=time.monotonic)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def minutes(self) -> float:
        """Return the minutes since the first request."""
        return (time.monotonic() - self.begun) / 60

    def body(self, side: str, question: Question) -> Json:
        """Return the fields of a request, without server-specific ones; streamed unless the question sets `stream`."""
        streamed = STREAMED if question.body.get("stream", True) else {}
        return {"model": self.sides[side].model, **self.settings, **streamed, **question.body}

    def ask(self, side: str, question: Question, cancel: bool = False) -> Replies:
        """Return the choices of a reply; with `cancel` the stream is aborted early."""
        with self.lock:
            if self.requests >= self.config.requests:
                self._end(f"the budget of {self.config.requests} requests is used up")
            seconds = self._seconds_left()
            self.requests += 1
            self.bar.show(self.requests)
        server = self.sides[side]
        begin = time.perf_counter()
        try:
            body = {**self.body(side, question), **server.config.extra}
            events = within(server.client, seconds).events(question.path, body)
            if cancel:
                with closing(cast(Generator[Any, None, None], events)) as begun:
                    list(islice(begun, CANCEL_AFTER))
                return [Reply(error="cancelled")]
            return read_replies(((time.perf_counter() - begin, event) for event in events), server.model)
        except (EndpointError, ValueError) as failure:  # ValueError: the server refuses the key, or lacks the path
            cause = getattr(failure, "cause", "")
            if cause == "timeout":
                self._seconds_left()
            if cause in ("unreachable", "timeout") and not server.alive():
                if side == AUDITED and self.in_flight > 1 and self.sides[BASELINE].alive():
                    self.crash = self.crash or (question, self.in_flight)
                self._end(f"a server went away: {server.url}: {one_line(failure)}")
            return [Reply(error=visible(one_line(failure)))]

    def one(self, side: str, question: Question, cancel: bool = False) -> Reply:
        """Return the only choice of a reply."""
        return self.ask(side, question, cancel)[0]

    def all(self, side: str, questions: Questions, in_flight: int, cancelled: Collection[int] = ()) -> Replies:
        """Return a server's replies, `in_flight` at a time; streams at the `cancelled` indices are aborted early."""
        self.in_flight = min(in_flight, len(questions))
        with ThreadPoolExecutor(in_flight) as pool:
            futures = [pool.submit(self.one, side, question, i in cancelled) for i, question in enumerate(questions)]
            try:
                return [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
                self.in_flight = 1

    def _end(self, reason: str) -> NoReturn:
        self.ended = self.ended or reason
        raise EndedError(self.ended)

    def _seconds_left(self) -> float:
        seconds = 60 * (self.config.minutes - self.minutes)
        if self.ended or seconds <= 0:
            self._end(f"the budget of {self.config.minutes:g} minutes is used up")
        return seconds


class Bound(float):
    """A lower bound of a gap in nats, for a token outside the listed ones."""


class Difference(NamedTuple):
    """An answer of the audited server that differs from all of the baseline's."""

    question: Question
    ours: str
    theirs: str
    at: int  # first byte at which both texts differ
    gap: float | None  # nats from the baseline's choice down to the audited server's token; None: unknown
    kind: Kind
    fault: str = ""  # a key of `faults` in words.j2, empty if it resembles none
    before: tuple[Question, ...] = ()  # questions to ask first for a reproduction
    in_flight: int = 1
    note: str = ""  # the violation, if it is not a difference of texts


@dataclass
class Finding:
    """The outcome of a check: its status, a sentence on what was compared, and the differences."""

    status: Status
    summary: str
    differences: list[Difference] = field(default_factory=list)
    figures: Json = field(default_factory=dict)
    check: str = ""  # a key of `checks` in words.j2, set by the caller of the check

    @property
    def fault(self) -> str:
        """Return the fault that most failures resemble, or one of ALONE if any does; empty without failures."""
        looks = Counter(d.fault for d in self.differences if d.kind == "fault" and d.fault)
        if not looks or self.status != "failed":
            return ""
        return next((fault for fault in ALONE if looks[fault]), looks.most_common(1)[0][0])


class Audit:
    """The checks' shared state, and the comparison of greedy answers with the baseline's; `near_tie` is in nats.

    `tokens` and `seconds` of timed answers are keyed by server and requests in flight.
    """

    def __init__(self, asker: Asker, questions: list[Question], config: AuditConfig) -> None:
        self.asker, self.questions, self.config, self.near_tie = asker, questions, config, config.near_tie
        self.few = questions[:MANY]
        self.tokens = Counter[tuple[str, int]]()
        self.seconds = defaultdict[tuple[str, int], float](float)
        self.answers = defaultdict[tuple[str, str], Replies](list)  # the baseline's answers by question
        self.explained: dict[tuple[str, str], Replies] = {}
        self.texts: dict[str, str] = {}  # the baseline's first answers by prompt

    def question(self, id_: str, text: str, *before: str, **fields: Any) -> Question:
        """Return a question with a user's text; `before` are the conversation's earlier messages, the user's first."""
        return ask_text(id_, text, self.config.client.chat, *before, **fields)

    def time(self, side: str, in_flight: int, replies: Iterable[Reply], seconds: float) -> None:
        """Record a server's time for answers with `in_flight` requests at a time."""
        self.tokens[side, in_flight] += sum(reply.completion_tokens or 0 for reply in replies)
        self.seconds[side, in_flight] += seconds

    def add_reference(self, question: Question, reply: Reply) -> None:
        """Add an answer by the baseline, with which others are compared."""
        if not reply.error:
            self.texts.setdefault(question.prompt, reply.text)
        self.answers[question.content].append(reply)

    def difference(self, question: Question, ours: Reply) -> Difference | None:
        """Compare an answer with all of the baseline's to this question; None if it equals one of them."""
        theirs = self.answers[question.content]
        if ours.content in {reply.content for reply in theirs}:
            return None
        if ours.error:
            return violation(question, ours.content, theirs[0].content, "error", "")
        explained = self.explained_by(question)
        if ours.content in {reply.content for reply in explained}:
            return None
        nearest = max(explained + theirs, key=lambda reply: first_difference(ours.text, reply.text))
        left = first_difference(ours.text, nearest.text)
        gaps = (gap_at(reply, ours.text, question.body) for reply in explained)
        at, gap = max(gaps, default=(left, None), key=lambda seen: (seen[0], seen[1] is not None))
        if gap is not None and gap > self.near_tie and left <= at:  # beyond `left` the baseline's own answers differ
            fault = self._looks(question, ours, nearest.text, at)
            return Difference(question, ours.content, nearest.content, at, gap, "fault", fault)
        unexplained = gap is None or isinstance(gap, Bound) or gap > self.near_tie
        kind: Kind = "unexplained" if unexplained else "near_tie"
        return Difference(question, ours.content, nearest.content, left if gap is None else at, gap, kind)

    def explained_by(self, question: Question) -> Replies:
        """Return the baseline's answers with logprobs; empty for a server without logprobs."""
        key = question.content
        if key not in self.explained:
            replies = [self.asker.one(BASELINE, with_logprobs(question)) for _ in range(EXPLAINED)]
            self.explained[key] = [reply for reply in replies if reply.tokens]
        return self.explained[key]

    def _looks(self, question: Question, ours: Reply, theirs: str, at: int) -> str:
        """Return the fault that the texts of a difference suggest."""
        rest, after = (text.encode()[at:].decode(errors="replace") for text in (ours.text, theirs))
        if not rest:
            return "early_stop" if ours.finish_reason == "stop" else "limit"
        others = [text for prompt, text in self.texts.items() if prompt != question.prompt]
        copied, resumed = rest[:COPIED], rest[:RESUMED]
        if len(copied) == COPIED and copied not in theirs and any(copied in text for text in others):
            return "leak"
        lost = len(resumed) == RESUMED and resumed in after[1 : LONGEST_TOKEN + RESUMED]
        return "lost_token" if lost else ""


def compare_answers(
    audit: Audit,
    answers: Iterable[Asked],
    fault: str = "",
    before: Mapping[str, tuple[Question, ...]] | None = None,
    in_flight: int = 1,
) -> Finding:
    """Return the finding on the audited server's answers.

    `fault` is the fault that a failure of this check suggests; `before` maps question ids to earlier questions.
    """
    differences, count, error = [], 0, "there are no such questions"
    for question, reply in [*answers]:  # all questions are asked before any comparison
        if errors := [theirs.error for theirs in audit.answers[question.content] if theirs.error]:
            error = f"the baseline does not answer: {errors[0]}"
            continue
        count += 1
        difference = audit.difference(question, reply)
        if difference is not None and difference.kind == "fault":
            telling = difference.fault != "leak" or in_flight > 1  # otherwise the text may come from a cache
            suspected = (telling and difference.fault) or fault or difference.fault
            earlier = (before or {}).get(question.id, ())
            difference = difference._replace(fault=suspected, before=earlier, in_flight=in_flight)
        differences += [] if difference is None else [difference]
    if not count:
        return Finding("not_offered", f"nothing was compared: {error}")
    counts = Counter(difference.kind for difference in differences)
    parts = [f"{counts[kind]} {words}" for kind, words in VERBS.items() if counts[kind]]
    summary = "; ".join([f"{count - len(differences)} of {count} answers are the baseline's", *parts])
    status: Status = "failed" if counts["fault"] else "undecided" if counts["unexplained"] else "passed"
    return Finding(status, summary, differences, {"answers": count})


def violation(question: Question, ours: str, theirs: str, fault: str, note: str) -> Difference:
    """Return the fault that a note states about an answer of the audited server."""
    return Difference(question, ours, theirs, first_difference(ours, theirs), None, "fault", fault, note=note[:SHOWN])


def ask_text(id_: str, text: str, chat: bool, *before: str, **fields: Any) -> Question:
    """Return a question with a user's text; `before` holds the conversation's earlier messages, the user's first."""
    if not chat:
        return Question(id_, "/completions", {"prompt": "\n\n".join([*before, text]), **fields})
    turns = zip(cycle(("user", "assistant")), [*before, text], strict=False)
    messages = [{"role": role, "content": content} for role, content in turns]
    return Question(id_, "/chat/completions", {"messages": messages, **fields})


def with_logprobs(question: Question) -> Question:
    """Return the same question, asked with logprobs."""
    fields = {"logprobs": True, "top_logprobs": LOGPROBS} if "messages" in question.body else {"logprobs": LOGPROBS}
    return question.having("with logprobs", **fields)


def unstreamed(question: Question) -> Question:
    """Return the same question, without streaming."""
    return question.having("whole", stream=False)


def first_difference(one: str, other: str) -> int:
    """Return the index of the first differing byte of two texts; the shorter length if it is a prefix of the other."""
    return shared_length(one.encode(), other.encode())


def gap_at(theirs: Reply, ours: str, body: Record) -> tuple[int, float | None]:
    """Return the byte where a text departs from an answer with logprobs, and the gap there in nats.

    The gap is None if the tokens do not give the text, or end earlier.
    """
    text, other = theirs.text.encode(), ours.encode()
    at, offset = first_difference(theirs.text, ours), 0
    for token in penalized(theirs.tokens, body):
        ended = offset == len(text) == at  # the token that ended the answer
        if not ended and not text.startswith(token.text, offset):
            break
        if ended or offset + len(token.text) > at:
            return at, lead(token, other[offset:])
        offset += len(token.text)
    return at, None


def lead(token: Token, rest: bytes) -> float | None:
    """Return a token's lead over the token that begins `rest`, or over the next best one if `rest` is empty."""
    others = {text: value for text, value in token.top.items() if text != token.text}
    going_on = [text for text in others if text and rest.startswith(text)]
    if not others:
        return None
    if not rest or going_on:
        return token.logprob - (others[max(going_on, key=len)] if going_on else max(others.values()))
    return Bound(token.logprob - min(others.values()))


def penalized(tokens: Sequence[Token], body: Record) -> list[Token]:
    """Apply presence and frequency penalties to reported logprobs, for engines that report them before penalties."""
    presence, frequency = (body.get(f"{key}_penalty", 0.0) for key in ("presence", "frequency"))
    if all(token.logprob >= max(token.top.values(), default=token.logprob) for token in tokens):
        return [*tokens]
    counts, adjusted = Counter[bytes](), []
    for token in tokens:
        values = {
            text: value - presence * (counts[text] > 0) - frequency * counts[text]
            for text, value in {**token.top, token.text: token.logprob}.items()
        }
        adjusted.append(token._replace(logprob=values[token.text], top={text: values[text] for text in token.top}))
        counts[token.text] += 1
    return adjusted


def diagnosed(findings: Sequence[Finding]) -> str:
    """Return the fault that the failed checks suggest, a key of `faults`; empty if none failed.

    Checks are ordered so that a fault shown by one check also fails later ones, so the first failure decides. But if
    only streamed answers differ and whole replies do not, the stream is at fault.
    """
    first = next((finding for finding in findings if finding.status == "failed"), None)
    if first is None:
        return ""
    if first.check == "identity" and first.fault not in ("error", "crash"):
        # A fault rarer than every second answer may be missing in whole replies by chance.
        most = 2 * sum(d.kind == "fault" for d in first.differences) > first.figures["answers"]
        if most and any(finding.check == "streaming" and finding.status == "passed" for finding in findings):
            return "streaming"
    return first.fault or "wrong_token"
