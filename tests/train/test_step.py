"""A step in this process: what is drawn for it, the gradient it moves by, and the average that follows it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from heads.base import Features
from tests.train import strategy_job
from train import start
from train import step as steps
from train.config import RunConfig
from train.step import Stepper


def made(case: str, **trainer: Any) -> Stepper:
    """Return a case of `strategy_job` whose every step has the same rows, each in a batch of its own."""
    run: RunConfig = strategy_job.run_of(case, "ddp")
    objective = replace(run.objective, anchors=6, noise=0.2)
    run = replace(run, objective=objective, trainer=replace(run.trainer, **trainer))
    found = strategy_job.stepper(run, case, Accelerator(cpu=True))
    rows = found.source.batches.sequences(0)
    found.source.batches.sequences = lambda _: rows
    return found


def weights(of: Stepper) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in of.head.named_parameters() if p.requires_grad}


def test_every_step_draws_its_own_anchors_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Features, Tensor]] = []
    step = made("eagle3")
    forward = step.strategy.forward

    def noted(features: Features, weight: Tensor, anchors: Tensor, *rest: Any, **named: Any) -> Any:
        seen.append((features, anchors))
        return forward(features, weight, anchors, *rest, **named)

    monkeypatch.setattr(step.strategy, "forward", noted)
    drawn, dropout, sown = [], list[list[int]](), list[int]()
    monkeypatch.setattr(torch, "manual_seed", sown.append)
    for number in (0, 1, 0):
        step(number, halted=lambda: False)
        dropout.append([*sown])
        sown.clear()
        hidden = torch.cat([features.hidden for features, _ in seen])
        drawn.append((torch.cat([features.token for features, _ in seen]), hidden, torch.cat([a for _, a in seen])))
        seen.clear()
    (token, noise, anchors), (others, noise1, anchors1), (_, noise0, anchors0) = drawn
    assert token.equal(others), "the rows are the same, so that what differs was drawn"
    assert dropout[0] == dropout[2]
    assert len({*dropout[0], *dropout[1]}) == 2 * len(step.source(0)), "a micro-batch has a dropout of its own"
    assert not (noise == noise1).any()
    assert not anchors.equal(anchors1)
    assert noise.equal(noise0)
    assert anchors.equal(anchors0)


@pytest.mark.parametrize("case", ["eagle", "lora"])
def test_the_average_follows_the_step_and_is_what_is_kept(case: str) -> None:
    """Of a head with factors those that are averaged are merged, into weights that stay as they were."""
    step = made(case, ema=0.5)
    before = weights(step)
    step(0, halted=lambda: False)
    after = weights(step)
    kept = step.state.weights()
    assert kept.keys() == step.head.state_dict().keys()
    for name, value in kept.items():
        if name in before:
            torch.testing.assert_close(value, (before[name] + after[name]) / 2)
        else:
            assert value.equal(step.head.state_dict()[name])
    changed = [name for name in before if not kept[name].equal(before[name])]
    assert [name for name in changed if not kept[name].equal(after[name])] == changed != []
    averaged, last = (start.merged_copy(step.head, each).state_dict() for each in (kept, step.head.state_dict()))
    assert any(not averaged[name].equal(last[name]) for name in last)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_gradient_that_moves_the_weights_is_clipped(monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    step, norms = made("eagle3", clip=clip), []
    take = step.strategy.step

    def noted() -> None:
        norms.append(torch.stack([p.grad.norm() for p in step.head.parameters() if p.grad is not None]).norm().item())
        take()

    monkeypatch.setattr(step.strategy, "step", noted)
    record = step(0, halted=lambda: False).record
    assert record is not None
    assert record["grad_norm"] > 0.1
    assert norms == [pytest.approx(clip or record["grad_norm"], rel=1e-3)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_wider_target_has_a_lower_rate_and_moves_as_much_the_less(optimizer: str) -> None:
    """By 1 / width; Muon's update of a matrix is as large as AdamW's, a fifth of the rate (arXiv 2502.16982)."""
    moved = {}
    for factor in (1, 4):
        step = made("muon", optimizer=optimizer, warmup=0.0, weight_decay=0.0)
        step.width *= factor
        before, trainer = weights(step), step.trainer
        step(0, halted=lambda: False)
        rate = steps.learning_rate(0, trainer) * trainer.lr_width / step.width
        assert all(group["lr"] == pytest.approx(rate) for group in step.optimizer.param_groups)
        moved[factor] = {name: (p - before[name]).square().mean().sqrt().item() for name, p in weights(step).items()}
        if optimizer == "muon":
            assert moved[factor]["fusion.fc.weight"] == pytest.approx(0.2 * rate, rel=0.2)
    assert all(moved[1][name] == pytest.approx(4 * moved[4][name], rel=0.02) for name in moved[1])
