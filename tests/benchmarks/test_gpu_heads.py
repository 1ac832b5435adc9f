import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import head_tables as tables
from benchmarks.gpu import heads as script
from benchmarks.gpu.common import Asked
from heads.common.resolvers import ROOT

SLEEP = "import time; time.sleep(60)"


def row(drafter: str, tau: float, speedup: float | None, **more: Any) -> dict[str, Any]:
    told = {
        "drafter": drafter, "workload": "code.jsonl", "temperature": 0.0, "tier": "live", "category": "", "tree": "t",
        "rule": "greedy", "prompts": 4, "steps": 10, "tau": tau, "tau_ci": [tau - 0.1, tau + 0.1],
        "accepted_by_depth": [0.5], "tokens_per_second": 100.0, "speedup": speedup, "speedup_ci": None,
        "lossless": {"checked": 4, "identical": 3, "near_tie": 1, "failed": 0}, "agreement": {},
        "seconds": {"draft": 0.1, "verify": 0.2, "other": 0.05}, "memory_bytes": 1,
    }  # fmt: skip
    return told | more


def report(rows: list[dict[str, Any]], red: str = "", drawn_red: str = "") -> dict[str, Any]:
    gates = {name: {"passed": name != red} for name in {each["drafter"] for each in rows} - {"plain"}}
    drawn = [{"drafter": name, "temperature": 1.0, "passed": name != drawn_red} for name in gates]
    return {
        "rows": rows,
        "device": {"dtype": "bfloat16"},
        "settings": {"gate": gates, "sampled_gate": drawn, "engine": "compiled"},
    }


ROWS = [row("plain", 1.0, 1.0), row("eagle", 3.6, 2.4), row("eagle3", 3.9, 2.6), row("mlp", 2.0, 2.9)]


def test_the_best_head_is_the_one_nearest_to_both_goals() -> None:
    rows = tables.measured(report(ROWS))
    assert tables.goals(rows) == {
        "head": "eagle3", "tau": 3.9, "tau_met": True, "speedup": 2.6, "speedup_met": True,
    }  # fmt: skip
    fewer = tables.measured(report([each for each in ROWS if each["drafter"] != "eagle3"]))
    judged = tables.goals(fewer)
    assert (judged["head"], judged["tau_met"], judged["speedup_met"]) == ("eagle", True, False)
    (goal,) = tables.goal_table(fewer)
    assert [line[-1] for line in goal.rows] == ["met", "not met"]
    assert tables.goals(tables.measured(report(ROWS[:1]))) == {}


def test_a_red_gate_meets_no_goal() -> None:
    withheld = [each | ({"speedup": None} if each["drafter"] == "eagle3" else {}) for each in ROWS[::2]]
    rows = tables.measured(report(withheld, red="eagle3"))
    judged = tables.goals(rows)
    assert (judged["head"], judged["speedup_met"]) == ("eagle3", False)
    table = tables.speed_table(rows, 0.0)
    (line,) = [each for each in table.rows if each[0] == "eagle3"]
    assert line[2] == "withheld"
    assert line[-1] == "3/4, 1 near ties RED"


def test_a_sampled_gate_counts_at_its_own_temperature() -> None:
    both = [*ROWS, *(each | {"temperature": 1.0} for each in ROWS)]
    rows = tables.measured(report(both, drawn_red="mlp"))
    assert [each["temperature"] for each in rows if not each["passed"]] == [1.0]


def test_other_tiers_and_categories_are_left_out() -> None:
    more = [row("eagle", 3.0, 2.0, tier="teacher_forced"), row("eagle", 3.0, 2.0, category="maths")]
    assert len(tables.measured(report(ROWS + more))) == len(ROWS)


def test_the_tables_have_a_line_for_every_head_and_what_is_missing() -> None:
    prose = [each | {"workload": "prose.jsonl"} for each in ROWS[:2]]
    numbers = {
        "measured": tables.measured(report(ROWS + prose)), "trained": {}, "features": "stored", "left": ["hass"],
        "failed": {"block": 2},
    }  # fmt: skip
    found = {table.caption: table for table in tables.tables_of(numbers)}
    speed = next(table for caption, table in found.items() if caption.startswith("Every head at T = 0"))
    assert speed.header == ["head", "code: tau", "code: speedup", "prose: tau", "prose: speedup", "lossless"]
    assert [line[0] for line in speed.rows] == ["plain", "eagle", "eagle3", "mlp"]
    assert speed.rows[1][3:5] == ["3.60 [3.50, 3.70]", "2.40"]
    assert speed.rows[2][3:5] == ["", ""]
    assert speed.rows[1][-1] == "6/8, 2 near ties"
    steps = next(table for caption, table in found.items() if caption.startswith("Where"))
    assert steps.rows[1][2:] == ["10.00", "20.00", "5.00", "35.00"]
    assert found["Missing"].rows == [("hass", "not finished"), ("block", "failed with status 2")]
    (figure,) = tables.figures_of(numbers)
    assert len(figure.spec["data"]["values"]) == 4
    assert tables.figures_of(numbers | {"measured": []}) == []


def test_training_is_told_without_its_first_steps(tmp_path: Path) -> None:
    cost = {"parameters": 5, "tokens": 80, "seconds": 4.0, "stall_seconds": 1.0}
    (tmp_path / "training.json").write_text(json.dumps(cost))
    rates = [1.0, 1.0, 1.0, 10.0, 30.0, 20.0]
    steps = [
        {"step": i, "loss": float(i), "tokens_per_second": rate, "flops_per_second": rate * 2, "memory_bytes": 10 - i}
        for i, rate in enumerate(rates)
    ]
    lines = [*steps, {"step": 6, "tau": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = tables.training_facts(tmp_path, rate=80.0)
    assert (found["tokens_per_second"], found["flops_per_second"], found["mfu"]) == (20.0, 40.0, 0.5)
    assert (found["stall_share"], found["peak_memory_bytes"], found["loss"]) == (0.25, 10, 2.5)
    assert found["mfu_of_data_sheet"] is None


def test_work_is_stopped_when_the_minutes_are_over() -> None:
    session = script.Session(1.0)
    session.end -= 59.7
    assert not session.run("slow", ["-c", SLEEP])
    assert not session.run("later", ["-c", "raise SystemExit(3)"])
    assert session.left == ["slow", "later"]
    assert session.failed == {}


def test_a_failed_piece_is_told_and_a_red_gate_is_none() -> None:
    session = script.Session(1.0)
    assert not session.run("broken", ["-c", "raise SystemExit(2)"])
    assert session.run("red", ["-c", "raise SystemExit(1)"], fine=(0, script.NOT_LOSSLESS))
    assert session.failed == {"broken": 2}
    assert session.left == []


def test_what_cannot_go_on_begins_only_with_time_left() -> None:
    session = script.Session(1.0)
    session.end -= 40
    assert not session.run("session", ["-c", "pass"], share=0.5)
    assert session.run("training", ["-c", "pass"])
    assert session.left == ["session"]


@pytest.fixture
def work(tmp_path: Path) -> script.Work:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "code.jsonl").touch()
    return script.Work(Asked(torch.device("cpu"), True, tmp_path), tmp_path / "target", "stored")


def test_a_finished_head_is_not_trained_again(work: script.Work) -> None:
    file = work.out / "eagle" / "training.json"
    file.parent.mkdir(parents=True)
    assert not work.trained("eagle")
    file.write_text(json.dumps({"tokens": work.sizes.steps * work.sizes.batch}))
    session = script.Session(0.0)
    assert work.train("eagle", session)
    assert not work.train("medusa", session)
    assert session.left == ["medusa"]
    work.sizes = replace(work.sizes, steps=work.sizes.steps + 1)
    with pytest.raises(SystemExit, match="are asked for"):
        work.train("eagle", session)


def test_a_report_that_lacks_a_head_is_made_again(work: script.Work) -> None:
    assert work.workloads == [["code"]]
    folder = work.report_of(["code"])
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report(ROWS)))
    session = script.Session(0.0)
    assert work.measure(["eagle", "mlp"], ["code"], session)
    assert not work.measure(["eagle", "hass"], ["code"], session)


def test_a_missing_target_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["heads.py", "--toy", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"make one by benchmarks/gpu/target\.py"):
        script.main()


@pytest.mark.slow
def test_toy_heads_are_trained_and_measured_in_two_calls(tmp_path: Path) -> None:
    toy = ["--toy", "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run([sys.executable, "benchmarks/gpu/target.py", *toy], cwd=ROOT, check=True, capture_output=True)
    words = [sys.executable, "benchmarks/gpu/heads.py", *toy]
    subprocess.run([*words, "--minutes", "0"], cwd=ROOT, check=True, capture_output=True)
    first = json.loads((tmp_path / "heads.json").read_text())
    assert first["numbers"]["left"] == ["the target's answers"]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    numbers = json.loads((tmp_path / "heads.json").read_text())["numbers"]
    assert (numbers["left"], numbers["failed"]) == ([], {})
    sizes = script.SMALL
    assert set(numbers["trained"]) == set(script.TOY_HEADS)
    assert {facts["tokens"] for facts in numbers["trained"].values()} == {sizes.steps * sizes.batch}
    assert all(facts["mfu"] > 0 and facts["peak_memory_bytes"] > 0 for facts in numbers["trained"].values())
    cases = {(each["drafter"], each["workload"], each["temperature"]) for each in numbers["measured"]}
    names = ("plain", *script.TOY_HEADS)
    assert cases == {(n, w, t) for n in names for w in ("code", "prose", "dialogue") for t in (0.0, 1.0)}
    for each in numbers["measured"]:
        assert each["passed"]
        assert each["prompts"] == sizes.prompts
        assert 1 <= each["tau"] <= 6
    again = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "train/run.py" not in again.stdout
    assert "eval/run.py" not in again.stdout
