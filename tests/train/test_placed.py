"""Runs whose target is placed: the losses of a target on one device, τ measured on the way, refusals before a start."""

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from heads.common.resolvers import ROOT, register_resolvers
from tests.train import driver, jobs
from train.config import run_config
from train.planning.plan import GIB, SAFE, plan

STEPS = 4
# Muon normalises the spectrum of a gradient, so that roundings of another route would show in the next loss.
HEAD = ["head=eagle3", "head.feature_layers=[0,1,2]", "trainer.optimizer=adamw", "trainer.lr=1e-3"]
TOGETHER = ["eval.prompts=0", "trainer.estimate_every=2"]


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
    assert [record["step"] for record in ours if "estimate" in record] == [2]
    return all(a.get(key) == b.get(key) for a, b in zip(ours, theirs, strict=True) for key in ("tau", "step"))


@pytest.mark.slow
def test_a_tensor_parallel_run_has_the_losses_of_one_process(alone: tuple[Path, list[str], list[Any]]) -> None:
    folder, words, whole = alone
    out = folder / "tensor_parallel"
    processes = ["model.placement=tensor_parallel", "launcher.num_processes=2"]
    jobs.finish(jobs.start([*words, *TOGETHER, *processes, f"out={out}"]))
    assert same(records(out), whole)
    assert json.loads((out / "provenance.json").read_text())["world_size"] == 2
    assert (out / "head" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed",
    [
        ["model.placement=fsdp", "launcher.num_processes=2"],
        ["model.placement=tensor_parallel", "model.tensor_parallel=2", "launcher.num_processes=4"],
    ],
    ids=["fsdp", "tensor parallel times data parallel"],
)
def test_a_placed_run_has_the_losses_of_one_process(
    alone: tuple[Path, list[str], list[Any]], placed: list[str], tmp_path: Path
) -> None:
    jobs.finish(jobs.start([*alone[1], *TOGETHER, *placed, f"out={tmp_path / 'placed'}"]))
    assert same(records(tmp_path / "placed"), alone[2])


def peak(words: list[str], *overrides: str) -> int:
    """Return the peak that the plan says of a process."""
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = run_config(compose("train", ["head=eagle", *words, "launcher.num_processes=2", *overrides]))
    return plan(run).memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("by", ["this command", "accelerate"])
def test_two_processes_of_little_memory_place_themselves(
    alone: tuple[Path, list[str], list[Any]], tmp_path: Path, by: str
) -> None:
    """And check themselves cut up, in the dtype that is given, which the report says."""
    words = [*alone[1], "trainer.estimate_every=2", "launcher.strategy=ddp"]  # fsdp2 saves about as much of a toy
    sharded = peak(words, "model.placement=tensor_parallel")
    whole = peak(words, "model.placement=replicate")
    limit = f"device.memory_gb={2 * (sharded + whole) / 2 / SAFE / GIB}"
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    start = jobs.start if by == "this command" else partial(jobs.start, launcher=launcher)
    several = ["launcher.num_processes=2"] if by == "this command" else []
    printed = jobs.finish(start([*words, *several, limit, "eval.gate_dtype=bfloat16", f"out={tmp_path / 'out'}"]))
    assert "2 processes, placed by the plan: model.placement=tensor_parallel launcher.strategy=ddp" in printed
    runs = records(tmp_path / "out"), alone[2]
    ours, theirs = ([record["loss"] for record in run if "loss" in record] for run in runs)
    assert ours == pytest.approx(theirs, rel=1e-3)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["settings"]["gate_dtype"] == "bfloat16"
    assert [line.partition(" ")[0] for line in report["warnings"]] == ["losslessness", "the", "2"]
    assert [row["lossless"]["failed"] for row in report["rows"]] == [0, 0]
    assert report["rows"][-1]["lossless"]["checked"] == 2
    wide = jobs.finish(start([*words, *several, "eval.prompts=0", f"out={tmp_path / 'roomy'}"]))
    assert "model.placement=replicate launcher.strategy=ddp" in wide


@pytest.mark.slow
def test_told_to_stop_amid_a_measurement_of_all_processes(alone: tuple[Path, list[str], list[Any]]) -> None:
    folder, words, whole = alone
    place = folder / "told"
    place.mkdir()
    words = [*words, *TOGETHER, "model.placement=fsdp", f"out={place / 'out'}"]
    pair = driver.start(place, words, "measured", world=2)
    pair[0].until(place / "prompts", 1)
    pair[1].signal(signal.SIGTERM)
    assert [job.end() for job in pair] == [143, 143], pair[0].printed()
    assert "stopped by SIGTERM, checkpoint at step 4" in pair[0].printed()
    pair = driver.start(place, [*words, "resume=true"], world=2)
    assert [job.end() for job in pair] == [0, 0], pair[0].printed()
    assert same(records(place / "out"), whole)


@pytest.mark.slow
def test_a_streamed_target_trains_and_is_evaluated(alone: tuple[Path, list[str], list[Any]], tmp_path: Path) -> None:
    _, words, whole = alone
    streamed = ["model.placement=offload", "model.offload=disk", "trainer.estimate_every=2"]
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
        (
            r"model\.placement=tensor_parallel .* rows of a store: give features=live",
            ["model.placement=tensor_parallel", "eval.prompts=0", "features=stored", "features.on_missing=compute"],
        ),
        (r"model\.placement is 'here'", ["model.placement=here"]),
    ],
)
def test_refusals_come_before_anything_is_loaded(words: str, overrides: list[str]) -> None:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", overrides)
    with pytest.raises(ValueError, match=words) as error:
        run_config(cfg)
    assert "\n" not in str(error.value)
