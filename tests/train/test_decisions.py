"""What a training decides and says of it: each branch with its numbers, at the limit and on either side of it."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from train.loop import Loop


def run_of(patience: int | None = 2) -> Any:
    """Return a loop's part that decides, with what it keeps, logs and says."""
    trainer = SimpleNamespace(patience=patience, eval_every=4, steps=10)
    loop: Any = SimpleNamespace(
        trainer=trainer, progress={"best_tau": 2.0, "best_step": 4, "stale": 1}, kept=[], lines=[]
    )
    loop.tracker = SimpleNamespace(log=loop.lines.append)
    loop.keep = loop.kept.append
    return loop


@pytest.mark.parametrize(
    ("tau", "better", "over"), [(2.0, False, True), (2.001, True, False), (1.5, False, True), (9.0, True, False)]
)
def test_the_best_head_is_kept_and_an_equal_one_is_no_better(
    tau: float, better: bool, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = run_of()
    monkeypatch.setattr("train.loop.print_above_bars", loop.lines.append)
    assert not Loop.exhausted(loop)
    measured = {"tau": tau, "tau_ci": (tau - 0.5, tau + 0.5)}
    loop.stepper = SimpleNamespace(state=SimpleNamespace(weights=lambda: {"w": torch.zeros(1)}))
    loop.evaluator = SimpleNamespace(tau=lambda _, halted: None if halted() else measured)
    loop.accelerator, loop.needs_all_ranks = SimpleNamespace(is_main_process=True), False
    loop.best_head = SimpleNamespace(decoding=dict)
    loop.control = SimpleNamespace(broadcast=dict, exchange=lambda over: (False, over), halted=lambda: False)
    Loop.measure(loop, 8)
    assert bool(loop.kept) == better
    assert loop.progress == {
        "best_tau": tau if better else 2.0, "best_step": 8 if better else 4, "stale": 0 if better else 2, "measured": 8,
    }  # fmt: skip
    assert Loop.exhausted(loop) == over
    assert not Loop.exhausted(run_of(None))
    assert loop.lines[0]["best"] is better
    mark = "  (best, kept)" if better else ""
    assert loop.lines[1] == f"step 8: τ {tau:.3f} [{tau - 0.5:.2f}, {tau + 0.5:.2f}]{mark}"


def test_what_is_measured() -> None:
    assert [step for step in range(1, 11) if Loop.due(run_of(), step)] == [4, 8, 10]


def test_the_best_step_has_a_checkpoint_though_none_is_due() -> None:
    loop, saved = run_of(None), list[int]()
    loop.trainer.save_every = 7
    loop.start, loop.saver, loop.save, loop.write_cost = 0, SimpleNamespace(finish=list), saved.append, str
    loop.train_step = loop.measure = lambda _: None  # the best step is 4, as `run_of` has it
    loop.due, loop.exhausted = partial(Loop.due, loop), partial(Loop.exhausted, loop)
    Loop.run_steps(loop)
    assert saved == [4, 7, 10]


def test_a_trainings_cost_counts_the_tokens_of_its_rollouts_too(tmp_path: Path) -> None:
    progress = {"flops": 100, "rollout_tokens": 30, "skipped": 2, "best_tau": 2.5, "seconds": 9.0, "stall": 1.5}
    step = SimpleNamespace(sizes=(11, 5))
    loop: Any = SimpleNamespace(
        stepper=step, progress=progress, out=tmp_path, saver=SimpleNamespace(seconds=0.25),
        source=SimpleNamespace(batches=SimpleNamespace(step_tokens=64)),
        accelerator=SimpleNamespace(is_main_process=True),
    )  # fmt: skip
    Loop.write_cost(loop, 7)
    assert json.loads((tmp_path / "training.json").read_text()) == {
        "parameters": 11, "frozen_parameters": 5, "steps": 7, "tokens": 7 * 64 + 30, "rollout_tokens": 30,
        "flops": 700, "skipped": 2, "best_tau": 2.5, "seconds": 9.0, "stall_seconds": 1.5, "save_seconds": 0.25,
    }  # fmt: skip
