"""Sweeps: what a run returns, what fails alone, and a search by Optuna that goes on where it was."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf

from eval.measures.results import LIVE, TEACHER_FORCED
from eval.report.write import Report
from heads.common.command import exit_this_run
from tests.eval.stubs import ROW
from tests.train import jobs
from train import run as training
from train import sweep
from train.distributed import launch

MODES = {"one": RunMode.RUN, "many": RunMode.MULTIRUN}


def mode(patch: pytest.MonkeyPatch, which: str) -> None:
    patch.setattr(HydraConfig, "initialized", lambda: True)
    patch.setattr(HydraConfig, "get", lambda: SimpleNamespace(mode=MODES[which], sweeper={"direction": "maximize"}))


@pytest.mark.parametrize(
    ("which", "code", "raised"), [("one", 2, SystemExit), ("many", 2, HydraException), ("many", 143, SystemExit)]
)
def test_a_run_of_many_fails_alone(
    monkeypatch: pytest.MonkeyPatch, which: str, code: int, raised: type[BaseException]
) -> None:
    mode(monkeypatch, which)
    with pytest.raises(raised), exit_this_run():
        raise SystemExit(code)


def test_every_run_of_many_is_begun_whatever_status_another_ends_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    statuses = iter([0, ValueError("a mistake"), 3])

    def end(*_: Any) -> int:
        status = next(statuses)
        if isinstance(status, ValueError):
            raise status
        return status

    monkeypatch.setattr("train.run.train", end)
    words = ["head=mlp", "launcher=inline", "trainer.seed=1,2,3"]
    monkeypatch.setattr("sys.argv", ["run.py", "-m", *words, f"hydra.sweep.dir={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 2
    assert not list(statuses)
    assert "error: a mistake" in capsys.readouterr().err


def test_a_search_needs_prompts_to_measure_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mode(monkeypatch, "many")
    sweep.check(1, waits=True)
    with pytest.raises(ValueError, match=r"trainer\.eval_prompts is 0"):
        sweep.check(0, waits=True)
    with pytest.raises(ValueError, match=r"launcher=slurm .* does not wait for the τ"):
        sweep.check(1, waits=False)
    mode(monkeypatch, "one")
    sweep.check(0, waits=False)


def test_the_best_tau_is_what_training_measured(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"best_tau": 2.25}))
    assert sweep.best_tau(tmp_path) == 2.25
    (tmp_path / "training.json").write_text(json.dumps({"best_tau": 0}))
    assert sweep.best_tau(tmp_path) is None


def test_the_table_has_what_a_clock_measured(tmp_path: Path) -> None:
    live = replace(ROW, lossless={"checked": 1, "identical": 1, "near_tie": 0, "failed": 0})
    along = replace(live, tier=TEACHER_FORCED, speedup=None, speedup_ci=None, speedup_hf=None)
    (tmp_path / "training.json").write_text("{}")
    others = [replace(live, drafter="plain"), replace(live, category="maths", workload="tiny/maths")]
    warm = replace(live, temperature=1.0)
    (tmp_path / "report.json").write_text(json.dumps(Report({}, {}, {}, {}, [*others, live, warm, along]).as_dict()))
    rows = sweep.rows_of("tiny-eagle", "eagle", tmp_path)
    assert [(row["tier"], row["temperature"], row["speedup"]) for row in rows] == [
        (LIVE, 0.0, ROW.speedup),
        (LIVE, 1.0, ROW.speedup),
    ]
    (tmp_path / "report.json").write_text('{"schema": 2, "rows": []}')
    with pytest.raises(ValueError, match=r"report\.json has schema 2, this version reads 1"):
        sweep.rows_of("tiny-eagle", "eagle", tmp_path)


def test_a_run_is_in_the_table_of_its_multirun_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lossless = {"checked": 8, "identical": 7, "near_tie": 0, "failed": 1}
    failed = replace(ROW, lossless=lossless, speedup=None, speedup_ci=None, speedup_hf=None)
    for name, flops, row in (("a", 1e12, ROW), ("b", None, failed), ("a", 3e12, ROW)):
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        cost = {"parameters": 5000, "tokens": 2000, "flops": flops, "seconds": 1234.4}
        (out / "training.json").write_text(json.dumps(cost))
        (out / "report.json").write_text(json.dumps(Report({}, {}, {}, {}, [row]).as_dict()))
        capsys.readouterr()
        sweep.note(f"tiny-{name}", "eagle", out)
        assert capsys.readouterr().out == ""  # a run by itself
        with monkeypatch.context() as patch:
            many = SimpleNamespace(mode=RunMode.MULTIRUN, sweep=SimpleNamespace(dir=str(tmp_path / "sweep")))
            patch.setattr(HydraConfig, "initialized", lambda: True)
            patch.setattr(HydraConfig, "get", lambda many=many: many)
            sweep.note(f"tiny-{name}", "eagle", out)
    table = json.loads((tmp_path / "sweep" / sweep.TABLE).read_text())
    assert [(row["name"], row["out"], row["failed"]) for row in table] == [
        ("tiny-b", str(tmp_path / "b"), True),
        ("tiny-a", str(tmp_path / "a"), False),
    ]
    first, second = (line for line in capsys.readouterr().out.splitlines() if "tiny-" in line)
    assert [cell.strip() for cell in first.split("│")][1:6] == ["tiny-b", "5,000", "2,000", "-", "1,234"]
    assert "withheld" in first
    assert [cell.strip() for cell in second.split("│")][1:-1] == [
        "tiny-a", "5,000", "2,000", "3,000", "1,234", "0", "2.03 [1.81, 2.24]", "0.75 0.28", "1.77 [1.61, 1.93]",
        "7/8, 1 near tie",
    ]  # fmt: skip


def test_trials_are_named_after_their_values() -> None:
    words = [[], ["trainer.lr=0.004"], ["head.layers=2"], []]
    *names, again = (jobs.configured(["sweep=optuna", *each]).name for each in words)
    assert again == names[0]
    assert len(set(names)) == len(names)
    assert all(name.startswith("tiny-eagle-") for name in names)


def test_a_runs_processes_are_given_its_overrides_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["out=x/${name}", "+a.b_token=${oc.env:HEADSTART_NONE_SECRET}"]
    overrides = OmegaConf.create({"task": given})
    monkeypatch.setattr(HydraConfig, "get", lambda: SimpleNamespace(overrides=overrides))
    assert launch.user_overrides() == given


def taus(folder: Path) -> dict[float, float]:
    """Return the best τ of every finished trial by its learning rate."""
    found = {}
    for out in (folder / "trials").iterdir():
        if (out / "training.json").exists():
            lr = yaml.safe_load((out / "config.yaml").read_text())["trainer"]["lr"]
            found[lr] = json.loads((out / "training.json").read_text())["best_tau"]
    return found


@pytest.mark.slow
def test_optuna_finds_the_best_and_goes_on(tmp_path: Path) -> None:
    overrides = [
        "-m", "sweep=optuna", *jobs.make(tmp_path), "trainer.steps=8", "eval.prompts=0", "trainer.patience=null",
        f"out={tmp_path / 'trials'}/${{name}}", f"hydra.sweep.dir={tmp_path / 'study'}",
    ]  # fmt: skip
    printed = jobs.finish(jobs.start([*overrides, "hydra.sweeper.n_trials=3"]))
    found = taus(tmp_path)
    assert len(found) == 3
    best = yaml.safe_load((tmp_path / "study" / "optimization_results.yaml").read_text())
    assert best["best_value"] == max(found.values()) == found[best["best_params"]["trainer.lr"]]
    assert "Best parameters: {" in printed
    assert f"'trainer.lr': {best['best_params']['trainer.lr']}" in printed

    again = jobs.finish(jobs.start([*overrides, "hydra.sweeper.n_trials=1", "trainer.clip=-1"]))
    assert "error: trainer.clip is -1" in again
    assert f"Best value: {best['best_value']}" in again, "the study goes on, whatever becomes of one trial"
    jobs.finish(jobs.start([*overrides, "hydra.sweeper.n_trials=1"]))
    assert len(taus(tmp_path)) == 4
