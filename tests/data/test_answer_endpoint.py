import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from data.answers import client as client_module
from data.answers.client import Client, Endpoint
from data.answers.files import write_answers
from data.text.records import parse
from tests.data import chat_server as serve
from tests.data.answering import LENGTH, chat, records, settings, words, work
from tests.data.asking import COUNT, ask, config, connect, lines
from tests.data.chat_server import Send, Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        yield made


def test_every_turn_is_asked_in_view_of_the_endpoints_own_answers(server: Server, tmp_path: Path) -> None:
    how = settings(0.7, thinking=True)
    tools = [{"name": "w9"}]
    record = parse({"id": "a", "messages": chat("a", "w1", "w2").messages, "tools": tools}, 0, "f")
    system = {"role": "system", "content": "w8"}
    record.messages.insert(0, system)
    switches = {"enable_thinking": True, "effort": 1}
    extra = {"top_k": -1, "chat_template_kwargs": switches, "proxy": "http://me:0123456789@host"}
    client = connect(server, "secret", extra=extra)
    given = work([record], how)._replace(notes={"by": "http://me:0123456789@host/v1"})
    write_answers(given, Endpoint(client, words(), how), tmp_path / "a")
    assert "0123456789" not in (tmp_path / "a.meta.json").read_text()
    first, second = server.bodies
    (line,) = lines(tmp_path / "a")
    wrapped = [{"type": "function", "function": {"name": "w9"}}]  # an endpoint takes no other
    assert line["tools"] == wrapped
    assert [m["role"] for m in line["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert first["messages"] == line["messages"][:2]
    assert second["messages"] == line["messages"][:4]
    assert line["messages"][2]["content"] == serve.completion(first)["choices"][0]["message"]["content"]
    assert first["seed"] != second["seed"]
    rest = {key: value for key, value in first.items() if key not in ("messages", "seed")}
    assert rest == {
        "model": "served", "temperature": 0.7, "top_p": 0.9, "max_tokens": LENGTH, "n": 1, "stream": False,
        "tools": wrapped, **extra,
    }  # fmt: skip
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_requests_run_side_by_side_and_the_file_is_in_order(server: Server, tmp_path: Path) -> None:
    ask(server, tmp_path / "one")
    assert [line["id"] for line in lines(tmp_path / "one")] == [record.id for record in records(COUNT)]
    assert {body["top_p"] for body in server.bodies} == {1.0}  # of temperature 0
    meeting = threading.Barrier(3, timeout=20)  # broken unless three requests are there at once

    def together(handler: serve.Handler, reply: dict[str, Any]) -> None:
        meeting.wait()
        serve.honest(handler, reply)

    server.script = [together] * 3
    ask(server, tmp_path / "three", concurrency=3)
    assert not meeting.broken
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


CUT = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": '}}]}


@pytest.mark.parametrize(
    ("send", "cause"),
    [
        (serve.choice(finish_reason="length"), "unfinished"),
        (serve.reasoned_away, "unfinished"),
        (serve.choice(message=CUT, finish_reason="length"), "unfinished"),
        (serve.message(content="w1 \ud83d"), "round_trip"),
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


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "content"])
def test_reasoning_is_kept_apart_from_the_answer(name: str, server: Server, tmp_path: Path) -> None:
    fields = {"content": "<think>\nw1 w2\n</think>\n\nw3"} if name == "content" else {"content": "w3", name: "w1 w2"}
    server.script = [serve.message(**fields)]
    ask(server, tmp_path / "a", [chat("x", "w1")])
    (line,) = lines(tmp_path / "a")
    assert line["messages"][1] == {"role": "assistant", "content": "w3", "reasoning_content": "w1 w2"}


@pytest.mark.parametrize(("arguments", "read"), [('{"x": 1}', {"x": 1}), ("", {})])
def test_a_tool_call_is_kept_as_templates_take_it_and_ends_the_chat(
    arguments: str, read: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    told = {"role": "assistant", "content": None, "tool_calls": [call]}
    server.script = [serve.choice(message=told, finish_reason="tool_calls")]
    counts, _ = ask(server, tmp_path / "a", [chat("x", "w1", "w2")])
    (line,) = lines(tmp_path / "a")
    kept = {"type": "function", "function": {"name": "f", "arguments": read}}
    assert line["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": [kept]}]
    assert counts["shortened"] == {"called": 1}


def test_failures_in_a_row_stop_the_job_and_what_was_answered_stays(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MOST_FAILURES", 3)
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


def test_ctrl_c_asks_nothing_more_and_keeps_the_chats_that_are_finished(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, client = settings(), Client(server.url, config(concurrency=2), None)
    of = work([chat("x", "w1"), chat("y", "w2", "w3"), chat("z", "w4")], how)
    meeting = threading.Barrier(3, timeout=20)

    def late(handler: serve.Handler, reply: dict[str, Any]) -> None:
        meeting.wait()
        client.stop.wait(20)
        serve.honest(handler, reply)

    def interrupted(*running: Any, **options: Any) -> Any:
        monkeypatch.setattr(client_module, "wait", wait)
        meeting.wait()
        raise KeyboardInterrupt

    server.script = [late, late]
    monkeypatch.setattr(client_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_answers(of, Endpoint(client, words(), how), tmp_path / "a")
    assert len(server.bodies) == 2
    (part,) = (tmp_path / "a.parts").glob("*.jsonl")
    assert sorted((line["id"], line["cause"]) for line in lines(part)) == [("x", ""), ("y", "stopped")]
    assert ask(server, tmp_path / "a", of.records, how)[0]["failed"] == {}
    assert len(server.bodies) == 2 + 3
    ask(server, tmp_path / "smooth", of.records, how)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "smooth").read_bytes()


def test_the_context_is_the_servers_where_it_tells(server: Server, tmp_path: Path) -> None:
    long = chat("x", "w1", " ".join(["w1"] * 90))
    counts, _ = ask(server, tmp_path / "a", [long])
    assert counts["shortened"] == {"context": 1}
    server.models = {"data": [{"id": "other", "max_model_len": 96}, {"id": "served"}]}
    counts, _ = ask(server, tmp_path / "b", [long], model="served")
    assert counts["shortened"] == {}


def test_plain_texts_and_plain_targets_are_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"record 7 is no chat, or .* has no chat template, and an endpoint answers chats"
    ):
        ask(server, tmp_path / "a", [parse({"id": 7, "text": "w1 w2"}, 0, "f")])
    with pytest.raises(
        ValueError, match=r"record x is no chat, or .* has no chat template, and an endpoint answers chats"
    ):
        write_answers(work([chat("x", "w1")]), Endpoint(connect(server), words(None), settings()), tmp_path / "b")
