"""A server of OpenAI's endpoints with a toy model and real speculative decoding, into which faults can be planted.

It answers in process (`events`) and over HTTP (`with AuditServer(…) as server`, then `server.url`). Fields of requests
are vLLM's; a stream has an event a pass.
"""

import json
import select
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

import numpy as np

from tests.http_server import LocalServer
from tests.ops.audit_decoding import OFTEN, Decoded, Engine, Step
from tests.ops.audit_model import VOCAB, Grammar, Sampling, json_program, tokenize
from tests.ops.endpoint_server import MODEL, Pages, vllm_page

CONTEXT = 16_384  # tokens of a prompt and its answer
UNLIMITED = 256  # tokens of an answer without max_tokens


class Ask:
    """A request, parsed; a ValueError says what is wrong with it."""

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self.body, self.chat = body, path.endswith("/chat/completions")
        if body.get("model") != MODEL or not body.get("messages" if self.chat else "prompt"):
            raise ValueError(f"give model={MODEL}, and messages to a chat, a prompt to a completion")
        self.stream, self.n, self.seed = bool(body.get("stream")), body.get("n", 1), body.get("seed")
        self.limit = body.get("max_tokens") or UNLIMITED
        self.stop = body.get("stop") or []
        self.penalties = body.get("presence_penalty", 0.0), body.get("frequency_penalty", 0.0)
        self.how = Sampling(*(body.get(key, default) for key, default in Sampling._field_defaults.items()))
        shown = body.get("logprobs")
        self.top = body.get("top_logprobs", 0) if self.chat and shown else None if self.chat else shown
        self.prompt = self.tokens(body.get("messages", []))
        if len(self.prompt) + self.limit > CONTEXT:
            raise ValueError(f"{len(self.prompt)} tokens and max_tokens={self.limit} exceed {CONTEXT}")

    def tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of the prompt, of a chat given its messages."""
        if not self.chat:
            return tokenize(self.body["prompt"])
        tools = json.dumps(self.body["tools"]) if self.body.get("tools") else ""
        turns = [f"<{message['role']}>\n{message.get('content') or ''}\n" for message in messages]
        return tokenize("".join([tools, *turns, "<assistant>\n"]))

    def without_answer(self) -> list[int]:
        """Return the prompt's tokens without the words of the assistant's last message."""
        messages = list(self.body.get("messages", []))
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if last is not None:
            messages[last] = {"role": "assistant"}
        return self.tokens(messages)

    @cached_property
    def tool(self) -> dict[str, Any] | None:
        """The function that is called where the last message asks for a report."""
        tools = self.body.get("tools")
        called = tools and "report" in self.body["messages"][-1]["content"]
        return dict(tools[0]["function"]) if called else None

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer must be, None for any text."""
        form = self.body.get("response_format")
        schema = form["json_schema"]["schema"] if form else None
        if self.tool is not None:
            schema = self.tool["parameters"]
        return None if schema is None else frozenset([json_program(schema)])


class Piece(NamedTuple):
    """What a pass adds to an answer: a text, the tokens, and the reason for its end, if it ends."""

    text: str
    steps: list[Step]
    finish_reason: str | None


class Answer:
    """What is delivered of a decoded text: up to its end, its limit or a stop string; iterated, its pieces."""

    def __init__(self, engine: Engine, ask: Ask, decoded: Decoded) -> None:
        self.engine, self.ask, self.decoded, self.fault = engine, ask, decoded, engine.fault
        self.text, self.sent, self.count = "", 0, 0
        self.finish_reason: str | None = None
        self.hold = max([0, *(len(stop) - 1 for stop in ask.stop)])  # characters that may begin a stop string
        self.truncated = self.fault == "tool_call" and ask.tool is not None
        self.last = ""

    def __iter__(self) -> Iterator[Piece]:
        while self.finish_reason is None:
            steps = self._take(self.engine.step(self.decoded))
            hold = 0 if self.finish_reason else max(self.hold, len(self.last) if self.truncated else 0)
            text = self.text[self.sent : len(self.text) - hold]
            self.sent += len(text)
            hidden = self.finish_reason and self.fault == "streaming" and self.ask.stream
            reason = "tool_calls" if self.finish_reason == "stop" and self.ask.tool else self.finish_reason
            yield Piece("" if hidden else text, steps, reason)

    def _take(self, steps: list[Step]) -> list[Step]:
        """Add a pass's tokens to the text, and return those up to its end."""
        if self.fault == "limit" and self.count + len(steps) > self.ask.limit:
            self.finish_reason = "length"
            return []
        lost = len(steps) if self.fault == "lost_token" and self.decoded.server.random() < OFTEN else 0
        for taken, step in enumerate(steps, 1):
            self.text += "" if taken == lost else step.text
            self.last = step.text or self.last
            if self._ends(step, self.count + taken, steps[taken:]):
                break
        self.count += len(steps) if self.fault == "usage" else taken
        if self.finish_reason and self.truncated:
            self.text = self.text.removesuffix(self.last)
        return steps[:taken]

    def _ends(self, step: Step, count: int, rest: list[Step]) -> bool:
        """Whether the text ends with a token, given how many there are and what the pass has behind it."""
        begin = min((at for stop in self.ask.stop if (at := self.text.find(stop)) >= 0), default=None)
        if begin is not None:
            leaked = self.fault == "stop_string" and rest
            self.text = self.text + "".join(more.text for more in rest) if leaked else self.text[:begin]
        self.finish_reason = (
            "stop" if begin is not None or not step.text else "length" if count == self.ask.limit else None
        )
        return self.finish_reason is not None


class AuditServer:
    """The server; its arguments are those of the engine."""

    def __init__(self, **engine: Any) -> None:
        self.engine = Engine(**engine)
        self.url = ""

    def __enter__(self) -> "AuditServer":
        self.http: Any = LocalServer(Handler).__enter__()
        self.http.api, self.url = self, self.http.url
        return self

    def __exit__(self, *_: object) -> None:
        self.http.__exit__()

    def models(self) -> dict[str, Any]:
        """Return the list of models."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": CONTEXT}]}

    def metrics(self) -> str:
        """Return the metrics page."""
        return vllm_page(self.engine.counts, self.engine.speculates)

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream, or the one reply that is not streamed; closed before its end, it is cancelled.

        Raises:
            ValueError: a request that the server does not take.
        """
        ask = Ask(path, body)
        _ = ask.grammar
        count = 0
        choices = []
        for index in range(ask.n):
            answer = self._answer(ask, index)
            try:
                if ask.stream:
                    yield from (_event(ask, [choice]) for choice in _streamed(ask, index, answer, self.engine.fault))
                else:
                    pieces = list(answer)
                    steps = [step for piece in pieces for step in piece.steps]
                    whole = Piece("".join(piece.text for piece in pieces), steps, pieces[-1].finish_reason)
                    choices.append(_choice(ask, index, whole, self.engine.fault, True))
            finally:
                self.engine.finish(answer.decoded, answer.finish_reason is None)
            count += answer.count
        usage = {"prompt_tokens": len(ask.prompt), "completion_tokens": count,
                 "total_tokens": len(ask.prompt) + count}  # fmt: skip
        if not ask.stream or (body.get("stream_options") or {}).get("include_usage"):
            yield {**_event(ask, choices), "usage": usage}

    def _answer(self, ask: Ask, index: int) -> Answer:
        prompt = ask.without_answer() if self.engine.fault == "history" else ask.prompt
        seed = None if ask.seed is None else ask.seed + index
        return Answer(self.engine, ask, self.engine.start(prompt, ask.how, ask.penalties, seed, ask.grammar))


def _event(ask: Ask, choices: list[dict[str, Any]]) -> dict[str, Any]:
    kind = "chat.completion" if ask.chat else "text_completion"
    kind += ".chunk" if ask.chat and ask.stream else ""
    return {"id": "answer", "object": kind, "created": 0, "model": MODEL, "choices": choices}


def _streamed(ask: Ask, index: int, answer: Answer, fault: str) -> Iterator[dict[str, Any]]:
    if ask.chat:
        yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for number, piece in enumerate(answer):
        yield _choice(ask, index, piece, fault, number == 0)


def _choice(ask: Ask, index: int, piece: Piece, fault: str, first: bool) -> dict[str, Any]:
    """Return a choice, or what an event of a stream adds to one, with a call's name in the first of them."""
    message: dict[str, Any] = {} if ask.stream else {"role": "assistant"}
    if ask.tool is None:
        message["content"] = piece.text
    else:
        function = {"name": ask.tool["name"]} if first else {}
        call = {"index": 0, "id": "call-0", "type": "function", "function": {**function, "arguments": piece.text}}
        message |= {"content": None, "tool_calls": [call]}
    key = "delta" if ask.stream else "message"
    text = {key: message} if ask.chat else {"text": piece.text}
    logprobs = None if ask.top is None else _logprobs(ask, piece.steps, fault)
    return {"index": index, **text, "logprobs": logprobs, "finish_reason": piece.finish_reason}


def _logprobs(ask: Ask, steps: list[Step], fault: str) -> dict[str, Any]:
    """Return logprobs in the form of chats or of completions."""
    tables = [_table(step, ask.top or 0, fault) for step in steps]
    if ask.chat:
        return {"content": [{**table[0], "top_logprobs": table[1:]} for table in tables]}
    return {
        "tokens": [table[0]["token"] for table in tables],
        "token_logprobs": [table[0]["logprob"] for table in tables],
        "top_logprobs": [{entry["token"]: entry["logprob"] for entry in table[::-1]} for table in tables],
    }


def _table(step: Step, top: int, fault: str) -> list[dict[str, Any]]:
    """Return the logprobs of a token and then of the most probable ones there."""
    values, listed = (
        np.maximum(scores - scores.max() - np.log(np.exp(scores - scores.max()).sum()), -9999.0)
        for scores in (step.scores, step.scores if step.top is None else step.top)
    )
    entries = [(step.token, values), *((int(i), listed) for i in np.argsort(-listed)[: max(0, top - step.fewer)])]
    return [
        {"token": VOCAB[i], "logprob": 0.0 if fault == "logprobs" else float(lp[i]), "bytes": list(VOCAB[i].encode())}
        for i, lp in entries
    ]


class Handler(Pages, BaseHTTPRequestHandler):
    """One connection."""

    server: Any

    def do_GET(self) -> None:
        """Answer with models or metrics."""
        api = self.server.api
        pages = {"/v1/models": json.dumps(api.models()), "/metrics": api.metrics()}
        self.send(200, pages[self.path]) if self.path in pages else self.send(404, "{}")

    def do_POST(self) -> None:
        """Answer a request."""
        body = self.body()
        events = self.server.api.events(self.path, body)
        try:
            first = next(events)
        except ValueError as error:
            self.send(400, json.dumps({"error": {"message": str(error), "code": 400}}))
            return
        if not body.get("stream"):
            self.send(200, json.dumps(first))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(json.dumps(first))
        for event in events:
            if self._gone():
                events.close()
                self.close_connection = True
                return
            self._chunk(json.dumps(event))
        self._chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: str) -> None:
        line = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))

    def _gone(self) -> bool:
        """Whether the client has closed the connection."""
        ready, _, _ = select.select([self.connection], [], [], 0)
        return bool(ready) and not self.connection.recv(1, socket.MSG_PEEK)
