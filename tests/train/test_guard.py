"""Bad steps: found, kept to the disk, skipped without a trace or the end of the run."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.features.source import FeatureSource, MicroBatch
from heads.base import Features
from tests.train import jobs
from tests.train.jobs import configured, resolved
from train import build, checkpoint
from train import run as runs
from train.loop import Loop
from train.step import BEGINNING, WINDOW, Guard

STEPS, BAD = 8, 3  # the bad one counts from 0
OPTIONS = [
    f"trainer.steps={STEPS}", "trainer.batch_tokens=128", "trainer.save_every=2", "trainer.keep=9", "trainer.ema=0.9",
    "trainer.eval_prompts=0", "eval.prompts=0",
]  # fmt: skip


class Poisoned:
    """Features as they are but for one packed row's, some of which are NaN."""

    def __init__(self, inner: FeatureSource, row: int) -> None:
        self.inner, self.batches, self.row, self.stall = inner, inner.batches, row, 0.0

    def __call__(self, step: int) -> list[MicroBatch]:
        return [micro._replace(read=partial(self.poisoned, micro)) for micro in self.inner(step)]

    def poisoned(self, micro: MicroBatch) -> Features:
        features = micro.read()
        features.last_hidden[micro.batch.index == self.row, :, 3:9] = float("nan")
        return features

    def close(self) -> str:
        return self.inner.close()


def poison(row: int) -> Any:
    """Return what takes the place of `train.build.source_for`."""
    inner = build.source_for
    return lambda *given: Poisoned(inner(*given), row)


class Job:
    """A toy run, and the packed row that its bad step alone has."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.overrides = folder, [*jobs.make(folder), *OPTIONS]
        self.rows: list[int] = []
        take = Loop.train_step

        def noted(loop: Loop, step: int) -> bool:
            self.rows = loop.source.batches.sequences(BAD).tolist()
            return take(loop, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Loop, "train_step", noted)
            self.train("good")

    def train(self, name: str, *overrides: str) -> Path:
        out = self.folder / name
        runs.train(resolved([*self.overrides, f"out={out}", *overrides]))
        return out


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module")
def skipped(job: Job) -> Path:
    """Return the folder of a run whose one bad step was skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "source_for", poison(job.rows[2]))
        return job.train("skipped")


def records(out: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in found if "loss" in record}


def same_head(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(out / "head" / "model.safetensors") for out in (one, other))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_only_the_bad_step_is_skipped_and_is_as_if_not_taken(
    job: Job, skipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Loop.train_step
    monkeypatch.setattr(Loop, "train_step", lambda loop, step: step == BAD or take(loop, step))
    without = job.train("without")
    found, expected = records(skipped), records(without)
    assert [step for step, record in found.items() if record.get("skipped")] == [BAD + 1]
    assert found.pop(BAD + 1)["loss"] is None
    assert {step: record["loss"] for step, record in found.items()} == {
        step: record["loss"] for step, record in expected.items()
    }
    assert same_head(skipped, without)
    assert not same_head(skipped, job.folder / "good")
    assert json.loads((skipped / "training.json").read_text())["skipped"] == 1


def test_a_run_with_a_skipped_step_resumes_bit_for_bit(
    job: Job, skipped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = job.folder / "resumed"
    shutil.copytree(skipped, out)
    for kept in (out / "checkpoints").glob("step-*"):
        if int(kept.name.removeprefix("step-")) > BAD + 1:
            shutil.rmtree(kept)
    shutil.rmtree(out / "head")
    monkeypatch.setattr(build, "source_for", poison(job.rows[2]))
    job.train("resumed", "resume=true")
    assert [record["loss"] for record in records(out).values()] == [r["loss"] for r in records(skipped).values()]
    assert same_head(out, skipped)
    assert "1 bad steps skipped; their batches are in" in capsys.readouterr().err


def test_the_batch_is_kept(job: Job, skipped: Path) -> None:
    kept = load_file(skipped / "bad" / f"step-{BAD + 1}.safetensors")
    assert kept["row"].tolist() == job.rows
    assert {name: tuple(part.shape) for name, part in kept.items() if name != "row"} == dict.fromkeys(
        ("token", "document", "mask"), (4, 32)
    )
    told = json.loads((skipped / "bad" / f"step-{BAD + 1}.json").read_text())
    assert (told["step"], told["seed"], told["why"]) == (BAD + 1, 0, "its loss is nan")
    assert len(list((skipped / "bad").iterdir())) == 2


def test_a_run_that_is_to_stop_stops_before_the_bad_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    out = job.folder / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(build, "source_for", poison(job.rows[0]))
        with pytest.raises(ValueError, match=rf"^stopped before step {BAD + 1}: its loss is nan; its batch") as caught:
            job.train("stopped", "trainer.on_bad_step=stop")
    assert "\n" not in str(caught.value)
    assert sorted(records(out)) == [1, 2, 3, 4]
    kept = json.loads((out / "checkpoints" / f"step-{BAD:08d}" / "state.json").read_text())
    assert '"skipped": 0, "in_a_row": 0' in json.dumps(kept), "it was not skipped: the resumed run judges it again"
    job.train("stopped", "resume=true")  # the data are mended: nothing of the bad step is left
    assert [record["loss"] for record in records(out).values()] == [
        record["loss"] for record in records(job.folder / "good").values()
    ]
    assert same_head(out, job.folder / "good")


def test_bad_steps_without_end_stop_a_run(job: Job) -> None:
    with pytest.raises(ValueError, match="2 bad steps in a row, "):
        job.train("endless", "trainer.bad_steps=2", "trainer.lr=1e18", "trainer.warmup=0", "trainer.clip=1e9")


def refused() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 2.00 GiB.")


def test_a_step_without_memory_ends_the_run_in_one_line_and_it_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As torch's allocator fails, and Python's own."""
    take, out = Loop.train_step, tmp_path / "crowded"
    words = [f"out={out}", "trainer.steps=6", "resume=true"]
    for fails in (refused, lambda: bytearray(2**62)):
        with monkeypatch.context() as patch:
            patch.setattr(
                Loop, "train_step", lambda loop, step, fails=fails: fails() if step == 5 else take(loop, step)
            )
            with pytest.raises(
                ValueError, match=r"out of memory \(.*\); resume=true .* trainer\.micro_tokens"
            ) as caught:
                job.train("crowded", *words)
        assert "\n" not in str(caught.value)
        assert checkpoint.checkpoints(out / "checkpoints")[-1].name == "step-00000004"
    job.train("crowded", *words, "trainer.micro_tokens=32")
    assert sorted(records(out)) == [1, 2, 3, 4, 5, 6]


def guard(spike: float | None = None) -> Guard:
    run = configured(["data.length=32", f"trainer.spike={'null' if spike is None else spike}"])
    return Guard(run.trainer, dict(BEGINNING))


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [(1.0, 2.0, None), (float("nan"), 2.0, "its loss is nan"), (1.0, float("inf"), "the norm of its gradient is inf")],
)
def test_what_is_not_finite_is_bad(loss: float, norm: float, why: str | None) -> None:
    watching = guard()
    watching.progress["skipped"] = 99  # of which none was in a row
    assert watching.check(loss, norm) == why
    assert watching.progress["skipped"] == 99 + (why is not None)
    assert watching.progress["recent"] == ([1.0] if why is None else [])
    assert not watching.stops()


def test_a_spike_is_measured_by_the_recent_median() -> None:
    watching = guard(3.0)
    assert watching.check(900.0, 1.0) is None, "before the window is full nothing is a spike"
    for step in range(WINDOW - 1):
        assert watching.check(2.0 + (step % 2) / 10, 1.0) is None
    again = Guard(watching.config, json.loads(json.dumps(watching.progress)))  # as a checkpoint keeps it
    assert watching.check(5.9, 1.0) is None
    for each in (watching, again):
        assert each.check(8.4, 1.0) == f"its loss is 8.4, 4.1 times the median of the last {WINDOW}"
        assert each.progress["in_a_row"] == 1
        assert len(each.progress["recent"]) == WINDOW
    assert watching.check(2.0, 1.0) is None
    assert (watching.progress["skipped"], watching.progress["in_a_row"]) == (1, 0)
    young = guard(3.0)
    assert [young.check(loss, 1.0) for loss in (1.0, 9.0)] == [None, None]
    calm = guard()
    assert all(calm.check(loss, 1.0) is None for loss in [1.0] * WINDOW + [1e9])
