"""The training loop: optimiser steps, measurements of acceptance by the real verifier, the best head."""

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from eval.measures import metrics
from heads.base import NamedTensors, Tokens
from heads.common.errors import one_line
from heads.common.files import read_checked, write_json
from heads.common.progress import print_above_bars, progress
from heads.common.typed import Json
from heads.formats.store import save_head
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.target.embeddings_only import AnyTarget
from inference.target.target import Target
from inference.verification.sample import GREEDY
from train.checkpoint import STATE, Saver, differences, plain, restore
from train.config import TrainerConfig
from train.distributed.processes import RELEASE_EVERY, STOPPED, ProcessControl, release_freed
from train.optim import same_rates
from train.start import merged_copy
from train.step import BAD, BEGINNING, Stepper, keep_batch
from train.trackers import Tracker

COST = "training.json"
# Parts of out-of-memory messages: CUDA, torch on a CPU, cuBLAS.
NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
SCHEDULE = {f"trainer.{key}": key for key in ("steps", "warmup", "cooldown")}
SHARED = ("best_tau", "best_step", "stale", "measured")


def with_new_schedule(then: Json, now: Json, trainer: TrainerConfig, steps: int) -> Json:
    """Return an earlier run's numerics with this run's schedule, if the finished steps would be the same."""
    # `base_loss_share` depends on the number of steps, as the rate does.
    if not SCHEDULE.keys() <= then.keys() or then.get("objective.base_loss_share") is not None:
        return then
    schedule = {key: then[name] for name, key in SCHEDULE.items()}
    return then | {name: now[name] for name in SCHEDULE} if same_rates(trainer, schedule, steps) else then


class AcceptanceEvaluator:
    """Measures heads on the same prompts: `trainer.eval_prompts` held-out ones, sampled by the seed."""

    def __init__(
        self, target: Target, prompts: list[Tokens], trainer: TrainerConfig, tree: TreeConfig, name: str,
        drafter: Callable[[Any, TreeConfig, str], Drafter] = HeadDrafter,
    ) -> None:  # fmt: skip
        sampled = random.Random(trainer.seed).sample(range(len(prompts)), min(trainer.eval_prompts, len(prompts)))
        self.target = target
        self.prompts = [prompts[i] for i in sorted(sampled)]
        self.tree, self.name, self.seed, self.drafter = tree, name, trainer.seed, drafter
        self.groups = metrics.cluster_prompts(self.prompts)
        self.settings = RequestParams(trainer.eval_tokens, GREEDY)
        # What τ depends on except the head: values are comparable only under equal ones.
        self.eval_settings = {
            "trainer.eval_prompts": len(self.prompts), "trainer.eval_tokens": trainer.eval_tokens,
            "prompts' fingerprint": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16],
            **{f"tree.{key}": value for key, value in asdict(tree).items()},
        }  # fmt: skip

    def tau(self, head: Any, halted: Callable[[], bool]) -> Json | None:
        """Return τ of greedy decoding, pooled over the prompts, its 95 % interval, and P(a >= d).

        Return None if `halted` returned true before a prompt.
        """
        drafter = self.drafter(head, self.tree, self.name)
        generations = []
        try:
            for prompt in progress(self.prompts, "measuring τ"):
                if halted():
                    return None
                generations.append(speculate(self.target, drafter, prompt, self.settings))
        finally:
            self.target.idle.pop(drafter, None)  # frees the drafter's batch, which holds a copy of the head
        acceptance = metrics.acceptance(generations)
        return {
            "tau": acceptance.tau or 1.0,  # answers of one token have no steps
            "tau_ci": metrics.tau_interval(generations, self.seed, self.groups),
            "accepted_by_depth": acceptance.accepted_by_depth,
        }


@dataclass
class BestHead:
    """The best head of a run, saved in a folder of its own with its tree."""

    folder: Path
    head: nn.Module
    target: AnyTarget
    tree: TreeConfig

    def decoding(self, weights: NamedTensors) -> Any:
        """Return a copy for decoding, with these weights, in the target's dtype."""
        return merged_copy(self.head, weights).eval().requires_grad_(False).to(self.target.device, self.target.dtype)

    def write(self, weights: NamedTensors) -> None:
        """Write the head with these weights."""
        save_head(self.folder, merged_copy(self.head, weights), self.target.spec, vars(self.tree))


class Loop:
    """A run's loop, on every process; the main process writes, and only it measures unless passes need all.

    With `resumes` it resumes from the newest good checkpoint in `out`, if there is one: a change in the "settings" of
    `fingerprint` is refused, one in "arithmetic" reported. `best_head` is a `BestHead` or has its methods; without an
    `evaluator` the newest head is kept. Trackers show `config`.
    """

    def __init__(
        self, out: Path, stepper: Stepper, best_head: Any, evaluator: AcceptanceEvaluator | None, fingerprint: Json,
        *, resumes: bool, config: Json,
    ) -> None:  # fmt: skip
        self.stepper, self.best_head, self.evaluator, self.fingerprint = stepper, best_head, evaluator, fingerprint
        self.trainer, self.accelerator = stepper.trainer, stepper.accelerator
        # If the target's passes need all processes, all decode the same prompts.
        self.needs_all_ranks = isinstance(best_head.target, Target) and best_head.target.placed.needs_all_ranks
        self.source, self.out = stepper.source, out
        self.control = ProcessControl(self.accelerator, self.trainer.timeout)
        self.saver = Saver(self.out, self.control, self.trainer.keep)
        self.start, self.progress = 0, dict(BEGINNING)
        self.eval_settings = {} if evaluator is None else plain(evaluator.eval_settings)
        if resumes:
            self.load()
        self.stepper.restore(self.progress)
        self.tracker = Tracker(
            self.out, active=self.accelerator.is_main_process, steps=self.trainer.steps, start=self.start,
            trackers=self.trainer.trackers, config=config,
        )  # fmt: skip
        if self.start:
            print_above_bars(f"resuming from the checkpoint of step {self.start}")

    def load(self) -> None:
        """Resume from the newest good checkpoint, if there is one."""
        path = self.saver.newest()
        if path is None:
            return
        state = read_checked(path / STATE)
        try:
            restore(self.stepper.state, path)
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self.out}: its checkpoints are of a head with other parts; resume=true continues with the "
                "overrides that the run was started with"
            ) from error
        self.start = state["step"]
        self.progress = self.progress | state.get("progress", {})
        now = self.fingerprint["arithmetic"]
        then = with_new_schedule(state.get("arithmetic", {}), now, self.trainer, self.start)
        if changed := differences(then, now):
            self.control.warn(f"resumed with other numerics, so not bit-identical to an unbroken run: {changed}")
        then = state.get("conditions", {})  # the best τ is dropped if it was measured under other settings
        over = self.exhausted() or self.progress["measured"] >= self.trainer.steps
        if self.evaluator is None or over:
            self.eval_settings = then
        elif then and self.progress["best_tau"] and (changed := differences(then, self.eval_settings)):
            self.control.warn(
                f"the best τ so far, {self.progress['best_tau']:.3f} at step {self.progress['best_step']}, does not "
                f"compare with those to come: {changed}; the next measurement is the best again"
            )
            self.progress["best_tau"] = 0.0

    def save(self, step: int) -> None:
        """Write a checkpoint asynchronously, unless the step has one."""
        if self.saver.saved != step:
            content = {"progress": dict(self.progress), "conditions": self.eval_settings, **self.fingerprint}
            self.saver.save(self.stepper.state, step, content, self.progress["best_step"])

    def train(self) -> None:
        """Run all steps, on SIGTERM write a checkpoint and exit with status 143; refuse a full disk or memory."""
        with self.tracker.bar, self.control.listening(), self.control.guarded():
            try:
                self.run_steps()
            except OSError as error:
                raise ValueError(f"{self.out}: {one_line(error)}; free space and resume=true continues") from error
            except (RuntimeError, MemoryError) as error:
                if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in NO_MEMORY):
                    raise
                raise ValueError(
                    f"{self.out}: out of memory ({one_line(error)}); resume=true continues from the last checkpoint "
                    "with a lower trainer.micro_tokens, or with trainer.recompute=true"
                ) from error
            finally:
                self.saver.close()
                if summary := self.source.close():
                    print_above_bars(
                        f"{summary}; waited {self.progress['stall']:.1f} of {self.progress['seconds']:.1f} s"
                    )
                if skipped := self.progress["skipped"]:
                    print_above_bars(f"{skipped} bad steps skipped; their batches are in {self.out / BAD}")
                self.tracker.close()

    def run_steps(self) -> None:
        """Run the remaining steps, with measurements and checkpoints."""
        trainer, done = self.trainer, self.start
        late = bool(done) and self.due(done) and self.progress["measured"] < done
        if late:
            self.measure(done)
        for step in range(self.start, trainer.steps):
            if self.exhausted():
                break
            self.train_step(step)
            done = step + 1
            if self.due(done):
                self.measure(done)
            if done % trainer.save_every == 0 or done in (trainer.steps, self.progress["best_step"]):
                self.save(done)
        if self.exhausted():
            self.save(done)
            print_above_bars(f"stopped at step {done}: no better τ in {trainer.patience} measurements")
        self.saver.finish()
        if late or done > self.start or not (self.out / COST).exists():
            self.write_cost(done)

    def due(self, done: int) -> bool:
        """Return whether τ is measured after this step."""
        return done % self.trainer.eval_every == 0 or done == self.trainer.steps

    def exhausted(self) -> bool:
        """Return whether patience has run out."""
        patience = self.trainer.patience
        return patience is not None and self.progress["stale"] >= patience

    def halt(self, step: int) -> NoReturn:
        """Stop the run on a signal, with a checkpoint after `step` steps: with status 143 on every process."""
        self.save(step)
        self.saver.finish()
        print_above_bars(f"stopped by {self.control.signal}, checkpoint at step {step}; resume=true continues")
        raise SystemExit(STOPPED)

    def train_step(self, step: int) -> None:
        """Run one step and record its cost and outcome; stop on a signal."""
        begin, stall = time.perf_counter(), self.source.stall
        counts = step == self.start and self.progress["flops"] is None
        taken = (self.stepper.count_flops if counts else self.stepper)(step, halted=self.control.halted)
        if taken is None:
            self.halt(step)
        self.progress["seconds"] += time.perf_counter() - begin
        self.progress["stall"] += self.source.stall - stall
        if taken.record is not None:
            self.tracker.log({"step": step + 1, **taken.record})
        if (why := taken.bad) is not None:
            if self.accelerator.is_main_process:
                why += f"; its batch is in {keep_batch(self.out / BAD, self.source.batches, step, why)}"
            if remedy := self.stepper.guard.stops():
                self.progress |= {key: self.progress[key] - 1 for key in ("skipped", "in_a_row")}  # undo this step
                self.save(step)
                self.saver.finish()
                self.control.abort(f"stopped before step {step + 1}: {why}; {remedy}")
            print_above_bars(f"step {step + 1} is skipped: {why}")
        if self.accelerator.device.type == "cpu" and (step + 1) % RELEASE_EVERY == 0:
            release_freed()
        self.stepper.phase_timer.mark("other")

    def write_cost(self, steps: int) -> None:
        """Write the training's cost: FLOPs extrapolated from one counted step, seconds without measurements."""
        progress = self.progress
        cost = {
            "parameters": self.stepper.sizes[0],
            "frozen_parameters": self.stepper.sizes[1],
            "steps": steps,
            "tokens": steps * self.source.batches.step_tokens + progress["rollout_tokens"],
            "flops": None if (flops := progress["flops"]) is None else flops * steps,
            **{key: progress[key] for key in ("rollout_tokens", "skipped", "best_tau", "seconds")},
            "stall_seconds": progress["stall"],
            "save_seconds": self.saver.seconds,
        }
        if self.accelerator.is_main_process:
            write_json(self.out / COST, cost)

    def measure(self, step: int) -> None:
        """Measure τ with the real verifier, and keep the head if it is the best; stop on a signal."""
        weights, measured = self.stepper.state.weights(), None
        if self.evaluator is None:
            self.keep(weights)
        elif self.accelerator.is_main_process or self.needs_all_ranks:
            measured = self.evaluator.tau(self.best_head.decoding(weights), self.control.halted)
            if measured is not None and not self.needs_all_ranks:  # releases the waiting processes
                self.control.exchange(over=True)
        else:
            while not any(self.control.exchange(over=False)):  # until the measurement is over or a process is to stop
                pass
        if measured is not None:
            tau = measured["tau"]
            better = tau > self.progress["best_tau"]
            self.progress |= {"stale": 0 if better else self.progress["stale"] + 1, "measured": step}
            if better:
                self.progress |= {"best_tau": tau, "best_step": step}
                self.keep(weights)
            self.tracker.log({"step": step, **measured, "best": better})
            low, high = measured["tau_ci"] or (tau, tau)
            print_above_bars(f"step {step}: τ {tau:.3f} [{low:.2f}, {high:.2f}]{'  (best, kept)' if better else ''}")
        # All processes take the main process's values.
        self.progress |= self.control.broadcast({key: self.progress[key] for key in SHARED})
        if self.evaluator is not None and self.progress["measured"] != step:
            self.halt(step)

    def keep(self, weights: NamedTensors) -> None:
        """Write a head with these weights to the run's folder."""
        if self.accelerator.is_main_process:
            self.best_head.write(weights)
