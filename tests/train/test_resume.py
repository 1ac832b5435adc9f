"""A run that was killed or told to stop goes on under each strategy: the same losses, each step and row once.

Whatever befalls it, nothing but the unfinished step is lost, and what went wrong is said in a line.
"""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads.common.files import read_checked, write_checked
from tests.train import driver, jobs
from tests.train.undisturbed import BATCHES, STEPS, Toy, records, steps, taus
from train import checkpoint
from train.config import STRATEGIES
from train.distributed.processes import RunLock

POINTS = random.Random(7).sample(range(6, STEPS * BATCHES - 6), 8)  # micro-batches at which a run is ended
SIGNALS = [signal.SIGKILL, signal.SIGINT, signal.SIGTERM]
CASES = [
    pytest.param(point, SIGNALS[i % 3], marks=[] if i < 2 else [pytest.mark.slow]) for i, point in enumerate(POINTS)
]


@pytest.mark.parametrize(("point", "kind"), CASES)
def test_ended_at_any_micro_batch(toy: Toy, point: int, kind: signal.Signals) -> None:
    place = toy.new()
    job = toy.start(place, hooks=("slow",))[0]
    job.until(place / "batches", point)
    job.signal(kind)
    status, done = job.end(), len(steps(place / "out"))
    assert done < STEPS, "the run was over before the signal: nothing was tested"
    if kind != signal.SIGKILL:
        assert status == 143, job.printed()
        assert f"stopped by {kind.name}, checkpoint at step {done}; resume=true continues" in job.printed()
        assert (place / "out" / "checkpoints" / f"step-{done:08d}").is_dir(), "the unfinished step alone may be lost"
    else:
        assert status == -signal.SIGKILL
    toy.start(place, "resume=true")[0].finish()
    toy.same(place)


def test_a_best_tau_of_other_prompts_does_not_decide(toy: Toy) -> None:
    place, words = toy.new(), ("trainer.eval_every=2", "trainer.save_every=2", "trainer.lr=0")
    toy.start(place, *words, "trainer.steps=2")[0].finish()
    (path,) = checkpoint.checkpoints(place / "out" / "checkpoints")
    state = read_checked(path / checkpoint.STATE)
    write_checked(path / checkpoint.STATE, state | {"progress": state["progress"] | {"best_tau": 99.0}})
    said = toy.start(place, *words, "trainer.steps=4", "trainer.eval_prompts=1", "resume=true")[0].finish()
    assert (
        "best τ so far, 99.000 at step 2, does not compare with those to come: trainer.eval_prompts (2, now 1)" in said
    )
    path = checkpoint.checkpoints(place / "out" / "checkpoints")[-1]
    assert read_checked(path / checkpoint.STATE)["progress"]["best_step"] == 4


@pytest.mark.slow
def test_a_run_out_of_patience_stays_so(toy: Toy) -> None:
    """Also at another number of processes; and the best checkpoint outlives newer ones."""
    place = toy.new()
    words = ("trainer.patience=2", "trainer.eval_every=2", "trainer.save_every=2", "trainer.lr=0", "trainer.keep=1")
    toy.start(place, *words)[0].finish()
    out = place / "out"
    assert list(taus(out)) == [2, 4, 6]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000006"]
    jobs_ = toy.start(place, *words, "resume=true", world=2)
    assert [job.end() for job in jobs_] == [0, 0], jobs_[0].printed()
    assert len(steps(out)) == 6
    assert json.loads((out / "training.json").read_text())["steps"] == 6
    assert torch.tensor(list(taus(out).values())).unique().numel() == 1


HERE = (
    "trainer.steps=8",
    "trainer.micro_tokens=32",
    "trainer.eval_every=4",
    "trainer.eval_prompts=1",
    "trainer.ema=0.5",
)


def end(toy: Toy, place: Path, *words: str, hooks: tuple[str, ...] = (), world: int = 2, status: int = 0) -> str:
    """Run to the end on so many processes; return what the first printed."""
    both = toy.start(place, *HERE, *words, hooks=hooks, world=world)
    assert [job.end() for job in both] == [status] * world, "".join(job.printed() for job in both)
    return both[0].printed()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_told_to_stop_amid_an_accumulation(toy: Toy, strategy: str) -> None:
    whole, place, word = toy.new(), toy.new(), f"launcher.strategy={strategy}"
    end(toy, whole, word)
    assert "checkpoint at step 5" in end(toy, place, word, hooks=("told@1",), status=143)
    one = toy.new()
    shutil.copytree(place / "out", one / "out")
    assert "not bit-identical" not in end(toy, place, word, "resume=true")
    assert jobs.losses(place / "out") == jobs.losses(whole / "out")
    assert steps(place / "out") == list(range(1, 9))
    ours, theirs = (load_file(run / "out" / "head" / "model.safetensors") for run in (place, whole))
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert "processes (2, now 1)" in end(toy, one, "resume=true", world=1)
    found, expected = jobs.losses(one / "out"), jobs.losses(whole / "out")
    assert all(abs(found[step] / expected[step] - 1) < 1e-4 for step in range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp", "zero2", "zero3"])
def test_a_step_that_is_bad_on_one_process_alone(toy: Toy, strategy: str) -> None:
    """All skip it, counted once; or all stop, the main process says why, and the run goes on as if it had not."""
    skipped, stopped, words = toy.new(), toy.new(), (f"launcher.strategy={strategy}", "trainer.eval_prompts=0")
    assert "1 bad steps skipped" in end(toy, skipped, *words, hooks=("poisoned@1",))
    pair = toy.start(stopped, *HERE, *words, "trainer.on_bad_step=stop", hooks=("poisoned@1",), world=2)
    assert [job.end() for job in pair] == [2, 2]
    said = [[line for line in job.printed().splitlines() if line.startswith("error:")] for job in pair]
    assert [len(each) for each in said] == [1, 0], said
    assert "stopped before step 6: its loss is nan; its batch is in" in said[0][0]
    assert "bad steps skipped" not in pair[0].printed()
    assert "1 bad steps skipped" in end(toy, stopped, *words, "resume=true", hooks=("poisoned@1",))
    for place in (skipped, stopped):
        assert [record["step"] for record in records(place / "out") if record.get("skipped")] == [6]
        assert json.loads((place / "out" / "training.json").read_text())["skipped"] == 1
        losses = jobs.losses(place / "out")
        assert losses.pop(6) is None
        assert all(loss > 0 for loss in losses.values())
    assert jobs.losses(stopped / "out") == jobs.losses(skipped / "out")


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
