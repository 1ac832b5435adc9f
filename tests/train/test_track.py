"""Trackers: what each is given, what a resumed run leaves in them, and that none of them can stop a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.train import jobs
from tests.train.jobs import resolved
from train import trackers as tracking
from train.run import train
from train.step import PARTS
from train.trackers import Tracker, numbers


def record(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "accuracy": [0.5, 0.25], "tokens_per_second": 9.0, "seconds": {"data": 0.1}}


def tracked(out: Path, trackers: list[str], start: int = 0, stop: int = 4) -> None:
    tracker = Tracker(out, active=True, steps=stop, start=start, trackers=trackers, config={"name": "mine"})
    for step in range(start + 1, stop + 1):
        tracker.log(record(step))
    tracker.close()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


class Stub:
    """A tracker that fails where it is told to."""

    def __init__(self, fails: str, seen: list[str]) -> None:
        self.fails, self.seen = fails, seen
        self.say("start")

    def say(self, what: str) -> None:
        self.seen.append(what)
        if what == self.fails:
            raise RuntimeError("the server\nis gone")

    def log(self, record: dict[str, Any]) -> None:
        self.say(f"log {record['step']}")

    def close(self) -> None:
        self.say("close")


@pytest.mark.parametrize(
    ("fails", "seen"),
    [
        ("start", ["start"]),
        ("log 2", ["start", "log 1", "log 2"]),
        ("close", ["start", "log 1", "log 2", "log 3", "log 4", "close"]),
    ],
)
def test_a_tracker_that_fails_is_named_once_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: str, seen: list[str]
) -> None:
    called: list[str] = []
    monkeypatch.setitem(tracking.TRACKERS, "stub", lambda *_: Stub(fails, called))
    tracked(tmp_path, ["stub", "tensorboard"])
    assert called == seen
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert [value for _, value in scalars(tmp_path, "train/loss")] == [1.0] * 4
    told = capsys.readouterr().err
    assert told.count("tracker stub failed and is left out from here on: the server is gone") == 1


def test_training_goes_on_without_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setitem(tracking.TRACKERS, "wandb", lambda *_: Stub("log 2", called))
    run = resolved(
        [*jobs.make(tmp_path), "trainer.steps=3", "trainer.eval_prompts=0", "eval.prompts=0", f"out={tmp_path / 'run'}",
         "trainer.trackers=[wandb]", "trainer.peak_tflops=0.001"]
    )  # fmt: skip
    train(run)
    assert called == ["start", "log 1", "log 2"]
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3]
    for line in found:
        assert set(line["seconds"]) == set(PARTS)
        assert sum(line["seconds"].values()) == pytest.approx(line["step_seconds"])
        assert min(line["seconds"][part] for part in ("data", "target", "head", "optimiser")) > 0
        assert line["tokens_per_second"] == pytest.approx(256 / line["step_seconds"])
        assert line["rows_per_second"] == pytest.approx(line["rows"] / line["step_seconds"])
        assert 2**20 < line["memory_bytes"] < 2**40
    assert "flops_per_second" not in found[0], "the first step is the one that is counted"
    flops = json.loads((tmp_path / "run" / "training.json").read_text())["flops"] / 3
    for line in found[1:]:
        assert line["flops_per_second"] == pytest.approx(flops / line["step_seconds"])
        assert line["mfu"] == pytest.approx(line["flops_per_second"] / 1e9)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, active=False, steps=4, start=0, trackers=["wandb", "tensorboard"], config={})
    tracker.log(record(1))
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_numbers_have_flat_names() -> None:
    given = {"step": 3, "seconds": {"data": 0.5}, "accuracy": [0.25, None], "tau_ci": None, "best": True, "why": "x"}
    assert dict(numbers(given)) == {"step": 3, "seconds/data": 0.5, "accuracy/1": 0.25, "best": 1}
    assert dict(numbers({"loss": float("nan"), "deep": [[1.0], [2.0]]})) == {"deep/1/1": 1, "deep/2/1": 2}


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, active=True, steps=1, start=0, trackers=[], config={})
    tracker.log(record(1, float("nan")) | {"seconds": {"data": float("inf")}})
    tracker.close()
    (line,) = lines(tmp_path)
    assert (line["loss"], line["seconds"]) == (None, {"data": None})


@pytest.mark.parametrize("odd", [b'{"step": 5, "lo', b"12\n", b'{"step": null}\n'])
def test_a_resumed_run_drops_what_came_after_and_what_is_no_record(
    tmp_path: Path, odd: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is what a run that was killed while it wrote leaves."""
    tracked(tmp_path, ["jsonl"])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(odd)
    tracked(tmp_path, [], start=2, stop=6)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert "failed" not in capsys.readouterr().err


def scalars(out: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard shows."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def texts(out: Path) -> dict[str, bytes]:
    """Return the texts that TensorBoard shows."""
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {name: events.Tensors(name)[0].tensor_proto.string_val[0].rstrip() for name in events.Tags()["tensors"]}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    tracked(tmp_path, ["tensorboard"])
    tracked(tmp_path, ["tensorboard"], start=2, stop=6)
    for name, value in (("train/loss", 1.0), ("train/accuracy/2", 0.25), ("train/seconds/data", 0.1)):
        found = scalars(tmp_path, name)
        assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
        assert all(each == pytest.approx(value) for _, each in found)


def test_wandb_offline_goes_on_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(sys, "argv", ["run.py", "a.api_key=cAnArY", "b=https://me:cAnArY@h"])
    tracked(tmp_path, ["wandb_offline"], stop=2)
    kept = (tmp_path / "wandb-id.txt").read_text()
    tracked(tmp_path, ["wandb_offline"], start=2, stop=3)
    assert (tmp_path / "wandb-id.txt").read_text() == kept
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all((folder / f"run-{kept}.wandb").stat().st_size > 0 for folder in folders)
    written = (folders[0] / f"run-{kept}.wandb").read_bytes()
    assert b"train/accuracy/2" in written
    assert b"cAnArY" not in written


def test_trackers_get_the_final_numbers_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in tracking.REPORT:
        (tmp_path / name).write_text(f"the {name}")
    final = {"step": 4, "final_tau": 2.5, "final_lossless": {"identical": 16}, "lossless": 1.0}
    log = tmp_path / tracking.METRICS
    log.write_text('{"step": 9}\n')  # of a run that is longer than it is asked to be when it is evaluated again
    tracking.conclude(tmp_path, ["jsonl", "tensorboard", "wandb_offline"], {"name": "mine"}, final)
    assert log.read_text() == '{"step": 9}\n'
    assert scalars(tmp_path, "eval/final_tau") == [(4, 2.5)]
    assert texts(tmp_path) == {"report/text_summary": b"the report.md"}
    wandb.teardown()  # its service has written all by then
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    written = next(folder.glob("run-*.wandb")).read_bytes()
    for expected in ("eval/final_tau", "eval/final_lossless/identical", "eval/lossless", *tracking.REPORT):
        assert expected.encode() in written
