"""An HTTP client for OpenAI-compatible endpoints such as vLLM's and SGLang's, for answers and for measurements.

Replies are untrusted: a malformed one is an `EndpointError` with a cause. Temporary failures are retried with
exponential back-off and jitter, or after the server's own time.
"""

import json
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from transformers import PreTrainedTokenizerBase

from data.answers.chats import AnswerSettings, Conversation, OngoingChat, Outcome, Reply
from data.text.files import CHUNK
from data.text.records import logged_answers
from heads.common.errors import HIDDEN, redacted
from heads.common.progress import update_bar
from heads.common.typed import Amount, Count, Json, Number, Positive
from heads.common.untrusted import parse_json, visible

log = logging.getLogger(__name__)
T = TypeVar("T")

API = "/v1"  # the path of an endpoint's API
UNKNOWN_CONTEXT = 2**31
SHOWN = 160  # characters of a reply in an error
NESTED = 50  # maximum depth of a tool call's arguments; the file of answers nests them deeper

TEMPORARY = (408, 425, 429)  # statuses after which a retry may succeed, as after 500 and above
FINISH_REASONS = ("stop", "length", "tool_calls")
REMEDIES = {
    401: "set the key in the environment variable that {options}.api_key_env names",
    403: "set the key in the environment variable that {options}.api_key_env names",
    404: "{by}= is the base URL of /models and /chat/completions, mostly .../v1",
}
EVENTS = "text/event-stream"
MOST_FAILURES = 8  # consecutive failed chats that stop the job
SEEDS = 2**31  # bound of seeds that every server accepts
TOKENS = {"return_token_ids": True, "return_prompt_token_ids": True}  # SGLang needs the second for chats
DONE = "[DONE]"  # the last event of a complete stream


@dataclass(frozen=True)
class EndpointConfig:
    """The configuration of requests to an endpoint; conf/data.yaml explains the keys."""

    model: str | None
    concurrency: Count
    timeout: Positive
    retries: Number
    backoff: Amount
    max_wait: Amount
    api_key_env: str
    extra: Json


def base_url(url: str) -> str:
    """Return an endpoint's URL without the API's path."""
    return url.rstrip("/").removesuffix(API)


def check_url(key: str, url: str) -> None:
    """Refuse a URL that is invalid for an endpoint or contains a secret; `key` is its option."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key}={url}: give a URL such as http://localhost:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{key}: the URL of {parts.hostname} carries a user or a query, which files would show: give the key in an "
            "environment variable, named by api_key_env"
        )


class EndpointError(Exception):
    """A failed request: its cause in one word, the server's message, whether to retry, and after how many seconds.

    The detail is written to files, so secrets are redacted and lone surrogates replaced.
    """

    def __init__(self, cause: str, detail: str, retry: bool = False, after: float | None = None) -> None:
        self.detail = redacted(visible(" ".join(detail[:CHUNK].split())))[:SHOWN]
        self.cause, self.retry, self.after = cause, retry, after
        super().__init__(f"{cause}: {self.detail}")


class Client:
    """The client of an endpoint; its methods may be called from several threads.

    Error messages name `by`, the option of the URL, `options`, that of the configuration, and `without_template`, the
    remedy if there is no chat template.
    """

    def __init__(
        self, url: str, config: EndpointConfig, key: str | None, by: str = "by", options: str = "endpoint",
        without_template: str = "",
    ) -> None:  # fmt: skip
        self.by, self.options, self.without_template = by, options, without_template
        key = (key or "").strip()  # a key from a file ends in a newline
        self.url, self.config, self.key = url.rstrip("/"), config, key or HIDDEN
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(headers=headers, limits=httpx.Limits(max_connections=None))  # concurrency bounds them
        self.stop = threading.Event()  # ends pauses and prevents retries once set

    def served(self) -> tuple[str, int]:
        """Return the model's name and its context in tokens (or UNKNOWN_CONTEXT); refuse one that is not listed."""
        try:
            data = self.request("GET", "/models", None)
        except EndpointError as failure:
            raise ValueError(
                f"{self.url}/models: {failure.cause} ({failure.detail}); start the endpoint, or correct {self.by}="
            ) from failure
        cards = data["data"] if isinstance(data.get("data"), list) else []
        models = {str(card["id"]): card for card in cards if isinstance(card, dict) and "id" in card}
        name = self.config.model or (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            missing = f", not {name}" if name else ""
            names = ", ".join(models)[:SHOWN] or "no model"
            raise ValueError(f"{self.url} serves {names}{missing}; name what it serves: {self.options}.model=NAME")
        context = models[name].get("max_model_len")
        return name, context if isinstance(context, int) and context > 0 else UNKNOWN_CONTEXT

    def request(self, method: str, path: str, body: Json | None) -> Json:
        """Send a request with retries, and return the reply's JSON object.

        Raises:
            EndpointError: the last attempt failed, or the server asks for a longer pause than `max_wait`.
            ValueError: the endpoint refuses the key or the path.
        """
        return self.retried(lambda _: self.once(method, path, body), self.config.retries)

    def once(self, method: str, path: str, body: Json | None) -> Json:
        """Send a request once and return the reply's JSON object; raise what `request` raises."""
        with self._exchange(method, path, body) as response:
            return self._read_reply(response, path)

    def retried(self, attempt: Callable[[int], T], retries: int) -> T:
        """Call `attempt` with 0, 1, … until it succeeds or fails permanently, and return its result."""
        for number in range(retries + 1):
            try:
                return attempt(number)
            except EndpointError as failure:
                pause = min(self.config.max_wait, self.config.backoff * 2**number * random.uniform(0.5, 1.5))
                pause = pause if failure.after is None else failure.after
                last = number == retries or pause > self.config.max_wait
                if not failure.retry or last or self.stop.wait(pause):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def events(self, path: str, body: Json) -> Iterator[Json]:
        """Send a request once, and yield the reply's JSON objects as they arrive.

        Each server-sent event is one object; a server that does not stream sends a single object.

        Raises:
            EndpointError: no reply arrived, it is malformed, or it breaks off.
            ValueError: the endpoint refuses the key or the path.
        """
        with self._exchange("POST", path, body) as response:
            if response.status_code != 200 or EVENTS not in response.headers.get("Content-Type", ""):
                yield self._read_reply(response, path)
                return
            for line in response.iter_lines():
                event = line.strip().removeprefix("data:").strip()
                if event == DONE:
                    return
                if line.startswith("data:"):
                    yield read_object(event)
        raise EndpointError("unreachable", "the stream broke off before its end", True)

    def page(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page, which need not be JSON; refuse a reply after the time-out."""
        with self._exchange("GET", path, None) as response:
            return response.status_code, response.read().decode(errors="replace")

    @contextmanager
    def _exchange(self, method: str, path: str, body: Json | None) -> Iterator[httpx.Response]:
        """Send a request and yield the open response; a failed connection raises an EndpointError."""
        try:
            with self.http.stream(method, self.url + path, json=body, timeout=self.config.timeout) as response:
                yield response
        except httpx.TimeoutException as error:
            raise EndpointError("timeout", f"nothing arrived for {self.config.timeout:g} s", True) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EndpointError("unreachable", f"{type(error).__name__}: {error}", True) from error

    def _read_reply(self, response: httpx.Response, path: str) -> Json:
        """Return the JSON object in a response, whose status must be 200."""
        content, status = response.read(), response.status_code
        text = content[:CHUNK].decode(errors="replace").replace(self.key, HIDDEN)  # some servers echo the key
        if status in REMEDIES:
            remedy = REMEDIES[status].format(by=self.by, options=self.options)
            words = " ".join(text.split())[:SHOWN]
            raise ValueError(f"{self.url}{path}: {status} ({words}); {remedy}")
        if status != 200:
            seconds = response.headers.get("Retry-After", "")  # a date is ignored in favour of our own pause
            after = float(seconds) if seconds.isdecimal() else None
            temporary = status in TEMPORARY or status >= 500
            if self.without_template and "chat template" in text:
                text = f"{self.without_template}; {text}"
            raise EndpointError(f"http_{status}", text, temporary, after)
        return read_object(content)


def read_object(content: bytes | str) -> Json:
    """Parse a JSON object; anything else raises an EndpointError."""
    text = content[:CHUNK] if isinstance(content, str) else content[:CHUNK].decode(errors="replace")
    try:
        value = parse_json(content)
    except ValueError as error:
        raise EndpointError("not_json", text, True) from error
    if not isinstance(value, dict):
        raise EndpointError("not_json", text)
    return value


def read_reply(data: Json, model: str) -> Reply:
    """Read the answer in a chat completion; refuse another model's, several choices, no text, odd finish reasons."""
    if data.get("model") != model:
        raise EndpointError("wrong_model", f"the reply is {data.get('model')!r}'s")
    try:
        (choice,) = data["choices"]
        message, finish = choice["message"], choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise EndpointError("choices", json.dumps(data)) from error
    if finish not in FINISH_REASONS:
        raise EndpointError("finish_reason", f"it is {finish!r}")
    try:
        calls, text = message.get("tool_calls") or [], message.get("content")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if text is None and (calls or finish == "length"):
            text = ""  # the reasoning used all tokens, or the answer is a tool call
        if message.get("role", "assistant") != "assistant" or not (
            isinstance(text, str) and isinstance(reasoning, str)
        ):
            raise TypeError
        read = []
        for call in calls if finish != "length" else []:  # the last call may be incomplete
            function = dict(call["function"])
            if isinstance(arguments := function["arguments"], str):  # chat templates expect an object
                function["arguments"] = parse_json(arguments, NESTED) if arguments.strip() else {}
            if not isinstance(function["name"], str):
                raise TypeError
            read.append({"type": "function", "function": function})
        return Reply(text, finish != "length", reasoning, tuple(read))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EndpointError("content", json.dumps(data)) from error


class Endpoint:
    """An answerer that sends chats to a served target, several at a time; a later call answers failed chats."""

    def __init__(self, client: Client, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings) -> None:
        self.client, self.tokenizer, self.settings = client, tokenizer, settings
        self.template = settings.options(tokenizer)
        self.lock = threading.Lock()  # guards the tokenizer, which is not thread-safe
        self.model, self.context = client.served()

    def answer(self, chats: Iterable[OngoingChat]) -> Iterator[Outcome]:
        """Answer all chats, and yield their outcomes.

        A job that stops, also on Ctrl-C, waits for the requests in flight and saves the chats that they complete.

        Raises:
            ValueError: too many consecutive chats failed, the endpoint refuses all requests, or a record is no chat.
        """
        source, failures = iter(chats), 0
        stopped: ValueError | KeyboardInterrupt | None = None
        running: set[Future[Outcome]] = set()
        with ThreadPoolExecutor(self.client.config.concurrency) as pool:
            try:
                while True:
                    if not stopped:
                        free = self.client.config.concurrency - len(running)
                        running |= {pool.submit(self._converse, chat) for chat in islice(source, free)}
                    if not running:
                        break
                    try:
                        done, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                        update_bar()
                    except KeyboardInterrupt as interrupt:
                        log.warning("stopping: waiting for the %d requests in flight", len(running))
                        done, stopped = set(), interrupt
                    for future in done:
                        try:
                            outcome = future.result()
                        except ValueError as error:
                            stopped = stopped or error
                            continue
                        failures = failures + 1 if outcome.failed else 0
                        yield outcome
                        if failures >= MOST_FAILURES:
                            stopped = stopped or ValueError(
                                f"{self.client.url}: {failures} chats in a row failed, the last one, {outcome.id}, by "
                                f"{outcome.cause} ({outcome.detail}); finished answers are kept: fix the endpoint and "
                                "run the same command again"
                            )
                    if stopped:
                        self.client.stop.set()
            finally:
                self.client.stop.set()
        if stopped:
            raise stopped

    def describe(self) -> Json:
        """Return the names of the served model and tokenizer, and the requests' extra fields."""
        return {
            "by": "endpoint",
            "target": {"served_as": self.model, "tokenizer": self.tokenizer.name_or_path},
            "extra": self.client.config.extra,
        }

    def _converse(self, chat: OngoingChat) -> Outcome:
        """Request every answer of a chat, and return the chat's outcome."""
        if not isinstance(chat, Conversation):
            raise ValueError(
                f"record {chat.id} is no chat, or the tokenizer of {self.tokenizer.name_or_path} has no chat template, "
                "and an endpoint answers chats; remove it, give model.path= of the model that is served, or by=engine"
            )
        try:
            while True:
                with self.lock:
                    if chat.ask() is None:
                        return chat.outcome()
                if self.client.stop.is_set():
                    raise EndpointError("stopped", "the job stopped before the chat's end")
                body = {
                    "model": self.model,
                    "messages": chat.prompt,
                    "temperature": self.settings.temperature,
                    "top_p": self.settings.top_p if self.settings.temperature else 1.0,
                    "max_tokens": self.settings.max_new_tokens,
                    "seed": chat.seed() % SEEDS,
                    "n": 1,
                    "stream": False,
                    **({"tools": chat.tools} if chat.tools else {}),
                    **(TOKENS if self.settings.save_tokens else {}),
                    **({"chat_template_kwargs": self.template} if self.template else {}),
                    **self.client.config.extra,
                }
                data = self.client.request("POST", "/chat/completions", body)
                reply = read_reply(data, self.model)
                if self.settings.save_tokens:
                    try:
                        (logged,) = logged_answers(data, "the reply")
                    except ValueError as error:
                        raise EndpointError(
                            "tokens", f"no tokens of prompt and answer ({error}): save_tokens=false, or a newer server"
                        ) from error
                    reply = reply._replace(logged=logged)
                with self.lock:
                    chat.take(reply)
        except EndpointError as failure:
            return Outcome(chat.id, None, 0, failure.cause, True, failure.detail)
