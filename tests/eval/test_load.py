"""Requests that come at a rate: who enters when, what each waits, and what the report makes of it."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.text.prompts import Prompt
from eval import live
from eval.live import Served, Setup, arrivals, measure_rate, queued_rows, requests_of, serve
from eval.measures.losslessness import Divergence, Gate
from eval.measures.results import Measurement, ResultRow
from eval.run import evaluate
from inference.batch import Batch
from inference.decode import Generation, RequestParams
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.step import DeviceStep
from inference.target.compiled import Graphs
from inference.verification.sample import GREEDY
from tests import toys
from tests.eval.small import small
from tests.eval.stubs import generation

GREEN, RED = Gate(2, 2, 0, 0), Gate(2, 1, 0, 1, Divergence("p1", 3, 4, 5, 2.5))
SETTINGS = RequestParams(12, GREEDY, seed=3)


class Clock:
    """A clock that others move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let seconds pass."""
        self.slept.append(seconds)
        self.now += seconds


class Paced(Batch):
    """A batch in which a prefill takes a second, a pass another, and each gives a token; an answer has three."""

    def __init__(self, size: int, clock: Clock) -> None:
        self.size, self.slots = size, []
        self.clock, self.made = clock, dict[int, Generation]()

    def admit(self, number: int, prompt: list[int], settings: RequestParams) -> Generation:
        """Begin an answer."""
        self.clock.now += 1
        request: Any = SimpleNamespace(request_index=number)
        self.slots.append(request)
        self.made[number] = Generation([7])
        return self.made[number]

    def step(self) -> None:
        """Give each answer a token."""
        self.clock.now += 1
        for row in self.running:
            made = self.made[row.request_index]
            made.tokens.append(7)
            made.finish_reason = "length" if len(made.tokens) == 3 else ""

    def release(self) -> None:
        """Let finished answers go."""
        for row in [row for row in self.running if self.made[row.request_index].finish_reason]:
            self.slots.remove(row)


@pytest.mark.parametrize(
    ("size", "when", "waits", "slept"),
    [
        (1, [0.0, 1.0, 10.0], [(0, 1, 3), (2, 3, 5), (0, 1, 3)], [4]),
        (2, [0.0, 1.0, 10.0], [(0, 1, 4), (0, 1, 3), (0, 1, 3)], [6]),
        (2, [0.0, 0.5, 0.75], [(0, 1, 4), (0.5, 1.5, 3.5), (3.25, 4.25, 6.25)], []),  # both places are taken
        (3, [0.0, 1.5, 2.0], [(0, 1, 5), (0.5, 1.5, 4.5), (1, 2, 4)], []),  # a pass ends first, two prefills follow
    ],
)
def test_a_request_enters_when_it_has_come_and_a_place_is_free(
    size: int, when: list[float], waits: list[tuple[float, ...]], slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=clock, sleep=clock.sleep))
    served = serve(Paced(size, clock), [[1], [2], [3]], when, SETTINGS)
    assert [(each.queue_s, each.ttft_s, each.generation.latency_s) for each in served] == waits
    assert [each.arrived for each in served] == when
    assert clock.slept == slept


def test_arrivals_have_the_rate_on_average_and_stretch_with_it() -> None:
    slow, fast = arrivals(2001, 2.0, random.Random(5)), arrivals(2001, 8.0, random.Random(5))
    assert slow[0] == 0
    assert slow == sorted(slow)
    assert abs(slow[-1] / 1000 - 1) < 4 / 2000**0.5  # four standard deviations of a mean of exponentials
    assert fast == pytest.approx([at / 4 for at in slow])


class Noted(Baseline):
    """A drafter that says when it forgets."""

    forgot = 0

    def reset(self) -> None:
        """Count."""
        self.forgot += 1


def test_all_drafters_meet_the_same_arrivals_and_each_round_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = toys.target(), list[list[float]]()

    def noted(batch: Batch, prompts: list[list[int]], when: list[float], settings: RequestParams) -> list[Served]:
        seen.append(when)
        return serve(batch, prompts, [0.0] * len(prompts), settings)

    monkeypatch.setattr(live, "serve", noted)
    prompts = [Prompt(f"p{i}", toys.prompt(i, 6), "") for i in range(3)]
    drafters = {name: Noted(target.device) for name in ("one", "two")}
    rounds = measure_rate(Setup(target, drafters, prompts, replace(SETTINGS, max_new_tokens=2)), 2, prompts[:1], 1, 5.0)
    assert seen[:3] == [[0.0]] * 3, "every source's warm-up"
    del seen[:3]
    assert len(seen) == 6
    assert seen[0] == seen[1] == seen[2] != seen[3] == seen[4] == seen[5]
    assert {drafter.forgot for drafter in drafters.values()} == {2}
    assert list(rounds) == ["plain", "one", "two"]
    assert all([len(each) for each in found] == [2, 2, 2] for found in rounds.values())
    measure_rate(Setup(target, {"one": drafters["one"]}, prompts, replace(SETTINGS, max_new_tokens=2)), 2, [], 1, 5.0)
    assert (seen[6], seen[9]) == (seen[0], seen[3])  # whoever else is measured


def test_graphs_are_captured_before_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stages that say where they are run first or captured: in a round its time would count."""
    target, where, begun = toys.target(), list[str](), DeviceStep.__init__
    monkeypatch.setattr(target, "captures", True)

    class Noting(Graphs):
        def __call__(self, key: Any, stage: Any, *args: Any) -> Any:
            where.append("again" if key in self.captured else "new")
            self.captured[key] = None, None
            return stage(*args)

    def static(self: DeviceStep, *args: Any) -> None:
        begun(self, *args)
        self.fixed_shapes = True

    def noted(*args: Any) -> list[Served]:
        where.append("served")
        return serve(*args)

    monkeypatch.setattr("inference.step.Graphs", Noting)
    monkeypatch.setattr(DeviceStep, "__init__", static)
    monkeypatch.setattr(live, "serve", noted)
    prompts = [Prompt(f"p{i}", toys.prompt(i, size), "") for i, size in enumerate((12, 70, 30))]
    drafters = {"eagle": HeadDrafter(toys.head("eagle", target), toys.TREES["chain"], "eagle")}
    measure_rate(Setup(target, drafters, prompts, SETTINGS), 2, [Prompt("w", toys.prompt(9, 20), "")], 2, 300.0)
    target.idle.clear()
    rounds = [i for i, what in enumerate(where) if what == "served"]
    assert "new" in where[: rounds[2]], "the warm-up of two sources"
    assert set(where[rounds[2] :]) == {"served", "again"}


def served(latency: float, arrived: float = 0.0, tokens: int = 5) -> Served:
    """Return a request that waited so long."""
    made = generation(tokens, [(0, 0)] * (tokens - 1), latency / 2)
    made.latency_s = latency
    return Served(made, arrived, latency / 4, latency / 3)


PLAIN = [[served(4.0), served(6.0)], [served(2.0, 3.0), served(8.0, 1.0, 9)]]
FAST = [[served(1.0), served(2.0)], [served(2.0, 3.0), served(3.0, 1.0, 9)]]


def loaded(gate: Gate, rate: float | None = 2.0, categories: dict[str, list[int]] | None = None) -> list[ResultRow]:
    """Return the rows of a session under load."""
    rounds = {"plain": PLAIN, "eagle": FAST}
    session = Measurement("tiny", 0.0, 1, 0, 0, categories=categories or {}, request_rate=rate)
    drafters = {"eagle": Baseline(torch.device("cpu"))}
    runs = {name: [[one.generation for one in repeats] for repeats in prompts] for name, prompts in rounds.items()}
    timed = live.rows(runs, drafters, {"eagle": gate}, session)
    return queued_rows(timed, requests_of(rounds), session)


def test_a_row_has_what_its_requests_waited() -> None:
    plain, eagle = loaded(GREEN)
    assert (plain.request_rate, plain.speedup, plain.latency_s) == (2.0, 1.0, 5.0)
    assert plain.tokens_per_second == (4 + 4 + 4 + 8) / (5 + 9), "from the first arrival to the last end"
    assert eagle.speedup_ci == pytest.approx((2.0, 10 / 3)), "only the second prompt, only the first"
    assert (eagle.speedup, eagle.latency_s, eagle.tokens_per_second) == (2.5, 2.0, (4 + 4 + 4 + 8) / (5 + 4))
    assert {eagle.speedup_hf, eagle.whole_speedup, eagle.whole_speedup_ci, eagle.whole_tokens_per_second} == {None}
    assert {*eagle.by_request} == {"tau", "latency_s", "ttft_s", "queue_s", "user_tokens_per_second"}
    assert [eagle.by_request[key]["p50"] for key in ("latency_s", "ttft_s", "queue_s")] == [2.0, 2 / 3, 0.5]
    assert (eagle.prompts, eagle.tokens) == (2, 8)  # acceptance is of each prompt's median round


def test_categories_have_the_latencies_of_their_own_requests() -> None:
    rows = {(row.drafter, row.category): row for row in loaded(GREEN, categories={"a": [0], "b": [1]})}
    assert rows["eagle", "a"].speedup == pytest.approx(10 / 3)
    assert rows["eagle", "b"].speedup == 2


def test_without_a_green_gate_there_is_no_ratio() -> None:
    _, eagle = loaded(RED)
    assert {eagle.speedup, eagle.speedup_ci, eagle.whole_speedup} == {None}
    assert eagle.latency_s == 2


def test_a_report_names_the_rates(runs: Path, tmp_path: Path) -> None:
    report = evaluate(small(runs, tmp_path, request_rate=[None, 40], batch_size=2, hf=False))
    assert report.passed
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [(row["drafter"], row["request_rate"]) for row in told["rows"]] == [
        (name, rate) for rate in (None, 40) for name in ("plain", "eagle")
    ]
    closed, slow = told["rows"][1], told["rows"][3]
    assert slow["speedup"] > 0
    assert (slow["ladder"], slow["whole_speedup"], closed["ladder"] is None) == (None, None, False)
    assert slow["tokens"] == closed["tokens"]
    assert set(told["settings"]["gate"]) == {"plain x2", "eagle x2"}  # gates know no rate
    written = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## Under load" in written
    assert "| eagle x2 at 40 req/s | 0 |" in written
    assert "came at random (Poisson)" in written
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="table-load"' in page
    assert "eagle x2 at 40 req/s" in page
