"""Whole jobs by their commands: told to stop, on two processes, refused with one line."""

import json
import signal
import time
from pathlib import Path

import pytest

from tests.train import jobs
from train.run import train

STEPS = 8


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[int, float]]:
    """One undisturbed run: its folder, its overrides, its losses."""
    folder = tmp_path_factory.mktemp("toy")
    rows = "trainer.batch_tokens=270"  # 8 rows of 32 tokens
    overrides = [*jobs.make(folder), f"trainer.steps={STEPS}", "trainer.eval_every=4", rows]
    jobs.finish(jobs.start([*overrides, f"out={folder / 'whole'}"]))
    return folder, overrides, jobs.losses(folder / "whole")


def test_a_run_leaves_its_contract_behind(toy: tuple[Path, list[str], dict[int, float]]) -> None:
    out = toy[0] / "whole"
    names = {path.name for path in out.iterdir()}
    assert {"config.yaml", "provenance.json", "metrics.jsonl"} <= names
    assert {"checkpoints", "head", "report.json", "report.md"} <= names
    assert sorted(toy[2]) == list(range(1, STEPS + 1))
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "tau" in record] == [4, 8]
    for record in records:
        if "loss" in record:
            assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(8 * 32)
    assert json.loads((out / "training.json").read_text())["tokens"] == STEPS * 8 * 32
    data = json.loads((out / "provenance.json").read_text())["data"]
    assert (data["held_out"], data["samples"], sum(data["kept"].values())) == (4, 116, 116)
    row = json.loads((out / "report.json").read_text())["rows"][-1]
    assert row["lossless"]["identical"] == row["lossless"]["checked"] > 0


@pytest.mark.slow
def test_a_sigterm_to_the_command_that_launches_reaches_the_processes(
    toy: tuple[Path, list[str], dict[int, float]],
) -> None:
    folder, overrides, whole = toy
    out = folder / "told"
    job = jobs.start([*overrides, f"out={out}", "launcher.num_processes=2", "trainer.save_every=100"])
    while len(jobs.losses(out) if (out / "metrics.jsonl").exists() else {}) < 2:
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)
    assert job.returncode == 143, printed
    done = len(jobs.losses(out))
    assert done < STEPS, "the run was over before the signal: nothing was tested"
    assert f"stopped by SIGTERM, checkpoint at step {done}; resume=true continues" in printed
    jobs.finish(jobs.start([*overrides, f"out={out}", "resume=true", "eval.prompts=0"]))
    found = jobs.losses(out)
    assert found.keys() == whole.keys()
    assert all(abs(found[step] - whole[step]) < 1e-4 * abs(whole[step]) for step in whole)


def test_bad_input_is_one_line(toy: tuple[Path, list[str], dict[int, float]]) -> None:
    folder, overrides, _ = toy
    (folder / "empty.txt").write_text("")
    for named, words in {
        "holds a run already": [f"out={folder / 'whole'}"],
        "nowhere": ["model.path=/nowhere", f"out={folder / 'x'}"],
        "empty.txt": [f"data.path={folder / 'empty.txt'}", f"out={folder / 'x'}"],
    }.items():
        with pytest.raises(ValueError, match=named) as error:
            train(jobs.resolved([*overrides, *words]))
        assert "\n" not in str(error.value)
    assert not (folder / "x").exists(), "a run that could not start left a folder that the next one stumbles over"
