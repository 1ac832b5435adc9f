"""Single checks of the audit: tool calls, choices, seeds, the stated power, and what the end of an audit leaves."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ops.audits.ask import SIDES
from ops.audits.compare import FAILED, FAULT, NEAR_TIE, NOT_OFFERED, NOT_RUN, PASSED, UNDECIDED, UNEXPLAINED, Timed
from ops.audits.greedy import _twice
from ops.audits.output import plot
from ops.audits.properties import difference_of, nearest_tie, parsed, token_gap
from ops.audits.run import CHECKS, PAGE, REPRODUCTION, Verdict, share_machine, speed
from ops.audits.sampling import kernels_of, permuted, smallest_shares
from ops.audits.seeds import fewer
from ops.served.exchange import Question, Reply, Token
from tests.ops.audit_server import AuditServer
from tests.ops.test_audit import ask, refusing, statuses

Body = dict[str, Any]


@pytest.fixture
def baseline() -> Iterator[AuditServer]:
    with AuditServer(speculates=False) as server:
        yield server


@pytest.fixture
def server() -> Iterator[AuditServer]:
    with AuditServer(speculates=True) as server:
        yield server


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what leaves an audit a few of its checks."""

    def chosen(*checks: str) -> None:
        monkeypatch.setattr("ops.audits.run.CHECKS", {check: CHECKS[check] for check in checks})

    return chosen


def finding_of(verdict: tuple[Verdict, Any], check: str) -> Any:
    return next(finding for finding in verdict[1]["findings"] if finding["check"] == check)


def changing(server: AuditServer, monkeypatch: pytest.MonkeyPatch, change: Callable[[Body, list[Body]], None]) -> None:
    """Let a server's events be changed, given the request's body."""
    events = server.events

    def changed(path: str, body: Any) -> Any:
        listed = list(events(path, body))
        change(body, listed)
        yield from listed

    monkeypatch.setattr(server, "events", changed)


def rewritten(change: Callable[[str], str], stream_alone: bool) -> Callable[[Body, list[Body]], None]:
    """Return what changes the arguments of calls of the model's own choice, in streams alone if it is so."""

    def change_of(body: Body, events: list[Body]) -> None:
        if body.get("tool_choice") != "auto" or (stream_alone and not body.get("stream")):
            return
        choices = [choice for event in events for choice in event["choices"]]
        messages = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        functions = [call["function"] for message in messages for call in message.get("tool_calls", [])]
        text = change("".join(function["arguments"] for function in functions))
        for number, function in enumerate(functions):
            function["arguments"] = "" if number else text

    return change_of


@pytest.mark.parametrize(
    ("change", "stream_alone", "note"),
    [
        (lambda text: text.replace('"degrees": ', '"degrees": 1'), False, "read as another call"),
        (lambda text: text.replace('"degrees": ', '"degrees": 1'), True, "another call"),
        (lambda text: text[1:], True, "is no JSON"),
        (lambda text: text[:0], True, "is no JSON"),
    ],
)
def test_a_parser_that_spoils_calls_of_the_model_s_choice_is_named(
    change: Any, stream_alone: bool, note: str, tmp_path: Path, server: AuditServer, baseline: AuditServer,
    only: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    only("tool_calls")
    changing(server, monkeypatch, rewritten(change, stream_alone))
    verdict, record = ask(tmp_path, server.url, baseline.url)
    finding = finding_of((verdict, record), "tool_calls")
    assert (verdict.status, verdict.fault) == (FAILED, "tool_call")
    assert finding["differences"][0]["id"].startswith("tool auto")
    assert note in finding["differences"][0]["note"]
    assert "named: 6 of 6 calls are the baseline's" in finding["summary"]


def test_spaces_in_arguments_are_no_difference_and_without_auto_named_calls_are_checked(
    tmp_path: Path, server: AuditServer, baseline: AuditServer, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("tool_calls")
    changing(server, monkeypatch, rewritten(lambda text: text.replace(": ", ":  "), False))
    assert statuses(ask(tmp_path, server.url, baseline.url)[1])["tool_calls"] == PASSED
    for one in (server, baseline):
        refusing(one, monkeypatch, lambda body: body.get("tool_choice") == "auto")
    finding = finding_of(ask(tmp_path, server.url, baseline.url), "tool_calls")
    assert finding["status"] == PASSED
    assert "auto: not offered, http_400" in finding["summary"]


def call(arguments: str, *tokens: Token) -> Reply:
    return Reply(calls=(("f", arguments),), finish="tool_calls", tokens=tokens)


def one(text: str, logprob: float, **top: float) -> Token:
    return Token(text.encode(), logprob, {key.encode(): value for key, value in top.items()})


@pytest.mark.parametrize(
    ("ours", "again", "kind"),
    [
        (call('{"a": 2}'), [call('{"a": 2}', one("2", -0.8))], NEAR_TIE),
        (call('{"a": 3}'), [call('{"a": 3}', one("3", -4.0))], FAULT),  # a token far below
        (call('{"a": 2}'), [call('{"a": 2}', one("1", -0.6))], FAULT),  # the tokens are the baseline's
        (call('{"a": 2}'), [call('{"a": 1}', one("1", -0.6))], NEAR_TIE),  # in a stream alone, and there is a near tie
        (call('{"a": '), [call('{"a": 1}', one("1", -0.6))], FAULT),  # no near tie breaks JSON
        (Reply("I cannot"), [Reply("I cannot", tokens=(one("I", -0.1),))], FAULT),
        (Reply(error="http_500"), [], FAULT),
    ],
)
def test_a_call_is_judged_by_its_tokens(ours: Reply, again: list[Reply], kind: str) -> None:
    question = Question("x", "/chat/completions", {"messages": [], "tool_choice": "auto"})
    right = [call('{"a": 1}', one("1", -0.6, **{"1": -0.6, "2": -0.8, "3": -4.0}))]
    assert difference_of(question, ours, right, again, 0.5).kind == kind
    silent = difference_of(question, ours, [call('{"a": 1}')], again, 0.5)
    broken = ours.error or ours.calls[:1] == (("f", '{"a": '),)
    assert silent.kind == (FAULT if broken else UNEXPLAINED)


def test_gaps_of_tokens() -> None:
    tokens = (one("a", -0.1, a=-0.1, b=-3.0), one("c", -0.2, c=-0.2, d=-0.9))
    assert token_gap(tokens, (tokens[0], one("d", 0.0))) == (1, pytest.approx(0.7))
    assert token_gap(tokens, tokens[:1]) == (1, pytest.approx(0.7))
    assert token_gap(tokens[:1], tokens) == (1, None)
    assert nearest_tie(tokens) == pytest.approx(0.7)
    assert nearest_tie((one("a", -0.1),)) is None
    assert nearest_tie(()) is None
    assert parsed(call("[" * 100_000)) == [("f", "[" * 100_000)]


def texts(events: list[Body]) -> dict[int, list[Body]]:
    """Return the deltas of each choice of a stream."""
    deltas: dict[int, list[Body]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        deltas.setdefault(choice["index"], []).append(choice["delta"])
    return deltas


def once(_: Body, events: list[Body]) -> None:
    for event in events:
        event["choices"] = [choice for choice in event["choices"] if choice["index"] == 0]


def counted_once(_: Body, events: list[Body]) -> None:
    events[-1]["usage"]["completion_tokens"] //= 2


def copied(_: Body, events: list[Body]) -> None:
    first, second = ("".join(delta["content"] for delta in deltas) for deltas in texts(events).values())
    for deltas in texts(events).values():
        for number, delta in enumerate(deltas):
            delta["content"] = "" if number else first or second


def reversed_second(_: Body, events: list[Body]) -> None:
    deltas = texts(events)[1]
    text = "".join(delta["content"] for delta in deltas)[::-1]
    for number, delta in enumerate(deltas):
        delta["content"] = "" if number else text


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("change", "fault"),
    [(None, ""), (once, "choices"), (counted_once, "usage"), (copied, "choices"), (reversed_second, "choices")],
)
def test_two_choices_are_checked_though_the_baseline_refuses_them_at_temperature_0(
    greedy: bool, change: Any, fault: str, tmp_path: Path, server: AuditServer, baseline: AuditServer, only: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    only("choices")
    if change is not None:
        changing(server, monkeypatch, lambda body, events: change(body, events) if body.get("n") == 2 else None)
    for each_server in (server, baseline):
        refusing(each_server, monkeypatch, lambda body: body.get("n") == 2 and not body["temperature"] and not greedy)
    verdict, record = ask(tmp_path, server.url, baseline.url)
    finding = finding_of((verdict, record), "choices")
    expected = fault if not greedy or change is not copied else ""  # which greedy ones are
    assert (finding["status"], verdict.fault) == (FAILED if expected else PASSED, expected)
    assert greedy or "with a temperature alone" in finding["summary"]
    if not greedy and change in (counted_once, copied):
        script = [sys.executable, str(tmp_path / REPRODUCTION)]
        shown = subprocess.run([*script, server.url, baseline.url], capture_output=True, text=True, check=False)
        same = subprocess.run([*script, baseline.url, baseline.url], capture_output=True, text=True, check=False)
        assert (shown.returncode, same.returncode) == (1, 0), shown.stdout + same.stdout + shown.stderr + same.stderr


def without_logprobs(_: Body, events: list[Body]) -> None:
    for choice in (choice for event in events for choice in event["choices"]):
        choice["logprobs"] = None


def of_other_tokens(_: Body, events: list[Body]) -> None:
    for choice in (choice for event in events for choice in event["choices"]):
        logprobs = choice.get("logprobs") or {}
        for entry in logprobs.get("content") or []:
            entry.update(token="x", bytes=[120])
        if "tokens" in logprobs:
            logprobs["tokens"] = ["x"] * len(logprobs["tokens"])


@pytest.mark.parametrize(("chat", "stream"), [(True, True), (False, False)])  # the replies that have the fault
@pytest.mark.parametrize(
    ("change", "note"),
    [
        (without_logprobs, "no logprobs"),
        (of_other_tokens, "the tokens of the logprobs are not those of the text"),
        ("copied_top", "an alternative to token"),
        ("shifted_top", "an alternative to token"),
        ("cut_top", "alternatives where the baseline lists"),
    ],
)
def test_wrong_logprobs_are_named_and_reproduced(
    change: Any, note: str, stream: bool, chat: bool, tmp_path: Path, server: AuditServer, baseline: AuditServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ops.audits.run.CHECKS", {"logprobs": CHECKS["logprobs"]})
    clean, faulty = server.events, AuditServer(fault=change).events if isinstance(change, str) else server.events

    def events(path: str, body: Any) -> Any:
        wrong = bool(body.get("stream")) == stream
        listed = list((faulty if wrong else clean)(path, body))
        if wrong and callable(change):
            change(body, listed)
        yield from listed

    monkeypatch.setattr(server, "events", events)
    client = {"model": None, "chat": chat, "timeout": 60.0, "api_key_env": "NONE", "extra": {}}
    finding = finding_of(ask(tmp_path, server.url, baseline.url, client=client), "logprobs")
    assert (finding["status"], finding["fault"]) == (FAILED, "logprobs")
    assert note in finding["differences"][0]["note"]
    assert finding["summary"] == "5 of 10 replies hold"
    script = [sys.executable, str(tmp_path / REPRODUCTION)]
    shown = subprocess.run([*script, server.url, baseline.url], capture_output=True, text=True, check=False)
    same = subprocess.run([*script, baseline.url, baseline.url], capture_output=True, text=True, check=False)
    assert (shown.returncode, same.returncode) == (1, 0), shown.stdout + same.stdout + shown.stderr + same.stderr


def test_choices_that_ignore_their_seed_are_named(
    tmp_path: Path, server: AuditServer, baseline: AuditServer, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("choices")
    with AuditServer(speculates=True, fault="seed") as faulty:
        for refused in (faulty, baseline):
            refusing(refused, monkeypatch, lambda body: body.get("n") == 2 and not body["temperature"])
        verdict, _ = ask(tmp_path, faulty.url, baseline.url)
    assert (verdict.status, verdict.fault) == (FAILED, "seed")


def test_seeds_that_the_baseline_ignores_too_are_not_offered(
    tmp_path: Path, only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("seeds")
    with AuditServer(speculates=True, fault="seed") as server, AuditServer(speculates=False) as plain:
        events = plain.events
        monkeypatch.setattr(plain, "events", lambda path, body: events(path, {**body, "seed": None}))
        finding = finding_of(ask(tmp_path, server.url, plain.url), "seeds")
    assert finding["status"] == NOT_OFFERED
    assert "it does not take a seed" in finding["summary"]


def test_the_test_of_seeds_is_one_sided_and_exact() -> None:
    rng = np.random.default_rng(0)
    assert fewer([4] * 8, [4] * 8, rng) == 1.0
    assert fewer([4] * 8, [0] * 8, rng) == 1.0
    assert fewer([4] * 8, [4] * 12, rng) == 1.0
    assert fewer([0, 0], [4, 4], rng) == pytest.approx(1 / 6, rel=0.02)
    assert fewer([0] * 24, [4] * 24, rng) < 1e-5


def test_the_stated_shares_are_those_that_the_tests_show() -> None:
    rng = np.random.default_rng(0)
    words = np.array([f" w{i}" for i in range(24)])

    def sampled(prompt: int, count: int, wrong: float, test: str) -> list[str]:
        """Return answers, a share of them wrong in the way of a test."""
        answers = []
        for _ in range(count):
            other = rng.random() < wrong
            first = 6 * ((prompt + (other and test != "lengths")) % 4)
            length = int(rng.integers(8, 16)) // (2 if other and test == "lengths" else 1)
            answers.append("".join(rng.choice(words[first : first + 6], length)))
        return answers

    bound, size = 0.01, 24
    shares = smallest_shares([([], sampled(prompt, size, 0.0, "")) for prompt in range(4)], bound, rng)
    assert set(shares) == {"beginnings", "lengths", "words"}
    for test, share in shares.items():
        assert share is not None
        shown = 0
        for _ in range(8):
            sides = [(sampled(i, 4 * size, share, test), sampled(i, 4 * size, 0.0, test)) for i in range(4)]
            kernels = kernels_of(sides)[test]
            labels = np.repeat([1.0, -1.0], 4 * size)
            shown += (
                permuted(kernels, 400, rng) >= sum(labels @ kernel @ labels for kernel in kernels)
            ).mean() <= bound
        assert shown >= 6
    assert smallest_shares([([], [" a b"] * 8)] * 2, bound, rng)["beginnings"] is None  # all answers are alike


@pytest.mark.parametrize(
    ("fault", "check", "requests", "status"),
    [
        ("usage", "usage", 8, FAILED),
        ("", "usage", 8, NOT_RUN),
        ("stale_cache", "prefix_cache", 11, UNDECIDED),  # no request is left to ask how near
        ("", "prefix_cache", 11, NOT_RUN),
        ("temperature", "sampling", 100, NOT_RUN),
        ("seed", "seeds", 70, NOT_RUN),
    ],
)
def test_a_budget_that_ends_in_a_check_keeps_what_it_has(
    fault: str, check: str, requests: int, status: str, tmp_path: Path, baseline: AuditServer, only: Any
) -> None:
    only(check, "limits")
    with AuditServer(speculates=True, fault=fault) as server:
        verdict, record = ask(tmp_path, server.url, baseline.url, requests=requests)
    finding = finding_of((verdict, record), check)
    assert finding["status"] == status
    assert finding["summary"].endswith(f", then the budget of {requests} requests is used up")
    assert bool(finding["differences"]) == (status in (FAILED, UNDECIDED))
    assert statuses(record)["limits"] == NOT_RUN
    assert record["requests"] == requests
    assert verdict.status == (FAILED if status == FAILED else UNDECIDED)
    assert f"then the budget of {requests} requests is used up" in verdict.sentence


def test_labels_of_the_plot_keep_off_its_title() -> None:
    loads = [
        {"in_flight": n, "user": {"audited": 9.0 / n, "baseline": 5.0 / n}, "throughput": {"audited": n, "baseline": n}}
        for n in (1, 8)
    ]
    drawn: Any = plot({"findings": [{"check": "speed", "figures": {"loads": loads}}]})
    assert min(y for curve in drawn["curves"] for _, y, _ in curve["points"]) >= drawn["edge"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fault", ["", "logprobs"])
def test_the_page_fits_a_phone_and_a_desk(fault: str, scheme: str, tmp_path: Path, baseline: AuditServer) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    with AuditServer(speculates=True, fault=fault) as server:
        ask(tmp_path, server.url, baseline.url)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width in (390, 1280):
            view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            view.goto((tmp_path / PAGE).as_uri())
            view.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true })")
            assert view.evaluate("document.documentElement.scrollWidth") == width
            heights = "[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height)"
            assert min(view.evaluate(heights)) > 10


@pytest.mark.parametrize(
    ("baseline", "shared"),
    [
        ("http://127.0.0.1:8001", True),
        ("http://localhost:8000", False),  # the same server, by a field of its requests
        ("http://elsewhere:8000", False),
    ],
)
def test_servers_of_one_machine_are_known(baseline: str, shared: bool) -> None:
    assert share_machine("http://localhost:8000", baseline) == shared
    timings = [Timed(side, 1, [Reply(text="a b", completion_tokens=2, latency_s=1.0)], 1.0) for side in SIDES]
    assert ("slow each other" in speed(timings, (None, None), 0, shared=shared).summary) == shared


def test_speculation_loses_from_a_load_on_only_if_no_larger_one_wins() -> None:
    timings = [
        Timed(side, load, [Reply(text="a b", completion_tokens=9, latency_s=seconds)] * 4, seconds)
        for load, gain in ((1, 0.5), (4, 2.0), (8, 0.8), (16, 0.7))
        for side, seconds in (("baseline", 1.0), ("audited", 1 / gain))
    ]
    found = speed(timings, (None, None), 0)
    assert [round(load["speedup"], 1) for load in found.figures["loads"]] == [0.5, 2.0, 0.8, 0.7]
    assert found.figures["loses_from"] == 8
    assert speed(timings[:4], (None, None), 0).figures["loses_from"] is None


def test_both_servers_come_first_as_often_and_in_no_fixed_order() -> None:
    questions = [SimpleNamespace(id=str(number)) for number in range(16)]
    asker = SimpleNamespace(one=lambda side, question: (side, question.id))
    audit: Any = SimpleNamespace(seed=0, chat=False, questions=questions, asker=asker)
    asked = [side for side, _ in _twice(audit)]
    firsts = asked[::2]
    assert firsts.count("audited") == 16
    assert firsts[16:] == asked[1::2][:16]
    assert 4 <= firsts[:16].count("audited") <= 12
