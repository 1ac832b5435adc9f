#!/usr/bin/env bash
# langsmith 0.15.1 with openai 3.57.0: `wrap_openai` logs the reasoning of a whole answer, under either name that servers use
# (reasoning, reasoning_content), and drops both of a streamed one, though the caller gets them. So one project holds answers of
# the same model with and without their thoughts, by how the client asked.
# headstart reads what such a run holds: where clients stream a reasoning model, log on the server, or write the answers anew.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet langsmith==0.15.1 openai==3.57.0
cd "$folder"
LANGSMITH_TRACING=true venv/bin/python - <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
from langsmith import Client
from langsmith.wrappers import wrap_openai

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


class Kept(Client):
    """Keeps what a run would send."""

    def create_run(self, *_, **__):
        pass

    def update_run(self, *_, **fields):
        outputs.append(fields["outputs"])
        sent.set()


for name in ("reasoning_content", "reasoning"):
    tracing = Kept(api_key="none", auto_batch_tracing=False)
    url = f"http://127.0.0.1:{server.server_port}/{name}"
    client = wrap_openai(openai.OpenAI(api_key="none", base_url=url), tracing_extra={"client": tracing})
    for stream in (False, True):
        outputs, sent = [], threading.Event()
        reply = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "What time is it?"}], stream=stream
        )
        message = [chunk.choices[0].delta for chunk in reply][0] if stream else reply.choices[0].message
        assert getattr(message, name) == THOUGHT  # the caller has it
        assert sent.wait(30)
        logged = outputs[-1]["choices"][0]["message"]
        print(name, "streamed" if stream else "whole", {key: value for key, value in logged.items() if value})
        assert logged["content"] == ANSWER and logged.get(name) == (None if stream else THOUGHT)
PYTHON
