"""The audit of a served model: faults are named, clean servers pass, and bad servers end in a line."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from heads.common.typed import from_yaml
from ops.audit import CHECKS, ENVIRONMENT, JSON, PAGE, REPRODUCTION, Verdict, audited, main
from ops.audits.compare import AuditConfig
from tests.eval.small import run_command
from tests.ops.audit_decoding import ALTERNATIVES
from tests.ops.audit_decoding import FAULTS as PLANTED
from tests.ops.audit_server import AuditServer
from tests.ops.endpoint_server import MODEL

Body = dict[str, Any]
NOISE = 0.03
SMALL: dict[str, Any] = {
    "prompts": 5, "max_new_tokens": 32, "minutes": 10.0, "concurrency": [1, 6], "borders": [512], "samples": 8,
    "sample_tokens": 12, "alpha": 1e-3,
}  # fmt: skip
LARGER = {"prompts": 12, "max_new_tokens": 48, "concurrency": [1, 8], "samples": 64, "sample_tokens": 24}
WRONG = ("rejected_draft", "draft_bonus")  # tokens of a pass
NAMES = {
    "temperature": "distribution",
    **dict.fromkeys(WRONG, "wrong_token"),
    **dict.fromkeys(ALTERNATIVES, "logprobs"),
}
SHOWN_BY = {  # the checks that show a fault by itself, after greedy answers alone
    **dict.fromkeys(("rejected_draft", "draft_bonus", "lost_token", "early_stop"), ()),
    "stale_cache": ("prefix_cache",), "prompt_chunk": ("borders",), "history": ("conversations",),
    "leak": ("concurrency",), "cancelled": ("cancelled",), "streaming": ("streaming",), "penalty": ("penalties",),
    "limit": ("limits",), "stop_string": ("stop_strings",), "usage": ("usage",), "seed": ("seeds",),
    "tool_call": ("schemas", "tool_calls"), "schema": ("schemas",), "temperature": ("sampling",),
    "top_p": ("sampling_top_p",), **dict.fromkeys(("logprobs", *ALTERNATIVES), ("logprobs",)),
}  # fmt: skip


def ask(out: Path, url: str, baseline: str | None, **values: Any) -> tuple[Verdict, Any]:
    """Audit a server; return the verdict and audit.json."""
    config = from_yaml(AuditConfig, "ops/audit", url=url, baseline=baseline, out=str(out), **SMALL | values)
    return audited(config), json.loads((out / JSON).read_text(encoding="utf-8"))


def client(chat: bool = True, key: str = "NONE") -> Body:
    return {"model": None, "chat": chat, "timeout": 60.0, "api_key_env": key, "extra": {}}


@pytest.fixture
def baseline() -> Iterator[AuditServer]:
    with AuditServer(speculates=False, noise=NOISE, seed=1) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[AuditServer]:
    with AuditServer(speculates=False) as server:
        yield server


@pytest.fixture
def server() -> Iterator[AuditServer]:
    with AuditServer() as server:
        yield server


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that leaves an audit a few of its checks."""
    return lambda *checks: monkeypatch.setattr("ops.audit.CHECKS", {check: CHECKS[check] for check in checks})


def statuses(record: Any) -> dict[str, str]:
    return {finding["check"]: finding["status"] for finding in record["findings"]}


def finding_of(record: Any, check: str) -> Any:
    return next(finding for finding in record["findings"] if finding["check"] == check)


def reproduces(out: Path, *pairs: tuple[str, str]) -> list[int]:
    """Return the reproduction's exit statuses for pairs of servers."""
    script = [sys.executable, str(out / REPRODUCTION)]
    return [subprocess.run([*script, *pair], capture_output=True, check=False).returncode for pair in pairs]


def refusing(server: AuditServer, monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    """Let a server fail where `refuses` says so of a request's body."""
    events = server.events

    def answered(path: str, body: Any) -> Any:
        if refuses(body):
            raise ValueError("no template")
        yield from events(path, body)

    monkeypatch.setattr(server, "events", answered)


def test_a_clean_server_passes_every_check_that_it_offers(
    tmp_path: Path, baseline: AuditServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with AuditServer(noise=NOISE) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert verdict.status == "passed"
    assert set(statuses(record).values()) == {"passed"}
    assert not (tmp_path / REPRODUCTION).exists()
    assert record["findings"][-1]["figures"]["drafts"] > 100
    assert "no fault in" in capsys.readouterr().out
    assert "Lossless as far as it was checked" in (tmp_path / PAGE).read_text(encoding="utf-8")


LONG = ("top_p", "temperature")  # distributions, told apart by some thousand samples: a minute or more


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.slow if fault in LONG else ())
        for fault in PLANTED
        if fault != "slow_concurrency"
    ],
)
def test_every_planted_fault_is_named(fault: str, tmp_path: Path, baseline: AuditServer, only: Any) -> None:
    only("identity", *SHOWN_BY[fault])
    whole = LARGER if fault in ("temperature", "top_p", "leak", "cancelled") else {}
    overlapping = 2e-3 if fault == "leak" else 0.0  # seconds of a pass: on a busy machine requests may not overlap
    with AuditServer(fault=fault, noise=NOISE, pass_s=overlapping) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url, **whole)
    name = NAMES.get(fault, fault)
    assert (verdict.status, verdict.fault, record["verdict"]["fault"]) == ("failed", name, name)
    faults: Any = ENVIRONMENT.get_template("words.j2").module
    assert str(escape(faults.faults[name])) in (tmp_path / PAGE).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in PLANTED if fault != "slow_concurrency"])
def test_a_whole_audit_names_every_fault(fault: str, tmp_path: Path, baseline: AuditServer) -> None:
    with AuditServer(fault=fault, noise=NOISE) as server:
        verdict, _ = ask(tmp_path, server.url, baseline.url, **LARGER)
    assert (verdict.status, verdict.fault) == ("failed", NAMES.get(fault, fault))


def test_the_reproduction_shows_the_fault_again_and_no_other(tmp_path: Path, plain: AuditServer, only: Any) -> None:
    only("identity", "prefix_cache")
    with AuditServer(fault="stale_cache") as server, AuditServer(fault="stale_cache") as fresh:
        ask(tmp_path, server.url, plain.url)
        assert reproduces(tmp_path, (fresh.url, plain.url), (plain.url, plain.url)) == [1, 0]
    assert reproduces(tmp_path, ("http://127.0.0.1:9", "http://127.0.0.1:9")) == [2]


@pytest.mark.slow
def test_a_server_that_loses_under_load_is_lossless_and_reported_to_lose(tmp_path: Path) -> None:
    slow = {"pass_s": 0.01}
    with AuditServer(fault="slow_concurrency", **slow) as server, AuditServer(speculates=False, **slow) as plain:
        verdict, record = ask(tmp_path, server.url, plain.url, max_new_tokens=16)
    speed = record["findings"][-1]
    assert (verdict.status, speed["figures"]["loses_from"]) == ("passed", 6)
    assert "speculation loses from 6 in flight on" in speed["summary"]
    assert "times as fast, one request at a time" in (tmp_path / PAGE).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["streaming", "cancelled", "temperature", "logprobs", "seed"])
def test_a_reproduction_asks_as_the_audit_did(
    fault: str, tmp_path: Path, baseline: AuditServer, plain: AuditServer
) -> None:
    with AuditServer(fault=fault) as server, AuditServer() as clean:
        whole = LARGER if fault in ("cancelled", "temperature", "seed") else {}
        verdict, _ = ask(tmp_path, server.url, plain.url if fault == "seed" else baseline.url, **whole)
        assert reproduces(tmp_path, (server.url, plain.url), (clean.url, plain.url)) == [1, 0]
    assert verdict.fault == NAMES.get(fault, fault)


def test_without_logprobs_a_difference_is_undecided(
    tmp_path: Path, plain: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.audits.compare.with_logprobs", lambda question: question)
    with AuditServer(fault="rejected_draft") as server:
        verdict, record = ask(tmp_path, server.url, plain.url, requests=32)
    assert (verdict.status, record["requests"]) == ("undecided", 32)
    assert (statuses(record)["identity"], statuses(record)["sampling"]) == ("undecided", "not_run")
    assert "the budget of 32 requests is used up" in verdict.sentence


@pytest.mark.parametrize(("requests", "status", "check"), [(33, "undecided", "borders"), (38, "failed", "concurrency")])
def test_a_server_that_dies_leaves_what_was_measured_and_has_a_fault_if_under_several_requests(
    requests: int, status: str, check: str, tmp_path: Path, baseline: AuditServer, server: AuditServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    events, left = server.events, threading.Semaphore(requests)

    def until(path: str, body: Any) -> Any:
        if not left.acquire(blocking=False):
            monkeypatch.setattr(server, "models", lambda: 1 / 0)
            raise ConnectionAbortedError
        return events(path, body)

    monkeypatch.setattr(server, "events", until)
    verdict, record = ask(tmp_path, server.url, baseline.url)
    assert (verdict.status, verdict.fault) == (status, "crash" if status == "failed" else "")
    assert "a server went away" in verdict.sentence
    assert (statuses(record)["identity"], statuses(record)["sampling"]) == ("passed", "not_run")
    assert finding_of(record, check)["status"] == ("failed" if status == "failed" else "not_run")
    assert finding_of(record, check)["summary"].startswith("a server went away")


def test_one_server_is_its_own_baseline_by_a_field_of_the_request(
    tmp_path: Path, baseline: AuditServer, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("identity", "logprobs")
    with AuditServer(fault="logprobs", noise=NOISE) as server:
        events = server.events
        monkeypatch.setattr(
            server, "events",
            lambda path, body: events(path, body) if body.get("drafts", True) else baseline.events(path, body),
        )  # fmt: skip
        verdict, record = ask(tmp_path, server.url, None, plain={"drafts": False})
        assert reproduces(tmp_path, (server.url, server.url)) == [1]
    assert record["baseline"] == record["audited"]
    assert (verdict.status, verdict.fault) == ("failed", "logprobs")


def test_texts_of_a_hostile_server_and_the_key_are_not_on_the_page(
    tmp_path: Path, baseline: AuditServer, server: AuditServer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    key = 'very"secret&key'
    monkeypatch.setenv("AUDIT_KEY", key)
    script = f"<script>alert(1)</script> \x1b[2J {key} \ud800"

    def hostile(path: str, body: Any) -> Any:
        reply = {"index": 0, "message": {"content": script}, "text": script, "finish_reason": "stop"}
        yield {"model": MODEL, "choices": [reply], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}

    monkeypatch.setattr(server, "events", hostile)
    verdict, _ = ask(tmp_path, server.url, baseline.url, client=client(key="AUDIT_KEY"), requests=100)
    assert verdict.status == "failed"
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


def test_the_command_s_exit_status_is_the_verdict(tmp_path: Path, baseline: AuditServer, only: Any) -> None:
    only("identity", "logprobs")
    for fault, more, status in (("", [], 0), ("logprobs", [], 1), ("", ["requests=8"], 3)):
        with AuditServer(fault=fault, noise=NOISE) as server:
            words = [f"url={server.url}", f"baseline={baseline.url}", "prompts=3", "max_new_tokens=16", *more]
            assert run_command(main, "ops/audit", *words, f"out={tmp_path}") == status


@pytest.mark.parametrize(
    ("check", "refuses"),
    [("borders", lambda body: len(str(body["messages"])) > 1500), ("seeds", lambda body: body["temperature"] > 0)],
)
def test_a_server_that_fails_where_the_baseline_answers_has_a_fault(
    check: str, refuses: Any, tmp_path: Path, plain: AuditServer, server: AuditServer, only: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    only("identity", check)
    refusing(server, monkeypatch, refuses)
    verdict, record = ask(tmp_path, server.url, plain.url)
    assert statuses(record)[check] == "failed"
    assert (verdict.status, verdict.fault) == ("failed", "error")


def test_a_failure_of_the_baseline_s_is_no_near_tie(
    tmp_path: Path, baseline: AuditServer, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("identity", "prefix_cache")
    seen: list[str] = []
    refusing(baseline, monkeypatch, lambda _: seen.append("") or len(seen) == 4)
    with AuditServer(fault="stale_cache", noise=NOISE) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url)
    assert record["settings"]["near_tie"] < 1
    assert verdict.fault == "stale_cache"


def test_a_list_without_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="concurrency is"):
        from_yaml(AuditConfig, "ops/audit", url="u", baseline="b", **SMALL | {"concurrency": []})


def test_a_baseline_that_speculates_is_refused_and_an_audited_one_that_does_not_undecided(
    tmp_path: Path, baseline: AuditServer, server: AuditServer, only: Any
) -> None:
    only("identity")
    with pytest.raises(ValueError, match="baseline is for the same model"):
        ask(tmp_path, baseline.url, server.url)
    with AuditServer(speculates=False, noise=NOISE) as idle:
        verdict, _ = ask(tmp_path, idle.url, baseline.url)
    assert verdict.status == "undecided"
    assert verdict.sentence.endswith("the server counts no drafts: does it speculate?")


def test_a_server_that_hangs_ends_with_the_minutes(
    tmp_path: Path, baseline: AuditServer, server: AuditServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    refusing(server, monkeypatch, lambda _: not released.wait(60))
    begin = time.monotonic()
    verdict, record = ask(tmp_path, server.url, baseline.url, minutes=0.02)
    seconds = time.monotonic() - begin
    released.set()
    assert seconds < 20
    assert "the budget of 0.02 minutes is used up" in verdict.sentence
    assert statuses(record)["identity"] == "not_run"


def deltas(events: list[Body], index: int) -> list[Body]:
    """Return the deltas of a choice of a stream."""
    return [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]


def second(change: Callable[[str, str], str]) -> Callable[[list[Body]], None]:
    """Return what changes the second choice's text, given both."""

    def changed(events: list[Body]) -> None:
        first, other = ("".join(delta["content"] for delta in deltas(events, index)) for index in range(2))
        for number, delta in enumerate(deltas(events, 1)):
            delta["content"] = "" if number else change(first, other)

    return changed


def once(events: list[Body]) -> None:
    for event in events:
        event["choices"] = [choice for choice in event["choices"] if choice["index"] == 0]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda _: None, ""),
        (once, "choices"),
        (lambda events: events[-1]["usage"].update(completion_tokens=8), "usage"),
        (second(lambda first, _: first), "choices"),
    ],
)
def test_two_choices_are_counted_and_their_own(
    change: Any, fault: str, tmp_path: Path, server: AuditServer, plain: AuditServer, only: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    only("choices")
    events = server.events

    def changed(path: str, body: Any) -> Any:
        listed = list(events(path, body))
        if body.get("n") == 2:
            change(listed)
        yield from listed

    monkeypatch.setattr(server, "events", changed)
    verdict, record = ask(tmp_path, server.url, plain.url)
    assert (statuses(record)["choices"], verdict.fault) == ("failed" if fault else "passed", fault)
    if change is once:
        script = (tmp_path / REPRODUCTION).read_text(encoding="utf-8")
        (tmp_path / REPRODUCTION).write_text(script.replace("SAMPLES = 256", "SAMPLES = 24"), encoding="utf-8")
        assert reproduces(tmp_path, (server.url, plain.url), (plain.url, plain.url)) == [1, 0]


def test_seeds_that_the_baseline_ignores_too_are_no_fault(
    tmp_path: Path, plain: AuditServer, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("seeds")
    events = plain.events
    monkeypatch.setattr(plain, "events", lambda path, body: events(path, {**body, "seed": None}))
    with AuditServer(fault="seed") as server:
        assert statuses(ask(tmp_path, server.url, plain.url)[1])["seeds"] in ("passed", "not_offered")
