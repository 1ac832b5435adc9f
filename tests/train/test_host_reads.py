"""A training step makes the host wait for an accelerator once, outside the loss and the attention of a head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batches import Packed
from heads.base import Features, to_device
from inference.target.attention import spans_of
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


@pytest.mark.parametrize("size", [2, 8])
def test_a_group_waits_twice_for_the_rows_of_all_its_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For their shapes and their documents, whatever the number of turns and of documents."""

    def all_gather(gathered: list[Tensor], x: Tensor, group: object) -> None:
        for each in gathered:
            each.copy_(x)

    for name, stand_in in (("get_rank", lambda _: 1), ("get_world_size", lambda _: size), ("all_gather", all_gather)):
        monkeypatch.setattr(torch.distributed, name, stand_in)
    ran: list[Any] = []
    target = toys.target()
    monkeypatch.setattr(target, "placed", target.placed._replace(group=mock.Mock(spec=torch.distributed.ProcessGroup)))

    def own_features(*inputs: Any) -> Features:
        ran.append(inputs)
        states = torch.zeros(2, 16, 1, 32)
        return Features(inputs[0], states, states[:, :, 0], inputs[1])

    monkeypatch.setattr(target, "own_features", own_features)
    token, document = torch.arange(32).view(2, 16), (torch.arange(16) // 3).expand(2, -1)
    with followed(monkeypatch, target.model) as noted:
        target.features(token, document, ())
    assert noted == 2 * ["inference/target/placed.py:by_turns"]
    assert len(ran) == size
    assert all(inputs[0].equal(token) and inputs[1].equal(document) for inputs in ran)
    assert all(inputs[3] == spans_of(document) for inputs in ran)


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
