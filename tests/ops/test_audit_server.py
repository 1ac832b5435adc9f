"""The audit's server: lossless without a fault; a clean audit of it and one of each fault hold the rest of it."""

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from data.answers.client import Client, EndpointConfig, EndpointError
from tests.ops.audit_decoding import FAULTS
from tests.ops.audit_server import AuditServer
from tests.ops.endpoint_server import MODEL

PROMPTS = [f"Tell me about number {i} of the rivers." for i in range(40)]
TOKENS = 48
ALONE = {"rejected_draft", "draft_bonus", "lost_token", "early_stop", "limit"}  # faults that plain greedy answers show


def fields_of(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a greedy completion."""
    return "/v1/completions", {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "prompt": prompt, **fields}


def ask(server: AuditServer, prompt: str, **fields: Any) -> dict[str, Any]:
    """Return the choice of a reply that is not streamed."""
    (reply,) = server.events(*fields_of(prompt, **fields))
    choice: dict[str, Any] = reply["choices"][0]
    return choice


def texts(server: AuditServer, **fields: Any) -> list[str]:
    return [ask(server, prompt, **fields)["text"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def base() -> AuditServer:
    return AuditServer(speculates=False)


def test_greedy_answers_are_the_baselines_and_noise_changes_few(base: AuditServer) -> None:
    clean, expected = AuditServer(), texts(base)
    assert len(set(expected)) == len(PROMPTS)
    assert texts(clean) == expected
    counts = clean.engine.counts
    assert 0.6 < counts["depth0"] / counts["passes"] < 0.85
    noisy = AuditServer(noise=0.03, speculates=False)
    assert 0 < sum(one != other for one, other in zip(texts(noisy), texts(noisy), strict=True)) < len(PROMPTS) / 2


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - ALONE))
def test_a_fault_of_something_else_leaves_plain_greedy_answers_alone(base: AuditServer, fault: str) -> None:
    assert texts(AuditServer(fault=fault)) == texts(base)


def test_a_baseline_has_no_fault_and_unknown_ones_are_refused(base: AuditServer) -> None:
    assert texts(AuditServer(speculates=False, fault="rejected_draft")) == texts(base)
    with pytest.raises(ValueError, match="no fault is named 'x'"):
        AuditServer(fault="x")


def chi_square(one: list[str], other: list[str]) -> float:
    """Return by how many standard deviations two samples differ more than samples of one distribution on average."""
    counts = np.array([[Counter(sample)[key] for key in sorted({*one, *other})] for sample in (one, other)])
    rare = counts.sum(0) < 10
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    expected = counts.sum(0) / 2
    freedom = counts.shape[1] - 1
    return float((((counts - expected) ** 2) / np.maximum(expected, 1e-9)).sum() - freedom) / (2 * freedom) ** 0.5


WAYS = [{"temperature": 1.3, "top_p": 0.7}, {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 1.0}]


@pytest.mark.parametrize("way", WAYS)
def test_sampled_tokens_are_of_the_baselines_distribution(base: AuditServer, way: Any) -> None:
    one, other = (
        [ask(server, "ice", max_tokens=3, logprobs=0, seed=i, **way)["logprobs"]["tokens"] for i in range(1000)]
        for server in (base, AuditServer())
    )
    for depth in (1, 2):
        assert chi_square([tokens[depth] for tokens in one], [tokens[depth] for tokens in other]) < 4.5


def together(server: AuditServer, cancel: int = -1) -> list[str]:
    """Return the texts of requests that take turns pass by pass; one is cancelled after two of its passes."""
    running = {i: server.events(*fields_of(prompt, stream=True)) for i, prompt in enumerate(PROMPTS)}
    written = [""] * len(PROMPTS)
    for turn in range(2 * TOKENS):
        for i in list(running):
            event = next(running[i], None)
            if event is None or (i == cancel and turn == 2):
                running.pop(i).close()
            else:
                written[i] += "".join(choice["text"] for choice in event["choices"])
    return written


def test_requests_in_flight_together_do_not_change_each_other(base: AuditServer) -> None:
    clean = AuditServer()
    assert together(clean) == texts(base)
    assert together(clean, cancel=3)[4:] == texts(base)[4:]


@pytest.mark.parametrize("streams", [False, True])
def test_over_http_it_is_the_same_and_a_client_that_goes_away_cancels(
    monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with AuditServer(pass_s=0.005) as server:
        client = Client(server.url + "/v1", EndpointConfig(None, 1, 10.0, 0, 0.0, 0.0, "KEY", {}), None)
        path, body = fields_of("hail", stream=streams)
        assert list(client.events(path[3:], body)) == list(AuditServer().events(path, body))
        with pytest.raises(EndpointError, match=r"http_400.*max_tokens=99999"):
            list(client.events(path[3:], body | {"max_tokens": 99_999}))
        passes = server.engine.counts["passes"]
        events: Any = client.events(path[3:], body | {"stream": True})
        next(events)
        events.close()
        time.sleep(0.2)
        assert not server.engine.running
        assert server.engine.counts["passes"] < passes + 10
