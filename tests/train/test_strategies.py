"""Two processes under each strategy train as one process does, keep what one keeps, and go on from it bit for bit."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from tests.train import driver, strategy_job

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
QUICK = ["ddp:eagle", "zero2:eagle", "fsdp2:muon", "zero3:lora"]
# Relative of losses and norms, absolute of weights, which AdamW moves by up to 0.07 in these steps whatever the size of
# a gradient. Muon multiplies in bf16, which processors round each in their own way.
TOLERANCE = {"bf16": (0.02, 0.05), "muon": (5e-4, 3e-3)}
SLOW = [f"{strategy}:{case}" for case in ("medusa", "lora", "bf16", "compiled") for strategy in STRATEGIES]
SLOW += ["ddp:eagle3", "fsdp2:eagle3", "zero2:eagle3", "zero3:eagle3", "ddp:fused", "fsdp2:fused", "zero3:fused"]
SLOW += ["fsdp2:layers compiled"]


def processes(count: int, folder: Path, cases: list[str]) -> Path:
    """Run cases on so many processes, which leave what came of them in a folder."""
    folder.mkdir()
    for job in driver.spawn(folder, count, strategy_job.main, folder, count, cases):
        assert job.end(within=280) == 0, job.printed()
    return folder


@pytest.fixture(scope="module")
def autocast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return processes(2, tmp_path_factory.mktemp("job") / "autocast", QUICK)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return processes(2, tmp_path_factory.mktemp("job") / "slow", SLOW)


@functools.cache
def alone(case: str) -> dict[str, Any]:
    """Return what comes of a case on one process: this one, but for torch.compile, which cannot follow its checks."""
    if case.endswith("compiled"):
        with tempfile.TemporaryDirectory() as folder:
            found: dict[str, Any] = torch.load(processes(1, Path(folder, "one"), [f"ddp:{case}"]) / f"ddp:{case}.pt")
            return found
    precision = "bf16" if case == "bf16" else "no"
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = precision
    return strategy_job.outcome("ddp", case, accelerator)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether the names and the bits agree."""
    return list(ours) == list(theirs) and all(ours[name].equal(theirs[name]) for name in ours)


def check(folder: Path, each: str) -> None:
    """Compare a case on two processes with the same on one."""
    found, one = torch.load(folder / f"{each}.pt"), alone(each.split(":")[1])
    loose, apart = TOLERANCE.get(each.split(":")[1], (1e-4, 3e-4))
    for key in ("before", "after"):
        assert found[key] == pytest.approx(one[key], rel=loose), key
    assert len({*found["before"], *found["after"]}) > 6, "nothing was trained"
    assert found["norm"] == pytest.approx(one["norm"], rel=loose)
    assert found["norm"] > 20 * max(found["before"][1::2]), "what was dropped would not have been seen"
    assert found["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=apart)
    assert list(found["kept"]) == list(one["kept"])
    assert all(found["kept"][name].shape == tensor.shape for name, tensor in one["kept"].items())
    assert same(found["kept"], found["again"]), "what was written is not what is read"
    assert found["resumed"] == found["after"], "what went on from what was kept is another run"
    assert same(found["last"], found["undisturbed"])


@pytest.mark.parametrize("each", QUICK)
def test_two_processes_train_as_one_and_go_on_bit_for_bit(autocast: Path, each: str) -> None:
    check(autocast, each)


@pytest.mark.slow
@pytest.mark.parametrize("each", SLOW)
def test_so_do_other_heads_and_options(slow: Path, each: str) -> None:
    check(slow, each)
