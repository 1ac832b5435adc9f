"""A stub of an engine's server: python stub_engine.py PORT LINK. It does not start with a broken head behind LINK."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    started = time.time()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"process_start_time_seconds {self.started}\nvllm:request_success_total 0\n".encode())

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    if "broken" in json.loads((Path(sys.argv[2]) / "config.json").read_text(encoding="utf-8")):
        sys.exit("cannot load this head")
    HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
