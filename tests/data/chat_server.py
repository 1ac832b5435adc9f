"""An OpenAI-compatible endpoint on this machine, which answers as it is told to: honestly, slowly, or not at all."""

import hashlib
import json
import socket
import struct
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.http_server import Connection, LocalServer

MODEL = "served"

Send = Callable[["Handler", dict[str, Any]], None]  # answers a request, given what an honest reply would be


class Server(LocalServer):
    """The server. `script` says how the next requests are answered, honestly where it has ended."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.url += "/v1"
        self.script: list[Send] = []
        self.always: Send = honest
        self.models: Any = {"data": [{"id": MODEL, "max_model_len": 96}]}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return an honest reply to a request."""
        return completion(body)


class Handler(Connection, BaseHTTPRequestHandler):
    """One connection."""

    server: Server

    def do_GET(self) -> None:
        """List the models."""
        self.send(200, json.dumps(self.server.models)) if self.path == "/v1/models" else self.send(404, "nothing here")

    def do_POST(self) -> None:
        """Complete a chat, as the script has it."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.headers.append(self.headers)
            answer = self.server.script.pop(0) if self.server.script else self.server.always
        answer(self, self.server.reply(body))

    def send(self, status: int, text: str, **headers: str) -> None:
        """Send a whole response."""
        data = text.encode(errors="surrogatepass")
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """Return an honest reply: words drawn from the messages and the seed."""
    key = json.dumps([body["messages"], body["seed"]])
    drawn = hashlib.sha256(key.encode()).hexdigest()
    text = " ".join(f"w{int(digit, 16)}" for digit in drawn[:5])
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": f"chatcmpl-{drawn[:16]}", "object": "chat.completion", "model": body["model"], "choices": [choice]}


def honest(handler: Handler, reply: dict[str, Any]) -> None:
    """Send the reply."""
    handler.send(200, json.dumps(reply))


def status(code: int, text: str = "", **headers: str) -> Send:
    """Refuse with a status."""
    return lambda handler, _: handler.send(code, text, **headers)


def text(made: Callable[[str], str]) -> Send:
    """Send what is made of the reply's text."""
    return lambda handler, reply: handler.send(200, made(json.dumps(reply)))


def changed(**fields: Any) -> Send:
    """Send the reply with other fields."""
    return lambda handler, reply: handler.send(200, json.dumps({**reply, **fields}))


def choice(**fields: Any) -> Send:
    """Send the reply with other fields in its one choice."""
    return lambda handler, reply: honest(handler, {**reply, "choices": [{**reply["choices"][0], **fields}]})


def message(**fields: Any) -> Send:
    """Send the reply with other fields in its message."""
    return lambda handler, reply: choice(message={**reply["choices"][0]["message"], **fields})(handler, reply)


def reasoned_away(handler: Handler, reply: dict[str, Any]) -> None:
    """Send reasoning that took all the tokens."""
    lost = {"role": "assistant", "content": None, "reasoning_content": "w1"}
    choice(message=lost, finish_reason="length")(handler, reply)


def reset(handler: Handler, reply: dict[str, Any]) -> None:
    """Reset the connection."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.close_connection = True
    handler.connection.close()


def hanging(handler: Handler, reply: dict[str, Any]) -> None:
    """Say nothing."""
    handler.server.over.wait(20)
    handler.close_connection = True


def raw(data: bytes) -> Send:
    """Send these bytes, and hang up."""

    def send(handler: Handler, reply: dict[str, Any]) -> None:
        handler.wfile.write(data)
        handler.close_connection = True

    return send
