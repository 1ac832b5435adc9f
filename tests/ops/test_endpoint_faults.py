"""What can be wrong with a served endpoint: one line each, and nothing written."""

from pathlib import Path
from typing import Any

import pytest

from data.answers.client import EndpointError
from heads.common.typed import from_yaml
from ops.served.client import Answer, read_answer
from ops.served.measurement import ServedConfig
from tests.ops.endpoint_server import MODEL, Served, key_of
from tests.ops.serving import PROMPTS, config, expected, measured, refuse, rows_of


def test_no_server(log: Path) -> None:
    with Served() as gone:
        pass
    refuse(log, r"/v1/models: unreachable \(ConnectError.*; start the endpoint, or correct url=", gone)


def test_a_model_that_is_not_served(served: Served, log: Path) -> None:
    client = config(served, log).client
    told = {**vars(client), "model": "other"}
    refuse(log, r"serves served, not other; name what it serves: client.model=NAME", served, client=told)


def test_a_server_without_metrics(log: Path) -> None:
    with Served(engine="") as served:
        refuse(log, r"/metrics has no counters of vLLM's, SGLang's or llama.cpp's: start vLLM without", served)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_does_not_speculate(engine: str, log: Path) -> None:
    with Served(engine, drafts=False) as served:
        refuse(log, "does not speculate: it counts no drafts; start it with a draft source", served)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_baseline_that_speculates(engine: str, served: Served, log: Path) -> None:
    with Served(engine) as other:
        refuse(
            log, "speculates: baseline is for the same model served without a draft source", served, baseline=other.url
        )


def test_a_baseline_that_says_in_its_replies_that_it_speculates(served: Served, log: Path) -> None:
    with Served(detailed=True) as other:
        other.hidden = True
        refuse(log, "speculates: baseline is for", served, baseline=other.url)


def test_a_baseline_of_another_model(served: Served, log: Path) -> None:
    with Served(drafts=False) as other:
        other.models = ["larger"]
        refuse(log, "serves larger and http.* served: the baseline is the same model", served, baseline=other.url)


def test_a_server_that_starts_anew_in_mid_run(served: Served, log: Path) -> None:
    def restart(body: dict[str, Any]) -> None:
        if len(served.bodies) == 3:
            served.counts.clear()

    served.before = restart
    refuse(log, "its counters began anew while it was measured", served)


def test_a_server_that_starts_anew_and_whose_counters_overtake(served: Served, log: Path) -> None:
    def restart(body: dict[str, Any]) -> None:
        if len(served.bodies) == 3:
            served.counts.update({"restarts": 1, "passes": 1000, "finished": 1000})

    served.before = restart
    refuse(log, "its counters began anew while it was measured", served)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_others_ask_too(engine: str, log: Path) -> None:
    with Served(engine) as served:
        served.before = lambda _: served.counts.update(["finished"])
        refuse(log, "counted 2 requests where 1 were sent: give a server without other clients", served)


def test_counters_that_do_not_hear_of_the_requests(served: Served, log: Path) -> None:
    served.before = lambda _: served.counts.subtract(["finished"])
    refuse(log, "counted 0 requests where 1 were sent", served)


def test_counters_may_lag_behind_the_answers(served: Served, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served.lag = 0.05
    monkeypatch.setattr("ops.served.client.LAG_S", 20.0)
    measured(config(served, log))
    accepted = [count for each in expected() for count in each]
    assert rows_of(log)[0]["tau"] == pytest.approx(1 + sum(accepted) / len(accepted))


@pytest.mark.parametrize("size", [1, 4])
def test_a_request_that_fails_in_mid_run(size: int, served: Served, log: Path) -> None:
    def fail(body: dict[str, Any]) -> None:
        if "say 2" in key_of(body):
            raise RuntimeError("out of\nmemory")

    served.before = fail
    told = r"prompt p2: http_500 \(out of memory\); nothing is written: fix the endpoint or leave the prompt out"
    refuse(log, told, served, batch_size=size)
    assert served.counts["finished"] <= PROMPTS  # none is sent again


def test_a_server_without_a_chat_template_has_its_option_named(served: Served, log: Path) -> None:
    def fail(body: dict[str, Any]) -> None:
        raise RuntimeError("default chat template is no longer allowed")

    served.before = fail
    refuse(log, r"http_500 \(client\.chat=false asks a model without a chat template; default chat", served)


PIECE = {"model": MODEL, "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{**PIECE, "usage": {"completion_tokens": 3}}, {"error": {"message": "gone"}}], "gone"),
        ([{"object": "error", "message": "no memory", "code": 500}], "no memory"),
        ([{**PIECE, "model": "other"}], "wrong_model: the reply is 'other'"),
        ([PIECE, PIECE], "the reply does not count its tokens"),
        ([{**PIECE, "choices": PIECE["choices"] * 2}], "choices"),
        ([{**PIECE, "choices": None}], "choices"),
        ([{**PIECE, "choices": [{"delta": None, "finish_reason": None}]}], "finish_reason"),
    ],
)
def test_a_reply_that_is_none(events: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(EndpointError, match=message):
        read_answer([(0.1 * place, event) for place, event in enumerate(events, 1)], MODEL)


def test_an_answer_out_of_pieces() -> None:
    pieces: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"reasoning_content": "so"}},
        {"delta": {"content": " it"}},
        {"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": "tool_calls"},
    ]
    events = [{"model": MODEL, "choices": [piece]} for piece in pieces]
    events.append({"model": MODEL, "choices": [], "usage": {"completion_tokens": 5}})
    found = read_answer([(float(at), event) for at, event in enumerate(events, 1)], MODEL)
    assert found == Answer("so itf{}", 5, 5.0, 2.0, None)


@pytest.mark.parametrize(
    ("count", "step_s", "whole"),
    [
        (24, 1e-5, True),  # read from a buffer
        (24, 0.01, False),
        (24, 1e-3, False),  # fewer seconds than 1 % of the prompt's, but a server's
        (12, 1e-5, False),  # few tokens may be those of a pass
    ],
)
def test_a_stream_that_a_gateway_held_back_has_no_time_of_its_first_token(
    count: int, step_s: float, whole: bool
) -> None:
    events: list[dict[str, Any]] = [{"model": MODEL, "choices": [{"delta": {"content": "a"}}]} for _ in range(count)]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"model": MODEL, "choices": [], "usage": {"completion_tokens": count}})
    found = read_answer([(3.0 + at * step_s, event) for at, event in enumerate(events)], MODEL)
    assert (found.ttft_s, found.decode_s is None) == (None if whole else 3.0, whole)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": "localhost:8000"}, "url=localhost:8000: give a URL such as http://localhost:8000"),
        ({"url": "http://me:secret@host:1"}, "url: the URL of host carries a user or a query"),
        ({"url": "http://host/v1?key=secret"}, "url: the URL of host carries a user or a query"),
        ({"baseline": "ftp://h:1"}, "baseline=ftp://h:1: give a URL such as"),
        ({"baseline": "http://h:1/v1/"}, "baseline is url itself"),
        ({"baseline": "http://h:2", "temperature": 1.0}, "texts can be compared at 0 alone"),
        ({"client": {"timeout": 0.0}}, "client.timeout is 0.0: give a number above 0"),
        ({"min_new_tokens": 999}, "min_new_tokens is 999: give 0 to max_new_tokens"),
        ({"top_p": 0.0}, "top_p is 0.0: give a number above 0"),
        ({"request_rate": 0}, "request_rate is 0: give requests a second"),
        ({"batch_size": []}, "batch_size is"),
    ],
)
def test_what_an_endpoint_cannot_be_asked_for(values: dict[str, Any], message: str) -> None:
    client = {"model": None, "chat": True, "timeout": 1.0, "api_key_env": "KEY", "extra": {}}
    with pytest.raises(ValueError, match=message) as error:
        from_yaml(
            ServedConfig,
            "ops/endpoint",
            **({"url": "http://h:1", "workload": "tiny"} | values | {"client": client | values.get("client", {})}),
        )
    assert "secret" not in str(error.value)
