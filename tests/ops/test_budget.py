"""A training within a budget: its forecast holds what comes out, its choice follows, and a killed one goes on."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from benchmarks.forecast import CURVES, forecasts
from data.text.sources import open_source
from heads.common.command import quoted
from heads.common.resolvers import ROOT, register_resolvers
from heads.common.typed import typed
from ops import budget as command
from ops.budget import (
    DECIDED,
    PROBE,
    STATE,
    Budget,
    BudgetConfig,
    Forecast,
    ForecastConfig,
    power_function,
    predict,
    shared_overrides,
)
from ops.commands import run_command, split_config
from tests.eval.stubs import ROW
from tests.refusals import refuses
from tests.train import jobs
from train import checkpoint
from train.config import run_config

BOUND = 6.0


@pytest.fixture
def composing() -> Iterator[None]:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


@pytest.mark.parametrize(("exponent", "noise"), [(0.2, 0.05), (1.0, 0.05)])
def test_intervals_hold_the_power_functions_that_they_forecast(exponent: float, noise: float) -> None:
    rng, tokens, held, errors = np.random.default_rng(0), np.array([1.0, 2.5, 5.0, 9.0]), [], []
    for _ in range(40):
        limit = rng.uniform(2.5, 4.5)
        law = limit, limit - rng.uniform(1.2, 1.6), exponent
        tau = power_function(tokens, *law) + noise * rng.normal(size=4)
        middle, low, high = predict(list(tokens), list(tau), [noise] * 4, 60.0, BOUND)
        came = power_function(np.array(60.0), *law)
        held.append(low <= came <= high)
        errors.append(middle - came)
    assert np.mean(held) >= 0.75  # 90 % are stated: three standard deviations below them
    assert abs(np.mean(errors)) < 0.15


def test_a_law_without_noise_is_found() -> None:
    tokens = np.array([1.0, 2.0, 4.0, 8.0])
    points = list(power_function(tokens, 3.0, 1.8, 0.5))
    middle, low, high = predict(list(tokens), points, [0.001] * 4, 64.0, BOUND)
    assert middle == pytest.approx(3.0 - 1.8 / 8, abs=0.01)
    assert low < middle < high < BOUND


def test_intervals_hold_nine_in_ten_of_recorded_curves() -> None:
    cases = np.array([case for group in forecasts(CURVES, 1).values() for case in group])
    _, low, high, came = cases.T
    assert 0.85 <= np.mean((low <= came) & (came <= high)) <= 0.95


@pytest.mark.parametrize(
    ("tau", "least", "most"), [([1.0] * 3, 1.0, 1.01), ([1.5, 2.0, 5.9], 3.5, BOUND), ([1.5, 1.4, 1.3], 1.3, 1.5)]
)
def test_flat_steep_and_falling_curves_are_fitted_within_the_bounds(
    tau: list[float], least: float, most: float
) -> None:
    middle, low, high = predict([1, 2, 4], tau, [0.0] * 3, 16.0, BOUND)
    assert 1.0 <= low <= middle <= high <= BOUND
    assert least <= middle <= most


@pytest.mark.parametrize("value", ["0", "-1h", "1x", "nan", "1h30", True, "1e9999"])
def test_a_budget_that_is_none_is_refused_in_a_line(value: Any) -> None:
    refuses(r"^budget is .*: give a time above 0 \(1s, 1min, 1h, 1d\), or a number", Budget.read, value)


def test_budgets_are_read() -> None:
    timed = {"1h": 3600, "90min": 5400, "1.5h": 5400, "20s": 20, "2d": 172800}
    assert {text: Budget.read(text).amount for text in timed} == timed
    assert Budget.read(5e15) == Budget.read("5e15") == Budget.read("5e+15") == Budget(5e15, timed=False)
    assert [str(Budget.read(value)) for value in ("1h", "90s", 5e15)] == ["1 h", "1.5 min", "5e+15 operations"]


def test_trainings_share_what_is_not_the_budgets_own() -> None:
    with pytest.raises(ValueError, match=r"head.layers is of one head"):
        shared_overrides(["budget=1h", "head.layers=2"], None)
    with pytest.raises(ValueError, match="both given"):
        shared_overrides(["data.path=b", "log=a"], "a")
    words = ["budget=1h", "trainer.lr=1", "forecast.share=0.1", "name=x", "resume=true", "+objective.losses.lk=1"]
    assert shared_overrides(words, "a b") == ["trainer.lr=1", "+objective.losses.lk=1"]


@pytest.mark.parametrize("key", DECIDED)
def test_what_a_budget_decides_is_refused_where_it_is_given(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}=1: {DECIDED[key]}$"):
        shared_overrides(["budget=1h", f"{key}=1"], None)


REPORT: dict[str, Any] = {"schema": 1, "target": {}, "device": {}, "settings": {}}


class Stage:
    """Candidates with planted curves, in place of trainings: what a forecast reads of one is written."""

    def __init__(self, out: Path, candidates: dict[str, tuple[float, float, float]], *words: str) -> None:
        self.planted, self.out, self.taken, self.runs = candidates, out, 0, list[list[str]]()
        training, own = split_config(compose("ops/budget", [f"out={out}", "trainer=debug", "tree=dynamic", *words]))
        self.run = run_config(training)
        forecast = replace(typed(ForecastConfig, own.forecast), candidates=list(candidates))
        self.config = BudgetConfig(Budget(100_000.0, timed=False), None, forecast)

    def forecast(self, config: BudgetConfig | None = None, **changed: Any) -> Forecast:
        return Forecast(replace(self.run, **changed), config or self.config, ["a=b"], self.train)

    def train(self, words: list[str]) -> None:
        """Take the steps that are left, at 2 operations each, and write their checkpoints and report as a run does.

        τ = 1 + best (1 - (steps / 25)^-b / 2), and a pass costs `cost` tokens of the baseline.
        """
        self.runs.append(words)
        given = dict(word.partition("=")[::2] for word in words)
        folder, steps = Path(given["out"].strip("'")), int(given["trainer.steps"])
        begin = max(map(checkpoint.step_of, checkpoint.checkpoints(folder / "checkpoints")), default=0)
        for step in range(begin + 1, steps + 1):
            if step % int(given.get("trainer.save_every", 100)) == 0 or step == steps:
                checkpoint.folder_of(folder / "checkpoints", step).mkdir(parents=True)
                checkpoint.delete_old_checkpoints(folder / "checkpoints", int(given.get("trainer.keep", 2)), 0)
        self.taken += steps - begin
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps({"step_seconds": 0.5}) for _ in range(steps)))
        (folder / "config.yaml").write_text("init: auto\n")
        (folder / "training.json").write_text(json.dumps({"flops": 2.0 * steps, "steps": steps, "best_tau": 1.0}))
        best, b, cost = self.planted[next(words for words in self.planted if words.startswith(given["head"]))]
        tau = 1 + best * (1 - (steps / 25) ** -b / 2)
        row = replace(ROW, drafter=given["head"], tau=tau, tau_ci=(tau - 0.1, tau + 0.1), speedup=tau / cost)
        (folder / "report.json").write_text(json.dumps({**REPORT, "rows": [asdict(row)]}))


PLANTED = {"mtp": (3.0, 0.3, 1.5), "mlp": (1.0, 0.5, 1.4), "eagle": (3.2, 0.3, 4.0), "medusa": (1.0, 1.0, 4.0)}


@pytest.mark.usefixtures("composing")
def test_every_round_drops_the_slower_half_and_the_fastest_is_trained_for_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, PLANTED)
    forecast = stage.forecast()
    assert forecast.choose() == "mtp"
    points = {words: [point["steps"] for point in of] for words, of in forecast.state["points"].items()}
    assert {words: len(of) for words, of in points.items()} == {"mtp": 4, "mlp": 2, "eagle": 1, "medusa": 1}
    assert all(steps == sorted({*steps}) for steps in points.values())
    spent = forecast.state["spent"]
    assert spent == 2 * stage.taken  # every step counts, and no step of a checkpoint twice
    probes = 2 * PROBE * len(PLANTED)
    assert 0.2 * 100_000 < spent - probes <= 0.25 * 100_000
    forecast.finish("mtp")
    last = dict(word.partition("=")[::2] for word in stage.runs[-1])
    steps, begin = int(last["trainer.steps"]), forecast.stable(points["mtp"][-1])
    assert 2 * (steps - begin) == pytest.approx(100_000 - spent, abs=2)
    assert (last["resume"], last["out"], last["head"]) == ("true", quoted(tmp_path), "mtp")
    assert stage.taken == (100_000 - 100_000 % 2) // 2, "the budget is spent"
    printed = capsys.readouterr().out
    came = 1 + 3 * (1 - (steps / 25) ** -0.3 / 2)
    outcome = f"came out: τ {came:.2f}, {came / 1.5:.2f}x"
    seen = re.search(rf"forecast: τ ([\d.]+) \[([\d.]+), ([\d.]+)\], .*; {outcome}", printed)
    assert seen
    middle, low, high = map(float, seen.groups())
    assert low < came < high
    assert middle == pytest.approx(came, rel=0.05)


@pytest.mark.usefixtures("composing")
def test_a_killed_forecast_continues_where_it_was(tmp_path: Path) -> None:
    whole = Stage(tmp_path / "whole", PLANTED)
    (one := whole.forecast()).finish(one.choose())
    stage = Stage(tmp_path / "killed", PLANTED)
    for at in (2, 7, len(whole.runs) - 1):  # in a probe, in a round, in the run itself

        def train(words: list[str], at: int = at) -> None:
            if len(stage.runs) == at:
                raise SystemExit(143)
            stage.train(words)

        resumed = Forecast(replace(stage.run, resume=(stage.out / STATE).exists()), stage.config, ["a=b"], train)
        with pytest.raises(SystemExit):
            resumed.finish(resumed.choose())
    with pytest.raises(ValueError, match="holds a forecast already"):
        stage.forecast()
    with pytest.raises(ValueError, match=r"changed are share \(0\.25, now 0\.5\)"):
        stage.forecast(replace(stage.config, forecast=replace(stage.config.forecast, share=0.5)), resume=True)
    kept = (stage.out / STATE).read_bytes()
    (stage.out / STATE).write_bytes(kept[:-9])
    with pytest.raises(ValueError, match=r"forecast\.json: damaged \(.*\); start again with overwrite=true"):
        stage.forecast(resume=True)
    (stage.out / STATE).write_bytes(kept)
    (again := stage.forecast(resume=True)).finish(again.choose())
    assert again.state["points"] == one.state["points"]
    ends = [[word for word in run if not word.startswith("out=")] for run in (stage.runs[-1], whole.runs[-1])]
    assert ends[0] == ends[1]
    assert stage.taken == whole.taken
    (again := stage.forecast(overwrite=True)).finish(again.choose())
    assert stage.taken == 2 * whole.taken


@pytest.mark.usefixtures("composing")
def test_the_checkpoint_before_a_long_cooldown_is_there_to_go_on_from(tmp_path: Path) -> None:
    forecast = Stage(tmp_path, {"mlp": (2.0, 0.2, 1.2)}, "forecast.cooldown=0.6").forecast()
    forecast.finish(forecast.choose())
    begin = forecast.stable(forecast.state["points"]["mlp"][-1]["steps"])
    assert begin in map(checkpoint.step_of, checkpoint.checkpoints(tmp_path / "forecast" / "0" / "checkpoints"))


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("status", [1, 2, 143])
def test_a_candidate_whose_processes_refuse_is_left_out_and_one_that_is_stopped_stops_all(
    status: int, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, {"mlp": (2.0, 0.2, 1.2), "eagle": (2.0, 0.2, 1.2)})

    def launched(words: list[str]) -> None:
        if "head=eagle" in words:
            raise SystemExit(status)
        stage.train(words)

    forecast = Forecast(stage.run, stage.config, [], launched)
    if status == 143:
        with pytest.raises(SystemExit):
            forecast.choose()
        return
    assert forecast.choose() == "mlp"
    assert forecast.state["left_out"] == {"eagle": f"its training ended with status {status}"}
    assert [*forecast.state["points"]] == ["mlp"]


@pytest.mark.usefixtures("composing")
def test_a_log_is_for_all_trainings_what_it_was_at_the_beginning(tmp_path: Path) -> None:
    (log := tmp_path / "log.jsonl").write_text(whole := '{"text": "a"}\n{"text": "b"}\n')
    stage, seen = Stage(tmp_path / "out", {"mlp": (2.0, 0.2, 1.2)}), list[str]()

    def train(words: list[str]) -> None:
        (path,) = (word.partition("=")[2].strip("'") for word in words if word.startswith("data.path="))
        seen.append("".join(file.read_text() for file in Path(path).iterdir()))
        assert [record["text"] for record in open_source(path, "train")] == ["a", "b"]
        with log.open("a") as file:
            file.write('{"text": "c"}\n')
        stage.train(words)

    config = replace(stage.config, log=str(log))
    Forecast(stage.run, config, [], train).choose()
    Forecast(replace(stage.run, resume=True), config, [], train).choose()
    assert set(seen) == {whole}

    def refuse(words: list[str]) -> None:
        raise SystemExit(2)

    with pytest.raises(ValueError, match=r"no candidate .* \(its training ended with status 2\)"):
        Forecast(replace(stage.run, overwrite=True), config, [], refuse).choose()


def test_a_plan_of_a_budget_is_that_of_each_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(command, "run_command", lambda script, words: started.append([script, *words]))
    words = ["budget=1h", "plan=True", f"out={tmp_path / 'out'}", "forecast.candidates=[mlp,'eagle3 head.layers=2']"]
    monkeypatch.setattr("sys.argv", ["ops/budget.py", *words])
    command.main()
    assert started == [
        ["train/run.py", "plan=True", "head=mlp"],
        ["train/run.py", "plan=True", "head=eagle3", "head.layers=2"],
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 15)", 143)])
def test_a_command_passes_its_status_on(code: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import sys\nassert sys.argv[1:] == ['a b', 'c']\n{code}\n")
    with pytest.raises(SystemExit) as ended:
        run_command(str(tmp_path / "script.py"), ["a b", "c"])
    assert ended.value.code == status


@pytest.mark.usefixtures("composing")
def test_the_last_line_names_the_cause_of_a_failed_training(tmp_path: Path) -> None:
    stage, words = Stage(tmp_path / "out", {"mlp": (2.0, 0.2, 1.2)}), ["model.device=cpu", "data.path=gone.jsonl"]
    forecast = Forecast(stage.run, stage.config, [], lambda more: run_command("train/run.py", [*more, *words]))
    with pytest.raises(ValueError, match=r"^no candidate can be trained \(gone\.jsonl: neither a file here"):
        forecast.choose()


@pytest.mark.usefixtures("composing")
@pytest.mark.parametrize("small", [Budget(100.0, timed=False), Budget(1.0, timed=True)])
def test_a_budget_that_is_too_small_says_what_would_do(small: Budget, tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"mlp": (1.0, 1.0, 1.0), "eagle": (1.0, 1.0, 1.0)})
    stage.config = replace(stage.config, budget=small)
    with pytest.raises(ValueError, match=r"too small for short trainings of 2 .* about .* overwrite=true$") as seen:
        stage.forecast().choose()
    (advised,) = re.findall(r"about (\S+(?: s| min| h)?)", str(seen.value))
    assert Budget.read(advised).amount > 4 * small.amount
    stage.config = replace(stage.config, budget=Budget.read(advised))
    assert stage.forecast(overwrite=True).choose() in stage.planted


@pytest.mark.slow
@pytest.mark.usefixtures("composing")
def test_a_budget_is_spent_on_real_trainings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [word for word in jobs.make(tmp_path) if not word.startswith(("data.held_out", "eval.prompts"))]
    words += [f"out={tmp_path / 'out'}", "data.held_out=8", "eval.prompts=4", "name=toy", "trainer.batch_tokens=64"]
    mine = ["budget=1e9", "forecast.candidates=[medusa,mlp]", "forecast.warmup=2", "forecast.prompts=8",
            "forecast.tokens=8"]  # fmt: skip
    training, own = split_config(compose("ops/budget", [*words, *mine]))
    run, config = run_config(training), typed(BudgetConfig, own, built_fields={"budget": Budget.read(own.budget)})
    forecast = Forecast(run, config, words, lambda more: run_command("train/run.py", [*words, *more]))
    forecast.finish(chosen := forecast.choose())
    assert len(forecast.state["points"][chosen]) == 4
    assert f'"{chosen}"' in Path(run.out, "head", "config.json").read_text()
    printed, warned = capfd.readouterr()
    assert "not bit-identical" not in printed + warned  # a run that is lengthened is as if it had been so long
    assert f"{chosen} is trained on" in printed
    assert "came out: τ" in printed
