"""The client of an OpenAI-compatible endpoint, such as vLLM's or SGLang's.

What comes back is not trusted: a reply that is no answer to what was asked is an `EndpointError`, with a cause.
Failures that may pass are tried again, after a time that doubles, with jitter, or that the server names.
"""

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import URLError
from urllib.request import HTTPErrorProcessor, Request, build_opener

from data.answer_chats import Reply

UNKNOWN_CONTEXT = 2**31
SHOWN = 160  # characters of a reply in an error

# Statuses after which the same request may succeed, besides all from 500 on.
TEMPORARY = (408, 425, 429)
REMEDIES = {
    401: "set the key in the environment variable that {options}.api_key_env names",
    403: "set the key in the environment variable that {options}.api_key_env names",
    404: "{by}= is the base that /models and /chat/completions stand under, mostly .../v1",
}
EVENTS = "text/event-stream"
DONE = "[DONE]"  # the last event of a stream that has come whole


@dataclass(frozen=True)
class EndpointConfig:
    """How an endpoint is asked.

    Attributes:
        model: the name it serves the target by; None takes the only one there is.
        concurrency: chats in flight.
        timeout: seconds for one reply, to its last byte.
        retries: of a request that failed for a while.
        backoff: seconds before the first of them, doubled each time, with jitter; Retry-After goes before it.
        max_wait: seconds that are waited before a retry at most; asked for more, the chat fails.
        max_failures: chats that fail one after another before the job stops.
        api_key_env: the environment variable with the key; unset, none is sent.
        extra: further fields of every request, such as top_k.
    """

    model: str | None
    concurrency: int
    timeout: float
    retries: int
    backoff: float
    max_wait: float
    max_failures: int
    api_key_env: str
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse counts and times that ask for nothing."""
        for name in ("concurrency", "timeout", "max_failures"):
            if getattr(self, name) <= 0:
                raise ValueError(f"endpoint.{name}={getattr(self, name)}: must be positive")
        if min(self.retries, self.backoff, self.max_wait) < 0:
            raise ValueError("endpoint.retries, endpoint.backoff and endpoint.max_wait must not be negative")


class EndpointError(Exception):
    """A request without an answer: why, in one word and as the server said it, and whether another try may help."""

    def __init__(self, cause: str, detail: str, retry: bool = False, after: float | None = None) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.retry, self.after = cause, " ".join(detail.split())[:SHOWN], retry, after


class AsItIs(HTTPErrorProcessor):
    """Lets every status through: what becomes of it is decided here, and no request follows a redirect."""

    def http_response(self, request: Request, response: HTTPResponse) -> HTTPResponse:
        """Return the response."""
        return response

    https_response = http_response


class Client:
    """The connection to an endpoint; its methods may be called from several threads.

    `by` and `options` are the keys under which the user gives URL and configuration, for errors.
    """

    def __init__(
        self, url: str, config: EndpointConfig, key: str | None, by: str = "by", options: str = "endpoint"
    ) -> None:
        self.by, self.options = by, options
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError(f"${config.api_key_env} holds what is no key: give printable ASCII alone")
        self.url, self.config = url.rstrip("/"), config
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.opener = build_opener(AsItIs)
        self.stop = threading.Event()  # nobody waits for a retry any more

    def served(self) -> tuple[str, int]:
        """Return the model's name and its context, which not every server tells.

        Raises:
            ValueError: the endpoint does not say what it serves, or not the model that is asked for.
        """
        try:
            data = self.request("GET", "/models", None)
        except EndpointError as failure:
            raise ValueError(
                f"{self.url}/models: {failure.cause} ({failure.detail}); start the endpoint, or correct {self.by}="
            ) from failure
        listed = data.get("data")
        entries = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        models = {str(each.get("id")): each for each in entries}
        wanted = self.config.model
        name = next(iter(models)) if wanted is None and len(models) == 1 else wanted
        if name is None or name not in models:
            lacking = "" if wanted is None else f", not {wanted}"
            names = ", ".join(models) or "no model"
            raise ValueError(f"{self.url} serves {names}{lacking}; name what it serves: {self.options}.model=NAME")
        context = models[name].get("max_model_len")
        return name, context if isinstance(context, int) and context > 0 else UNKNOWN_CONTEXT

    def request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """Send a request, again after a while where that may help; return the JSON object that comes back."""
        for attempt in range(self.config.retries + 1):
            try:
                return self._send(method, path, body)
            except EndpointError as failure:
                pause = min(self.config.max_wait, self.config.backoff * 2**attempt * random.uniform(0.5, 1.5))
                pause = pause if failure.after is None else failure.after
                last = attempt == self.config.retries or pause > self.config.max_wait
                if not failure.retry or last or self.stop.wait(pause):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request once, and yield the objects of the reply as they come.

        They are those of server-sent events, or where the server does not stream, the one that the reply is.

        Raises:
            EndpointError: there is no reply, it is none, or it breaks off before its end.
        """
        deadline = time.monotonic() + self.config.timeout
        with self._exchange("POST", path, body) as response:
            if response.status != 200 or EVENTS not in response.headers.get("Content-Type", ""):
                text = self._read(response, deadline)
                self._check(response, path, text)
                yield read_object(text)
                return
            for line in self._lines(response, deadline):
                said = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if said == DONE:
                    return
                if line.startswith(b"data:"):
                    yield read_object(said)
        raise EndpointError("unreachable", "the stream broke off before its end", True)

    def page(self, path: str) -> tuple[int, str]:
        """Return the status and the text of a page that need not be JSON.

        Raises:
            EndpointError: nobody answers in time.
        """
        deadline = time.monotonic() + self.config.timeout
        with self._exchange("GET", path, None) as response:
            return response.status, self._read(response, deadline)

    @contextmanager
    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        """Send a request; a connection that fails before all is read is an EndpointError."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url + path, data, self.headers, method=method)
            with self.opener.open(request, timeout=self.config.timeout) as response:
                yield response
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise EndpointError("timeout", f"no reply within {self.config.timeout:g} s", True) from error
            raise EndpointError("unreachable", f"{type(reason).__name__}: {reason}", True) from error

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        deadline = time.monotonic() + self.config.timeout
        with self._exchange(method, path, body) as response:
            text = self._read(response, deadline)
        self._check(response, path, text)
        return read_object(text)

    def _check(self, response: HTTPResponse, path: str, text: str) -> None:
        """Refuse a reply whose status is no success."""
        if response.status in REMEDIES:
            remedy = REMEDIES[response.status].format(by=self.by, options=self.options)
            raise ValueError(f"{self.url}{path}: {response.status} ({' '.join(text.split())[:SHOWN]}); {remedy}")
        if response.status != 200:
            after = retry_after(response.headers.get("Retry-After", ""))
            temporary = response.status in TEMPORARY or response.status >= 500
            raise EndpointError(f"http_{response.status}", text, temporary, after)

    def _pieces(self, response: HTTPResponse, deadline: float) -> Iterator[bytes]:
        """Yield the body as it comes; it must come whole and in time, however small the pieces."""
        while piece := response.read1():
            yield piece
            if time.monotonic() > deadline:
                raise EndpointError("timeout", f"no whole reply within {self.config.timeout:g} s", True)
        if response.length:
            raise EndpointError("unreachable", f"the reply broke off {response.length} bytes before its end", True)

    def _read(self, response: HTTPResponse, deadline: float) -> str:
        return b"".join(self._pieces(response, deadline)).decode(errors="replace")

    def _lines(self, response: HTTPResponse, deadline: float) -> Iterator[bytes]:
        rest = b""
        for piece in self._pieces(response, deadline):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


def read_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text is.

    Raises:
        EndpointError: it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EndpointError("not_json", text, True) from error
    if not isinstance(value, dict):
        raise EndpointError("not_json", text)
    return value


def read_reply(data: Mapping[str, Any], model: str) -> Reply:
    """Return what a chat completion says.

    Raises:
        EndpointError: it is another model's, no or several answers, no text, or ended for a reason that is none.
    """
    if data.get("model") != model:
        raise EndpointError("wrong_model", f"the reply is {data.get('model')!r}'s")
    choices = data.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise EndpointError("choices", json.dumps(data))
    message, finish = choices[0].get("message"), choices[0].get("finish_reason")
    if finish not in ("stop", "length", "tool_calls"):
        raise EndpointError("finish_reason", f"it is {finish!r}")
    if not isinstance(message, dict) or message.get("role", "assistant") != "assistant":
        raise EndpointError("content", json.dumps(data))
    calls, text = message.get("tool_calls") or [], message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if text is None and (calls or finish == "length"):
        text = ""  # the reasoning took all the tokens, or the call stands for itself
    if not isinstance(text, str) or not isinstance(reasoning, str) or not isinstance(calls, list):
        raise EndpointError("content", json.dumps(data))
    whole = calls if finish != "length" else []  # the last call may be cut off anywhere
    return Reply(text, finish != "length", reasoning, tuple(read_call(call) for call in whole))


def read_call(call: Any) -> dict[str, Any]:
    """Return a tool call as chat templates take it: its arguments as an object, not as JSON in a string.

    Raises:
        EndpointError: it is none.
    """
    try:
        function = dict(call["function"])
        arguments = function["arguments"]
        function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"type": "function", "function": function}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise EndpointError("content", f"a tool call that is none: {call!r}") from error


def retry_after(asked: str) -> float | None:
    """Return the seconds that a server asks to be left alone, which it says as a number or as a date."""
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        return None
