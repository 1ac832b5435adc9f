"""The client of an OpenAI-compatible endpoint, such as vLLM's or SGLang's.

What comes back is not trusted: a reply that is no answer to what was asked is an `EndpointError`, with a cause.
Failures that may pass are tried again, after a time that doubles, with jitter, or that the server names.
"""

import io
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import HTTPErrorProcessor, HTTPHandler, HTTPSHandler, Request, build_opener

from data.answers.chats import Reply
from data.text.files import CHUNK
from heads.common.redact import HIDDEN, redacted
from heads.common.untrusted import parse_json

UNKNOWN_CONTEXT = 2**31
SHOWN = 160  # characters of a reply in an error
FEW = 10  # models in an error
LARGEST = 2**26  # bytes of a response, its headers included
NESTED = 50  # lists and mappings in each other of a tool call's arguments: in their file they stand in others

# Statuses after which the same request may succeed, besides all from 500 on.
TEMPORARY = (408, 425, 429)
REMEDIES = {
    401: "set the key in the environment variable that {options}.api_key_env names",
    403: "set the key in the environment variable that {options}.api_key_env names",
    404: "{by}= is the base that /models and /chat/completions stand under, mostly .../v1",
}
EVENTS = "text/event-stream"
DONE = b"[DONE]"  # the last event of a stream that has come whole


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


def check_url(key: str, url: str) -> None:
    """Refuse what is no endpoint's URL, or tells a secret to whoever reads it.

    Raises:
        ValueError: naming the key by which it was given.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key}={url}: give a URL such as http://localhost:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(
            f"{key}: the URL of {parts.hostname} carries a user or a query, which files would tell: give the key in an "
            "environment variable, named by api_key_env"
        )


class EndpointError(Exception):
    """A request without an answer: why, in one word and as the server said it, and whether another try may help.

    The detail goes into files: no secret stands in it, and no half of a surrogate pair.
    """

    def __init__(self, cause: str, detail: str, retry: bool = False, after: float | None = None) -> None:
        text = redacted(" ".join(detail[:CHUNK].split())).encode(errors="backslashreplace").decode()[:SHOWN]
        self.cause, self.detail, self.retry, self.after = cause, text, retry, after
        super().__init__(f"{cause}: {self.detail}")


class BoundedReader(io.RawIOBase):
    """The bytes of a socket, status line and headers among them, up to a deadline and to `LARGEST`."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        self.sock, self.raw, self.deadline, self.left = sock, raw, deadline, LARGEST

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what there is, within the time that is left."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self.sock.settimeout(seconds)
        count = self.raw.readinto(buffer)
        self.left -= count or 0
        if self.left < 0:
            raise EndpointError("too_large", f"the reply has more than {LARGEST} bytes")
        return count

    def close(self) -> None:
        """Close the socket's file."""
        self.raw.close()
        super().close()


class BoundedResponse(HTTPResponse):
    """A response that is read by a `BoundedReader` from its first byte on."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **named: Any) -> None:
        super().__init__(sock, *args, **named)
        self.fp = io.BufferedReader(BoundedReader(sock, self.fp.detach(), deadline))


class Exchange(HTTPHandler, HTTPSHandler, HTTPErrorProcessor):
    """Sends a request whose timeout is for the whole exchange, and follows no redirect: every status comes through."""

    def do_open(self, http_class: Any, req: Request, **named: Any) -> HTTPResponse:
        """Return the response to a request."""

        def connection(host: str, *, timeout: float, **more: Any) -> Any:
            made = http_class(host, timeout=timeout, **more)
            made.response_class = partial(BoundedResponse, deadline=time.monotonic() + timeout)
            return made

        opened: Any = connection
        return super().do_open(opened, req, **named)

    def http_response(self, request: Request, response: HTTPResponse) -> HTTPResponse:
        """Return the response, whatever its status is."""
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
        self.url, self.config, self.key = url.rstrip("/"), config, key or HIDDEN
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self.opener = build_opener(Exchange)
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
        models = {name: each for each in entries if isinstance(name := each.get("id"), str) and name.isprintable()}
        wanted = self.config.model
        name = next(iter(models)) if wanted is None and len(models) == 1 else wanted
        if name is None or name not in models:
            lacking = "" if wanted is None else f", not {wanted}"
            names = ", ".join(itertools.islice(models, FEW))[:SHOWN] or "no model"
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
        with self._exchange("POST", path, body) as response:
            if response.status != 200 or EVENTS not in response.headers.get("Content-Type", ""):
                content = _read(response)
                self._check(response, path, content)
                yield read_object(content)
                return
            for line in _lines(response):
                said = line.strip().removeprefix(b"data:").strip()
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
        with self._exchange("GET", path, None) as response:
            return response.status, _read(response).decode(errors="replace")

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
                raise EndpointError("timeout", f"no whole reply within {self.config.timeout:g} s", True) from error
            raise EndpointError("unreachable", f"{type(reason).__name__}: {reason}", True) from error

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._exchange(method, path, body) as response:
            content = _read(response)
        self._check(response, path, content)
        return read_object(content)

    def _check(self, response: HTTPResponse, path: str, content: bytes) -> None:
        """Refuse a reply whose status is no success."""
        text = content[:CHUNK].decode(errors="replace").replace(self.key, HIDDEN)  # some servers repeat the key
        if response.status in REMEDIES:
            remedy = REMEDIES[response.status].format(by=self.by, options=self.options)
            raise ValueError(f"{self.url}{path}: {response.status} ({' '.join(text.split())[:SHOWN]}); {remedy}")
        if response.status != 200:
            after = retry_after(response.headers.get("Retry-After", ""))
            temporary = response.status in TEMPORARY or response.status >= 500
            raise EndpointError(f"http_{response.status}", text, temporary, after)


def _pieces(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the body as it comes; it must come whole."""
    while piece := response.read1(CHUNK):  # without a number, as many bytes are reserved as a chunk says it has
        yield piece
    if response.length:
        raise EndpointError("unreachable", f"the reply broke off {response.length} bytes before its end", True)


def _read(response: HTTPResponse) -> bytes:
    return b"".join(_pieces(response))


def _lines(response: HTTPResponse) -> Iterator[bytes]:
    rest = bytearray()
    for piece in _pieces(response):
        rest += piece
        if b"\n" in piece:
            *lines, rest = rest.split(b"\n")
            yield from map(bytes, lines)


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object that a text is.

    Raises:
        EndpointError: it is none.
    """
    text = content[:CHUNK].decode(errors="replace")
    try:
        value = parse_json(content)
    except ValueError as error:
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
        name, arguments = function["name"], function["arguments"]
        if not isinstance(name, str):
            raise TypeError
        function["arguments"] = parse_json(arguments.encode(), NESTED) if isinstance(arguments, str) else arguments
        return {"type": "function", "function": function}
    except (KeyError, TypeError, ValueError) as error:
        raise EndpointError("content", f"a tool call that is none: {call!r}") from error


def retry_after(asked: str) -> float | None:
    """Return the seconds that a server asks to be left alone, which it says as a number or as a date."""
    try:
        return max(0.0, float(asked))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None
