"""A stub of an engine's server: python stub_engine.py PORT LINK. The head behind LINK says how well it drafts."""

import json
import random
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PASSES = 20  # between two readings of the metrics


class Handler(BaseHTTPRequestHandler):
    config: dict[str, float]
    started = time.time()
    passes = accepted = finished = 0

    def do_GET(self) -> None:
        kind = Handler
        if self.path == "/metrics":
            rate = kind.config["rate"]
            kind.finished += 1
            if rate >= 0:
                kind.passes += PASSES
                kind.accepted += sum(random.random() < rate / 4 for _ in range(4 * PASSES))
            if kind.finished > kind.config.get("dies", 10**9):
                sys.exit(1)
        drafts = f"vllm:spec_decode_num_drafts_total {kind.passes}\n" if kind.passes else ""
        page = (
            f"process_start_time_seconds {kind.started}\nvllm:request_success_total {kind.finished}\n{drafts}"
            f"vllm:spec_decode_num_accepted_tokens_total {kind.accepted}\n"
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    Handler.config = json.loads((Path(sys.argv[2]) / "config.json").read_text(encoding="utf-8"))
    if "broken" in Handler.config:
        sys.exit("cannot load this head")
    random.seed(0)
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
