"""What may befall a run: each time nothing but the unfinished step is lost, and what went wrong is said in a line."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.train import driver, jobs
from tests.train.jobs import resolved
from tests.train.undisturbed import BATCHES, STEPS, Toy, steps
from train import run as runs
from train.distributed.processes import RunLock

ENDED = "another process has ended, or did not answer within trainer.timeout="


def errors(job: driver.Job) -> list[str]:
    assert "Traceback" not in job.printed(), job.printed()
    return [line for line in job.printed().splitlines() if line.startswith("error:")]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_killed_while_a_checkpoint_is_written(toy: Toy) -> None:
    place = toy.new()
    job = toy.start(place, hooks=("slow", "slow_disk"))[0]
    job.until(place / "writing", 2)
    job.until(place / "batches", 9 * BATCHES)
    assert len(steps(place / "out")) >= 8, "training waited for the disk"
    with pytest.raises(ValueError, match=f"another run writes to it, process {job.process.pid} on .* since 20"):
        RunLock(place / "out").take()
    job.signal(signal.SIGKILL)
    job.end()
    left = checkpoints(place / "out")
    assert left[0].startswith(".partial-00000008")
    assert left[1:] == ["step-00000004"]
    toy.start(place, "resume=true")[0].finish()
    toy.same(place)
    assert checkpoints(place / "out") == ["step-00000008", "step-00000012", "step-00000016"]


def other_weights(head: Path) -> None:
    """Write what is a head too, as one that was measured after the last checkpoint and then lost with its run."""
    tensors = load_file(head / "model.safetensors")
    save_file({name: value + value.is_floating_point() for name, value in tensors.items()}, head / "model.safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        lambda head: os.truncate(head / "model.safetensors", 1000),
        other_weights,
    ],
    ids=["gone", "cut", "another"],
)
def test_a_finished_run_gets_the_head_of_its_best_step_back(
    toy: Toy, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    place = toy.new()
    shutil.copytree(toy.folder / "whole", place / "out")
    again = resolved([*toy.overrides, f"out={place / 'out'}", "resume=true"])
    damage(place / "out" / "head")
    runs.train(again)
    toy.same(place)
    assert caplog.text.count("is not the head of its best step, and is written again from step-00000008") == 1
    caplog.clear()
    shutil.rmtree(place / "out" / "checkpoints" / "step-00000008")
    runs.train(again)
    toy.same(place)
    assert not caplog.text, "a head that is whole needs no checkpoint"
    damage(place / "out" / "head")
    if damage is not other_weights:  # which no one can tell without the checkpoint
        with pytest.raises(ValueError, match=r"its head is lost \(.*its best step \(.*overwrite=true") as caught:
            runs.train(again)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [1, 0])
def test_a_process_dies(toy: Toy, dead: int) -> None:
    place = toy.new()
    pair = toy.start(place, hooks=("slow",), world=2)
    pair[0].until(place / "batches", 6 * BATCHES)
    pair[dead].signal(signal.SIGKILL)
    left = pair[1 - dead]
    assert left.end(within=30) == 2, left.printed()
    said = errors(left)
    assert len(said) == dead, "the main process says it, or the launcher, which is not here"
    assert all(ENDED in error for error in said)
    pair = toy.start(place, "resume=true", world=2)
    assert [job.end() for job in pair] == [0, 0], pair[0].printed()
    if dead:
        whole = toy.new()
        both = toy.start(whole, world=2)
        assert [job.end() for job in both] == [0, 0]
        assert jobs.losses(place / "out") == jobs.losses(whole / "out")
    assert steps(place / "out") == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_process_hangs(toy: Toy) -> None:
    place = toy.new()
    pair = toy.start(place, "trainer.timeout=6", hooks=("slow",), world=2)
    pair[0].until(place / "batches", 6 * BATCHES)
    pair[1].signal(signal.SIGSTOP)
    try:
        assert pair[0].end(within=40) == 2
    finally:
        pair[1].process.kill()
    (error,) = errors(pair[0])
    assert ENDED in error
    assert "did not answer within trainer.timeout=6 s (" in error
