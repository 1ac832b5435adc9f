"""A training step makes the host wait for an accelerator once, outside the loss and the attention of a head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batches import Packed
from heads.base import to_device
from tests import toys
from tests.train import strategy_job
from tests.train.host_reads import followed

# These are counted elsewhere: by chunks, and by blocks of a CPU's attention.
APART = ("train/objective.py", "train/losses.py", "heads/modules/attention.py")
HEADS = {
    "block": ("block", ["head=block", "objective.depths=4"]),
    "mtp": ("mtp", ["head=mtp"]),
    "hydra": ("hydra", ["head=hydra", "objective.depths=4"]),
}
HERE = torch.device("cpu")
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "flags": lambda x: x[x > 0],
    "set by flags": lambda x: x.clone().index_put_((x > 0,), x.new_zeros(())),
    "equal": lambda x: x.equal(x + 1),
    "copy": lambda x: torch.ones(3).to(HERE) + x,
    "copy to its device": lambda x: torch.ones(3).to(x),
    "numbers": lambda x: torch.tensor([1.0, 2.0, 3.0], device=HERE) + x,
}


@pytest.mark.parametrize("name", WAITS)
def test_every_kind_of_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(3, 3)
    with followed(monkeypatch, module) as noted:
        WAITS[name](module.weight[0].detach() * 2)
    assert noted == ["tests/train/test_host_reads.py:<lambda>"]


def test_what_does_not_wait_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    module, rows = nn.Linear(3, 3), torch.ones(4, 3)
    with followed(monkeypatch, module) as noted:
        rows.sum().item()
        rows[rows > 0].tolist()
        module(to_device(rows, HERE))[:, torch.tensor([0, 2])].sum().backward()
    assert noted == []


# What is compiled runs no operation that could be followed.
@pytest.mark.parametrize("case", [case for case in (*strategy_job.CASES, *HEADS) if "compiled" not in case])
def test_the_host_waits_once_a_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of micro-batches, with packed documents, noise, anchors and an average of the weights."""
    monkeypatch.setattr(strategy_job, "CASES", strategy_job.CASES | HEADS)
    run = strategy_job.run_of(case, "ddp")
    objective = replace(run.objective, anchors=6, noise=0.2)
    run = replace(run, objective=objective, trainer=replace(run.trainer, ema=0.5))
    for rows in (1, 3):
        step = strategy_job.stepper(run, case, Accelerator(cpu=True))
        batches = step.source.batches
        document = (torch.arange(16) > 9).long().expand(batches.packed.token.shape)
        batches.packed, batches.micro_rows = Packed(batches.packed.token, document, torch.ones_like(document)), rows
        step(0, halted=lambda: False)
        with followed(monkeypatch, step.head, toys.target().model) as noted:
            step(1, halted=lambda: False)
        assert [wait for wait in noted if not wait.startswith(APART)] == ["train/step.py:read"]
