"""The training loop: optimiser steps, the acceptance length measured on the way, the best head kept."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batches import Batch, Batches
from data.features import FeatureSource, Given
from heads.base import Features, frozen_count, parameter_count
from heads.law import TopLaw
from heads.store import save_head
from inference.bare import Bare
from inference.target import Target
from train import adapt, checkpoint
from train.acceptance import Judge
from train.checkpoint import Checkpoint
from train.config import RunConfig
from train.flops import Flops
from train.losses import ObjectiveConfig
from train.objective import objective
from train.optim import Average, learning_rate, optimizer
from train.track import Tracker
from train.weights import Weights, draw_anchors, noisy, trainable, weights


class Loss(nn.Module):
    """The loss as a forward pass, since data-parallel wrappers synchronise gradients in `forward` alone."""

    def __init__(self, head: nn.Module, config: ObjectiveConfig, *, compiled: bool) -> None:
        super().__init__()
        self.head, self.config = head, config
        unroll: Any = head.unroll
        self.unroll = torch.compile(unroll) if compiled else unroll

    def forward(
        self, features: Features, weight: Tensor, anchors: Tensor | None, top: TopLaw | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draft from the rows and weigh what comes of it."""
        head: Any = self.head
        drafts = self.unroll(features, self.config.depths, anchors)
        return objective(head, drafts, features, weight, self.config, top=top)


class Loop:
    """One run, on every process alike; the main process alone measures and writes."""

    def __init__(
        self, run: RunConfig, accelerator: Accelerator, target: Target | Bare, head: nn.Module, batches: Batches,
        source: FeatureSource, prompts: list[list[int]], resolved: dict[str, Any],
    ) -> None:  # fmt: skip
        self.run, self.accelerator, self.target, self.head, self.batches = run, accelerator, target, head, batches
        self.judge = Judge(target, prompts, run) if isinstance(target, Target) and run.trainer.eval_prompts else None
        self.source, self.out = source, Path(run.out)
        self.average = Average(head, run.trainer.ema)
        self.optimizer: Any
        self.module, self.optimizer = accelerator.prepare(
            Loss(head, run.objective, compiled=run.trainer.compile), optimizer(head, run.trainer)
        )
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
        self.average.weights = {k: v.to(self.accelerator.device) for k, v in found.average.items()}
        self.optimizer.load_state_dict(found.optimizer)
        self.start, self.progress = found.step, self.progress | found.progress

    def save(self, step: int) -> None:
        """Write a checkpoint on the main process."""
        if self.accelerator.is_main_process:
            weights = {k: v.detach() for k, v in self.head.state_dict().items()}
            state = Checkpoint(step, weights, self.average.weights, self.optimizer.state_dict(), self.progress)
            checkpoint.save(self.out / "checkpoints", state, self.run.trainer.keep)

    def train(self) -> None:
        """Run all steps; on SIGTERM write a checkpoint and exit with status 143."""
        trainer = self.run.trainer
        previous = signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        try:
            for step in range(self.start, trainer.steps):
                begin = time.perf_counter()
                stopped = self.counted(step) if step == self.start else self.step(step)
                done = step + 1
                self.progress["seconds"] += time.perf_counter() - begin
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

    def step(self, step: int) -> bool:
        """Take one optimiser step on the global batch; return whether any process was told to stop."""
        begin, stall = time.perf_counter(), self.source.stall
        trainer, device = self.run.trainer, self.accelerator.device
        micro = [self.drawn(batch, step) for batch in self.batches(step)]
        mine = sum(torch.stack([each.amount, each.trained.sum((1, 2))]) for _, _, each in micro)
        assert isinstance(mine, Tensor)
        flag = torch.tensor([float(self.stopping)])
        # One reduction tells every process the global batch's numbers and whether one of them must stop.
        shared: Any = self.accelerator.reduce(torch.cat([mine.flatten(), flag]).to(device), "sum")
        (amount, trained), stopped = shared[:-1].view(2, -1).clamp_min(1), bool(shared[-1] > 0)
        totals: dict[str, Tensor] = {}
        for i, ((batch, anchors, weight), given) in enumerate(zip(micro, self.source(step), strict=True)):
            scaled = weight.row.to(device) / amount[:, None, None]
            loss, sums = self.backward(given, number(batch, step), anchors, scaled, last=i + 1 == len(micro))
            for name, value in {"loss": loss.detach().expand(len(trained)), **sums}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norm = self.accelerator.clip_grad_norm_(self.module.parameters(), trainer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update(self.head)
        if (step + 1) % trainer.log_every == 0:
            packed: Any = self.accelerator.reduce(torch.stack(list(totals.values())), "sum")
            means = {
                name: each if name == "loss" else each / trained for name, each in zip(totals, packed, strict=True)
            }
            spent = time.perf_counter() - begin, self.source.stall - stall
            self.report(step, means, float(norm), int(trained[0]), spent)
        self.progress["stall"] += self.source.stall - stall
        return stopped

    def counted(self, step: int) -> bool:
        """Take a step and count its floating-point operations, the target's and the backward pass's included."""
        if self.run.trainer.compile:
            return self.step(step)
        counter: Any = Flops
        with counter() as count:
            stopped = self.step(step)
        self.flops = count.total * self.accelerator.num_processes
        return stopped

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

    def rate(self, step: int) -> float:
        """Return the step's learning rate at this target's width."""
        return learning_rate(step, self.run.trainer) * self.run.trainer.lr_width / self.target.ends.hidden_size

    def drawn(self, batch: Batch, step: int) -> tuple[Batch, Tensor | None, Weights]:
        """Return a micro-batch with the rows that are drafted from in this step, and what each counts."""
        config = self.run.objective
        useful = trainable(batch.document, batch.mask, config.depths).any(0)
        anchors = draw_anchors(useful, config.anchors, self.run.trainer.seed, number(batch, step))
        return batch, anchors, weights(batch.document, batch.mask, anchors, config)

    def backward(
        self, given: Given, drawn: Tensor, anchors: Tensor | None, weight: Tensor, *, last: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add one micro-batch's gradient, `drawn` its rows' numbers; processes average theirs, hence the factor."""
        config, device, features = self.run.objective, self.accelerator.device, given.features
        if self.accelerator.mixed_precision == "no":
            dtype = next(self.head.parameters()).dtype
            features = features._replace(hidden=features.hidden.to(dtype), last=features.last.to(dtype))
        features = noisy(features, config.noise, self.run.trainer.seed, drawn)
        anchors = None if anchors is None else anchors.to(device)

        # What dropout leaves out follows from seed and step alone, as all that is drawn: a resumed run sees the same.
        torch.manual_seed((self.run.trainer.seed * 1_000_003 + int(drawn[0])) % 2**63)

        def go() -> tuple[Tensor, dict[str, Tensor]]:
            with self.accelerator.autocast():
                loss, sums = self.module(features, weight, anchors, given.top)
            self.accelerator.backward(loss * self.accelerator.num_processes)
            return loss, sums

        if last:
            return go()
        with self.accelerator.no_sync(self.module):
            return go()

    def report(self, step: int, means: dict[str, Tensor], norm: float, rows: int, spent: tuple[float, float]) -> None:
        """Log one step: the loss, its parts, the accuracy per depth, and the seconds it took, and waited for reads."""
        seconds, stall = spent
        loss = float(means.pop("loss")[0])
        accuracy = means.pop("accuracy").tolist()
        record = {
            "step": step + 1,
            "loss": loss,
            "accuracy": accuracy,
            **{name: value.tolist() for name, value in means.items()},
            "lr": self.rate(step),
            "grad_norm": norm,
            "rows": rows,
            "tokens_per_second": self.run.trainer.batch_tokens / seconds,
            "stall_seconds": stall,
        }
        self.tracker.log(record)

    def measure(self, step: int) -> bool:
        """Measure τ with the real verifier, keep the head if it is the best; return whether patience has run out."""
        patience = self.run.trainer.patience
        if self.judge is None:
            self.keep(self.average.state(self.head))
        elif self.accelerator.is_main_process:
            weights = self.average.state(self.head)
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
        stale = torch.tensor([float(self.progress["stale"])], device=self.accelerator.device)
        shared: Any = self.accelerator.reduce(stale, "sum")
        return patience is not None and bool(shared.item() >= patience)

    def keep(self, weights: dict[str, Tensor]) -> None:
        """Write a head with these weights to the run's folder."""
        if self.accelerator.is_main_process:
            head = decoding_copy(self.head, weights, None)
            save_head(self.out / "head", head, self.target.spec, vars(self.run.tree))

    def estimate(self, step: int) -> None:
        """Log what one pass over recorded text says of the head."""
        if self.judge is not None and self.accelerator.is_main_process:
            head = decoding_copy(self.head, self.average.state(self.head), self.target)
            self.tracker.log({"step": step, "estimate": self.judge.estimate(head)})


def number(batch: Batch, step: int) -> Tensor:
    """Return the rows' numbers in the run, from which what is drawn for them follows."""
    return batch.index + step * 10_000_019


def decoding_copy(head: nn.Module, weights: dict[str, Tensor], target: Target | Bare | None) -> Any:
    """Return a plain copy of the head with these weights, in the target's dtype, or in its own without a target."""
    copy = adapt.plain(head, weights).eval().requires_grad_(False)
    return copy.to(target.device, target.dtype) if target else copy
