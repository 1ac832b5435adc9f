"""The audit's server: lossless without a fault, fast, and with each fault wrong in the way of that fault."""

import json
import re
import threading
import time
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest

from data.answers.client import Client, EndpointConfig, EndpointError
from tests.ops.audit_decoding import ALTERNATIVES, CHUNK, FAULTS
from tests.ops.audit_model import END, SIZE, Cursor, target, tokenize
from tests.ops.audit_server import AuditServer
from tests.ops.endpoint_server import DEPTH, MODEL

PROMPTS = [f"Tell me about number {i} of the rivers." for i in range(200)]
FEW = PROMPTS[:40]
TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24}, "degrees": {"type": "integer"}, "sunny": {"type": "boolean"},
        "names": {"type": "array", "items": {"enum": ["red", "road"]}},
    },
}  # fmt: skip
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}}
TOOL = {
    "tools": [{"type": "function", "function": {"name": "report", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "report"}},
}
AUTO = TOOL | {"tool_choice": "auto"}
DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
ALONE = {"rejected_draft", "draft_bonus", "lost_token", "early_stop", "limit"}  # what plain greedy answers show


def fields_of(prompt: str | list[str], **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a greedy request: a completion, or a chat of several messages."""
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, **fields}
    if isinstance(prompt, str):
        return "/v1/completions", {"prompt": prompt, **body}
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(prompt)]
    return "/v1/chat/completions", {"messages": messages, **body}


def ask(server: AuditServer, prompt: str | list[str], **fields: Any) -> dict[str, Any]:
    """Return a reply that is not streamed."""
    (reply,) = server.events(*fields_of(prompt, **fields))
    return reply


def text(server: AuditServer, prompt: str | list[str], **fields: Any) -> str:
    """Return the text of a reply."""
    choice = ask(server, prompt, **fields)["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def stream(server: AuditServer, prompt: str | list[str], **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a reply."""
    return list(server.events(*fields_of(prompt, stream=True, stream_options={"include_usage": True}, **fields)))


def joined(events: list[dict[str, Any]]) -> str:
    """Return the text of events."""
    return "".join(choice["text"] for event in events for choice in event["choices"])


def texts(server: AuditServer, prompts: list[str] = FEW, **fields: Any) -> list[str]:
    """Return the texts of several replies."""
    return [text(server, prompt, **fields) for prompt in prompts]


@pytest.fixture(scope="module")
def base() -> AuditServer:
    return AuditServer(speculates=False)


@pytest.fixture(scope="module")
def clean() -> AuditServer:
    return AuditServer()


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> AuditServer:
    """Return a server with the fault that the test is named after."""
    return AuditServer(fault=request.node.name.removeprefix("test_"))


def test_greedy_answers_are_the_baselines(base: AuditServer, clean: AuditServer) -> None:
    expected = texts(base, PROMPTS)
    assert len(set(expected)) == len(PROMPTS)
    assert texts(clean, PROMPTS) == expected
    streams = [stream(clean, prompt) for prompt in PROMPTS]
    assert [joined(events) for events in streams] == expected
    counts = clean.engine.counts
    assert 0.6 < counts["depth0"] / counts["passes"] < 0.85
    assert len(streams[0]) < TOKENS / 2  # an event a pass, the first of one token
    ends = Counter(reply["choices"][0]["finish_reason"] for reply in (ask(base, p, max_tokens=60) for p in PROMPTS))
    assert 0.2 < ends["stop"] / len(PROMPTS) < 0.5


def test_near_ties_are_rare_and_most_gaps_small() -> None:
    rng = np.random.default_rng(0)
    cursors = [Cursor(int(state), tuple(rng.integers(1, 60, 3).tolist())) for state in rng.integers(2**32, size=4000)]
    top = np.sort([target(cursor) for cursor in cursors], axis=1)[:, ::-1]
    gaps = top[:, 0] - top[:, 1]
    assert 1 / 120 < (gaps < 0.1).mean() < 1 / 30
    assert ((gaps > 1) & (gaps < 4)).mean() > 0.6


def test_an_answer_depends_on_every_word_of_the_prompt(base: AuditServer) -> None:
    words = [f"w{i}" for i in range(80)]
    variants = [" ".join([*words[:i], "other", *words[i + 1 :]]) for i in range(80)]
    assert len({text(base, variant, max_tokens=32) for variant in variants}) == 80


def test_noise_changes_answers_at_near_ties_alone() -> None:
    noisy = AuditServer(noise=0.03, speculates=False)
    changed = [i for i, (one, other) in enumerate(zip(texts(noisy), texts(noisy), strict=True)) if one != other]
    assert 0 < len(changed) < len(FEW) / 2
    assert texts(AuditServer(noise=0.03)) != texts(AuditServer())


def test_a_seed_gives_its_text_again_and_no_seed_another(clean: AuditServer) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 12}
    assert text(clean, "hail", seed=7, **sampled) == text(clean, "hail", seed=7, **sampled)
    assert len({text(clean, "hail", seed=seed, **sampled) for seed in range(8)}) == 8
    assert len({text(clean, "hail", **sampled) for _ in range(8)}) == 8


def chi_square(one: list[str], other: list[str]) -> float:
    """Return by how many standard deviations two samples differ more than samples of one distribution on average."""
    counts = np.array([[Counter(sample)[key] for key in sorted({*one, *other})] for sample in (one, other)])
    rare = counts.sum(0) < 10
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(1)])
    expected = counts.sum(0) / 2
    freedom = counts.shape[1] - 1
    return float((((counts - expected) ** 2) / np.maximum(expected, 1e-9)).sum() - freedom) / (2 * freedom) ** 0.5


def sampled_tokens(server: AuditServer, count: int, **fields: Any) -> list[tuple[str, str]]:
    """Return the second and third tokens of sampled answers."""
    replies = [ask(server, "ice", max_tokens=3, logprobs=0, seed=seed, **fields) for seed in range(count)]
    tokens = [reply["choices"][0]["logprobs"]["tokens"] for reply in replies]
    return [(second, third) for _, second, third in tokens]


WAYS = [
    {"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.7}, {"temperature": 1.2, "top_k": 4, "min_p": 0.05},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_sampled_tokens_are_of_the_baselines_distribution(base: AuditServer, clean: AuditServer, way: Any) -> None:
    one, other = (sampled_tokens(server, 1500, **way) for server in (base, clean))
    for depth in range(2):
        assert chi_square([pair[depth] for pair in one], [pair[depth] for pair in other]) < 4.5


def test_filters_leave_few_tokens(base: AuditServer) -> None:
    def kinds(**fields: Any) -> int:
        return len({text(base, "mist", max_tokens=1, seed=seed, temperature=1.5, **fields) for seed in range(200)})

    assert kinds(top_k=1) == kinds(min_p=1.0) == kinds(top_p=1e-6) == 1
    assert kinds(top_k=3) == 3
    assert kinds() > 20


@pytest.mark.parametrize("chat", [False, True])
def test_logprobs_are_those_of_the_texts_tokens(base: AuditServer, clean: AuditServer, chat: bool) -> None:
    prompt: Any = ["hail"] if chat else "hail"
    shown = {"logprobs": True, "top_logprobs": 4} if chat else {"logprobs": 4}
    one, other = (ask(server, prompt, **shown)["choices"][0] for server in (base, clean))
    assert one == other
    events = stream(clean, prompt, **shown)
    parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice.get("logprobs")]
    if chat:
        assert list(chain(*(part["content"] for part in parts))) == one["logprobs"]["content"]
        entries = [(entry["token"], entry["logprob"], entry["top_logprobs"][0]["logprob"]) for entry in
                   one["logprobs"]["content"]]  # fmt: skip
    else:
        logprobs = one["logprobs"]
        assert list(chain(*(part["tokens"] for part in parts))) == logprobs["tokens"]
        tops = [max(top.values()) for top in logprobs["top_logprobs"]]
        assert [len(top) for top in logprobs["top_logprobs"]] == [4] * len(tops)
        entries = list(zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True))
    written = "".join(token for token, _, _ in entries).removesuffix("</s>")
    assert written == (one["message"]["content"] if chat else one["text"])
    assert all(value == top <= 0 for _, value, top in entries)


def test_usage_counts_prompt_and_answer(clean: AuditServer) -> None:
    reply = ask(clean, "one two three.", n=2, logprobs=0)
    counts = [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": sum(counts), "total_tokens": 4 + sum(counts)}
    assert stream(clean, "one two three.", n=2)[-1]["usage"] == reply["usage"]


@pytest.mark.parametrize("stop", [" ", "a", "ar", "e s", " st"])
def test_an_answer_ends_before_a_stop_string(base: AuditServer, clean: AuditServer, stop: str) -> None:
    for prompt in FEW:
        whole = text(base, prompt)
        reply = ask(base, prompt, stop=stop)
        assert reply["choices"][0]["text"] == whole.split(stop)[0]
        assert ask(clean, prompt, stop=[stop, "not there"]) == reply
        assert joined(stream(clean, prompt, stop=stop)) == whole.split(stop)[0]


def test_answers_keep_to_a_schema_a_tool_and_a_pattern(base: AuditServer, clean: AuditServer) -> None:
    for i, temperature in enumerate([0, 1.0] * 6):
        how = {"max_tokens": 120, "temperature": temperature, "seed": i}
        values = [json.loads(text(clean, [f"weather {i}"], **FORM, **how))]
        choice = ask(clean, [f"weather {i}"], **TOOL, **how)["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], choice["finish_reason"]) == ("report", "tool_calls")
        deltas = [event["choices"][0]["delta"] for event in stream(clean, [f"weather {i}"], **TOOL, **how)[1:-1]]
        functions = [delta["tool_calls"][0]["function"] for delta in deltas]
        assert [function.get("name") for function in functions] == ["report"] + [None] * (len(functions) - 1)
        if not temperature:
            assert "".join(function["arguments"] for function in functions) == call["function"]["arguments"]
            assert text(base, [f"weather {i}"], **FORM, **how) == text(clean, [f"weather {i}"], **FORM, **how)
        for value in [*values, json.loads(call["function"]["arguments"])]:
            assert list(value) == list(SCHEMA["properties"])
            assert {*value["names"]} <= {"red", "road"}
            assert len(value["city"]) <= 24
        assert re.fullmatch(DATE, text(clean, f"date {i}", structured_outputs={"regex": DATE}, **how))


def test_a_faultless_baseline_has_no_fault_and_unknown_ones_are_refused(base: AuditServer) -> None:
    assert texts(AuditServer(speculates=False, fault="rejected_draft")) == texts(base)
    with pytest.raises(ValueError, match="no fault is named 'x'"):
        AuditServer(fault="x")


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - ALONE))
def test_a_fault_of_something_else_leaves_plain_greedy_answers_alone(base: AuditServer, fault: str) -> None:
    assert texts(AuditServer(fault=fault)) == texts(base)


def differing(base: AuditServer, faulty: AuditServer, **fields: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts that differ, the baseline's first."""
    pairs = zip(texts(base, **fields), texts(faulty, **fields), strict=True)
    return [(one, other) for one, other in pairs if one != other]


def passes(server: AuditServer, prompt: str) -> list[list[str]]:
    """Return the tokens of each pass."""
    events = stream(server, prompt, logprobs=0)
    return [choice["logprobs"]["tokens"] for event in events for choice in event["choices"]]


def first_wrong(base: AuditServer, faulty: AuditServer) -> Counter[tuple[int, int]]:
    """Return how often the first wrong token is which of its pass, counted from its end, in passes of which length."""
    counts: Counter[tuple[int, int]] = Counter()
    for prompt in FEW:
        right = list(chain(*passes(base, prompt)))
        index = 0
        for step in passes(faulty, prompt):
            wrong = next((i for i, token in enumerate(step) if [token] != right[index + i : index + i + 1]), None)
            if wrong is not None:
                counts[len(step) - wrong, len(step)] += 1
                break
            index += len(step)
    return counts


def test_rejected_draft(base: AuditServer, faulty: AuditServer) -> None:
    assert all(behind == 2 for behind, _ in first_wrong(base, faulty))
    assert len(differing(base, faulty)) > 30


def test_draft_bonus(base: AuditServer, faulty: AuditServer) -> None:
    assert set(first_wrong(base, faulty)) == {(1, DEPTH + 1)}


def test_lost_token(base: AuditServer, faulty: AuditServer) -> None:
    pairs = differing(base, faulty)
    assert len(pairs) > 10
    for one, other in pairs:
        words = iter(re.findall(r"\s*\S+", one))
        assert all(any(word in right for right in words) for word in re.findall(r" \w+", other))


def test_early_stop(base: AuditServer, faulty: AuditServer) -> None:
    pairs = differing(base, faulty)
    assert len(pairs) > 10
    assert all(one.startswith(other) for one, other in pairs)


def test_limit(base: AuditServer, faulty: AuditServer) -> None:
    replies = [ask(faulty, prompt, max_tokens=10) for prompt in FEW]
    short = [reply for reply in replies if reply["usage"]["completion_tokens"] < 10]
    assert len(short) > 10
    assert {reply["choices"][0]["finish_reason"] for reply in short} == {"length"}


def test_usage(base: AuditServer, faulty: AuditServer) -> None:
    replies = [ask(faulty, prompt, max_tokens=10) for prompt in FEW]
    assert max(reply["usage"]["completion_tokens"] for reply in replies) > 10
    assert [reply["choices"][0]["text"] for reply in replies] == texts(base, max_tokens=10)


def test_stop_string(base: AuditServer, faulty: AuditServer) -> None:
    pairs = differing(base, faulty, stop=" w")
    assert len(pairs) > 5
    assert all(other.startswith(f"{one} w") for one, other in pairs)


def test_streaming(base: AuditServer, faulty: AuditServer) -> None:
    whole, streamed = texts(base), [joined(stream(faulty, prompt)) for prompt in FEW]
    assert all(one.startswith(other) for one, other in zip(whole, streamed, strict=True))
    assert sum(one != other for one, other in zip(whole, streamed, strict=True)) > 20


def test_logprobs(faulty: AuditServer) -> None:
    reply = ask(faulty, "hail", logprobs=2)
    assert set(reply["choices"][0]["logprobs"]["token_logprobs"]) == {0.0}


@pytest.mark.parametrize("fault", ALTERNATIVES)
def test_alternatives(clean: AuditServer, fault: str) -> None:
    fields: dict[str, Any] = {"prompt": ["hail"], "logprobs": True, "top_logprobs": 5}
    right, wrong = (
        [
            choice["logprobs"]["content"]
            for event in stream(server, **fields)
            for choice in event["choices"]
            if choice.get("logprobs")
        ]
        for server in (clean, AuditServer(fault=fault))
    )
    for one, other in zip(right, wrong, strict=True):
        tops = [entry.pop("top_logprobs") for entry in one]
        expected = {
            "copied_top": tops[:1] * len(tops),
            "shifted_top": [tops[0], *tops[:-1]],
            "cut_top": [tops[0], *(top[:3] for top in tops[1:])],
        }
        assert [entry.pop("top_logprobs") for entry in other] == expected[fault]
        assert one == other
    assert max(map(len, right)) > 2


def test_penalty(base: AuditServer, clean: AuditServer, faulty: AuditServer) -> None:
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
    assert not differing(base, clean, **penalties)
    assert differing(base, AuditServer(), presence_penalty=0.0) == []
    assert len(differing(base, faulty, **penalties)) > 10


def test_stale_cache(base: AuditServer, faulty: AuditServer) -> None:
    prefix = "the notes of this page are about rivers and about stones and what lies between them at night. "
    one, other = prefix + "What are they about?", prefix + "Which words are the last?"
    assert text(faulty, one) == text(faulty, one) == text(base, one)
    assert text(faulty, other) != text(base, other)


def test_prompt_chunk(base: AuditServer, faulty: AuditServer) -> None:
    words = [f"w{i}" for i in range(CHUNK + 1)]
    whole, shorter = " ".join(words), " ".join(words[1:])
    assert text(faulty, whole) != text(base, whole)
    assert text(faulty, shorter) == text(base, shorter)


def test_history(base: AuditServer, faulty: AuditServer) -> None:
    chat = ["hail", "It hails in spring.", "Why?"]
    assert text(faulty, chat) == text(base, [chat[0], "", chat[2]]) != text(base, chat)
    assert ask(faulty, chat)["usage"]["prompt_tokens"] == ask(base, chat)["usage"]["prompt_tokens"]


def test_top_p(base: AuditServer, faulty: AuditServer) -> None:
    one, other = (sampled_tokens(server, 1500, temperature=1.3, top_p=0.7) for server in (base, faulty))
    assert chi_square([second for second, _ in one], [second for second, _ in other]) > 10


def test_temperature(base: AuditServer, faulty: AuditServer) -> None:
    one, other = (sampled_tokens(server, 400, temperature=1.0) for server in (base, faulty))
    assert chi_square([second for second, _ in one], [second for second, _ in other]) > 10


def test_seed(faulty: AuditServer) -> None:
    assert len({text(faulty, "hail", seed=7, temperature=1.0) for _ in range(4)}) == 4


def test_tool_call(base: AuditServer, faulty: AuditServer) -> None:
    def arguments(server: AuditServer, how: Any = AUTO) -> str:
        choice = ask(server, ["report it"], max_tokens=120, **how)["choices"][0]
        return choice["message"]["tool_calls"][0]["function"]["arguments"]

    assert arguments(faulty) == arguments(base)[:-1]
    assert arguments(faulty, TOOL) == arguments(base, TOOL) == arguments(base)
    assert "tool_calls" not in ask(base, ["hail"], max_tokens=8, **AUTO)["choices"][0]["message"]
    events = stream(faulty, ["report it"], max_tokens=120, **AUTO)[1:-1]
    calls = [event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for event in events]
    assert "".join(calls) == arguments(faulty)


def test_schema(faulty: AuditServer) -> None:
    for i in range(4):
        with pytest.raises(ValueError, match=r"line 1|Expecting"):
            json.loads(text(faulty, [f"weather {i}"], max_tokens=200, **FORM))


def together(server: AuditServer, prompts: list[str], cancel: int = -1) -> list[str]:
    """Return the texts of requests that take turns pass by pass; one is cancelled after two of its passes."""
    running = {i: server.events(*fields_of(prompt, stream=True)) for i, prompt in enumerate(prompts)}
    written = [""] * len(prompts)
    for turn in range(10 * TOKENS):
        for i in list(running):
            event = next(running[i], None)
            if event is None or (i == cancel and turn == 2):
                running.pop(i).close()
            else:
                written[i] += joined([event])
    return written


def test_requests_in_flight_together_do_not_change_each_other(base: AuditServer, clean: AuditServer) -> None:
    assert together(clean, FEW) == texts(base)
    assert together(clean, FEW, cancel=3)[4:] == texts(base)[4:]


def test_leak(base: AuditServer, faulty: AuditServer) -> None:
    pairs = zip(together(faulty, FEW), texts(base), strict=True)
    assert 10 < sum(one != other for one, other in pairs) < len(FEW)


def test_cancelled(base: AuditServer, faulty: AuditServer) -> None:
    assert together(faulty, FEW) == texts(base)
    pairs = zip(together(faulty, FEW, cancel=3), texts(base), strict=True)
    assert [i for i, (one, other) in enumerate(pairs) if one != other and i != 3] == [4]


def test_slow_concurrency() -> None:
    def seconds(fault: str, count: int) -> float:
        server = AuditServer(fault=fault, pass_s=0.003)
        threads = [threading.Thread(target=text, args=(server, prompt)) for prompt in FEW[:count]]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    assert seconds("slow_concurrency", 8) > 2 * seconds("", 8)
    assert seconds("slow_concurrency", 2) < 2 * seconds("", 2)


def client(server: AuditServer, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client of the server's API."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    config = EndpointConfig(model=None, concurrency=1, timeout=10.0, retries=0, backoff=0.0, max_wait=0.0,
                            max_failures=1, api_key_env="OPENAI_API_KEY", extra={})  # fmt: skip
    return Client(server.url + "/v1", config, None)


@pytest.mark.parametrize("prompt", ["hail", ["hail"]])
@pytest.mark.parametrize("streams", [False, True])
def test_over_http_it_is_the_same(
    base: AuditServer, monkeypatch: pytest.MonkeyPatch, prompt: Any, streams: bool
) -> None:
    with AuditServer() as server:
        assert client(server, monkeypatch).served()[0] == MODEL
        path, body = fields_of(prompt, stream=streams)
        assert list(client(server, monkeypatch).events(path[3:], body)) == list(AuditServer().events(path, body))
        with pytest.raises(EndpointError, match=r"http_400.*max_tokens=99999"):
            list(client(server, monkeypatch).events(path[3:], body | {"max_tokens": 99_999}))


def test_a_client_that_goes_away_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with AuditServer(pass_s=0.005) as server:
        path, body = fields_of("hail", stream=True)
        events = client(server, monkeypatch).events(path[3:], body)
        next(events)
        assert len(server.engine.running) == 1
        events.close()
        time.sleep(0.05)
        assert not server.engine.running
        assert server.engine.counts["passes"] < 10


def test_tokens_take_microseconds(clean: AuditServer) -> None:
    begin = time.perf_counter()
    count = sum(ask(clean, prompt)["usage"]["completion_tokens"] for prompt in PROMPTS)
    assert (time.perf_counter() - begin) / count < 1e-3


def test_prompts_are_read_word_by_word() -> None:
    assert tokenize("a river, a stone.") == [*tokenize("a"), *tokenize("river"), *tokenize(","), *tokenize("a stone.")]
    assert len({*tokenize("alpha beta gamma delta")}) == 4
    assert END not in tokenize("</s>")
    assert max(tokenize("alpha")) >= SIZE
