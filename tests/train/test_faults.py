"""What may befall a run: each time nothing but the unfinished step is lost, and what went wrong is said in a line."""

import signal
from pathlib import Path

import pytest

from tests.train import driver, jobs
from tests.train.undisturbed import BATCHES, STEPS, Toy, steps
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
    assert checkpoints(place / "out")[-2:] == ["step-00000012", "step-00000016"]


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
