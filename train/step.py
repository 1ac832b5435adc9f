"""One optimiser step on the global batch, the same on every process: micro-batches, gradient, update.

A bad step changes no weights, optimiser or EMA; its batch is saved, and `trainer.on_bad_step` may stop the run.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from data.batches import Batch, Batches
from data.features.source import FeatureSource
from eval.measures.machine import peak_memory
from heads.base import Features, NamedTensors, frozen_count, parameter_count, to_device
from heads.common.files import atomic_write, write_json
from heads.common.typed import Json
from heads.modules.layers import compile_layers
from inference.request import PhaseTimer
from train.checkpoint import TrainState
from train.config import LauncherConfig, TrainerConfig
from train.distributed import strategy
from train.losses import ObjectiveConfig
from train.objective import (
    Chunks,
    LossWeights,
    chunk_rows,
    chunked,
    loss_weights,
    noisy,
    objective,
    row_keys,
    sample_anchors,
    trainable,
    trained_rows,
)
from train.optim import Ema, learning_rate, optimizer
from train.resolve import peak_of
from train.rollouts import Rollouts


class Flops(TorchDispatchMode):
    """A counter of FLOPs; torch's FlopCounterMode cannot count a gradient inside a forward pass."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its FLOPs."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (cost := flop_registry.get(func.overloadpacket)) is not None:
            # torch's formula for addmm would take a dtype for a shape.
            self.total += cost(*(x for x in args if not isinstance(x, torch.dtype)), **kwargs, out_val=out)
        return out


def in_dtype(features: Features, dtype: torch.dtype) -> Features:
    """Return features whose states have this dtype."""
    return features._replace(hidden=features.hidden.to(dtype), last_hidden=features.last_hidden.to(dtype))


BAD = "bad"
# A run's progress at its start, shared by all processes.
BEGINNING: Json = {
    "best_tau": 0.0, "best_step": 0, "stale": 0, "measured": 0, "seconds": 0.0, "stall": 0.0, "flops": None,
    "rollout_tokens": 0, "recent": [], "skipped": 0, "in_a_row": 0,
}  # fmt: skip
PARTS = ("data", "rollout", "target", "head", "optimiser", "wait", "other")  # parts of a step's time
WINDOW = 50  # good steps whose median is the reference for a spike; fewer steps detect none


class Loss(nn.Module):
    """The loss as a module, since data-parallel wrappers synchronise gradients only in `forward`."""

    def __init__(self, head: nn.Module, config: ObjectiveConfig, *, compiled: bool, autocast: bool) -> None:
        super().__init__()
        self.head, self.noise, self.autocast = head, config.noise, autocast
        drafted = config.on_policy.losses or config.losses
        names = dict.fromkeys([*config.losses, *drafted], 0.0)  # a metric is the unweighted mean over all rows
        self.config = replace(config, losses=names | config.losses)
        self.rollout_config = replace(config, losses=names | drafted)
        unroll: Any = head.unroll
        self.progress = 0.0  # fraction of all steps that are done
        whole = compiled and not compile_layers(head)  # heads without decoder layers are fast enough uncompiled
        self.unroll = torch.compile(unroll) if whole else unroll

    def forward(
        self, features: Features, weight: Tensor, anchors: Tensor | None, chunks: Chunks
    ) -> tuple[Tensor, NamedTensors]:
        """Unroll the head and return the weighted loss with its metrics, matmuls in bf16 if `autocast`."""
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=self.autocast):
            drafts = self.unroll(features, self.config.depths, anchors)
            config = self.config if features.path is None else self.rollout_config
            base_loss_share = config.base_loss_share_at(self.progress)
            return objective(self.head, drafts, features, weight, config, chunks, base_loss_share)

    def chunks(self, trained: Tensor, device: torch.device, path: Tensor | None = None) -> Chunks:
        """Return a micro-batch's trained rows in chunks on a device, from tensors on the host."""
        return chunked(trained, chunk_rows(self.head, device.type, trained.numel()), device, path)

    def sample_rows(self, batch: Batch, keys: Tensor) -> tuple[Tensor | None, LossWeights]:
        """Return a micro-batch's anchors, the rows to draft from in this step, and each row's weight.

        Without sampled anchors they are all trained rows: at most half of the rows in a typical chat. `keys` are the
        sequences' random keys (train/objective.py).
        """
        trained = (
            trainable(batch.document, batch.loss_mask, self.config.depths) if batch.trained is None else batch.trained
        )
        has_loss = trained.any(0)
        anchors = sample_anchors(has_loss, self.config.anchors, keys)
        chosen = None if anchors is None else torch.zeros_like(has_loss).scatter_(1, anchors, True)
        weight = loss_weights(batch.document, trained, chosen, self.config)
        if anchors is None and batch.path is None:
            anchors = trained_rows(has_loss)
        if batch.path is not None:  # each row counts as so many rows
            factor = self.config.on_policy.weight
            weight = weight._replace(row=weight.row * factor, normalizer=weight.normalizer * factor)
        return anchors, weight


@dataclass
class Guard:
    """Detect bad steps and decide whether they stop the run.

    A step is bad if its loss or gradient norm is not finite, or its loss is far above the recent ones. These numbers
    are sums over all processes, so all decide the same. The guard's state is in `progress`, which checkpoints save:
    `recent` losses, the number of `skipped` steps, and the number of consecutive bad steps, `in_a_row`.
    """

    config: TrainerConfig
    progress: Json

    def check(self, loss: float, norm: float) -> str | None:
        """Record a step's loss and gradient norm; return why the step is bad, or None."""
        recent = self.progress["recent"]
        usual, reason = statistics.median(recent) if len(recent) == WINDOW else math.inf, None
        if not math.isfinite(loss):
            reason = f"its loss is {loss}"
        elif not math.isfinite(norm):
            reason = f"the norm of its gradient is {norm}"
        elif self.config.spike is not None and loss > self.config.spike * usual:
            reason = f"its loss is {loss:.4g}, {loss / usual:.1f} times the median of the last {WINDOW}"
        if reason is None:
            self.progress |= {"recent": [*recent, loss][-WINDOW:], "in_a_row": 0}
        else:
            self.progress |= {key: self.progress[key] + 1 for key in ("skipped", "in_a_row")}
        return reason

    def stops(self) -> str | None:
        """Return why the bad step just recorded stops the run, with the remedy; None if the run continues."""
        if self.config.on_bad_step == "stop":
            return "trainer.on_bad_step=skip resume=true continues without it"
        if (count := self.progress["in_a_row"]) < self.config.bad_steps:
            return None
        return (
            f"{count} bad steps in a row, as many as trainer.bad_steps allows: fix the data, or start again with a "
            "lower trainer.lr"
        )


@dataclass(frozen=True)
class Step:
    """The outcome of a step."""

    record: Json | None  # the metrics to log; None if the step is not logged
    bad: str | None  # why the step is bad; None for a good step


class Stepper:
    """The optimiser step: the wrapped head, its optimiser and the EMA of its weights.

    `loss` is a `Loss`, or another module with its attributes and methods.
    """

    def __init__(
        self, trainer: TrainerConfig, launcher: LauncherConfig, accelerator: Accelerator, loss: Any,
        source: FeatureSource, width: int, rollouts: Rollouts | None = None,
    ) -> None:  # fmt: skip
        self.trainer, self.accelerator, self.loss, self.rollouts = trainer, accelerator, loss, rollouts
        self.source, self.width = source, width
        self.head = head = loss.head
        self.sizes = parameter_count(head), frozen_count(head)  # counted before sharding
        self.phase_timer = PhaseTimer(accelerator.device)
        self.peak = trainer.peak_tflops  # TFLOP/s of one device, if known
        if self.peak is None and accelerator.device.type == "cuda":
            self.peak = peak_of(torch.cuda.get_device_name(accelerator.device))
        self.steps, self.rows, self.stall = 0, 0, 0.0  # counts since the last record
        self.restore(dict(BEGINNING))
        self.strategy = strategy.prepare(launcher, accelerator, loss, partial(optimizer, config=trainer), trainer.clip)
        self.optimizer = self.strategy.optimizer
        self.average = Ema(head, trainer.ema)
        self.state = TrainState(head, self.optimizer, self.average)

    def restore(self, progress: Json) -> None:
        """Restore a run's progress in place: FLOPs per step, tokens of rollouts, the guard's history."""
        self.progress, self.guard = progress, Guard(self.trainer, progress)

    def __call__(self, step: int, *, halted: Callable[[], bool]) -> Step | None:
        """Take step `step`, counted from 0; None if `halted` stopped all processes before a micro-batch."""
        mark = self.phase_timer.mark
        mark(None)  # time before this is not the step's
        trainer, device, stall = self.trainer, self.accelerator.device, self.source.stall
        self.loss.progress = step / trainer.steps
        micro_batches, rollout_tokens = self.source(step), 0
        batches = [micro.batch for micro in micro_batches]
        mark("data")
        if self.rollouts is not None and self.rollouts.due(step):
            rollout, rollout_tokens = self.rollouts(step, batches, self.state.weights())
            micro_batches = micro_batches + rollout
            batches += [micro.batch for micro in rollout]
            mark("rollout")
        keys = [row_keys(trainer.seed, step, batch.index) for batch in batches]
        sampled = [self.loss.sample_rows(*inputs) for inputs in zip(batches, keys, strict=True)]
        mine: Any = sum(torch.stack([weight.normalizer, weight.trained.sum((1, 2))]) for _, weight in sampled)
        mine = torch.cat([mine, torch.full_like(mine[:1], rollout_tokens)])
        mark("data")
        normalizer, trained, read_tokens = self.accelerator.reduce(to_device(mine, device), "sum")
        normalizer, trained = normalizer.clamp_min(1), trained.clamp_min(1)
        mark("wait")
        totals: NamedTensors = {}
        for i, (micro, (anchors, weight)) in enumerate(zip(micro_batches, sampled, strict=True)):
            features = micro.read()
            mark("target")
            if halted():
                return None
            mark("wait")
            scaled = to_device(weight.row, device) / normalizer[:, None, None]
            chunks = self.loss.chunks(weight.trained, device, micro.batch.path)
            loss, sums = self.backward(features, keys[i], anchors, scaled, chunks, last=i + 1 == len(micro_batches))
            for name, value in {"loss": loss.detach().expand_as(trained), **sums}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
            mark("head")
        norm = self.strategy.clip(trainer.clip)
        mark("optimiser")
        table = torch.stack([*totals.values(), torch.as_tensor(norm).to(trained).expand_as(trained)])
        table = self.accelerator.reduce(table, "sum")
        table[1:-1] /= trained  # the loss is a mean already
        *means, norms, rows = torch.cat([table, trained[None]]).tolist()  # the only read of the host
        metrics = dict(zip(totals, means, strict=True))
        numbers = {"loss": metrics.pop("loss")[0], "accuracy": metrics.pop("accuracy"), **metrics}
        numbers |= {"grad_norm": norms[0] / self.accelerator.num_processes, "rows": int(rows[0])}
        if self.rollouts is not None:
            numbers["rollout_tokens"] = int(read_tokens[0])
            self.progress["rollout_tokens"] += numbers["rollout_tokens"]
        mark("wait")
        bad = self.guard.check(numbers["loss"], numbers["grad_norm"])
        if bad is None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(step)
            self.strategy.step()
            self.average.update(self.head)
        else:
            self.strategy.drop()
        mark("optimiser")
        self.steps, self.rows = self.steps + 1, self.rows + numbers["rows"]
        self.stall += self.source.stall - stall
        if bad is None and (step + 1) % trainer.log_every:
            return Step(None, None)
        skipped = {} if bad is None else {"skipped": True}
        return Step({**numbers, "lr": self.rate(step), **skipped, **self.cost()}, bad)

    def cost(self) -> Json:
        """Return the cost per step since the last record: rates over all processes, other numbers for this one."""
        steps, rows, stall = self.steps, self.rows, self.stall
        self.steps, self.rows, self.stall = 0, 0, 0.0
        spent = dict.fromkeys(PARTS, 0.0) | self.phase_timer.seconds()
        moved = min(stall, spent["target"])  # waiting for features is part of reading the data
        spent |= {"data": spent["data"] + moved, "target": spent["target"] - moved}
        phases = {phase: seconds / steps for phase, seconds in spent.items()}
        seconds = max(sum(phases.values()), 1e-9)  # an accelerator may not have reached any event
        peak = self.peak
        rate = None if self.progress["flops"] is None else self.progress["flops"] / seconds
        return {
            "tokens_per_second": self.source.batches.step_tokens / seconds,
            "rows_per_second": rows / steps / seconds,
            "step_seconds": seconds,
            "seconds": phases,
            "stall_seconds": stall,
            **({} if rate is None else {"flops_per_second": rate}),
            **({} if rate is None or peak is None else {"mfu": rate / (1e12 * peak * self.accelerator.num_processes)}),
            "memory_bytes": peak_memory(self.accelerator.device),
        }

    def count_flops(self, step: int, *, halted: Callable[[], bool]) -> Step | None:
        """Run a step and count its FLOPs over all processes, including the target's."""
        counter: Any = Flops
        with counter() as count, torch.compiler.set_stance("force_eager"):  # compiled operations cannot be counted
            taken = self(step, halted=halted)
        if taken is not None:
            self.progress["flops"] = count.total * self.accelerator.num_processes
        return taken

    def rate(self, step: int) -> float:
        """Return the step's learning rate, scaled for the target's width."""
        return learning_rate(step, self.trainer) * self.trainer.lr_width / self.width

    def backward(
        self, features: Features, keys: Tensor, anchors: Tensor | None, weight: Tensor, chunks: Chunks | None,
        *, last: bool,
    ) -> tuple[Tensor, NamedTensors]:  # fmt: skip
        """Accumulate one micro-batch's gradient; the factor undoes the average over processes."""
        device = self.accelerator.device
        if self.accelerator.mixed_precision == "no":
            features = in_dtype(features, next(self.head.parameters()).dtype)
        features = noisy(features, self.loss.noise, to_device(keys, device))
        anchors = None if anchors is None else to_device(anchors, device)
        # Dropout is seeded by run and step, so that a resumed run repeats it.
        torch.manual_seed(int(keys[0]))
        loss, sums = self.strategy.forward(features, weight, anchors, chunks, last=last)
        self.strategy.backward(loss * self.accelerator.num_processes)
        return loss, sums


def keep_batch(folder: Path, batches: Batches, step: int, why: str) -> Path:
    """Write the global batch of step `step`, counted from 0, into `folder`; return its file.

    `step-N.safetensors` has the sequences' indices, tokens, documents and masks; N counts from 1, as in metrics.jsonl.
    `step-N.json` has the seed, the world size and the reason.
    """
    row, path = batches.sequences(step), folder / f"step-{step + 1}.safetensors"
    names = ("token", "document", "mask")
    tensors = {"row": row, **{name: field[row] for name, field in zip(names, batches.packed, strict=True)}}
    record = {"step": step + 1, "seed": batches.seed, "why": why, "world_size": batches.world}
    atomic_write(path, to_bytes(tensors))
    write_json(path.with_suffix(".json"), record)
    return path
