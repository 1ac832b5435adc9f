import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.answers.client import Client, EndpointError, check_url
from tests.data import chat_server as serve
from tests.data.asking import COUNT, ask, config, connect
from tests.data.chat_server import Send, Server

BODY = {"model": "served", "messages": [], "seed": 0}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        yield made


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return what an honest endpoint's answers are."""
    with pytest.MonkeyPatch.context() as patch, Server() as honest:
        patch.setenv("no_proxy", "127.0.0.1")
        out = tmp_path_factory.mktemp("smooth") / "a"
        ask(honest, out)
    return out.read_bytes()


@pytest.mark.parametrize(
    ("send", "pauses"),
    [
        (serve.status(500, "oops"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(503, "busy", Retry_After="7"), [(7, 7), (7, 7)]),
        (serve.status(429, "slow down", Retry_After="0"), [(0, 0), (0, 0)]),
        (serve.status(429, "slow down", Retry_After="Wed, 21 Oct 2099 07:28:00 GMT"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(429, "slow down", Retry_After="²"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(425, "early"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.text(lambda whole: whole[:-9]), [(0.5, 1.5), (1.0, 3.0)]),
    ],
)
def test_a_passing_failure_is_tried_again_after_a_while(
    send: Send, pauses: list[tuple[float, float]], server: Server, smooth: bytes, tmp_path: Path
) -> None:
    server.script = [send, send]
    counts, asked = ask(server, tmp_path / "a")
    assert counts["failed"] == {}
    assert (tmp_path / "a").read_bytes() == smooth
    assert len(asked) == len(pauses)
    assert all(low <= pause <= high for pause, (low, high) in zip(asked, pauses, strict=True))
    server.script = [send, send]
    longest = ask(server, tmp_path / "b", backoff=1e6)[1]
    assert longest == ([60.0, 60.0] if pauses[0] == (0.5, 1.5) else asked)


@pytest.mark.parametrize(
    ("send", "cause"),
    [
        (serve.status(500, "oops"), "http_500"),
        (serve.status(429, "slow down", Retry_After="3600"), "http_429"),
        (serve.status(400, "too long"), "http_400"),
        (serve.reset, "unreachable"),
        (serve.hanging, "timeout"),
        (serve.status(200, "<html>login</html>"), "not_json"),
        (serve.text(lambda whole: f"[{whole}]"), "not_json"),
        (serve.changed(model="\udcff"), "wrong_model"),
        (serve.changed(choices=[]), "choices"),
        (lambda handler, reply: serve.honest(handler, {**reply, "choices": reply["choices"] * 2}), "choices"),
        (serve.choice(message=None), "content"),
        (serve.message(content=None), "content"),
        (serve.message(role="user"), "content"),
        (serve.message(tool_calls=[{"function": {"name": "f"}}]), "content"),
        (serve.message(tool_calls=[{"function": {"name": "f", "arguments": "[" * 90 + "]" * 90}}]), "content"),
        (serve.choice(finish_reason="content_filter"), "finish_reason"),
    ],
)
def test_a_lie_or_a_lasting_failure_leaves_the_chat_for_the_next_call(
    send: Send, cause: str, server: Server, smooth: bytes, tmp_path: Path
) -> None:
    server.script = [send]
    counts, _ = ask(server, tmp_path / "a", retries=0, timeout=0.5)
    assert (counts["failed"], counts["chats"]) == ({cause: 1}, COUNT - 1)
    assert json.loads((tmp_path / "a.meta.json").read_text())["failed"] == {cause: ["chat0"]}
    assert ask(server, tmp_path / "a")[0]["failed"] == {}
    assert (tmp_path / "a").read_bytes() == smooth


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, None, "serves a, b; name what it serves: endpoint.model=NAME"),
        ({"data": [{"id": "a"}]}, "b", "serves a, not b; name what it serves"),
        ({"data": [{"id": f"m{i}"} for i in range(99)]}, None, "serves m0, m1, [m0-9, ]{152}; name what it serves"),
        ({"models": 1}, None, "serves no model; name"),
        ([1], None, "/models: not_json"),
    ],
)
def test_a_model_that_is_not_served_is_named(models: Any, wanted: str | None, message: str, server: Server) -> None:
    server.models = models
    with pytest.raises(ValueError, match=message):
        connect(server, model=wanted).served()


def test_what_is_no_endpoint_is_named(server: Server) -> None:
    with pytest.raises(ValueError, match=r"endpoint.concurrency is 0: give 1 or more"):
        config(concurrency=0)
    with pytest.raises(ValueError, match=r"endpoint.retries is -1: give 0 or more"):
        config(retries=-1)
    with pytest.raises(ValueError, match="by: the URL of h carries a user or a query, which files would show"):
        check_url("by", "http://me:password@h/v1")
    with pytest.raises(ValueError, match=r"404 \(nothing here\); by= is the base URL of /models"):
        Client(server.url + "/v2", config(), None).served()
    with Server() as gone:
        url = gone.url
    with pytest.raises(ValueError, match=r"/models: unreachable \(ConnectError.*; start the endpoint, or correct by="):
        Client(url, config(retries=0), None).served()


def test_a_key_is_not_shown_and_a_refused_one_stops_the_job_at_once(server: Server, tmp_path: Path) -> None:
    server.script = [serve.status(400, "Incorrect API key provided: my-own-key")]
    with pytest.raises(EndpointError, match=r"provided: \[redacted\]"):
        connect(server, "my-own-key").request("POST", "/chat/completions", BODY)
    server.script = [serve.honest]
    connect(server, "sk-secret\n").request("POST", "/chat/completions", BODY)
    assert server.headers[-1]["Authorization"] == "Bearer sk-secret"
    for status in (401, 403):
        server.bodies, server.script = [], [serve.honest, serve.status(status, "no such key")]
        with pytest.raises(ValueError, match=rf"completions: {status} \(no such key\); set the key in the environment"):
            ask(server, tmp_path / str(status))
        assert len(server.bodies) == 2
