#!/usr/bin/env bash
# langfuse 5.0.4 with openai 3.57.0: the tracing client (`from langfuse.openai import OpenAI`) leaves the reasoning out of the answer
# that it logs, streamed or not, under either name that servers use (reasoning, reasoning_content), though the caller gets it and
# its tokens are in the logged usage. A head trained on such a log never sees the text that a reasoning model mostly writes.
# Seen: the client's message has the reasoning; the span's output is role and content alone, streamed the content alone.
# headstart reads what such a log holds: where the reply had reasoning, log it on the server, or write the answers anew.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet langfuse==5.0.4 openai==3.57.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from langfuse import Langfuse
from langfuse.openai import OpenAI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

THOUGHT, ANSWER = "Two and two are four.", "4"


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does, with both names of the reasoning."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT, "reasoning_content": THOUGHT}
        kind, field = ("chat.completion.chunk", "delta") if request.get("stream") else ("chat.completion", "message")
        reply = {"id": "1", "object": kind, "created": 0, "model": "m", "choices": [
            {"index": 0, "finish_reason": "stop", field: message}
        ], "usage": {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}}
        body = json.dumps(reply).encode()
        if request.get("stream"):
            body = b"data: " + body + b"\n\ndata: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if request.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
spans = InMemorySpanExporter()
tracing = Langfuse(public_key="pk-lf-test", secret_key="sk-lf-test", base_url="http://127.0.0.1:9", span_exporter=spans)
client = OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/v1")
asked = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
whole = client.chat.completions.create(**asked).choices[0].message
streamed = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
assert whole.reasoning == whole.reasoning_content == streamed[0].reasoning == streamed[0].reasoning_content == THOUGHT
tracing.flush()
logged = [dict(span.attributes) for span in spans.get_finished_spans()]
assert len(logged) == 2, logged
for attributes in logged:
    output = json.loads(attributes["langfuse.observation.output"])
    print("logged:", output, attributes["langfuse.observation.usage_details"])
    assert output in ({"role": "assistant", "content": ANSWER}, json.loads(ANSWER)) and THOUGHT not in json.dumps(attributes)
PYTHON
