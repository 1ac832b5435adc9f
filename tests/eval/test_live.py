"""Who is measured when, and what the rows make of it."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from data.text.prompts import Prompt
from eval import live
from eval.live import Setup, interleave, measure, rows
from eval.measures.losslessness import Divergence, Gate
from eval.measures.results import Measurement
from heads.common.progress import OPEN
from inference.decode import Generation, RequestParams, autoregress
from inference.drafters.plain import Baseline
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.stubs import StubTarget, generation

PROMPTS = [Prompt(f"p{i}", [i], "") for i in range(4)]
WARM = [Prompt(f"w{i}", [i], "") for i in (7, 8, 9)]
SETTINGS = RequestParams(8, GREEDY, seed=3)
GREEN = Gate(4, 4, 0, 0)
RED = Gate(4, 3, 0, 1, Divergence("p2", 5, 1, 2, 3.5))


class Ranked(Baseline):
    """A drafter with a rule and a tree to show."""

    name, rule, tree = "ranked", "point mass", "chain-2"


def record(seed: int, repeats: int = 3, warmup: int = 0) -> tuple[list[tuple[str, int]], live.Runs]:
    """Interleave three runners; return the calls in their order, and the runs."""
    calls: list[tuple[str, int]] = []

    def runner(name: str) -> Callable[[list[int]], Generation]:
        def run(prompt: list[int]) -> Generation:
            calls.append((name, prompt[0]))
            return generation([len(calls), prompt[0]])

        return run

    names = ("plain", "eagle", "medusa")
    return calls, interleave({name: runner(name) for name in names}, PROMPTS, repeats, WARM[:warmup], seed)


def test_each_prompt_is_measured_by_each_runner_as_often_as_asked() -> None:
    calls, runs = record(0)
    assert {call: calls.count(call) for call in calls} == {(n, i): 3 for n in runs for i in range(4)}
    for name in runs:
        assert [[run.tokens[1] for run in repeats] for repeats in runs[name]] == [[i] * 3 for i in range(4)]


def test_runners_take_turns_on_a_prompt_in_a_changing_order() -> None:
    calls, _ = record(0)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert all(len({name for name, _ in turn}) == 3 and len({prompt for _, prompt in turn}) == 1 for turn in rounds)
    assert len({tuple(name for name, _ in turn) for turn in rounds}) > 2
    assert record(1)[0] == record(1)[0] != record(2)[0]


def test_every_round_begins_without_memory_and_keeps_the_prompts_order() -> None:
    calls: list[str] = []

    def run(prompt: list[int]) -> Generation:
        calls.append(f"{OPEN[-1].label} {prompt[0]}")
        return generation(2)

    interleave({"suffix": run}, PROMPTS, 2, WARM[:1], 0, [lambda: calls.append("forget")])
    assert calls == ["warming up 7", *["forget", *(f"measuring {i}" for i in range(4))] * 2]


def test_the_warm_up_comes_first_and_does_not_count() -> None:
    warmup, prompts = 2, [7, 8]
    calls, runs = record(0, repeats=1, warmup=warmup)
    first, counted = calls[: 3 * warmup], calls[3 * warmup :]
    assert first == [(name, prompt) for prompt in prompts for name in ("plain", "eagle", "medusa")]
    assert len(counted) == 3 * len(PROMPTS)
    kept = sorted(run.tokens[0] for each in runs.values() for repeats in each for run in repeats)
    assert kept == list(range(3 * warmup + 1, len(calls) + 1))


def test_a_batch_is_warmed_up_by_full_batches_of_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[int], int]] = []

    def speculate(_: Any, drafter: Baseline, prompts: list[list[int]], batch_size: int, **__: Any) -> list[Generation]:
        calls.append((drafter.name, [token for (token,) in prompts], batch_size))
        return [generation(2) for _ in prompts]

    monkeypatch.setattr(live, "speculate", speculate)
    setup = Setup(StubTarget(device=torch.device("cpu")), {"ranked": Ranked(torch.device("cpu"))}, PROMPTS, SETTINGS)
    for count, warmed in ((2, [7, 8, 7]), (0, None)):
        runs = measure(setup, 2, WARM[:count], hf=True, batch_size=3)
        assert [call[:2] for call in calls if len(call[1]) == 3] == [
            (name, warmed) for name in ("plain", "ranked") if warmed
        ]
        assert sorted(call for call in calls if len(call[1]) == 4) == [
            (name, [0, 1, 2, 3], 3) for name in ("plain", "plain", "ranked", "ranked")
        ]
        assert {name: [len(repeats) for repeats in each] for name, each in runs.items()} == {
            name: [2] * 4 for name in ("plain", "ranked")
        }
        calls.clear()


def test_hf_generate_emits_plain_decodings_tokens() -> None:
    target, prompt = toys.target(), toys.prompt(0)
    plain = autoregress(target, prompt, RequestParams(24, GREEDY))
    run = live.hf_generate(target, prompt, RequestParams(24, GREEDY))
    assert toys.lively(run.tokens)
    assert run.tokens == plain.tokens
    assert (run.finish_reason, run.steps) == ("length", [])
    assert run.decode_s > 0
    prompt = toys.prompt(0, target.max_model_len - 4)
    assert len(live.hf_generate(target, prompt, RequestParams(24, GREEDY)).tokens) == 4


def test_hf_decoding_is_timed_without_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, *(3 + 3 / 8 * token for token in range(1, 9))])  # a prefill of 2, eight more tokens in 3
    monkeypatch.setattr(live.time, "perf_counter", lambda: next(times))
    run = live.hf_generate(toys.target(), toys.prompt(0), RequestParams(9, GREEDY))
    assert (run.prefill_s, run.decode_s, len(run.tokens)) == (2.0, 3.0, 9)


def session_rows(gate: Gate, temperature: float = 0.0, hf: bool = True) -> dict[str, dict[str, Any]]:
    """Return rows by drafter: it is twice as fast as the baseline and four times as fast as HF."""
    runs = {
        "plain": [[generation(7, [(0, 0)] * 6, time) for time in (9.0, 2.0, 1.0)] for _ in PROMPTS],
        "eagle": [[generation(7, [(2, 1)] * 3, time) for time in (0.5, 1.0, 8.0)] for _ in PROMPTS],
    }
    if hf:
        runs["hf"] = [[generation(7, seconds=4.0)] * 3 for _ in PROMPTS]
    session = Measurement("tiny", temperature, 1, 123, 0)
    made = rows(runs, {"eagle": Ranked(torch.device("cpu"))}, {"eagle": gate}, session)
    return {row.drafter: asdict(row) for row in made}


def test_rows_hold_the_numbers_and_what_they_were_measured_under() -> None:
    found = session_rows(GREEN)
    plain, eagle = found["plain"], found["eagle"]
    assert list(found) == ["plain", "eagle"]
    assert (plain["tau"], plain["speedup"], plain["speedup_hf"], plain["draft_tokens"]) == (1, 1, 2, 0)
    assert (eagle["tau"], eagle["speedup"], eagle["speedup_hf"], eagle["draft_tokens"]) == (2, 2, 4, 24)
    assert (eagle["tokens"], eagle["steps"], eagle["tokens_per_second"]) == (24, 12, 6)
    assert eagle["tau_ci"] == eagle["speedup_ci"] == (2, 2)
    assert (eagle["rule"], eagle["tree"], plain["tree"]) == ("point_mass", "chain-2", "root")
    assert (eagle["workload"], eagle["temperature"], eagle["batch_size"], eagle["memory_bytes"]) == ("tiny", 0, 1, 123)
    assert eagle["lossless"] == {"checked": 4, "identical": 4, "near_tie": 0, "failed": 0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gate", [RED, Gate(0, 0, 0, 0)])
def test_without_a_green_gate_there_is_no_speedup_at_any_temperature(gate: Gate, temperature: float) -> None:
    found = session_rows(gate, temperature)
    assert {found["eagle"][key] for key in ("speedup", "speedup_ci", "speedup_hf")} == {None}
    assert found["eagle"]["tau"] == 2
    assert found["plain"]["speedup"] == 1


def test_sampled_rows_were_not_compared_token_by_token() -> None:
    eagle = session_rows(GREEN, temperature=0.7)["eagle"]
    assert eagle["lossless"]["checked"] == 0
    assert (eagle["speedup"], session_rows(GREEN, hf=False)["eagle"]["speedup_hf"]) == (2, None)


def test_turns_of_a_dialogue_are_resampled_together() -> None:
    drafters: dict[str, Any] = {"ranked": Ranked(torch.device("cpu"))}
    tokens = (6, 9, 12, 7)
    runs = {
        name: [[generation(n, [(0, 0)] * (n // 2), n * s)] for n in tokens]
        for name, s in (("plain", 2.0), ("ranked", 1.5))
    }
    session = Measurement("tiny", 0.0, 1, 123, 0, categories={"a": [0, 1], "b": [2, 3]})
    found = {
        groups: rows(runs, drafters, {"ranked": GREEN}, replace(session, conversations=groups))
        for groups in ((), (0, 1, 2, 3), (0, 0, 2, 2))
    }
    assert found[()] == found[0, 1, 2, 3]
    assert all(row.tau_ci for row in found[()])
    for row in found[0, 0, 2, 2]:
        several = not row.category  # each category is one dialogue
        assert [each is not None for each in (row.tau_ci, row.speedup_ci, row.whole_speedup_ci)] == [several] * 3


def test_each_category_is_compared_with_its_own_prompts_plain_runs_all_of_them() -> None:
    plain, ranked = (1.0, 2.0, 4.0, 9.0), (0.5, 0.5, 1.0, 1.0)
    runs = {
        "plain": [[replace(generation(7, [(0, 0)] * 6, seconds), latency_s=seconds)] for seconds in plain],
        "ranked": [[generation(7, [(2, 1)] * 3, seconds)] for seconds in ranked],
        "hf": [[generation(7, seconds=2 * seconds)] for seconds in plain],
    }
    session = Measurement("tiny", 0.0, 1, 123, 0, categories={"a": [0, 2], "b": [1, 3]}, conversations=(0, 1, 2, 3))
    found = rows(runs, {"ranked": Ranked(torch.device("cpu"))}, {"ranked": GREEN}, session)
    told = {(row.drafter, row.category): row for row in found}
    for category, slow, fast in (("", 16.0, 3.0), ("a", 5.0, 1.5), ("b", 11.0, 1.5)):
        row, count = told["ranked", category], 2 if category else 4
        assert (row.speedup, row.speedup_hf) == pytest.approx((slow / fast, 2 * slow / fast))
        assert row.whole_speedup == pytest.approx((slow + 0.1 * count) / (fast + 0.1 * count))  # each prefill takes 0.1
        assert told["plain", category].speedup == 1
    of_one = {key: told["ranked", "a"].by_request[key]["p50"] for key in ("speedup", "tau", "tokens_per_second")}
    assert of_one == pytest.approx({"speedup": 3.0, "tau": 2.0, "tokens_per_second": 9.0})  # of 1 / 0.5 and 4 / 1
    assert (told["plain", ""].latency_s, told["plain", ""].prefill_s) == pytest.approx((3.0, 0.4))  # a median, a sum
    assert told["ranked", "b"].speedup_ci == pytest.approx((4.0, 9.0))  # the quotients of its two prompts
