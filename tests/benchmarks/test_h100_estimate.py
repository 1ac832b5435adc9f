"""The estimate of a training step: its arithmetic by hand, and what it counts of a toy."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from transformers import LlamaConfig

from benchmarks import h100_estimate as estimate
from benchmarks import training_kernels as counted
from benchmarks.h100_estimate import BANDWIDTH, KERNEL, LAUNCH, PRODUCTS, READ
from benchmarks.training_kernels import Kernel, Kernels
from tests import toys
from tests.train.test_memory import run_of
from train.planning.shapes import head_cost

SMALL = Kernel(counted.SMALL, 0, 8)


def test_a_kernel_takes_its_products_or_its_bytes() -> None:
    assert estimate.device_seconds(SMALL) == KERNEL
    assert estimate.device_seconds(Kernel("", int(PRODUCTS), int(BANDWIDTH / 2))) == 1
    assert estimate.device_seconds(Kernel("", int(PRODUCTS), int(3 * BANDWIDTH))) == 3


def test_a_step_takes_what_host_and_device_take_beside_each_other() -> None:
    """The host is the slower one of small kernels, and is far ahead while a large one runs."""
    large = Kernel("", int(PRODUCTS), 0)
    assert estimate.step_seconds([SMALL] * 10) == pytest.approx(10 * LAUNCH + KERNEL + READ)
    assert estimate.step_seconds([large, *[SMALL] * 10]) == pytest.approx(LAUNCH + 1 + 10 * KERNEL + READ)
    assert estimate.step_seconds([*[SMALL] * 10, large]) == pytest.approx(11 * LAUNCH + 1 + READ)


def test_the_table_adds_up() -> None:
    kernels = [Kernel(counted.TARGET, int(PRODUCTS), int(1e9)), Kernel(counted.LOSS, 0, int(2 * BANDWIDTH))]
    lines = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:]] for line in
             estimate.training_table(kernels, 3000)}  # fmt: skip
    assert lines[counted.TARGET][:4] == ["1", "1", "620.0", "1,000"]
    assert lines[counted.LOSS][:4] == ["1", "5,700", "0.0", "2,000"]
    assert lines[counted.ATTEND][:4] == ["0", "0", "0.0", "0"]
    launches, moved, flops, step = lines["**step**"][:4]
    assert (launches, moved, flops) == ("2", "5,701", "620.0")
    assert re.match(r"\*\*3,000: 1,000 tokens/s, MFU 21%\*\*", step)
    assert lines["features given"][3] == "2,000: 1,500 tokens/s"


def test_bytes_and_operations_are_those_of_the_shapes() -> None:
    with FakeTensorMode():
        a, b = torch.empty(4, 8), torch.empty(8, 16)
        table, index = torch.empty(1000, 8), torch.zeros(5, dtype=torch.long)
        with Kernels() as kernels, kernels.within("x"):
            (a @ b).view(2, -1)
            a.add_(1)
            a[0].expand(7, 8) + 1
            functional.embedding(index, table)
            torch.empty(3)
    expected = [
        (2 * 4 * 8 * 16, 4 * (32 + 128 + 64)), (0, 4 * (32 + 32)), (0, 4 * (32 + 56)), (0, 2 * 4 * 40)
    ]  # fmt: skip
    assert [kernel[1:] for kernel in kernels.noted] == expected


def job(vocab: int = toys.VOCAB) -> counted.Job:
    config = LlamaConfig(**toys.SIZES | {"vocab_size": vocab})
    head = "head.feature_layers=[0,1,2]", "head.head_dim=16", "head.draft_vocab=30"
    # Long rows, since a kernel's tiles of drafted rows are most of short ones.
    long = "trainer.optimizer=adamw", "data.length=4096", "trainer.micro_tokens=4096"
    return counted.Job(run_of("eagle3", *head, *long), config, 2)


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[Kernel]]:
    step, update = counted.head_kernels(job())
    return {"step": step, "update": update, "target": counted.target_kernels(job().config, job(), (0, 2), 64)}


def parts(noted: list[Kernel]) -> set[str]:
    return {kernel.part for kernel in noted}


def test_every_kernel_of_a_step_has_a_part(kernels: dict[str, list[Kernel]]) -> None:
    assert parts(kernels["step"] + kernels["update"] + kernels["target"]) == {*estimate.TRAINING}
    assert parts(kernels["target"]) == {counted.TARGET}
    assert len(kernels["update"]) == 4  # of matrices and of vectors, the steps and a fused kernel


def test_the_products_are_those_of_the_plan(kernels: dict[str, list[Kernel]]) -> None:
    one = job()
    planned = head_cost(one.run, one.config, one.rows, "cuda", bf16=True, accumulates=False).flops
    assert sum(kernel.flops for kernel in kernels["step"]) == pytest.approx(planned, rel=0.1)
