"""A served model on this machine measured like a local one; and what can be wrong with it, one line each."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data.answers.client import EndpointError
from data.text.records import parse
from eval.measures.counters import verified
from eval.measures.losslessness import Gate
from eval.measures.results import Measurement, finite
from eval.report.write import Report, read_report
from eval.run import publish
from heads.common.typed import from_yaml
from ops.endpoint import Runs, ServedConfig, main, measure, rows, text_gate
from ops.served import answer_of, questions_of, read_answer
from tests.eval.small import run_command
from tests.ops.endpoint_server import DEPTH, MODEL, Served, key_of, passes, words
from tests.refusals import refuses

TOKENS = 12
PROMPTS = 4


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


@pytest.fixture
def plain() -> Iterator[Served]:
    with Served(drafts=False) as made:
        yield made


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a workload of two categories; it is asked of this machine, without a key."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("ops.served.LAG_S", 0.2)
    file = tmp_path / "log.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"say {i}", "category": "ab"[i % 2]} for i in range(PROMPTS + 1)]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return file


def config(served: Served, log: Path, **values: Any) -> ServedConfig:
    """Return a measurement of the server that takes a moment, its report in the workload's folder."""
    given = {
        "url": served.url, "workload": str(log), "out": str(log.parent / "report"), "prompts": PROMPTS,
        "max_new_tokens": TOKENS, "repeats": 1, "warmup": 1,
        "client": {"model": None, "chat": True, "timeout": 10.0, "api_key_env": "OPENAI_API_KEY", "extra": {}},
    }  # fmt: skip
    return from_yaml(ServedConfig, "ops/endpoint", **(given | values))


def measured(config: ServedConfig) -> Report:
    """Measure, and write the report."""
    report = measure(config)
    publish(report, Path(config.out))
    return report


def expected() -> list[list[int]]:
    """Return what each pass of each measured prompt accepts."""
    keys = [key_of({"messages": [{"role": "user", "content": f"say {i}"}]}) for i in range(PROMPTS)]
    return [passes(key, TOKENS - 1) for key in keys]


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Return the rows of the report that was written, those of whole workloads."""
    told = read_report(log.parent / "report" / "report.json")
    return [row for row in told["rows"] if not row["category"]]


def wrong(key: str, count: int) -> list[str]:
    """Answer one prompt otherwise, from the fourth token on."""
    return words(key, 3) + [" <b>no</b>"] * (count - 3) if "say 2" in key else words(key, count)


def refuse(log: Path, message: str, served: Served, **values: Any) -> None:
    """See the measurement refused in one line, and nothing written."""
    refuses(message, measured, config(served, log, **values))
    assert not (log.parent / "report").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("detailed", [False, True])
def test_acceptance_is_what_the_server_counts_at_every_batch_size(engine: str, detailed: bool, log: Path) -> None:
    accepted = [count for each in expected() for count in each]
    with Served(engine, detailed=detailed) as made:
        measured(config(made, log, batch_size=[1, 4], repeats=2))
    first, second = rows_of(log)
    for row in (first, second):
        assert (row["tier"], row["prompts"], row["tokens"]) == ("live", PROMPTS, 2 * PROMPTS * (TOKENS - 1))
        assert row["steps"] == 2 * len(accepted)
        assert row["draft_tokens"] == 2 * DEPTH * len(accepted)
        exact = engine == "vllm" or detailed  # SGLang's counters know the passes, and of them what the answer kept
        kept = sum(accepted) if exact else PROMPTS * (TOKENS - 1) - len(accepted)
        assert row["tau"] == pytest.approx(1 + kept / len(accepted))
        assert row["accepted_per_draft_token"] == pytest.approx(kept / (DEPTH * len(accepted)))
        deeper = [sum(count > depth for count in accepted) / len(accepted) for depth in range(DEPTH)]
        assert row["accepted_by_depth"] == (pytest.approx(deeper) if exact else [])
        assert (row["speedup"], row["whole_speedup"], row["lossless"]["checked"]) == (None, None, 0)
        assert row["tokens_per_second"] > row["whole_tokens_per_second"] > 0
        assert set(row["by_request"]) >= {"latency_s", "ttft_s", "tokens_per_second"}
    assert (first["batch_size"], second["batch_size"]) == (1, 4)
    assert first["tau_ci"][0] <= first["tau"] <= first["tau_ci"][1]
    assert (second["tau_ci"] is None) is not detailed  # side by side, counters do not tell requests apart
    assert first["drafter"] == "endpoint"


def test_as_many_requests_are_in_flight_as_the_batch_size_says(served: Served, log: Path) -> None:
    measured(config(served, log))
    assert served.most == 1
    meet = threading.Barrier(PROMPTS, timeout=20)
    served.before = lambda _: meet.wait()
    measured(config(served, log, batch_size=PROMPTS, warmup=0))
    assert served.most == PROMPTS


def test_requests_arrive_at_a_rate(served: Served, plain: Served, log: Path) -> None:
    measured(config(served, log, baseline=plain.url, batch_size=2, request_rate=[None, 80], repeats=2))
    found = rows_of(log)
    assert [(row["drafter"], row["request_rate"]) for row in found] == [
        ("plain", None), ("endpoint", None), ("plain", 80), ("endpoint", 80),
    ]  # fmt: skip
    for row in found[2:]:
        assert set(row["by_request"]) >= {"queue_s", "latency_s", "ttft_s"}
        assert (row["whole_speedup"], row["tau"], row["lossless"]["failed"]) == (
            None,
            found[row["drafter"] != "plain"]["tau"],
            0,
        )
        assert row["speedup"] > 0


def test_a_request_that_arrives_while_others_are_in_flight_waits(served: Served, log: Path) -> None:
    served.before = lambda _: time.sleep(0.05)
    measured(config(served, log, request_rate=1e6, repeats=1))
    row = rows_of(log)[0]
    assert served.most == 1
    waits = [0.05 * place for place in range(PROMPTS)]
    for level, low in (("p5", waits[0]), ("p95", waits[-2])):
        assert row["by_request"]["queue_s"][level] >= low
        assert row["by_request"]["latency_s"][level] >= low + 0.05
    assert row["tokens_per_second"] <= PROMPTS * (TOKENS - 1) / (0.05 * PROMPTS)


def test_beside_a_baseline_there_is_a_speedup(
    served: Served, plain: Served, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = measured(config(served, log, baseline=plain.url, batch_size=[1, 4], repeats=3))
    assert made.passed
    told = rows_of(log)
    assert [(row["drafter"], row["batch_size"]) for row in told] == [
        ("plain", 1), ("endpoint", 1), ("plain", 4), ("endpoint", 4),
    ]  # fmt: skip
    for base, row in (told[:2], told[2:]):
        assert (base["tau"], base["speedup"], base["whole_speedup"]) == (1, 1, 1)
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / base["tokens_per_second"])
        assert row["whole_speedup"] == pytest.approx(row["whole_tokens_per_second"] / base["whole_tokens_per_second"])
        assert row["speedup_ci"][0] < row["speedup_ci"][1]
        assert row["lossless"] == {"checked": PROMPTS, "identical": PROMPTS, "near_tie": 0, "failed": 0}
        assert row["ladder"] is None  # nobody says where a step's time goes
    report = json.loads((log.parent / "report" / "report.json").read_text(encoding="utf-8"))
    assert report["settings"]["gate"]["endpoint x4"]["passed"] is True
    assert report["target"]["name"] == MODEL
    assert report["device"]["name"] == f"vllm at {served.url}"
    assert (report["settings"]["endpoint"], report["settings"]["baseline"]) == (served.url, plain.url)
    assert "Served endpoints" in (log.parent / "report" / "report.md").read_text(encoding="utf-8")
    assert "Served endpoints" in (log.parent / "report" / "report.html").read_text(encoding="utf-8")
    assert "endpoint x4" in capsys.readouterr().out


def test_the_two_take_turns_in_random_order(log: Path) -> None:
    order: list[str] = []
    with Served() as served, Served(drafts=False) as plain:
        for name, each in (("served", served), ("plain", plain)):
            each.before = lambda _, name=name: order.append(name)
        measured(config(served, log, baseline=plain.url, repeats=4, warmup=0))
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert len(pairs) == 4 * PROMPTS
    assert set(pairs) == {("served", "plain"), ("plain", "served")}


def test_texts_that_differ_withhold_the_speedup_and_the_first_is_shown(
    served: Served, plain: Served, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.words = wrong
    made = measured(config(served, log, baseline=plain.url))
    row = rows_of(log)[1]
    assert row["lossless"] == {"checked": PROMPTS, "identical": PROMPTS - 1, "near_tie": 0, "failed": 1}
    assert (row["speedup"], row["speedup_ci"], row["whole_speedup"]) == (None, None, None)
    assert row["tau"] > 1
    _, line = capsys.readouterr().err.splitlines()  # the first warns of few prompts
    at = len("".join(words(key_of({"messages": [{"role": "user", "content": "say 2"}]}), 3))) + 1
    assert line.startswith("NOT LOSSLESS: endpoint: 1 of 4 prompts differ from the reference; speedup withheld")
    assert f"prompt p2, character {at}: '<b>no</b>" in line
    assert "<b>no</b>" not in (log.parent / "report" / "report.html").read_text(encoding="utf-8")
    told = read_report(log.parent / "report" / "report.json")
    assert told["settings"]["gate"] == finite(made.checks()["gate"])


def test_a_difference_is_a_near_tie_only_from_where_the_baseline_wavers() -> None:
    gate = text_gate(
        [["abc", "abd"], ["abc", "abd"], ["abc", "abc"]],
        [["abe", "abc"], ["xbc", "abc"], ["abc", "abe"]],
        ["p", "q", "r"],
    )
    assert gate.counts() == {"checked": 3, "identical": 0, "near_tie": 1, "failed": 2}
    assert str(gate.first) == "prompt q, character 0: 'xbc' instead of 'abc'"


def test_a_server_that_does_not_stream_has_whole_times_alone(plain: Served, log: Path) -> None:
    with Served(stream=False) as served:
        measured(config(served, log, baseline=plain.url))
    row = rows_of(log)[1]
    assert (row["tokens_per_second"], row["speedup"]) == (None, None)
    assert row["whole_speedup"] > 0
    assert row["lossless"]["identical"] == PROMPTS
    assert row["tau"] > 1


def test_requests_say_all_of_sampling_and_carry_the_key_which_the_report_does_not(
    served: Served, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    measured(config(served, log, temperature=[0, 0.5], warmup=0))
    greedy, drawn = served.bodies[0], served.bodies[-1]
    assert {key: greedy[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    assert (greedy["max_tokens"], greedy["stream"]) == (TOKENS, True)
    assert ("seed" in greedy, drawn["seed"], drawn["temperature"]) == (False, 0, 0.5)
    assert greedy["messages"] == [{"role": "user", "content": "say 0"}]
    assert served.headers[0]["Authorization"] == "Bearer sk-very-secret"
    files = list((log.parent / "report").iterdir())
    assert len(files) == 3
    assert all("very-secret" not in file.read_text(encoding="utf-8") for file in files)
    assert {row["rule"] for row in rows_of(log)} == {"greedy", "the server's"}


def test_texts_and_tokens_are_completions(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    lines = [{"id": "t", "text": "one two three four"}, *[{"prompt_token_ids": [3, 4], "token_ids": [5]}] * 2]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    made = measured(config(served, file, warmup=0))
    assert [body["prompt"] for body in served.bodies] == ["one two", [3, 4], [3, 4]]
    assert (made.settings["prompts"], made.settings["distinct_prompts"]) == (3, 2)
    assert "prompts 3, distinct prompts 2," in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert "<dt>distinct prompts</dt><dd>2</dd>" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert made.rows[0].tau_ci is not None
    file.write_text("\n".join([json.dumps(lines[-1])] * 3), encoding="utf-8")
    assert measured(config(served, file, warmup=0)).rows[0].tau_ci is None


def test_every_question_after_its_recorded_answers() -> None:
    said = [{"role": role, "content": role[0] + str(i)} for i, role in enumerate(["user", "assistant", "user"])]
    record = parse({"id": "d", "messages": [{"role": "system", "content": "s"}, *said]}, 0, "x")
    first, second = questions_of(record, "all", chat=True)
    assert [first.id, second.id] == ["d.1", "d.2"]
    assert [message["content"] for message in second.body["messages"]] == ["s", "u0", "a1", "u2"]
    (alone,) = questions_of(record, "first", chat=False)
    assert (alone.path, alone.body["prompt"]) == ("/completions", "u0")
    unanswered = parse({"id": "d", "messages": [said[0], said[2]]}, 0, "x")
    with pytest.raises(ValueError, match="nobody recorded the answer before question 2; give a log with answers, or"):
        list(questions_of(unanswered, "all", chat=True))


def test_the_command(served: Served, plain: Served, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"url={served.url}/v1", f"workload={log}", f"out={log.parent / 'report'}", "repeats=1"]
    words += ["max_new_tokens=8", "client.timeout=10"]
    assert run_command(main, "ops/endpoint", *words, "batch_size=[1,4]", f"baseline={plain.url}") == 0
    assert [row["drafter"] for row in rows_of(log)] == ["plain", "endpoint"] * 2
    served.words = wrong
    assert run_command(main, "ops/endpoint", *words, f"baseline={plain.url}") == 1
    capsys.readouterr()
    assert run_command(main, "ops/endpoint", *words, "client.model=other") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_command(main, "ops/endpoint", f"url={served.url}") == 2
    assert "workload is missing" in capsys.readouterr().err


def test_speedups_and_their_intervals_are_the_servers_over_the_baselines() -> None:
    """All requests alike, so that the intervals are points: ten tokens after the first, in a quarter of the time."""
    session = Measurement("log", 0.0, 1, 0, 0, conversations=range(4))
    drafts = verified(5, 10, 5, (5,))

    def runs(latency_s: float) -> Runs:
        return Runs([[answer_of("x", 11, latency_s, 1.0, drafts)] for _ in range(4)], [drafts] * 4)

    _, row = rows({"plain": runs(5.0), "endpoint": runs(2.0)}, {"endpoint": Gate(4, 4, 0, 0)}, session)
    assert (row.tokens_per_second, row.speedup, row.speedup_ci) == (10.0, 4.0, (4.0, 4.0))
    assert (row.whole_tokens_per_second, row.whole_speedup, row.whole_speedup_ci) == (5.5, 2.5, (2.5, 2.5))
    assert row.by_request["speedup"]["p50"] == 4.0
    assert (row.tau, row.tau_ci, row.prefill_s) == (2.0, (2.0, 2.0), 4.0)


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
        ({}, miscounting(-1), "counted 0 requests where 1 were sent", {}),
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


PIECE = {"model": MODEL, "choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{**PIECE, "usage": {"completion_tokens": 3}}, {"error": {"message": "gone"}}], "gone"),
        ([{"object": "error", "message": "no memory", "code": 500}], "no memory"),
        ([{**PIECE, "model": "other"}], "wrong_model: the reply is 'other'"),
        ([PIECE, PIECE], "the reply does not count its tokens"),
        ([{**PIECE, "usage": [3]}], "the reply does not count its tokens"),
        ([{**PIECE, "choices": [{"index": "first"}, {"index": 1}]}], "choices"),
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
    assert found == answer_of("so itf{}", 5, 5.0, 2.0, None)


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
    assert (found.prefill_s, found.decoding is None) == (None if whole else 3.0, whole)


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
        ({"request_rate": 0}, "request_rate is 0.0: give a number above 0"),
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
