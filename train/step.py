"""One optimiser step on the global batch, on every process alike: its micro-batches, their gradient, the update."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batches import Batch, Batches
from data.features import FeatureSource, Given
from heads.base import Features
from heads.law import TopLaw
from train import strategy
from train.config import RunConfig
from train.flops import Flops
from train.losses import ObjectiveConfig
from train.objective import objective
from train.optim import Average, learning_rate
from train.state import TrainState
from train.weights import Weights, draw_anchors, noisy, trainable, weights


class Loss(nn.Module):
    """The loss as a forward pass, since data-parallel wrappers synchronise gradients in `forward` alone."""

    def __init__(self, head: nn.Module, config: ObjectiveConfig, *, compiled: bool, quick: bool = False) -> None:
        super().__init__()
        self.head, self.config, self.quick = head, config, quick
        unroll: Any = head.unroll
        self.unroll = torch.compile(unroll) if compiled else unroll

    def forward(
        self, features: Features, weight: Tensor, anchors: Tensor | None, top: TopLaw | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Draft from the rows and weigh what comes of it, matrix products in bf16 if `quick`."""
        head: Any = self.head
        with torch.autocast(weight.device.type, torch.bfloat16, enabled=self.quick):
            drafts = self.unroll(features, self.config.depths, anchors)
            return objective(head, drafts, features, weight, self.config, top=top)


@dataclass(frozen=True)
class Step:
    """What a step did.

    Attributes:
        stopped: whether some process was told to stop.
        record: what is logged of it, beside the step's number; None where it is not logged.
    """

    stopped: bool
    record: dict[str, Any] | None


class Stepper:
    """Takes steps: holds the head as the processes share it, its optimiser and the running average of its weights."""

    def __init__(
        self, run: RunConfig, accelerator: Accelerator, head: nn.Module, batches: Batches, source: FeatureSource,
        width: int,
    ) -> None:  # fmt: skip
        self.run, self.accelerator, self.head, self.batches, self.source = run, accelerator, head, batches, source
        self.width = width
        quick = accelerator.mixed_precision == "bf16"
        loss = Loss(head, run.objective, compiled=run.trainer.compile, quick=quick)
        self.strategy = strategy.prepare(run.launcher, run.trainer, accelerator, loss)
        self.optimizer = self.strategy.optimizer
        self.average = Average(head, run.trainer.ema)
        self.state = TrainState(head, self.optimizer, self.average)

    def __call__(self, step: int, *, stopping: bool) -> Step:
        """Take step `step`, counted from 0; `stopping` tells every process that this one must stop after it."""
        begin, stall = time.perf_counter(), self.source.stall
        trainer, device = self.run.trainer, self.accelerator.device
        micro = [self.drawn(batch, step) for batch in self.batches(step)]
        mine = sum(torch.stack([each.amount, each.trained.sum((1, 2))]) for _, _, each in micro)
        assert isinstance(mine, Tensor)
        flag = torch.tensor([float(stopping)])
        # One reduction tells every process the global batch's numbers and whether one of them must stop.
        shared: Any = self.accelerator.reduce(torch.cat([mine.flatten(), flag]).to(device), "sum")
        (amount, trained), stopped = shared[:-1].view(2, -1).clamp_min(1), bool(shared[-1] > 0)
        totals: dict[str, Tensor] = {}
        for i, ((batch, anchors, weight), given) in enumerate(zip(micro, self.source(step), strict=True)):
            scaled = weight.row.to(device) / amount[:, None, None]
            loss, sums = self.backward(given, number(batch, step), anchors, scaled, last=i + 1 == len(micro))
            for name, value in {"loss": loss.detach().expand(len(trained)), **sums}.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value
        norm = self.strategy.clip(trainer.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.strategy.step()
        self.average.update(self.head)
        if (step + 1) % trainer.log_every:
            return Step(stopped, None)
        packed: Any = self.accelerator.reduce(torch.stack(list(totals.values())), "sum")
        means = {name: each if name == "loss" else each / trained for name, each in zip(totals, packed, strict=True)}
        record = {
            "loss": float(means.pop("loss")[0]),
            "accuracy": means.pop("accuracy").tolist(),
            **{name: value.tolist() for name, value in means.items()},
            "lr": self.rate(step),
            "grad_norm": float(norm),
            "rows": int(trained[0]),
            "tokens_per_second": trainer.batch_tokens / (time.perf_counter() - begin),
            "stall_seconds": self.source.stall - stall,
        }
        return Step(stopped, record)

    def counted(self, step: int, *, stopping: bool) -> tuple[Step, int | None]:
        """Take a step and count the floating-point operations of all processes in it, the target's included.

        None is the count where the head is compiled, whose operations cannot be followed.
        """
        if self.run.trainer.compile:
            return self(step, stopping=stopping), None
        counter: Any = Flops
        with counter() as count:
            taken = self(step, stopping=stopping)
        return taken, count.total * self.accelerator.num_processes

    def rate(self, step: int) -> float:
        """Return the step's learning rate at this target's width."""
        return learning_rate(step, self.run.trainer) * self.run.trainer.lr_width / self.width

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

        loss, sums = self.strategy.forward(features, weight, anchors, given.top, last=last)
        self.strategy.backward(loss * self.accelerator.num_processes)
        return loss, sums


def number(batch: Batch, step: int) -> Tensor:
    """Return the rows' numbers in the run, from which what is drawn for them follows."""
    return batch.index + step * 10_000_019
