"""What can be wrong with a served endpoint: one line each, and nothing written."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.answers.client import EndpointError
from heads.common.typed import from_yaml
from ops.endpoint import ServedConfig
from ops.served import Answer, read_answer
from tests.ops.endpoint_server import MODEL, Served, key_of
from tests.ops.serving import PROMPTS, config, expected, measured, refuse, rows_of


def restarting(**counts: int) -> Callable[[Served], None]:
    """Return a change of a server, whose counters begin again before its third request."""

    def change(served: Served) -> None:
        def before(_: Any) -> None:
            if len(served.bodies) == 3:
                served.counts = Counter(counts)

        served.before = before

    return change


def failing(text: str, prompt: str = "") -> Callable[[Served], None]:
    """Return a change of a server, which fails to answer a prompt."""

    def change(served: Served) -> None:
        def before(body: dict[str, Any]) -> None:
            if prompt in key_of(body):
                raise RuntimeError(text)

        served.before = before

    return change


def miscounting(count: int) -> Callable[[Served], None]:
    """Return a change of a server, which counts more requests than there are, or fewer."""
    return lambda served: setattr(served, "before", lambda _: served.counts.update({"finished": count}))


OTHERS = "counted 2 requests where 1 were sent: give a server without other clients"
ANEW = "its counters began again while it was measured"
IDLE = "does not speculate: it counts no drafts; start it with a drafter"
MEMORY = r"prompt p2: http_500 \(out of memory\); nothing is written: fix the endpoint or leave the prompt out"
TEMPLATE = r"http_500 \(client\.chat=false asks a model without a chat template; default chat"


@pytest.mark.parametrize(
    ("server", "change", "message", "values"),
    [
        ({"engine": ""}, None, "/metrics has no counters of vLLM's, SGLang's or llama.cpp's: start vLLM without", {}),
        ({"engine": "vllm", "drafts": False}, None, IDLE, {}),
        ({"engine": "sglang", "drafts": False}, None, IDLE, {}),
        ({}, restarting(), ANEW, {}),
        ({}, restarting(restarts=1, passes=1000, finished=1000), ANEW, {}),  # the counters overtake
        ({"engine": "vllm"}, miscounting(1), OTHERS, {}),
        ({"engine": "sglang"}, miscounting(1), OTHERS, {}),
        ({}, miscounting(-1), "counted 0 requests where 1 were sent", {}),
        ({}, failing("out of\nmemory", "say 2"), MEMORY, {"batch_size": 1}),
        ({}, failing("out of\nmemory", "say 2"), MEMORY, {"batch_size": 4}),
        ({}, failing("default chat template is no longer allowed"), TEMPLATE, {}),
        ({}, None, r"serves served, not other; name what it serves: client.model=NAME", {"client": {"model": "other"}}),
    ],
)
def test_a_server_that_cannot_be_measured(
    server: dict[str, Any], change: Any, message: str, values: dict[str, Any], log: Path
) -> None:
    with Served(**server) as served:
        if change is not None:
            change(served)
        values = {key: vars(config(served, log).client) | value if key == "client" else value
                  for key, value in values.items()}  # fmt: skip
        refuse(log, message, served, **values)
    assert served.counts["finished"] <= 1000 + PROMPTS  # none is sent again


def test_no_server(log: Path) -> None:
    with Served() as gone:
        pass
    refuse(log, r"/v1/models: unreachable \(ConnectError.*; start the endpoint, or correct url=", gone)


@pytest.mark.parametrize(
    ("server", "changes", "message"),
    [
        ({"engine": "vllm"}, {}, "speculates: baseline is for the same model served without a drafter"),
        ({"engine": "sglang"}, {}, "speculates: baseline is for the same model"),
        ({"detailed": True}, {"hidden": True}, "speculates: baseline is for"),  # its replies say so
        ({"drafts": False}, {"models": ["larger"]}, "serves larger and http.* served: the baseline is the same model"),
    ],
)
def test_a_server_that_is_no_baseline(
    server: dict[str, Any], changes: dict[str, Any], message: str, served: Served, log: Path
) -> None:
    with Served(**server) as other:
        vars(other).update(changes)
        refuse(log, message, served, baseline=other.url)


def test_counters_may_lag_behind_the_answers(served: Served, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served.lag = 0.05
    monkeypatch.setattr("ops.served.LAG_S", 20.0)
    measured(config(served, log))
    accepted = [count for each in expected() for count in each]
    assert rows_of(log)[0]["tau"] == pytest.approx(1 + sum(accepted) / len(accepted))


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
        ({"baseline": "http://h:2", "temperature": 1.0}, "texts can be compared at 0 only"),
        ({"client": {"timeout": 0.0}}, "client.timeout is 0.0: give a number above 0"),
        ({"request_rate": 0}, "request_rate is 0: give requests per second"),
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
