"""The training loop: optimiser steps, the acceptance length measured on the way, the best head kept."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batches import Batches
from data.features import FeatureSource
from heads.base import frozen_count, parameter_count
from heads.store import save_head
from inference.bare import Bare
from inference.target import Target
from train import adapt, checkpoint
from train.acceptance import Judge
from train.checkpoint import Checkpoint
from train.config import RunConfig
from train.step import Stepper
from train.track import Tracker


class Loop:
    """One run, on every process alike; the main process alone writes, and measures unless that takes all of them."""

    def __init__(
        self, run: RunConfig, accelerator: Accelerator, target: Target | Bare, head: nn.Module, batches: Batches,
        source: FeatureSource, prompts: list[list[int]], resolved: dict[str, Any],
    ) -> None:  # fmt: skip
        self.run, self.accelerator, self.target, self.head = run, accelerator, target, head
        self.judge = Judge(target, prompts, run) if isinstance(target, Target) and run.trainer.eval_prompts else None
        together = isinstance(target, Target) and target.placed.together
        self.judges = accelerator.is_main_process or together  # all decode the same, so that passes meet
        self.source, self.out = source, Path(run.out)
        self.step = Stepper(run, accelerator, head, batches, source, target.ends.hidden_size)
        self.start, self.progress = 0, {"best_tau": 0.0, "best_step": 0, "stale": 0, "seconds": 0.0, "stall": 0.0}
        if run.resume:
            self.load()
        self.stopping = False
        self.flops: int | None = None
        self.tracker = Tracker(
            self.out, active=accelerator.is_main_process, steps=run.trainer.steps, start=self.start,
            wandb_mode=run.trainer.wandb, config=resolved,
        )  # fmt: skip

    def load(self) -> None:
        """Continue from the newest checkpoint that loads, if there is one."""
        found = checkpoint.newest(self.out / "checkpoints")
        if found is None:
            return
        try:
            self.head.load_state_dict(found.weights)
        except RuntimeError as error:
            raise ValueError(
                f"{self.out}: its checkpoints are of a head with other parts; resume=true goes on with the "
                "overrides that the run was started with"
            ) from error
        self.step.average.weights = {k: v.to(self.accelerator.device) for k, v in found.average.items()}
        self.step.optimizer.load_state_dict(found.optimizer)
        self.start, self.progress = found.step, self.progress | found.progress

    def save(self, step: int) -> None:
        """Write a checkpoint on the main process."""
        if self.accelerator.is_main_process:
            weights = {k: v.detach() for k, v in self.head.state_dict().items()}
            state = Checkpoint(
                step, weights, self.step.average.weights, self.step.optimizer.state_dict(), self.progress
            )
            checkpoint.save(self.out / "checkpoints", state, self.run.trainer.keep)

    def train(self) -> None:
        """Run all steps; on SIGTERM write a checkpoint and exit with status 143."""
        trainer = self.run.trainer
        previous = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        try:
            for step in range(self.start, trainer.steps):
                done, stopped = step + 1, self.take(step)
                if done % trainer.eval_every == 0 or done == trainer.steps:
                    stopped = self.measure(done) or stopped
                elif trainer.estimate_every is not None and done % trainer.estimate_every == 0:
                    self.estimate(done)
                if done % trainer.save_every == 0 or done == trainer.steps or stopped:
                    self.save(done)
                if stopped and self.stopping:
                    raise SystemExit(143)
                if stopped:
                    self.write_cost(done)
                    self.tracker.say(f"stopped at step {done}: no better τ in {trainer.patience} measurements")
                    break
            else:
                if self.start < trainer.steps:  # a finished run that is resumed has written it
                    self.write_cost(trainer.steps)
        finally:
            if said := self.source.close():
                self.tracker.say(f"{said}; waited {self.progress['stall']:.1f} of {self.progress['seconds']:.1f} s")
            self.tracker.close()
            signal.signal(signal.SIGTERM, previous)

    def take(self, step: int) -> bool:
        """Take one step, note what it cost and did; return whether any process was told to stop."""
        begin, stall = time.perf_counter(), self.source.stall
        if step == self.start:
            taken, self.flops = self.step.counted(step, stopping=self.stopping)
        else:
            taken = self.step(step, stopping=self.stopping)
        self.progress["seconds"] += time.perf_counter() - begin
        self.progress["stall"] += self.source.stall - stall
        if taken.record is not None:
            self.tracker.log({"step": step + 1, **taken.record})
        return taken.stopped

    def write_cost(self, steps: int) -> None:
        """Write what the training has cost: matrix operations as counted in one step, seconds without measurements."""
        cost = {
            "parameters": parameter_count(self.head),
            "frozen_parameters": frozen_count(self.head),
            "steps": steps,
            "tokens": steps * self.run.trainer.batch_tokens,
            "flops": None if self.flops is None else self.flops * steps,
            "seconds": self.progress["seconds"],
            "stall_seconds": self.progress["stall"],
        }
        if self.accelerator.is_main_process:
            (self.out / "training.json").write_text(json.dumps(cost, indent=2) + "\n")

    def measure(self, step: int) -> bool:
        """Measure τ with the real verifier, keep the head if it is the best; return whether patience has run out."""
        patience = self.run.trainer.patience
        if self.judge is None:
            self.keep(self.step.average.state(self.head))
        elif self.judges:
            weights = self.step.average.state(self.head)
            head = decoding_copy(self.head, weights, self.target)
            found = self.judge.tau(head)
            tau = found["tau"]
            better = tau > self.progress["best_tau"]
            self.progress["stale"] = 0 if better else self.progress["stale"] + 1
            if better:
                self.progress |= {"best_tau": tau, "best_step": step}
                self.keep(weights)
            self.tracker.log({"step": step, **found, "best": better})
            low, high = found["tau_ci"] or (tau, tau)
            self.tracker.say(f"step {step}: τ {tau:.3f} [{low:.2f}, {high:.2f}]{'  (best, kept)' if better else ''}")
        self.accelerator.wait_for_everyone()
        own = self.progress["stale"] if self.accelerator.is_main_process else 0.0
        stale = torch.tensor([float(own)], device=self.accelerator.device)
        shared: Any = self.accelerator.reduce(stale, "sum")
        return patience is not None and bool(shared.item() >= patience)

    def keep(self, weights: dict[str, Tensor]) -> None:
        """Write a head with these weights to the run's folder."""
        if self.accelerator.is_main_process:
            head = decoding_copy(self.head, weights, None)
            save_head(self.out / "head", head, self.target.spec, vars(self.run.tree))

    def estimate(self, step: int) -> None:
        """Log what one pass over recorded text says of the head."""
        if self.judge is not None and self.judges:
            head = decoding_copy(self.head, self.step.average.state(self.head), self.target)
            self.tracker.log({"step": step, "estimate": self.judge.estimate(head)})


def decoding_copy(head: nn.Module, weights: dict[str, Tensor], target: Target | Bare | None) -> Any:
    """Return a plain copy of the head with these weights, in the target's dtype, or in its own without a target."""
    copy = adapt.plain(head, weights).eval().requires_grad_(False)
    return copy.to(target.device, target.dtype) if target else copy
