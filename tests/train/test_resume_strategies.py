"""Two processes under each strategy, told to stop amid an accumulation, go on bit for bit; and then one goes on."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.train import jobs
from tests.train.undisturbed import Toy, records, steps
from train.config import STRATEGIES

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
    assert "no longer bit for bit" not in end(toy, place, word, "resume=true")
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
