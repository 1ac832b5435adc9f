"""A client for the endpoint on this machine, and answers by it."""

import json
import threading
from pathlib import Path
from typing import Any

from data.answers.client import Client, Endpoint, EndpointConfig
from data.answers.files import write_answers
from data.text.records import Record
from heads.common.typed import typed
from tests.data.answering import records, settings, words, work
from tests.data.chat_server import Server

COUNT = 6


class Pauses(threading.Event):
    """The event that ends waiting, which notes how long one would wait and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout or 0.0)
        return self.is_set()


def config(**changed: Any) -> EndpointConfig:
    values: dict[str, Any] = {
        "model": None, "concurrency": 1, "timeout": 10.0, "retries": 2, "backoff": 1.0, "max_wait": 60.0,
        "api_key_env": "KEY", "extra": {},
    }  # fmt: skip
    return typed(EndpointConfig, {**values, **changed}, "endpoint")


def connect(server: Server, key: str | None = None, **changed: Any) -> Client:
    client = Client(server.url, config(**changed), key)
    client.stop = Pauses()
    return client


def ask(
    server: Server, out: Path, of: list[Record] | None = None, how: Any = None, **changed: Any
) -> tuple[dict[str, Any], list[float]]:
    """Let the endpoint answer; return the counts and the pauses before retries."""
    how = how or settings(keep_unfinished=False)
    client = connect(server, **changed)
    meta = write_answers(work(of or records(COUNT), how), Endpoint(client, words(), how), out)
    assert meta is not None
    assert isinstance(client.stop, Pauses)
    return meta["counts"], client.stop.asked


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
