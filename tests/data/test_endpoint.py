import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from data.answers.client import Client, EndpointError, read_reply, retry_after
from tests.data import chat_server as serve
from tests.data.asking import COUNT, ask, config, connect
from tests.data.chat_server import Send, Server

BODY = {"model": "served", "messages": [], "seed": 0}
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        yield made


@pytest.mark.parametrize(
    ("send", "pauses"),
    [
        (serve.status(500, "oops"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(503, "busy", Retry_After="7"), [(7, 7), (7, 7)]),
        (serve.status(429, "slow down", Retry_After="0"), [(0, 0), (0, 0)]),
        (serve.status(408, "late"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(425, "early"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.reset, [(0.5, 1.5), (1.0, 3.0)]),
        (serve.half, [(0.5, 1.5), (1.0, 3.0)]),
        (serve.text(lambda whole: whole[:-9]), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(200, "<html>maintenance</html>"), [(0.5, 1.5), (1.0, 3.0)]),
    ],
)
def test_a_passing_failure_is_tried_again_after_a_while(
    send: Send, pauses: list[tuple[float, float]], server: Server, tmp_path: Path
) -> None:
    ask(server, tmp_path / "smooth")
    server.script = [send, send]
    counts, asked = ask(server, tmp_path / "a")
    assert counts["failed"] == {}
    assert (tmp_path / "a").read_bytes() == (tmp_path / "smooth").read_bytes()
    assert len(asked) == len(pauses)
    assert all(low <= pause <= high for pause, (low, high) in zip(asked, pauses, strict=True))


def test_a_pause_grows_to_the_longest_alone(server: Server, tmp_path: Path) -> None:
    server.script = [serve.status(500, "oops")] * 2
    assert ask(server, tmp_path / "a", backoff=1e6)[1] == [60.0, 60.0]


@pytest.mark.parametrize(
    ("send", "cause"),
    [
        (serve.status(500, "oops"), "http_500"),
        (serve.status(429, "slow down", Retry_After="3600"), "http_429"),
        (serve.status(400, "too long"), "http_400"),
        (serve.status(302, "", Location="/elsewhere"), "http_302"),
        (serve.reset, "unreachable"),
        (serve.half, "unreachable"),
        (serve.status(200, "<html>login</html>"), "not_json"),
        (serve.text(lambda whole: whole[:40]), "not_json"),
        (serve.status(200, ""), "not_json"),
        (serve.text(lambda whole: f"[{whole}]"), "not_json"),
        (serve.changed(model="other"), "wrong_model"),
        (serve.changed(choices=[]), "choices"),
        (serve.changed(choices=None), "choices"),
        (serve.changed(error={"message": "no"}, choices={}), "choices"),
        (lambda handler, reply: serve.honest(handler, {**reply, "choices": reply["choices"] * 2}), "choices"),
        (serve.choice(message=None), "content"),
        (serve.message(content=None), "content"),
        (serve.message(content=["w1"]), "content"),
        (serve.message(role="user"), "content"),
        (serve.message(tool_calls=[{"function": {"name": "f"}}]), "content"),
        (serve.message(tool_calls=[{"function": {"name": "f", "arguments": "[" * 99999}}]), "content"),
        (serve.choice(finish_reason=None), "finish_reason"),
        (serve.choice(finish_reason="content_filter"), "finish_reason"),
    ],
)
def test_a_lie_or_a_lasting_failure_leaves_the_chat_for_the_next_call(
    send: Send, cause: str, server: Server, tmp_path: Path
) -> None:
    ask(server, tmp_path / "smooth")
    server.script = [send]
    counts, _ = ask(server, tmp_path / "a", retries=0)
    assert (counts["failed"], counts["chats"]) == ({cause: 1}, COUNT - 1)
    assert json.loads((tmp_path / "a.meta.json").read_text())["failed"] == {cause: ["chat0"]}
    assert ask(server, tmp_path / "a")[0]["failed"] == {}
    assert (tmp_path / "a").read_bytes() == (tmp_path / "smooth").read_bytes()


@pytest.mark.parametrize(
    ("send", "cause"),
    [
        (serve.raw(CHUNKED + b"FFFFFFFFFFFFFFF\r\n{"), "unreachable"),
        (serve.raw(CHUNKED + b"-5\r\n{"), "unreachable"),
        (serve.text(lambda whole: whole.replace("w", "\udcff")), "not_json"),
        (serve.changed(more=json.loads("[" * 150 + "]" * 150)), "not_json"),
        (serve.changed(id="\udcff", model="\udcff"), "wrong_model"),
        (serve.message(tool_calls=[{"function": {"name": "f", "arguments": "[" * 90 + "]" * 90}}]), "content"),
        (serve.message(tool_calls=[{"function": {"name": 1, "arguments": "{}"}}]), "content"),
    ],
)
def test_a_reply_that_is_none(send: Send, cause: str, server: Server) -> None:
    server.script = [send]
    with pytest.raises(EndpointError) as error:
        read_reply(connect(server, retries=0).request("POST", "/chat/completions", BODY), "served")
    assert error.value.cause == cause
    error.value.detail.encode()


@pytest.mark.parametrize(
    "send",
    [
        serve.hanging,
    ],
)
def test_a_reply_that_takes_too_long_is_given_up(send: Send, server: Server, tmp_path: Path) -> None:
    server.script = [send]
    counts, _ = ask(server, tmp_path / "a", timeout=0.3, retries=0)
    assert counts["failed"] == {"timeout": 1}
    assert counts["chats"] == COUNT - 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_stops_the_job_at_once(status: int, server: Server, tmp_path: Path) -> None:
    server.script = [serve.honest, serve.status(status, "no such key")]
    with pytest.raises(ValueError, match=rf"completions: {status} \(no such key\); set the key in the environment"):
        ask(server, tmp_path / "a")
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, None, "serves a, b; name what it serves: endpoint.model=NAME"),
        ({"data": [{"id": "a"}]}, "b", "serves a, not b; name what it serves"),
        ({"data": [{"id": f"m{i}"} for i in range(99)]}, None, "serves m0, m1, [m0-9, ]*m9; name what it serves"),
        ({"data": [{"id": "a" * 999}]}, "b", "serves a{160}, not b; name what it serves"),
        ({"data": []}, None, "serves no model; name"),
        ({"models": 1}, None, "serves no model; name"),
        ({"data": [{"id": "\ud83d"}, {"id": 1}]}, None, "serves no model; name"),
        ([1], None, "/models: not_json"),
    ],
)
def test_a_model_that_is_not_served_is_named(models: Any, wanted: str | None, message: str, server: Server) -> None:
    server.models = models
    with pytest.raises(ValueError, match=message):
        connect(server, model=wanted).served()


def test_what_is_no_endpoint_is_named(server: Server) -> None:
    with pytest.raises(ValueError, match=r"404 \(nothing here\); by= is the base URL of /models"):
        Client(server.url + "/v2", config(), None).served()
    with Server() as gone:
        url = gone.url
    with pytest.raises(ValueError, match=r"/models: unreachable \(ConnectError.*; start the endpoint, or correct by="):
        Client(url, config(retries=0), None).served()


def test_proxies_of_the_environment_are_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/v1"))
    with pytest.raises(ValueError, match=r"http://elsewhere.invalid/v1/models: 404 \(nothing here\)"):
        Client("http://elsewhere.invalid/v1", config(), None).served()
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"/models: unreachable \(ConnectError"):
        Client("http://elsewhere.invalid/v1", config(retries=0), None).served()


def test_impossible_ways_to_ask_are_refused() -> None:
    with pytest.raises(ValueError, match=r"endpoint.concurrency is 0: give 1 or more"):
        config(concurrency=0)
    with pytest.raises(ValueError, match=r"endpoint.retries is -1: give 0 or more"):
        config(retries=-1)


def test_a_key_that_is_none_is_not_shown(server: Server) -> None:
    with pytest.raises(ValueError, match=r"\$KEY holds what is no key") as error:
        connect(server, "sk-secret\n")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("status", [400, 401])
def test_a_key_that_the_server_repeats_is_not_shown(status: int, server: Server) -> None:
    server.script = [serve.status(status, "Incorrect API key provided: my-own-key")]
    with pytest.raises((EndpointError, ValueError), match=r"provided: \[redacted\]"):
        connect(server, "my-own-key").request("POST", "/chat/completions", BODY)


def test_retry_after_is_seconds_or_a_date() -> None:
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100), usegmt=True)
    past, far = (format_datetime(datetime.now(timezone.utc) + timedelta(days=days), usegmt=True) for days in (-1, 3))
    late = "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"
    found = [retry_after(value) for value in ("3", "-1", "soon", "", late)]
    assert found == [3.0, 0.0, None, None, None]
    assert 90 < (retry_after(soon) or 0) <= 100
    assert (retry_after(past), (retry_after(far) or 0) // 86_400) == (0.0, 2)
