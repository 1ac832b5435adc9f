#!/usr/bin/env bash
# openai 3.57.0 with httpx2 2.16.2: the synchronous client leaves a streamed reply at [DONE] without reading it to its end, so the
# connection is lost and the next question opens another; the asynchronous client reads on, and keeps one. Whoever measures a server's
# time to the first token with `OpenAI()` measures a handshake in it each time, over TLS two round trips more, with drafts and without:
# a server with drafts looks less fast than it is.
# Seen: five streams by OpenAI() came over 5 connections, five whole replies over 1, five streams by AsyncOpenAI() over 1.
# headstart's client opens a connection for each streamed question, too, to both servers alike: kept ones, shared by threads, failed
# twice in some 60,000 questions ("Bad file descriptor"). Compare servers over a short way, or with the asynchronous client.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.57.0 httpx2==2.16.2
cd "$folder"
no_proxy=127.0.0.1 venv/bin/python - <<'PYTHON'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import AsyncOpenAI, OpenAI

ports = set()


class Server(BaseHTTPRequestHandler):
    """Streams in chunks, as servers of language models do, and keeps connections."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        ports.add(self.client_address[1])
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stream = request.get("stream")
        kind, field = ("chat.completion.chunk", "delta") if stream else ("chat.completion", "message")
        choice = {"index": 0, "finish_reason": "stop", field: {"role": "assistant", "content": "4"}}
        body = json.dumps({"id": "1", "object": kind, "created": 0, "model": "m", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        if stream:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for piece in (b"data: " + body + b"\n\n", b"data: [DONE]\n\n", b"") if stream else ():
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"" if stream else body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
where = {"api_key": "none", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}
asked = {"model": "m", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def connections():
    count = len(ports)
    ports.clear()
    return count


client = OpenAI(**where)
for _ in range(5):
    assert [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)] == ["4"]
streamed = connections()
for _ in range(5):
    assert client.chat.completions.create(**asked).choices[0].message.content == "4"
whole = connections()


async def ask():
    client = AsyncOpenAI(**where)
    for _ in range(5):
        stream = await client.chat.completions.create(**asked, stream=True)
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["4"]


asyncio.run(ask())
found = {"streams": streamed, "whole replies": whole, "asynchronous streams": connections()}
print("connections of five requests:", found)
assert found == {"streams": 5, "whole replies": 1, "asynchronous streams": 1}, found
PYTHON
