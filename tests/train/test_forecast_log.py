"""A forecast from a log to its end: what it keeps of it, goes on with, and leaves of an earlier run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from data.text.sources import open_source
from heads.common.resolvers import ROOT, register_resolvers
from tests.train.test_forecast import Stage
from train.config import run_config
from train.forecast.command import check, train_within
from train.forecast.pilots import STATE


class StubBench:
    """A bench that measures what a stage has planted, and keeps the data that it was given."""

    stage: Stage

    def __init__(self, run: Any) -> None:
        self.run, self.answered = run, [0]

    def examined(self) -> dict[str, Any]:
        """Return the numbers of a log; refuse one that is not read to its end."""
        for _ in open_source(self.run.data.path, ""):
            pass
        numbers = {"requests": 2, "duplicates": 0, "samples": 2, "tokens": 9, "lengths": [4, 4, 5], "repeated": 0.0}
        return {"log": {**numbers, "entropy": 1.0, "greedy": 0.5, "rows": 1, "others": 20}, "answered": [0]}

    def measure(self, folders: list[Path]) -> list[dict[str, Any]]:
        """Return what was planted."""
        return self.stage.measure(folders)


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Stage]]:
    """Yield a run within a budget that takes its log, and the stage on which its candidates train."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield planted(tmp_path, monkeypatch)


def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Stage]:
    stage = Stage(tmp_path / "out", {"mlp": (2.0, 2.5, 1.2)}, least=100.0)
    monkeypatch.setattr("train.forecast.command.Bench", StubBench)
    monkeypatch.setattr(StubBench, "stage", stage, raising=False)
    stub = SimpleNamespace(spec=SimpleNamespace(fingerprint="planted"))
    monkeypatch.setattr("train.forecast.command.load_target", lambda *_, **__: stub)
    run = run_config(compose("train", [f"out={tmp_path / 'out'}", "trainer=debug"]))
    (tmp_path / "log.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    pilots = stage.pilots
    return replace(run, log=str(tmp_path / "log.jsonl"), budget=pilots.budget, forecast=pilots.config), stage


def test_a_log_that_grows_is_for_all_trainings_what_it_was_at_the_beginning(staged: tuple[Any, Stage]) -> None:
    run, stage = staged
    log, seen = Path(run.log), list[bytes]()

    def train(words: list[str]) -> None:
        if len(seen) == 2:
            raise SystemExit(143)
        path = next(word for word in words if word.startswith("data.path=")).partition("=")[2].strip("'")
        (copy,) = Path(path).iterdir()
        seen.append(copy.read_bytes())
        assert [record["text"] for record in open_source(path, "train")] == ["a", "b"]
        with log.open("a") as file:
            file.write('{"text": "c"}\n')
        stage.train(words)

    whole = log.read_bytes()
    with pytest.raises(SystemExit):
        train_within(run, train)
    begun = seen.copy()
    seen.clear()
    log.unlink()
    train_within(replace(run, resume=True), train)
    assert begun + seen == [whole] * 4


def test_a_forecast_that_goes_on_measures_as_before(staged: tuple[Any, Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    run, stage = staged
    train_within(run, stage.train)
    kept, again = Path(run.out, STATE).read_bytes(), replace(run, resume=True)
    other = SimpleNamespace(spec=SimpleNamespace(fingerprint="other"))
    for changed, named in (
        ({"forecast": replace(run.forecast, prompts=8)}, r"forecast\.prompts \(32, now 8\)"),
        ({"forecast": replace(run.forecast, tokens=8)}, r"forecast\.tokens \(64, now 8\)"),
        ({"tree": replace(run.tree, top_k=run.tree.top_k + 1)}, r"tree\.top_k \("),
        ({"workload": "tiny"}, r'workload \(null, now "tiny"\)'),
        ({"data": replace(run.data, held_out=3)}, r"data\.held_out \("),
        ({"log": "b.jsonl"}, r'log \(".*, now "b\.jsonl"\)'),
        ({"model": replace(run.model, path="b")}, r'target\'s fingerprint \(".*", now "other"\)'),
    ):
        with monkeypatch.context() as patch:
            if "model" in changed:
                patch.setattr("train.forecast.command.load_target", lambda *_, **__: other)
            with pytest.raises(
                ValueError, match=rf"{STATE}: resume=true goes on .* here differ {named}.*; give the old"
            ):
                train_within(replace(again, **changed), stage.train)
        assert Path(run.out, STATE).read_bytes() == kept
    train_within(replace(again, forecast=replace(run.forecast, worth=0.1, points=2)), stage.train)


def test_a_forecast_in_place_of_a_run_leaves_nothing_of_it_unless_it_cannot_begin(staged: tuple[Any, Stage]) -> None:
    run, stage = staged
    out = Path(run.out)
    files = ("training.json", "metrics.jsonl", "report.json", "config.yaml", "provenance.json", "head/config.json")
    for path in (out / name for name in (*files, ".head.old/config.json", "checkpoints/step-00000004/index.json")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    before = sorted(out.iterdir())
    whole = Path(run.log).read_text()
    Path(run.log).write_text("none")
    with pytest.raises(ValueError, match="is no JSON"):
        train_within(replace(run, overwrite=True), stage.train)
    assert set(before) <= {*out.iterdir()}
    Path(run.log).write_text(whole)
    train_within(replace(run, overwrite=True), stage.train)  # and no candidate pays
    assert sorted(path.name for path in out.iterdir()) == ["forecast", STATE]


def test_a_log_that_cannot_be_read_is_named_and_copied_anew(staged: tuple[Any, Stage]) -> None:
    run, stage = staged
    log = Path(run.log)
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"text": "c')  # which a service is writing
    with pytest.raises(ValueError, match=rf"line 3 is no JSON .* in log={log}, of which this is a copy$"):
        train_within(run, stage.train)
    log.write_bytes(whole)
    check(run)
    train_within(run, stage.train)
    log.rename(log.with_suffix(".log"))
    with pytest.raises(ValueError, match=r"log\.log: the formats read are"):
        train_within(replace(run, log=str(log.with_suffix(".log")), overwrite=True), stage.train)
