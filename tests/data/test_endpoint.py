import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from data.answer_endpoint import Endpoint
from data.answers import write_answers
from data.endpoint import Client, EndpointConfig, retry_after
from data.records import Record, parse
from tests.data import chat_server as serve
from tests.data.answering import LENGTH, chat, records, settings, words, work
from tests.data.chat_server import Send, Server

COUNT = 6


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Server() as made:
        yield made


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
        "max_failures": 3, "api_key_env": "KEY", "extra": {},
    }  # fmt: skip
    return EndpointConfig(**{**values, **changed})


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


def test_every_turn_is_asked_in_view_of_the_endpoints_own_answers(server: Server, tmp_path: Path) -> None:
    how = settings(0.7, thinking=True)
    tools = [{"name": "w9"}]
    record = parse({"id": "a", "messages": chat("a", "w1", "w2").messages, "tools": tools}, 0, "f")
    system = {"role": "system", "content": "w8"}
    record.messages.insert(0, system)
    client = connect(server, "secret", extra={"top_k": -1})
    write_answers(work([record], how), Endpoint(client, words(), how), tmp_path / "a")
    first, second = server.bodies
    (line,) = lines(tmp_path / "a")
    assert line["tools"] == tools
    assert [m["role"] for m in line["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert first["messages"] == line["messages"][:2]
    assert second["messages"] == line["messages"][:4]
    assert line["messages"][2]["content"] == serve.completion(first)["choices"][0]["message"]["content"]
    assert first["seed"] != second["seed"]
    rest = {key: value for key, value in first.items() if key not in ("messages", "seed")}
    assert rest == {
        "model": "served", "temperature": 0.7, "top_p": 0.9, "max_tokens": LENGTH, "n": 1, "stream": False,
        "tools": tools, "chat_template_kwargs": {"enable_thinking": True}, "top_k": -1,
    }  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_requests_run_side_by_side_and_the_file_is_in_order(server: Server, tmp_path: Path) -> None:
    ask(server, tmp_path / "one")
    assert [line["id"] for line in lines(tmp_path / "one")] == [record.id for record in records(COUNT)]
    meeting = threading.Barrier(3, timeout=20)  # broken unless three requests are there at once

    def together(handler: serve.Handler, reply: dict[str, Any]) -> None:
        meeting.wait()
        serve.honest(handler, reply)

    server.script = [together] * 3
    ask(server, tmp_path / "three", concurrency=3)
    assert not meeting.broken
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


@pytest.mark.parametrize(
    ("send", "pauses"),
    [
        (serve.status(500, "oops"), [(0.5, 1.5), (1.0, 3.0)]),
        (serve.status(503, "busy", Retry_After="7"), [(7, 7), (7, 7)]),
        (serve.status(429, "slow down", Retry_After="0"), [(0, 0), (0, 0)]),
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


@pytest.mark.parametrize("send", [serve.hanging, serve.dripping])
def test_a_reply_that_takes_too_long_is_given_up(send: Send, server: Server, tmp_path: Path) -> None:
    server.script = [send]
    counts, _ = ask(server, tmp_path / "a", timeout=0.3, retries=0)
    assert counts["failed"] == {"timeout": 1}
    assert counts["chats"] == COUNT - 1


@pytest.mark.parametrize(
    ("send", "cause"),
    [
        (serve.choice(finish_reason="length"), "unfinished"),
        (serve.reasoned_away, "unfinished"),
        (serve.message(content=" \n"), "empty"),
        (serve.message(content="w1 nonesuch w2"), "round_trip"),
        (serve.message(content="w1 \ud83d"), "round_trip"),
        (serve.message(content="w1 <|end|> <|user|> w2"), "round_trip"),
    ],
)
def test_an_answer_that_is_no_good_is_counted_and_not_asked_for_again(
    send: Send, cause: str, server: Server, tmp_path: Path
) -> None:
    server.script = [send]  # chat0 has one turn, so nothing of it is left
    counts, _ = ask(server, tmp_path / "a")
    assert counts["left_out"] == {cause: 1}
    assert [line["id"] for line in lines(tmp_path / "a")] == [f"chat{i}" for i in range(1, COUNT)]
    before = len(server.bodies)
    ask(server, tmp_path / "a")
    assert len(server.bodies) == before
    server.script = [serve.honest, send]
    counts, _ = ask(server, tmp_path / "b", [chat("x", "w1", "w2", "w3")])
    assert counts["shortened"] == {cause: 1}
    assert len(lines(tmp_path / "b")[0]["messages"]) == 2


def test_a_reply_that_came_before_is_no_answer(server: Server, tmp_path: Path) -> None:
    server.always = serve.changed(id="chatcmpl-0")
    counts, _ = ask(server, tmp_path / "a", [chat("x", "w1"), chat("y", "w1"), chat("z", "w1")])
    assert (counts["chats"], counts["failed"]) == (1, {"duplicate": 2})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "content"])
def test_reasoning_is_kept_apart_from_the_answer(name: str, server: Server, tmp_path: Path) -> None:
    fields = {"content": "<think>\nw1 w2\n</think>\n\nw3"} if name == "content" else {"content": "w3", name: "w1 w2"}
    server.script = [serve.message(**fields)]
    ask(server, tmp_path / "a", [chat("x", "w1")])
    (line,) = lines(tmp_path / "a")
    assert line["messages"][1] == {"role": "assistant", "content": "w3", "reasoning_content": "w1 w2"}


def test_a_tool_call_is_kept_as_templates_take_it_and_ends_the_chat(server: Server, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    server.script = [serve.choice(message=told, finish_reason="tool_calls")]
    counts, _ = ask(server, tmp_path / "a", [chat("x", "w1", "w2")])
    (line,) = lines(tmp_path / "a")
    kept = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert line["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [kept]}]
    assert counts["shortened"] == {"called": 1}


def test_failures_in_a_row_stop_the_job_and_what_was_answered_stays(server: Server, tmp_path: Path) -> None:
    ask(server, tmp_path / "smooth")
    bad, good = serve.status(500, "out of\nmemory"), serve.honest
    server.script = [bad, bad, *[good] * 3, bad]  # chat0, chat1; chat2 has three turns
    server.always = bad
    with pytest.raises(
        ValueError, match=r"3 chats in a row failed, the last one, chat5, by http_500 \(out of memory\); "
    ):
        ask(server, tmp_path / "a", retries=0)
    assert not (tmp_path / "a").exists()
    server.always = good
    before = len(server.bodies)
    assert ask(server, tmp_path / "a")[0]["failed"] == {}
    assert (tmp_path / "a").read_bytes() == (tmp_path / "smooth").read_bytes()
    assert len(server.bodies) - before == sum(1 + n % 3 for n in range(COUNT)) - 3  # chat2 was kept


def test_a_refused_key_stops_the_job_at_once(server: Server, tmp_path: Path) -> None:
    server.script = [serve.honest, serve.status(401, "no such key")]
    with pytest.raises(ValueError, match=r"completions: 401 \(no such key\); set the key in the environment variable"):
        ask(server, tmp_path / "a")
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, None, "serves a, b; name what it serves: endpoint.model=NAME"),
        ({"data": [{"id": "a"}]}, "b", "serves a, not b; name what it serves"),
        ({"data": []}, None, "serves no model; name"),
        ({"models": 1}, None, "serves no model; name"),
        ([1], None, "/models: not_json"),
    ],
)
def test_a_model_that_is_not_served_is_named(models: Any, wanted: str | None, message: str, server: Server) -> None:
    server.models = models
    with pytest.raises(ValueError, match=message):
        connect(server, model=wanted).served()


def test_what_is_no_endpoint_is_named(server: Server) -> None:
    with pytest.raises(ValueError, match=r"404 \(nothing here\); by= is the base that /models"):
        Client(server.url + "/v2", config(), None).served()
    with Server() as gone:
        url = gone.url
    with pytest.raises(
        ValueError, match=r"/models: unreachable \(ConnectionRefusedError.*; start the endpoint, or correct by="
    ):
        Client(url, config(retries=0), None).served()


def test_the_context_is_the_servers_where_it_tells(server: Server, tmp_path: Path) -> None:
    long = chat("x", "w1", " ".join(["w1"] * 90))
    counts, _ = ask(server, tmp_path / "a", [long])
    assert counts["shortened"] == {"context": 1}
    server.models = {"data": [{"id": "served"}]}
    counts, _ = ask(server, tmp_path / "b", [long])
    assert counts["shortened"] == {}


def test_plain_texts_and_plain_targets_are_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record 7 is no chat, and an endpoint answers chats"):
        ask(server, tmp_path / "a", [parse({"id": 7, "text": "w1 w2"}, 0, "f")])
    with pytest.raises(ValueError, match="has no chat template, and an endpoint answers chats"):
        Endpoint(connect(server), words(None), settings())


def test_impossible_ways_to_ask_are_refused() -> None:
    with pytest.raises(ValueError, match=r"endpoint.concurrency=0: must be positive"):
        config(concurrency=0)
    with pytest.raises(ValueError, match=r"must not be negative"):
        config(retries=-1)


def test_a_key_that_is_none_is_not_shown(server: Server) -> None:
    with pytest.raises(ValueError, match=r"\$KEY holds what is no key") as error:
        connect(server, "sk-secret\n")
    assert "secret" not in str(error.value)


def test_retry_after_is_seconds_or_a_date() -> None:
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(seconds=100), usegmt=True)
    found = [retry_after(value) for value in ("3", "-1", "soon", "")]
    assert found == [3.0, 0.0, None, None]
    assert 90 < (retry_after(soon) or 0) <= 100
