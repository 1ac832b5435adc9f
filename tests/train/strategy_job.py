"""What each process of a job does that trains toy heads under one strategy after another, or one process by itself."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from data.batches import Batches, Packed
from data.features.source import LiveFeatures
from tests import toys
from tests.train import jobs
from train import optim
from train.config import RunConfig
from train.objective import row_keys
from train.start import adapt
from train.step import Loss, Stepper

BEFORE, AFTER = 3, 3  # steps, with what is kept of the run between
ADAMW = ["trainer.optimizer=adamw", "trainer.lr=3e-3"]
EAGLE3 = ["head=eagle3", "objective.depths=3", *ADAMW]
CASES: dict[str, tuple[str, list[str]]] = {
    "eagle": ("eagle", ["head=eagle", "trainer.ema=0.5"]),
    "eagle3": ("eagle3", [*EAGLE3, "trainer.weight_decay=0.1"]),
    "medusa": ("medusa", ["head=medusa", "objective.depths=4"]),
    "lora": ("eagle pruned", ["head=eagle", "peft=lora", "peft.rank=2", "init=x", "trainer.ema=0.5"]),
    "muon": ("eagle3", ["head=eagle3", "objective.depths=3", "trainer.lr=3e-3"]),
    "fused": ("eagle3", [*EAGLE3, "trainer.weight_decay=0.1"]),
    "bf16": ("eagle3", [*EAGLE3, "trainer.precision=bf16"]),
    "compiled": ("medusa shared", ["head=medusa", "objective.depths=4", "trainer.compile=true"]),
    "layers compiled": ("eagle3", [*EAGLE3, "trainer.compile=true"]),
}


def run_of(case: str, strategy: str) -> RunConfig:
    """Return a case's configuration."""
    small = ["trainer.steps=20", "data.length=16", "trainer.batch_tokens=80", "trainer.micro_tokens=32"]
    return jobs.configured(["launcher=inline", f"launcher.strategy={strategy}", *small, *CASES[case][1]])


def stepper(run: RunConfig, case: str, accelerator: Accelerator) -> Stepper:
    """Return a toy head at its start, with rows of which the second process has fewer."""
    target, head = toys.target(), toys.head(CASES[case][0], toys.target()).requires_grad_().train()
    made: Any = head
    torch.manual_seed(4)
    adapt(head, run.peft)
    token = torch.randint(toys.VOCAB, (24, 16), generator=torch.Generator().manual_seed(5))
    packed = Packed(token, torch.zeros_like(token), torch.ones_like(token))
    batches = Batches(packed, 5, 2, 0, accelerator.process_index, accelerator.num_processes)
    source, width = LiveFeatures(target, batches, made.feature_layers), target.embeddings.hidden_size
    loss = Loss(head, run.objective, compiled=run.trainer.compile, autocast=accelerator.mixed_precision == "bf16")
    with mock.patch.object(optim, "FUSED", ("cpu",) if case == "fused" else ("cuda",)):
        return Stepper(run.trainer, run.launcher, accelerator, loss, source, width)


def losses(step: Stepper, first: int, count: int) -> list[float]:
    """Take steps and return their losses and gradient norms."""
    taken = [step(number, halted=lambda: False).record for number in range(first, first + count)]
    return [each[key] for each in taken if each is not None for key in ("loss", "grad_norm")]


def snapshot(step: Stepper) -> dict[str, torch.Tensor]:
    """Return all that is kept of a run."""
    return {name: step.state.read(name) for name in step.state.names()}


def spoiled(step: Stepper) -> float:
    """Add a gradient, far larger than that of any step, and drop it; return its norm."""
    for micro in step.source(9):
        keys = row_keys(step.trainer.seed, 9, micro.batch.index)
        anchors, weight = step.loss.sample_rows(micro.batch, keys)
        read = micro.read()
        chunks = step.loss.chunks(weight.trained, weight.row.device)
        step.backward(read, keys, anchors, 1e3 * weight.row, chunks, last=False)
    step.backward(read, keys, anchors, weight.row, chunks, last=True)
    norm = float(step.strategy.clip(1.0))
    step.strategy.drop()
    return norm


def outcome(strategy: str, case: str, accelerator: Accelerator) -> dict[str, Any]:
    """Train, keep, train on; and once more from what was kept, with a gradient between that is dropped."""
    run = run_of(case, strategy)
    one = stepper(run, case, accelerator)
    before = losses(one, 0, BEFORE)
    kept = snapshot(one)
    after = losses(one, BEFORE, AFTER)
    two = stepper(run, case, accelerator)
    for name, value in kept.items():
        two.state.write(name, value)
    again = snapshot(two)
    norm = spoiled(two)
    return {
        "before": before, "after": after, "kept": kept, "again": again, "norm": norm,
        "resumed": losses(two, BEFORE, AFTER), "weights": one.state.weights(),
        "last": snapshot(two), "undisturbed": snapshot(one),
    }  # fmt: skip


def main(folder: Path, world: int, cases: list[str]) -> None:
    """Run the cases on this process, and write what each gave to a folder."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world
    for each in cases:
        strategy, case = each.split(":")
        mixed = CASES[case][1][-1] == "trainer.precision=bf16"
        accelerator.state._mixed_precision = "bf16" if mixed else "no"
        found = outcome(strategy, case, accelerator)
        if accelerator.is_main_process:
            torch.save(found, folder / f"{each}.pt")
