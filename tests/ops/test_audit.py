"""The audit of a served model: faults are named, clean servers pass, and bad servers end in a line."""

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from data.answers.client import EndpointError
from heads.common.typed import from_yaml
from ops.audit import main
from ops.audits.ask import AuditConfig
from ops.audits.compare import (
    FAILED,
    FAULT,
    FAULTS,
    NOT_RUN,
    PASSED,
    UNDECIDED,
    Difference,
    Finding,
    diagnosed,
    gap_at,
)  # fmt: skip
from ops.audits.output import cut
from ops.audits.properties import schema_breach, stop_in
from ops.audits.run import JSON, PAGE, REPRODUCTION, Verdict, audited
from ops.audits.sampling import OPENING, critical, kernels_of, p_value, permuted, smallest_shares
from ops.served.exchange import Reply, Token, read_replies, read_tokens
from tests.eval.small import run_command
from tests.ops.audit_decoding import ALTERNATIVES
from tests.ops.audit_decoding import FAULTS as PLANTED
from tests.ops.audit_proxy import FAULTS as PROXIED
from tests.ops.audit_proxy import AuditProxy
from tests.ops.audit_server import AuditServer
from tests.ops.endpoint_server import MODEL

NOISE = 0.03
SMALL: dict[str, Any] = {
    "prompts": 5, "max_new_tokens": 32, "minutes": 10.0, "concurrency": [1, 6], "borders": [512], "samples": 8,
    "sample_tokens": 12,
}  # fmt: skip
NAMES = {"temperature": "distribution", **dict.fromkeys(ALTERNATIVES, "logprobs")}
# Some that a small audit shows at once; a whole one shows all.
QUICK = ("stale_cache", "penalty", "tool_call")


def ask(out: Path, url: str, baseline: str | None, whole: bool = False, **values: Any) -> tuple[Verdict, Any]:
    """Audit a server; return the verdict and audit.json."""
    larger = {"prompts": 12, "max_new_tokens": 48, "concurrency": [1, 8], "samples": 64, "sample_tokens": 24}
    size = SMALL | (larger if whole else {}) | values
    verdict = audited(from_yaml(AuditConfig, "ops/audit", url=url, baseline=baseline, out=str(out), **size))
    return verdict, json.loads((out / JSON).read_text(encoding="utf-8"))


@pytest.fixture
def baseline() -> Iterator[AuditServer]:
    with AuditServer(speculates=False, noise=NOISE, seed=1) as server:
        yield server


def statuses(record: Any) -> dict[str, str]:
    return {finding["check"]: finding["status"] for finding in record["findings"]}


@pytest.mark.parametrize("chat", [True, False])
def test_a_clean_server_passes_every_check_that_it_offers(
    chat: bool, tmp_path: Path, baseline: AuditServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with AuditServer(speculates=True, noise=NOISE) as server:
        client = {"model": None, "chat": chat, "timeout": 60.0, "api_key_env": "NONE", "extra": {}}
        verdict, record = ask(tmp_path, server.url, baseline.url, client=client)
    assert verdict.status == PASSED
    others = {check for check, status in statuses(record).items() if status != PASSED}
    assert others == (set() if chat else {"tool_calls"})
    assert not (tmp_path / REPRODUCTION).exists()
    tau = record["findings"][-1]["figures"]["tau"]
    assert 1.5 < tau < 4  # of drafts of three tokens
    assert "no fault in" in capsys.readouterr().out
    assert "Lossless as far as it was checked" in (tmp_path / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("fault", QUICK)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path, baseline: AuditServer) -> None:
    with AuditServer(speculates=True, fault=fault, noise=NOISE) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert (verdict.status, verdict.fault) == (FAILED, fault)
    assert str(escape(FAULTS[fault].what)) in (tmp_path / PAGE).read_text(encoding="utf-8")
    assert record["verdict"]["fault"] == fault


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in PLANTED if fault != "slow_concurrency"])
def test_a_whole_audit_names_every_fault(fault: str, tmp_path: Path, baseline: AuditServer) -> None:
    with AuditServer(speculates=True, fault=fault, noise=NOISE) as server:
        verdict, _ = ask(tmp_path, server.url, baseline.url, whole=True)
    assert (verdict.status, verdict.fault) == (FAILED, NAMES.get(fault, fault))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", *PROXIED])
def test_a_fault_that_a_proxy_plants_is_named(
    fault: str, tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with AuditServer(speculates=True) as server, AuditProxy(server.url, fault) as proxy:
        verdict, _ = ask(tmp_path, proxy.url, baseline.url, samples=24, sample_tokens=24)
    assert (verdict.status, verdict.fault) == (FAILED if fault else PASSED, fault)


@pytest.mark.slow
def test_a_server_that_loses_under_load_is_lossless_and_said_to_lose(tmp_path: Path) -> None:
    slow = {"pass_s": 0.01}
    with (
        AuditServer(speculates=True, fault="slow_concurrency", **slow) as server,
        AuditServer(speculates=False, **slow) as plain,
    ):
        verdict, record = ask(tmp_path, server.url, plain.url, max_new_tokens=16)
    speed = record["findings"][-1]
    assert verdict.status == PASSED
    assert speed["figures"]["loses_from"] == 6
    assert "speculation loses from 6 in flight on" in speed["summary"]
    assert "Throughput against the speed of one user" in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_the_reproduction_shows_the_fault_again_and_no_other(tmp_path: Path, baseline: AuditServer) -> None:
    with AuditServer(speculates=True, fault="stale_cache", noise=0.0) as server:
        ask(tmp_path, server.url, baseline.url)
        script = [sys.executable, str(tmp_path / REPRODUCTION)]
        with AuditServer(speculates=True, fault="stale_cache") as fresh, AuditServer(speculates=False) as plain:
            shown = subprocess.run([*script, fresh.url, plain.url], capture_output=True, text=True, check=False)
            same = subprocess.run([*script, plain.url, plain.url], capture_output=True, text=True, check=False)
    assert (shown.returncode, same.returncode) == (1, 0), shown.stderr + same.stderr
    assert shown.stdout.startswith("with speculation:")
    for words, line in (([], "usage: python"), (["http://127.0.0.1:9"] * 2, "error: http://127.0.0.1:9: ")):
        wrong = subprocess.run([*script, *words], capture_output=True, text=True, check=False)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert wrong.stderr.startswith(line)


@pytest.mark.slow
def test_the_reproduction_of_a_seed_asks_twice(tmp_path: Path) -> None:
    with AuditServer(speculates=True, fault="seed") as server, AuditServer(speculates=False) as plain:
        verdict, _ = ask(tmp_path, server.url, plain.url, whole=True)
        script = [sys.executable, str(tmp_path / REPRODUCTION)]
        shown = subprocess.run([*script, server.url, plain.url], capture_output=True, text=True, check=False)
        same = subprocess.run([*script, plain.url, plain.url], capture_output=True, text=True, check=False)
    assert verdict.fault == "seed"
    assert (shown.returncode, same.returncode) == (1, 0), shown.stderr + same.stderr


def test_without_logprobs_a_difference_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ops.audits.compare.with_logprobs", lambda question: question)
    with (
        AuditServer(speculates=True, fault="rejected_draft") as server,
        AuditServer(speculates=False) as plain,
    ):
        verdict, record = ask(tmp_path, server.url, plain.url, requests=32)
    assert verdict.status == UNDECIDED
    assert statuses(record)["identity"] == UNDECIDED
    assert statuses(record)["sampling"] == NOT_RUN
    assert record["requests"] == 32
    assert "the budget of 32 requests is used up" in verdict.sentence


@pytest.mark.parametrize(("requests", "status", "check"), [(33, UNDECIDED, "borders"), (38, FAILED, "concurrency")])
def test_a_server_that_dies_leaves_what_was_measured_and_has_a_fault_if_beside_other_requests(
    requests: int, status: str, check: str, tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditServer(speculates=True) as server:
        events, left = server.events, threading.Semaphore(requests)

        def until(path: str, body: Any) -> Any:
            if not left.acquire(blocking=False):
                monkeypatch.setattr(server, "models", lambda: 1 / 0)
                raise ConnectionAbortedError
            return events(path, body)

        monkeypatch.setattr(server, "events", until)
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert (verdict.status, verdict.fault) == (status, "crash" if status == FAILED else "")
    assert "a server went away" in verdict.sentence
    assert statuses(record)["identity"] == PASSED
    assert statuses(record)["sampling"] == NOT_RUN
    summary = next(finding["summary"] for finding in record["findings"] if finding["check"] == check)
    assert "answers are the baseline's" in summary
    assert ", then a server went away" in summary
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert ("the server goes away under requests in flight" if status == FAILED else "Undecided") in page


def test_one_server_is_its_own_baseline_by_a_field_of_the_request(
    tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditServer(speculates=True, fault="logprobs", noise=NOISE) as server:
        events = server.events

        def switched(path: str, body: Any) -> Any:
            return events(path, body) if body.get("drafts", True) else baseline.events(path, body)

        monkeypatch.setattr(server, "events", switched)
        verdict, record = ask(tmp_path, server.url, None, plain={"drafts": False}, requests=250)
        script = [sys.executable, str(tmp_path / REPRODUCTION), server.url, server.url]
        shown = subprocess.run(script, capture_output=True, text=True, check=False)
    assert record["baseline"] == record["audited"]
    assert (verdict.status, verdict.fault) == (FAILED, "logprobs")
    assert shown.returncode == 1, shown.stderr


@pytest.mark.parametrize("key", ["very-secret-key", 'very"secret&key'])
def test_texts_of_a_hostile_server_and_the_key_are_not_on_the_page(
    key: str, tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUDIT_KEY", key)
    client = {"model": None, "chat": True, "timeout": 60.0, "api_key_env": "AUDIT_KEY", "extra": {}}
    script = f"<script>alert(1)</script> \x1b[2J {key} \ud800"

    def hostile(path: str, body: Any) -> Any:
        reply = {"index": 0, "message": {"content": script}, "text": script, "finish_reason": "stop"}
        yield {"model": MODEL, "choices": [reply], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}

    with AuditServer(speculates=True) as server:
        monkeypatch.setattr(server, "events", hostile)
        verdict, _ = ask(tmp_path, server.url, baseline.url, client=client, requests=200)
    assert verdict.status == FAILED
    for name in (JSON, PAGE, REPRODUCTION):
        content = (tmp_path / name).read_text(encoding="utf-8")
        assert not any(shown in content for shown in (key, json.dumps(key)[1:-1], str(escape(key))))
        assert name != PAGE or ("<script>" not in content and "alert(1)" in content)
    assert key not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "url is missing"),
        (["url=http://127.0.0.1:9"], "audit needs a baseline: the same model served without speculation"),
        (["url=http://127.0.0.1:9", "baseline=http://127.0.0.1:9"], "audit needs a baseline"),
        (["url=nothing", "baseline=http://127.0.0.1:9"], "url=nothing: give a URL such as"),
        (["url=http://127.0.0.1:9", "baseline=nothing"], "baseline=nothing: give a URL such as"),
        (["url=http://127.0.0.1:9", "baseline=http://127.0.0.1:8"], "start the endpoint, or correct url="),
    ],
)
def test_wrong_use_ends_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(main, "ops/audit", *words) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "outputs" / "audit" / JSON).exists()


def test_the_command_s_exit_status_is_the_verdict(tmp_path: Path, baseline: AuditServer) -> None:
    small = ["prompts=3", "max_new_tokens=16", "samples=8", "concurrency=[1]", "borders=[64]"]
    words = [f"baseline={baseline.url}", *small, f"out={tmp_path}"]
    for fault, status in (("", 0), ("logprobs", 1)):
        with AuditServer(speculates=True, fault=fault, noise=NOISE) as server:
            assert run_command(main, "ops/audit", f"url={server.url}", *words) == status
    with AuditServer(speculates=True, noise=NOISE) as server:
        assert run_command(main, "ops/audit", f"url={server.url}", *words, "requests=8") == 3


def refusing(server: AuditServer, monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    """Let a server fail where `refuses` says so of a request's body."""
    events = server.events

    def answered(path: str, body: Any) -> Any:
        if refuses(body):
            raise ValueError("no template")
        yield from events(path, body)

    monkeypatch.setattr(server, "events", answered)


def test_servers_that_answer_nothing_are_undecided(
    tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditServer(speculates=True) as server:
        for one in (server, baseline):
            refusing(one, monkeypatch, lambda _: True)
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert verdict.status == UNDECIDED
    assert verdict.sentence.startswith("nothing could be compared: the baseline does not answer: http_400")
    assert set(statuses(record).values()) == {"not_offered", NOT_RUN}


@pytest.mark.parametrize(
    ("check", "refuses"),
    [
        ("borders", lambda body: len(str(body["messages"])) > 1500),
        pytest.param("sampling", lambda body: body["temperature"] > 0, marks=pytest.mark.slow),
        pytest.param("seeds", lambda body: body["temperature"] > 0, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_fails_where_the_baseline_answers_has_a_fault(
    check: str, refuses: Any, tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AuditServer(speculates=True) as server:
        refusing(server, monkeypatch, refuses)
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert statuses(record)[check] == FAILED
    assert (verdict.status, verdict.fault) == (FAILED, "error")


def test_a_failure_of_the_baseline_s_is_no_near_tie(
    tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    refusing(baseline, monkeypatch, lambda _: seen.append("") or len(seen) == 4)
    with AuditServer(speculates=True, fault="stale_cache", noise=NOISE) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url, requests=90)
    assert record["settings"]["near_tie"] < 1
    assert verdict.fault == "stale_cache"


def test_a_baseline_that_speculates_is_refused_and_an_audited_one_that_does_not_undecided(
    tmp_path: Path, baseline: AuditServer
) -> None:
    with AuditServer(speculates=True) as server, pytest.raises(ValueError, match="baseline is for the same model"):
        ask(tmp_path, baseline.url, server.url)
    with AuditServer(speculates=False, noise=NOISE) as server:
        verdict, _ = ask(tmp_path, server.url, baseline.url)
    assert verdict.status == UNDECIDED
    assert verdict.sentence.endswith("the server counts no drafts: does it speculate?")


def test_without_logprobs_of_the_baseline_they_are_not_offered(
    tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.audits.properties.with_logprobs", lambda question: question)
    with AuditServer(speculates=True, noise=NOISE) as server:
        _, record = ask(tmp_path, server.url, baseline.url, requests=300)
    assert statuses(record)["logprobs"] == "not_offered"
    assert statuses(record)["usage"] == PASSED


def test_a_server_that_hangs_ends_with_the_minutes(
    tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    with AuditServer(speculates=True) as server:
        refusing(server, monkeypatch, lambda _: not released.wait(60))
        begin = time.monotonic()
        verdict, record = ask(tmp_path, server.url, baseline.url, minutes=0.02)
        seconds = time.monotonic() - begin
        released.set()
    assert seconds < 20
    assert "the budget of 0.02 minutes is used up" in verdict.sentence
    assert statuses(record)["identity"] == NOT_RUN


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["streaming", "cancelled", "temperature", "choices", "logprobs"])
def test_a_reproduction_asks_as_the_audit_did(
    fault: str, tmp_path: Path, baseline: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    whole = fault in ("cancelled", "temperature")
    with (
        AuditServer(speculates=True, fault=fault if fault in PLANTED else "") as server,
        AuditProxy(server.url, "" if fault in PLANTED else fault) as proxy,
        AuditServer(speculates=True) as clean,
        AuditServer(speculates=False) as plain,
    ):
        url = server.url if fault in PLANTED else proxy.url
        verdict, _ = ask(tmp_path, url, baseline.url, whole=whole)
        script = [sys.executable, str(tmp_path / REPRODUCTION)]
        shown = subprocess.run([*script, url, plain.url], capture_output=True, text=True, check=False)
        same = subprocess.run([*script, clean.url, plain.url], capture_output=True, text=True, check=False)
    assert verdict.fault == NAMES.get(fault, fault)
    assert (shown.returncode, same.returncode) == (1, 0), shown.stdout + same.stdout + shown.stderr + same.stderr


def token(text: str, logprob: float, **top: float) -> Token:
    return Token(
        text.encode(), logprob, {text.encode(): logprob, **{key.encode(): value for key, value in top.items()}}
    )


def test_the_gap_is_that_of_the_token_at_the_first_difference() -> None:
    tokens = (token("a", -0.1, b=-3.0), token("bc", -0.2, bd=-0.5, x=-4.0), token("e", -0.1, f=-2.0))
    theirs = Reply("abce", tokens=tokens)
    assert gap_at(theirs, "abde", {}) == (2, pytest.approx(0.3))
    assert gap_at(theirs, "abze", {}) == (2, pytest.approx(3.8))  # at least: the token is not listed
    assert gap_at(theirs, "abc", {}) == (3, pytest.approx(1.9))  # an end
    assert gap_at(theirs, "abcef", {}) == (4, None)  # the baseline ended, and does not say how surely
    assert gap_at(Reply("abce"), "abde", {}) == (2, None)
    assert gap_at(Reply("zbce", tokens=tokens), "zbde", {}) == (2, None)  # the tokens are not the text's
    ended = Reply("abce", tokens=(*tokens, token("</s>", -0.4, g=-0.6)))
    assert gap_at(ended, "abceg", {}) == (4, pytest.approx(0.2))


def test_replies_are_assembled_from_their_events() -> None:
    first = {"logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}}
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}
    events = [
        (0.1, {"model": "m", "choices": [{"index": 0, "delta": {"content": "a"}, **first}]}),
        (0.2, {"model": "m", "choices": [{"index": 1, "delta": {"tool_calls": [call]}}]}),
        (
            0.3,
            {"model": "m", "choices": [{"index": 1, "delta": {"tool_calls": [more]}, "finish_reason": "tool_calls"}]},
        ),
        (0.4, {"model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": True}}),
    ]
    one, other = read_replies(events, "m")
    assert (one.text, one.tokens, one.steps, one.ttft_s) == ("a", (Token(b"a", -0.5, {}),), (1,), 0.1)
    assert (other.calls, other.finish, other.prompt_tokens, other.completion_tokens) == (
        (("f", '{"a": 1}'),), "tool_calls", 3, None,
    )  # fmt: skip
    assert read_tokens({"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None]}) == []
    assert read_tokens({"content": [{"token": "a", "bytes": 10**12, "logprob": -math.inf}]}) == [
        Token(b"a", -9999.0, {})
    ]
    huge = {"choices": [{"text": "a"}], "model": "m", "usage": {"completion_tokens": 10**400}}
    assert read_replies([(0.1, huge)], "m")[0].completion_tokens is None
    with pytest.raises(EndpointError, match="choices"):
        read_replies([(0.1, {"choices": [{"delta": {"tool_calls": ["f"]}}], "model": "m"})], "m")
    with pytest.raises(EndpointError, match="too_large"):
        read_replies([(0.1, {"choices": [{"text": "a" * 100_000}], "model": "m"})] * 11, "m")
    assert read_tokens({"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -2}]}) == [
        Token(b"a", -1.0, {b"b": -2.0})
    ]


def test_samples_of_one_distribution_pass_and_others_do_not() -> None:
    rng = np.random.default_rng(1)
    words = np.array([f"{a} {b}" for a in "uvwxyz" for b in "stuv"])

    def sampled(count: int, shift: float) -> list[str]:
        weights = np.ones(len(words))
        weights[0] += shift
        return [str(text) for text in rng.choice(words, count, p=weights / weights.sum())]

    ps = [p_value(kernels_of([(sampled(40, 0), sampled(40, 0))])["beginnings"], rng) for _ in range(60)]
    assert sum(p <= 0.1 for p in ps) <= 15
    assert min(ps) > 1e-3
    assert p_value(kernels_of([(sampled(80, 40), sampled(80, 0))])["beginnings"], rng) < 1e-4
    lengths = kernels_of([(["a b c"] * 30, ["a b"] * 30)])
    assert p_value(lengths["lengths"], rng) < 1e-4
    same = "a " * OPENING
    swapped = kernels_of([([same + "b c d e"] * 30, [same + "e d c b"] * 30)])
    assert p_value(swapped["beginnings"], rng) == p_value(swapped["lengths"], rng) == 1
    assert p_value(swapped["words"], rng) < 1e-4, "the same words in another order are other answers"
    kernels = kernels_of([(sampled(60, 0), sampled(60, 0))])["beginnings"]
    exceeded = (permuted(kernels, 20_000, rng) > critical(kernels, [np.ones(len(k)) for k in kernels], 0.01)).mean()
    assert 0.003 < exceeded < 0.02
    pairs = [([], [str(i)] * 50) for i in range(3)]
    shares = smallest_shares(pairs, 1e-4, rng)
    assert shares["beginnings"] is not None
    assert shares["beginnings"] <= 0.2


def test_the_diagnosis_is_of_the_first_failure_but_for_telling_ones() -> None:
    def finding(check: str, status: str = FAILED) -> Finding:
        return Finding(check, status, "")

    assert diagnosed([finding("identity", PASSED)]) == ""
    assert diagnosed([finding("identity"), finding("streaming")]) == "wrong_token"
    assert diagnosed([finding("tool_calls"), finding("schemas")]) == "schema"
    nothing: Any = None
    for look, differing, named in (
        ("", 9, "streaming"), ("limit", 9, "streaming"), ("", 1, "wrong_token"), ("error", 9, "error"),
    ):  # fmt: skip
        wrong = [Difference(nothing, "", "", 0, None, FAULT, look)] * differing
        first = Finding("identity", FAILED, "", wrong, {"answers": 16})
        assert diagnosed([first, finding("streaming", PASSED)]) == named
    failing = Finding("tool_calls", FAILED, "", [Difference(nothing, "", "", 0, None, FAULT, "error")])
    assert diagnosed([failing, finding("schemas")]) == "error"
    unseeded = Difference(nothing, "", "", 0, None, FAULT, "seed")
    seeded = Finding("choices", FAILED, "", [unseeded])
    assert diagnosed([seeded, finding("sampling", PASSED)]) == "seed"
    assert diagnosed([seeded, finding("sampling")]) == "distribution"


def test_schemas_stop_strings_and_shown_texts() -> None:
    assert schema_breach('{"city": "Oslo", "degrees": 3, "sunny": true}', "stop") is None
    assert "is no int" in str(schema_breach('{"city": "Oslo", "degrees": true, "sunny": true}', "stop"))
    assert "is no JSON" in str(schema_breach('{"city": "Os', "stop"))
    assert schema_breach('{"city": "Os', "length") is None
    assert "is no JSON" in str(schema_breach("The weather in Oslo is", "length"))  # free text up to the limit
    assert "keys" in str(schema_breach("[]", "stop"))
    assert stop_in("one two three one two four") == " one"
    assert stop_in("a") is None
    assert cut("é" * 300, 500)[0].startswith("…")
