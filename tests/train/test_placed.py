"""Runs whose target is placed: the losses of a target on one device, τ measured on the way, refusals before a start."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from heads.base import Features
from inference.target.attention import spans_of
from tests import toys
from tests.train import jobs

STEPS = 4
# Muon normalises the spectrum of a gradient, so that roundings of another route would show in the next loss.
HEAD = ["head=eagle3", "head.feature_layers=[0,1,2]", "trainer.optimizer=adamw", "trainer.lr=1e-3"]
TOGETHER = ["eval.prompts=0"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """A run of one process: its folder, its overrides, its records."""
    folder = tmp_path_factory.mktemp("placed")
    words = [*jobs.make(folder), *HEAD, f"trainer.steps={STEPS}", "trainer.eval_every=4"]
    jobs.finish(jobs.start([*words, *TOGETHER, f"out={folder / 'alone'}"]))
    return folder, words, records(folder / "alone")


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Compare losses up to rounding: a pass cut up, or rows on two processes, add in another order.

    Measured by tensor parallelism in four steps: 3e-7 of the loss in fp32, 5e-16 with target and head in fp64.
    """
    assert [record.keys() for record in ours] == [record.keys() for record in theirs]
    losses, expected = ([record["loss"] for record in run if "loss" in record] for run in (ours, theirs))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [record["step"] for record in ours if "tau" in record] == [STEPS]
    return all(a.get(key) == b.get(key) for a, b in zip(ours, theirs, strict=True) for key in ("tau", "step"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed",
    [
        ["model.placement=tensor_parallel", "launcher.num_processes=2"],
        ["model.placement=fsdp", "launcher.num_processes=2"],
        ["model.placement=tensor_parallel", "model.tensor_parallel=2", "launcher.num_processes=4"],
    ],
    ids=["tensor parallel", "fsdp", "tensor parallel times data parallel"],
)
def test_a_placed_run_has_the_losses_of_one_process(
    alone: tuple[Path, list[str], list[Any]], placed: list[str], tmp_path: Path
) -> None:
    jobs.finish(jobs.start([*alone[1], *TOGETHER, *placed, f"out={tmp_path / 'placed'}"]))
    assert same(records(tmp_path / "placed"), alone[2])


@pytest.mark.slow
def test_a_streamed_target_trains_and_is_evaluated(alone: tuple[Path, list[str], list[Any]], tmp_path: Path) -> None:
    _, words, whole = alone
    streamed = ["model.placement=offload", "model.offload=disk"]
    jobs.finish(jobs.start([*words, *streamed, f"out={tmp_path / 'streamed'}"]))
    found = records(tmp_path / "streamed")
    assert [record.get("loss") for record in found] == [record.get("loss") for record in whole]
    row = json.loads((tmp_path / "streamed" / "report.json").read_text())["rows"][-1]
    assert row["lossless"]["identical"] == row["lossless"]["checked"] > 0


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        (
            r"model\.placement=fsdp takes all processes for a pass.*give objective",
            ["model.placement=fsdp", "objective.on_policy.prompts=1"],
        ),
        (r"model\.placement is 'here'", ["model.placement=here"]),
    ],
)
def test_refusals_come_before_anything_is_loaded(words: str, overrides: list[str]) -> None:
    with pytest.raises(ValueError, match=words) as error:
        jobs.configured(overrides)
    assert "\n" not in str(error.value)


def test_a_group_runs_the_rows_of_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(gathered: list[Tensor], x: Tensor, group: object) -> None:
        for each in gathered:
            each.copy_(x)

    for name, stand_in in (("get_rank", lambda _: 1), ("get_world_size", lambda _: 3), ("all_gather", all_gather)):
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
    target.features(token, document, ())
    assert len(ran) == 3
    assert all(inputs[0].equal(token) and inputs[1].equal(document) for inputs in ran)
    assert all(inputs[3] == spans_of(document) for inputs in ran)
