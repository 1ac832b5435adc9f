"""A run that was killed or told to stop goes on: the same losses, every step once, every row once."""

import json
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heads.common.files import write_checked
from tests.train import jobs
from tests.train.undisturbed import BATCHES, STEPS, Toy, steps, taus
from train.checkpoints import format
from train.loop import Loop

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
        assert f"stopped by {kind.name}, checkpoint at step {done}; resume=true goes on" in job.printed()
        assert (place / "out" / "checkpoints" / f"step-{done:08d}").is_dir(), "the unfinished step alone may be lost"
    else:
        assert status == -signal.SIGKILL
    toy.start(place, "resume=true")[0].finish()
    toy.same(place)


@pytest.mark.slow
def test_told_to_stop_amid_a_measurement(toy: Toy) -> None:
    place = toy.new()
    job = toy.start(place, hooks=("measured",))[0]
    job.until(place / "prompts", 1)
    job.signal(signal.SIGTERM)
    assert job.end() == 143
    assert (place / "prompts").read_text() == "\n", "it went on to the next prompt"
    assert taus(place / "out") == {}
    toy.start(place, "resume=true")[0].finish()
    toy.same(place)


@pytest.mark.slow
def test_one_process_is_told_and_all_stop(toy: Toy) -> None:
    """Then one goes on, then two again: every row of every step is trained on once."""
    place = toy.new()
    pair = toy.start(place, hooks=("slow", "rows"), world=2)
    pair[0].until(place / "batches", 4 * BATCHES + 2)
    pair[1].signal(signal.SIGTERM)
    assert [job.end() for job in pair] == [143, 143], pair[0].printed()
    assert pair[0].printed().count("stopped by SIGTERM, checkpoint at step") == 1
    first = len(steps(place / "out"))
    one = toy.start(place, "resume=true", hooks=("slow", "rows"))[0]
    one.until(place / "batches", 9 * BATCHES)
    one.signal(signal.SIGTERM)
    assert one.end() == 143
    assert "processes (2, now 1)" in one.printed()
    second = len(steps(place / "out"))
    pair = toy.start(place, "resume=true", hooks=("rows",), world=2)
    assert [job.end() for job in pair] == [0, 0], pair[0].printed()
    assert first < second < STEPS
    found = jobs.losses(place / "out")
    assert steps(place / "out") == list(range(1, STEPS + 1))
    assert all(abs(found[step] - toy.losses[step]) < 1e-4 * toy.losses[step] for step in found)
    assert trained(place, [0, first, second, STEPS]) == trained_alone(toy)


def trained(place: Path, embeddings: list[int]) -> dict[int, list[int]]:
    """Return the rows of every step, of each session those that it finished."""
    sessions: list[list[tuple[int, int]]] = []
    for file in sorted(place.glob("rows-*"), key=lambda each: int(each.name.split("-")[1])):
        lines = [(int(step), int(row)) for step, row in map(str.split, file.read_text().splitlines())]
        if sessions and min(lines)[0] == min(sessions[-1])[0]:  # the other process of the same session
            sessions[-1] += lines
        else:
            sessions.append(lines)
    found: dict[int, list[int]] = {step: [] for step in range(embeddings[-1])}
    for lines, begin, end in zip(sessions, embeddings, embeddings[1:], strict=False):
        for step, row in lines:
            if begin <= step < end:
                found[step].append(row)
    return {step: sorted(rows) for step, rows in found.items()}


def trained_alone(toy: Toy) -> dict[int, list[int]]:
    """Return the rows of every step of an undisturbed run."""
    place = toy.new()
    toy.start(place, "trainer.eval_prompts=0", hooks=("rows",))[0].finish()
    rows = trained(place, [0, STEPS])
    assert len({row for each in rows.values() for row in each}) > 90
    return rows


@pytest.mark.slow
def test_what_may_change_and_what_may_not(toy: Toy) -> None:
    place = toy.new()
    toy.start(place, "trainer.steps=4", "trainer.eval_prompts=0")[0].finish()
    config = (place / "out" / "config.yaml").read_text()
    job = toy.start(place, "resume=true", "trainer.seed=99")[0]
    assert job.end() == 2
    (error,) = (line for line in job.printed().splitlines() if line.startswith("error:"))
    assert "now 99)" in error
    assert (place / "out" / "config.yaml").read_text() == config, "a run that was refused has left its mark"
    allowed = ("trainer.steps=6", "trainer.save_every=1", "trainer.eval_every=3", "trainer.eval_prompts=1")
    said = toy.start(place, "resume=true", *allowed, "trainer.lr=1e-3", "objective.depth_decay=0.5")[0].finish()
    assert "no longer bit for bit: trainer.steps (4, now 6), trainer.lr (0.003, now 0.001), objective.depth" in said
    assert steps(place / "out") == [1, 2, 3, 4, 5, 6]
    kept = sorted(path.name for path in (place / "out" / "checkpoints").iterdir())
    assert kept == ["step-00000005", "step-00000006"]


def test_a_best_tau_of_other_prompts_does_not_decide(toy: Toy) -> None:
    place, words = toy.new(), ("trainer.eval_every=2", "trainer.save_every=2", "trainer.lr=0")
    toy.start(place, *words, "trainer.steps=2")[0].finish()
    (path,) = format.checkpoints(place / "out" / "checkpoints")
    state = format.state_of(path)
    write_checked(path / format.STATE, state | {"progress": state["progress"] | {"best_tau": 99.0}})
    said = toy.start(place, *words, "trainer.steps=4", "trainer.eval_prompts=1", "resume=true")[0].finish()
    assert (
        "best τ so far, 99.000 at step 2, does not compare with those to come: trainer.eval_prompts (2, now 1)" in said
    )
    path = format.checkpoints(place / "out" / "checkpoints")[-1]
    assert format.state_of(path)["progress"]["best_step"] == 4


@pytest.mark.parametrize(("then", "measured", "best"), [({}, 2, 2.0), ({"a": 1}, 4, 2.0), ({"a": 1}, 2, 0.0)])
def test_a_best_tau_stays_where_nothing_else_is_to_be_compared(
    then: dict[str, int], measured: int, best: float
) -> None:
    """Of a checkpoint that does not say what it was measured on, or of a run that is over."""
    loop: Any = SimpleNamespace(
        progress={"best_tau": 2.0, "best_step": 2, "measured": measured}, conditions={"a": 2}, evaluator=object(),
        trainer=SimpleNamespace(steps=4), exhausted=lambda: False, control=SimpleNamespace(warn=str),
    )  # fmt: skip
    Loop.compare(loop, then)
    assert loop.progress["best_tau"] == best


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
