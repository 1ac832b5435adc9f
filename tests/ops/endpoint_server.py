"""A served model on this machine: OpenAI's endpoints, streamed, and the counters of vLLM or SGLang beside them."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Any
from zlib import crc32

from tests.http_server import Connection, LocalServer

MODEL = "served"
DEPTH = 3  # of every draft


def key_of(body: dict[str, Any]) -> str:
    """Return what tells a prompt from others."""
    return json.dumps(body.get("messages") or body.get("prompt"))


def words(key: str, count: int) -> list[str]:
    """Return the model's greedy answer."""
    return [f" w{crc32(f'{key} {place}'.encode()) % 97}" for place in range(count)]


def passes(key: str, decoded: int) -> list[int]:
    """Return how many drafted tokens each pass over an answer accepts; the last may go beyond the end."""
    found: list[int] = []
    while sum(found) + len(found) < decoded:
        found.append(crc32(f"{key} {len(found)} a".encode()) % (DEPTH + 1))
    return found


class Pages(Connection, BaseHTTPRequestHandler):
    """A connection that answers with whole pages."""

    def body(self) -> dict[str, Any]:
        """Return a request's body."""
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def send(self, status: int, text: str, kind: str = "application/json") -> None:
        """Send a whole response."""
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Served(LocalServer):
    """A server with the metrics of an `engine`, empty for none; if `detailed`, replies tell of their own drafts.

    Metrics may be `hidden`, or know of an answer after a `lag` in seconds. `words` answers a prompt; `before` is called
    with every request's body before the answer, and may raise.
    """

    def __init__(self, engine: str = "vllm", drafts: bool = True, detailed: bool = False, stream: bool = True) -> None:
        super().__init__(Handler)
        self.engine, self.drafts, self.detailed, self.stream = engine, drafts, detailed, stream
        self.words: Any = words
        self.before: Any = lambda _: None
        self.hidden, self.lag = False, 0.0
        self.models = [MODEL]
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.together = self.most = 0

    def page(self) -> str:
        """Return the metrics page."""
        if self.engine == "vllm":
            return vllm_page(self.counts, self.drafts)
        return sglang_page(self.counts, self.drafts)

    def answer(self, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
        """Return the tokens of an answer and what the reply tells of its drafts, and count them."""
        key = key_of(body)
        tokens = self.words(key, body["max_tokens"])
        made = passes(key, len(tokens) - 1) if self.drafts else []
        told = {
            "num_spec_steps": len(made), "num_accepted_draft_tokens": sum(made), "num_draft_tokens": DEPTH * len(made),
            "acceptance_histogram": [made.count(depth) for depth in range(DEPTH + 1)],
        }  # fmt: skip
        count = partial(self.count, made)
        threading.Timer(self.lag, count).start() if self.lag else count()
        return tokens, told

    def count(self, made: list[int]) -> None:
        """Count a request, given what each of its passes accepted."""
        with self.lock:
            self.counts["finished"] += 1
            self.counts["passes"] += len(made)
            self.counts["tokens"] += 1 + len(made) + sum(made)
            self.counts["accepted"] += sum(made)
            for depth in range(DEPTH):
                self.counts[f"depth{depth}"] += sum(accepted > depth for accepted in made)


def vllm_page(counts: Counter[str], drafts: bool) -> str:
    """Return counters as vLLM writes them."""
    label = f'engine="0",model_name="{MODEL}"'
    lines = [
        "# HELP vllm:request_success_total Count of successfully processed requests.",
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{{label},finished_reason="stop"}} 0.0',
        f'vllm:request_success_total{{{label},finished_reason="length"}} {float(counts["finished"])}',
    ]
    if drafts:
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{label}}} {float(counts['passes'])}",
            f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7638e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(DEPTH * counts['passes'])}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(counts['accepted'])}",
            *(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{depth}"}} '
                f"{float(counts[f'depth{depth}'])}"
                for depth in range(DEPTH)
            ),
        ]
    return "\n".join([*lines, f"process_start_time_seconds {1.7638e9 + counts['restarts']}"]) + "\n"


def sglang_page(counts: Counter[str], drafts: bool) -> str:
    """Return counters and gauges as SGLang writes them: those of speculation after the first request."""
    label = f'model_name="{MODEL}"'
    lines = [
        "# TYPE sglang:num_requests_total counter",
        f"sglang:num_requests_total{{{label}}} {float(counts['finished'])}",
        f"sglang:generation_tokens_total{{{label}}} {float(counts['tokens'])}",
        f"sglang:gen_throughput{{{label}}} 0.0",
    ]
    if drafts and counts["passes"]:
        lines += [
            f"sglang:spec_accept_length{{{label}}} 9.9",
            f"sglang:spec_num_draft_tokens{{{label}}} {DEPTH + 1}.0",
            f"sglang:spec_verify_calls_total{{{label}}} {float(counts['passes'])}",
        ]
    return "\n".join(lines) + "\n"


class Handler(Pages, BaseHTTPRequestHandler):
    """One connection."""

    server: Served

    def do_GET(self) -> None:
        """Tell the models and the metrics."""
        pages = {"/v1/models": json.dumps({"data": [{"id": name} for name in self.server.models]})}
        if self.server.engine and not self.server.hidden:
            pages["/metrics"] = self.server.page()
        self.send(200, pages[self.path]) if self.path in pages else self.send(404, "nothing here")

    def do_POST(self) -> None:
        """Answer."""
        server, body = self.server, self.body()
        with server.lock:
            server.bodies.append(body)
            server.headers.append(self.headers)
            server.together += 1
            server.most = max(server.most, server.together)
        try:
            server.before(body)
            if server.engine == "sglang" and body.get("stream") and body.get("return_meta_info"):
                self.send(400, "return_meta_info is not supported with streaming")  # SGLang 0.5.23
                return
        except RuntimeError as error:
            self.send(500, str(error))
            return
        finally:
            with server.lock:
                server.together -= 1
        tokens, told = server.answer(body)
        events = list(self.events(body, tokens, told))
        if server.stream:
            self.stream(events)
        else:
            self.send(200, json.dumps(self.whole(tokens, events)))

    def events(self, body: dict[str, Any], tokens: list[str], told: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the pieces of a streamed reply; the last has no choice and the counts."""
        chat = self.path.endswith("/chat/completions")
        meta = {
            "spec_verify_ct": told["num_spec_steps"], "spec_num_correct_drafts": told["num_accepted_draft_tokens"],
            "spec_num_proposed_drafts": told["num_draft_tokens"],
            "spec_correct_drafts_histogram": told["acceptance_histogram"],
        }  # fmt: skip
        for place, token in enumerate(tokens):
            last = place + 1 == len(tokens)
            piece: dict[str, Any] = {"delta": {"content": token}} if chat else {"text": token}
            piece |= {"index": 0, "finish_reason": "length" if last else None}
            yield {"id": "c", "model": body["model"], "choices": [piece]}
        if self.server.detailed and self.server.engine == "sglang" and body.get("return_spec_tokens_details"):
            yield {"id": "c", "model": body["model"], "choices": [], "sglext": {"spec_tokens_details": meta}}
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}
        more = {"metrics": {"speculative_decoding": told}} if self.detailed_vllm() else {}
        yield {"id": "c", "model": body["model"], "choices": [], "usage": usage, **more}

    def detailed_vllm(self) -> bool:
        """Whether the reply has vLLM's own counts."""
        return self.server.detailed and self.server.drafts and self.server.engine == "vllm"

    def whole(self, tokens: list[str], events: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the reply that is not streamed."""
        text = "".join(tokens)
        last = next(event["choices"][0] for event in reversed(events) if event["choices"])
        said = {"message": {"role": "assistant", "content": text}} if "delta" in last else {"text": text}
        return events[-2] | events[-1] | {"choices": [{"index": 0, **said, "finish_reason": last["finish_reason"]}]}

    def stream(self, events: list[dict[str, Any]]) -> None:
        """Send server-sent events."""
        data = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send(200, data, "text/event-stream; charset=utf-8")
