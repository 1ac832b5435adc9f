#!/usr/bin/env bash
# openinference-instrumentation-openai 0.1.66 and opentelemetry-instrumentation-openai (OpenLLMetry) 0.62.4 with openai 3.57.0: where
# a span has the reasoning of an answer. OpenInference's lists, llm.output_messages.*, which a reader of its conventions takes, have
# text and calls and no reasoning, under either name that servers use; the JSON of output.value has it. OpenLLMetry's
# gen_ai.output.messages has reasoning_content, behind the text that it preceded and before the calls, and drops `reasoning`, the
# name that vLLM uses. Seen streamed and whole. Trained as it stands, an answer has no thought, or a thought after its text.
# headstart takes OpenInference's answer from output.value, and puts such reasoning before the text; what was dropped is lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.57.0 opentelemetry-sdk==1.45.2 openinference-instrumentation-openai==0.1.66 \
    opentelemetry-instrumentation-openai==0.62.4
cd "$folder"
cat >spans.py <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import openai
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

THOUGHT, ANSWER = "The clock tells.", "Let me look."


class Server(BaseHTTPRequestHandler):
    """Answers in one chunk, or whole, with the reasoning under the name of the path."""

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        message = {"role": "assistant", "content": ANSWER, self.path.split("/")[1]: THOUGHT, "tool_calls": [call]}
        kind, field = ("chat.completion.chunk", "delta") if request.get("stream") else ("chat.completion", "message")
        choice = {"index": 0, "finish_reason": "tool_calls", field: message}
        body = json.dumps({"id": "1", "object": kind, "created": 0, "model": "m", "choices": [choice]}).encode()
        body = b"data: " + body + b"\n\ndata: [DONE]\n\n" if request.get("stream") else body
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if request.get("stream") else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
import_module(sys.argv[1]).OpenAIInstrumentor().instrument(tracer_provider=provider)
for name in ("reasoning_content", "reasoning"):
    client = openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/{name}")
    for stream in (False, True):
        reply = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "What time is it?"}], stream=stream
        )
        message = [chunk.choices[0].delta for chunk in reply][0] if stream else reply.choices[0].message
        assert getattr(message, name) == THOUGHT  # the caller has it
        logged = spans.get_finished_spans()[-1].attributes
        if "output.value" in logged:
            listed = {key: value for key, value in logged.items() if key.startswith("llm.output_messages")}
            print(name, "streamed" if stream else "whole", listed)
            assert ANSWER in listed.values() and THOUGHT not in listed.values()
            assert json.loads(logged["output.value"])["choices"][0]["message"][name] == THOUGHT
        else:
            (written,) = json.loads(logged["gen_ai.output.messages"])
            print(name, "streamed" if stream else "whole", written["parts"])
            between = ["reasoning"] if name == "reasoning_content" else []
            assert [part["type"] for part in written["parts"]] == ["text", *between, "tool_call"]
PYTHON
venv/bin/python spans.py openinference.instrumentation.openai
venv/bin/python spans.py opentelemetry.instrumentation.openai
