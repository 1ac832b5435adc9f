"""The protocol through a whole evaluation: workloads, categories, and the gate above temperature 0."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval import gates
from eval.live import interleaved
from eval.run import evaluate
from inference.verification.verify import COUPLED
from tests import toys
from tests.eval.small import small


@pytest.mark.slow
def test_workloads_and_categories_have_rows_of_their_own(runs: Path, tmp_path: Path) -> None:
    kinds = [{"id": f"{kind}{i}", "category": kind, "turns": [f"w{i} w2", "w4"]} for kind in "ab" for i in (1, 2)]
    (tmp_path / "kinds.jsonl").write_text("\n".join(map(json.dumps, kinds)), encoding="utf-8")
    workloads = [str(tmp_path / "kinds.jsonl"), str(runs / "prompts.jsonl")]
    values = {"workload": workloads, "turns": "all", "hf": False, "temperature": [0, 1.0], "warmup": 1, "gate_tv": 0.1}
    made = evaluate(small(runs, tmp_path, **values))
    assert made.passed
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    rows = {(row["workload"], row["temperature"]): row for row in told["rows"] if row["drafter"] == "eagle"}
    whole, parts = "kinds.jsonl", ("kinds.jsonl/a", "kinds.jsonl/b")
    assert list(rows) == [
        *((name, t) for t in (0.0, 1.0) for name in (whole, *parts)),
        *(("prompts.jsonl", t) for t in (0.0, 1.0)),
    ]
    for t in (0.0, 1.0):
        assert [rows[part, t]["category"] for part in parts] == ["a", "b"]
        assert [rows[name, t]["prompts"] for name in (whole, *parts, "prompts.jsonl")] == [4, 2, 2, 2]
        assert [rows[name, t]["lossless"]["identical"] for name in (whole, *parts, "prompts.jsonl")] == [4, 2, 2, 2]
        assert rows[whole, t]["tokens"] == sum(rows[part, t]["tokens"] for part in parts)
        assert rows[whole, t]["whole_speedup"] > 0
        quantiles = {"tau", "tokens_per_second", "user_tokens_per_second", "latency_s", "speedup"}
        assert set(rows[whole, t]["by_request"]) == quantiles
        assert rows[whole, t]["definitions"]["mean_acceptance_length"] == rows[whole, t]["tau"]
    agreed = rows[whole, 0.0]["agreement"]
    assert (agreed["dtype"], agreed["checked"], agreed["identical"], agreed["gaps"]) == ("float32", 4, 4, [])
    (drawn,) = told["settings"]["sampled_gate"]
    assert (drawn["drafter"], drawn["temperature"], drawn["coupled"]["identical"]) == ("eagle", 1.0, 6)
    assert drawn["law"]["control_caught"]
    assert told["settings"]["warmup_prompts"] == "further ones"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| eagle, kinds.jsonl |" in text
    assert "broken control caught" in text


def test_the_turns_of_one_dialogue_leave_nothing_to_resample(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "two.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["w1 w2", "w4"]}), encoding="utf-8")
    values = {"workload": str(tmp_path / "two.jsonl"), "hf": False}
    made = evaluate(small(runs, tmp_path, turns="all", **values))
    assert [(row.prompts, row.tau_ci, row.speedup_ci) for row in made.rows] == [(2, None, None)] * 2


def test_batches_are_gated_above_temperature_0_too(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speculate = interleaved.speculate

    def broken_in_batches(*args: Any, **how: Any) -> Any:
        made = speculate(*args, **how)
        if isinstance(made, list) and args[3].rule == COUPLED and args[1].tree != "root":
            made[-1].tokens[2] = (made[-1].tokens[2] + 1) % toys.VOCAB
        return made

    monkeypatch.setattr(interleaved, "speculate", broken_in_batches)
    made = evaluate(small(runs, tmp_path, hf=False, temperature=[0, 1.0], batch_size=[1, 2]))
    assert not made.passed
    (failure,) = made.failures()
    assert "eagle at T=1: 1 of 2 prompts equal under coupled noise at batch sizes 1, 2; " in failure
    assert "; batch size 2, prompt p1, position 2: " in failure
    hot = [
        (row.batch_size, row.speedup, row.lossless["failed"])
        for row in made.rows
        if row.temperature and row.rule != "none"
    ]
    assert hot == [(1, None, 1), (2, None, 1)]
    assert all(row.speedup for row in made.rows if not row.temperature)


def test_a_red_draw_withholds_the_speedup_of_its_temperature_alone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "resampled", lambda p, rng, count: rng.sample(p.expand(count, -1)))  # nothing broken
    made = evaluate(small(runs, tmp_path, hf=False, temperature=[0, 1.0], gate_tv=0.1, seed=3))
    assert not made.passed
    assert "broken control NOT caught" in made.failures()[0]
    assert [row.speedup is None for row in made.rows if row.drafter == "eagle"] == [False, True]
    assert [row.whole_speedup is None for row in made.rows if row.drafter == "eagle"] == [False, True]
