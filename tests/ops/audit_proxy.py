"""A proxy before a served model that plants faults in what it passes on, so that a real engine has faults to be named.

A reply is read whole before it is sent on: texts and counts are the engine's but for the fault, times are not.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

from data.answers.client import Client, EndpointConfig, EndpointError
from tests.ops.audit_server import AuditServer

Body = dict[str, Any]
SHORT = 8  # tokens of an answer that counts as short
LONG = 32  # characters of an answer in which a fault is planted
ONCE = EndpointConfig(
    model=None, concurrency=1, timeout=120.0, retries=0, backoff=0.0, max_wait=0.0, api_key_env="NONE",
    extra={},
)  # fmt: skip


def without(*keys: str) -> Callable[[Body], Body]:
    """Return what takes fields out of requests."""
    return lambda body: {key: value for key, value in body.items() if key not in keys}


def fewer(body: Body) -> Body:
    """Ask for a token less than a few."""
    limit = body["max_tokens"]
    return body | {"max_tokens": limit - 1} if 1 < limit <= SHORT else body


def colder(body: Body) -> Body:
    """Sample at another temperature."""
    return body | {"temperature": 0.4} if body["temperature"] > 0 else body


def forgetful(body: Body) -> Body:
    """Read the last message alone."""
    return body | {"messages": body["messages"][-1:]} if "messages" in body else body


REQUESTS: dict[str, Callable[[Body], Body]] = {
    "stop_string": without("stop"),
    "seed": without("seed"),
    "penalty": without("presence_penalty", "frequency_penalty"),
    "schema": without("response_format", "structured_outputs", "regex", "grammar"),
    "top_p": without("top_p"),
    "limit": fewer,
    "distribution": colder,
    "history": forgetful,
}
REPLIES = ("usage", "streaming", "lost_token", "early_stop", "tool_call", "logprobs", "choices", "leak", "error")
FAULTS = (*REQUESTS, *REPLIES)  # by the audit's names


class AuditProxy(AuditServer):
    """The proxy of the server at a URL, with a fault; used as `AuditServer` is over HTTP."""

    def __init__(self, server: str, fault: str) -> None:
        self.client, self.fault, self.url = Client(server, ONCE, None), fault, ""
        self.numbers, self.running, self.lock = count(), 0, threading.Lock()
        self.crowded = False  # since several requests were running, until none is
        self.last: dict[str, str] = {}  # the newest long answers by their prompts

    def models(self) -> Body:
        """Return the server's list of models."""
        return self.client.once("GET", "/v1/models", None)

    def metrics(self) -> str:
        """Return the server's metrics page."""
        return self.client.page("/metrics")[1]

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[Body]:
        """Yield the events of a reply with the fault; refuse what the server refuses."""
        with self.lock:
            number, self.running = next(self.numbers), self.running + 1
            self.crowded |= self.running > 1
        try:
            if self.fault == "error" and self.running > 1 and number % 4 == 0:
                raise ValueError("internal error")
            passed = REQUESTS.get(self.fault, dict)(dict(body))
            events = list(self.client.events(path, passed))
            self._plant(events, passed, number)
        except EndpointError as error:
            raise ValueError(str(error)) from error
        finally:
            with self.lock:
                self.running -= 1
                self.crowded &= self.running > 0
        yield from events

    def _plant(self, events: list[Body], body: Body, number: int) -> None:
        choices = [choice for event in events for choice in event.get("choices") or []]
        if self.fault == "usage":
            for usage in (event["usage"] for event in events if event.get("usage")):
                usage["completion_tokens"] += 1
                usage["total_tokens"] += 1
        elif self.fault == "logprobs":
            for choice in choices:
                silence(choice.get("logprobs") or {})
        elif self.fault == "tool_call":
            rewrite(choices, lambda text: text[:-1], calls=True)
        elif self.fault == "choices":
            rewrite([choice for choice in choices if choice["index"]], lambda text: text[::-1])
        elif self.fault == "streaming" and body.get("stream"):
            for message, key in [held for held in texts(choices) if held[0][held[1]]][-1:]:
                message[key] = ""
        elif self.fault == "lost_token":
            rewrite(choices, lambda text: re.sub(r"(?s)^(.{16,}?)\s\S{2,16}(?=\s.{16})", r"\1", text, count=1))
        elif self.fault == "early_stop":
            self._end_early(choices)
        elif self.fault == "leak":
            self._mix_up(choices, str(body.get("messages") or body["prompt"]), number)

    def _end_early(self, choices: list[Body]) -> None:
        rewrite(choices, lambda text: text[: len(text) * 2 // 3] if len(text) > LONG else text)
        for choice in choices:
            choice["finish_reason"] = choice.get("finish_reason") and "stop"

    def _mix_up(self, choices: list[Body], prompt: str, number: int) -> None:
        text = "".join(message[key] for message, key in texts(choices))
        other = next((answer for key, answer in self.last.items() if key != prompt), "")
        if len(text) > LONG:
            self.last = {prompt: text, **self.last}
        if self.crowded and number % 2 == 0 and other and len(text) > LONG:
            rewrite(choices, lambda text: text[: len(text) // 4] + other[len(other) // 4 :])


def texts(choices: list[Body], calls: bool = False) -> list[tuple[Body, str]]:
    """Return where the pieces of answers stand, or of the arguments of tool calls: mappings with a key each."""
    held = []
    for choice in choices:
        message = choice.get("delta") or choice.get("message") or choice
        pieces = [call["function"] for call in message.get("tool_calls") or []] if calls else [message]
        for piece in pieces:
            held += [(piece, key) for key in ("arguments", "content", "text") if isinstance(piece.get(key), str)]
    return held


def rewrite(choices: list[Body], change: Callable[[str], str], calls: bool = False) -> None:
    """Change every choice's text; a stream then has it in its first event."""
    for index in {choice["index"] for choice in choices}:
        held = texts([choice for choice in choices if choice["index"] == index], calls)
        text = change("".join(message[key] for message, key in held))
        for number, (message, key) in enumerate(held):
            message[key] = "" if number else text


def silence(logprobs: Body) -> None:
    """Put 0 in place of the tokens' logprobs, in the form of chats or of completions."""
    for entry in logprobs.get("content") or []:
        entry["logprob"] = 0.0
    if "token_logprobs" in logprobs:
        logprobs["token_logprobs"] = [0.0] * len(logprobs["token_logprobs"])
