"""What lies in host memory has to fit there: on this machine it is compared, of another one the plan says how much."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig

from tests.train import jobs
from train.config import RunConfig
from train.planning.plan import GIB, SAFE, plan
from train.planning.resolve import resolve_placement, with_processes
from train.planning.table import advice, in_words, table

SMALL = ("head=eagle", "data.length=64", "trainer.batch_tokens=64", "trainer.micro_tokens=64", "trainer.keep=1")
HERE = ("launcher.num_processes=1", "launcher.strategy=ddp", "device.count=1", "device.context_gb=0.1")


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The override of a target whose layers are most of it."""
    LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=8
    ).save_pretrained(tmp_path)
    return f"model.path={tmp_path}"


def run(*overrides: str) -> RunConfig:
    return with_processes(jobs.configured([*SMALL, *overrides]))


def shown(given: RunConfig, planned: dict[str, Any]) -> str:
    console = Console(width=160)
    with console.capture() as text:
        console.print(table(given, planned))
    return text.get()


def at_a_machine(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    """Let the plan be made on a machine with an accelerator and so many bytes of host memory."""
    monkeypatch.setattr("train.planning.plan.device_named", lambda _: torch.device("cuda"))
    monkeypatch.setattr("train.planning.plan.host_bytes", lambda: round(host))


def test_layers_go_to_a_host_that_holds_them_and_else_stay_in_their_files(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_a_machine(monkeypatch, 100 * GIB)
    words = (target, *HERE, "eval.prompts=0", "trainer.eval_prompts=0")
    whole, streamed = (
        plan(resolve_placement(run(*words, "device.memory_gb=80", f"model.placement={kind}")))
        for kind in ("replicate", "offload")
    )
    small = f"device.memory_gb={(whole['peak_bytes'] + streamed['peak_bytes']) / 2 / SAFE / GIB}"
    needed = streamed["host"].peak / SAFE
    for host, disk in ((needed + GIB / 100, "cpu"), (needed - GIB / 100, "disk")):
        at_a_machine(monkeypatch, host)
        placed = resolve_placement(run(*words, small))
        assert (placed.model.placement, placed.model.offload) == ("offload", disk)
        assert f"model.placement=offload model.offload={disk} " in in_words(placed)
        assert plan(placed)["fits"]
    at_a_machine(monkeypatch, streamed["host"].peak / 2)  # nothing fits, and the host lacks most
    placed = resolve_placement(run(*words, f"device.memory_gb={streamed['peak_bytes'] / GIB}"))
    assert (placed.model.placement, placed.model.offload) == ("offload", "disk")


def test_what_the_host_does_not_hold_does_not_fit(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placement that is given stays, and the plan says what to change."""
    words = (target, *HERE, "device.memory_gb=80", "model.placement=offload", "eval.gate_dtype=bfloat16")
    at_a_machine(monkeypatch, 100 * GIB)
    room = plan(resolve_placement(run(*words, "model.offload=disk")))["host"].peak
    at_a_machine(monkeypatch, room)
    given = resolve_placement(run(*words))
    planned = plan(given)
    assert all(device.utilization <= 1 for device in planned["devices"])
    assert not planned["fits"]
    changes = {change.overrides: change for change in advice(given, planned)}
    assert changes["model.offload=disk"].fits
    text = shown(given, planned)
    assert re.search(rf"host memory of each node: \d.* of {room / GIB:.2f} GiB, does NOT fit", text)
    assert "the largest saving of host memory first" in text


def test_of_another_machine_a_plan_says_how_much_it_needs(target: str) -> None:
    """The final evaluation included, in whose dtype the layers may take twice as much."""
    needed = []
    for gate in ("bfloat16", "float32"):
        given = resolve_placement(run(target, "device=h100", "model.placement=offload", f"eval.gate_dtype={gate}"))
        planned = plan(given)
        assert planned["fits"]
        needed.append(planned["host"].peak)
        assert f"it fits if a node has {-(-needed[-1] // GIB)} GiB of host memory; without plan=true" in shown(
            given, planned
        )
    assert needed[1] > needed[0]
