"""What a step asks of an accelerator: one wait of the host, launches that no vocabulary changes, bounded memory."""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads import HEADS
from heads.modules.vocab import GradientSum
from tests.train import device_step
from train.objective import chunked
from train.step import Flops

ROWS_AND_DEPTHS = ("4096:5", "16384:5")
PLAIN = [f"{vocab}:{vocab}:{rest}" for vocab in (1000, 128_256) for rest in ROWS_AND_DEPTHS] + ["128256:128256:8192:5"]
PRUNED = [f"{vocab}:{vocab // 4}:4096:5" for vocab in (4000, 128_256)]
MEMORY = ["memory:4096:5:fp32", "memory:16384:5:bf16"]
LOSSES = [*PLAIN, *PRUNED, *MEMORY]
BEFORE = 9024  # launches at c9e2252, whose chunks were 130 rows of 128,256 tokens: 4,096 rows, 5 depths, fp32


@cache
def counted(*cases: str) -> dict[str, Any]:
    """Return the counts of cases, from a process of their own."""
    run = subprocess.run([sys.executable, device_step.__file__, *cases], capture_output=True, text=True, check=True)
    found: dict[str, Any] = {}
    for line in run.stdout.splitlines():
        found |= json.loads(line)
    assert list(found) == [*cases]
    return found


@pytest.fixture
def counts() -> dict[str, Any]:
    return counted(*QUICK, *LOSSES)


def test_launches_do_not_depend_on_the_vocabulary(counts: dict[str, Any]) -> None:
    for rest in ROWS_AND_DEPTHS:
        assert counts[f"1000:1000:{rest}"] == counts[f"128256:128256:{rest}"]
    assert counts[PRUNED[0]] == counts[PRUNED[1]]


def test_a_tenth_of_the_launches_is_left(counts: dict[str, Any]) -> None:
    """They are linear in the chunks, of which 8,192 rows have no more than 4,096 at five depths."""
    assert counts["128256:128256:4096:5"] == counts["128256:128256:8192:5"] <= BEFORE / 10
    chunk = (counts["1000:1000:16384:5"] - counts["1000:1000:4096:5"]) / 4
    assert chunk <= 41 * 5
    assert counts["1000:1000:4096:5"] - 4 * chunk <= 30


class Moves(TorchDispatchMode):
    """Notes what copies from the host to a device, and what else touches one."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.there: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if inputs == {"cpu"} and any(x.device.type != "cpu" for x in tree_leaves(out) if isinstance(x, Tensor)):
            self.copies.append(bool((kwargs or {}).get("non_blocking")))
        elif inputs != {"cpu"} and not func.is_view:
            self.there[str(func)] += 1
        return out


def test_rows_are_picked_on_the_host_and_sent_in_one_copy() -> None:
    torch.manual_seed(0)
    trained = torch.rand(3, 2, 50) < 0.4
    trained[:, :, -3:] = False
    with Moves() as moves:
        there = chunked(trained, 16, torch.device("meta"))
    assert moves.copies == [True]
    assert not moves.there
    here = chunked(trained, 16, torch.device("cpu"))
    shapes = [[x.shape for x in tree_leaves(chunks)] for chunks in (here, there)]
    assert shapes[0] == shapes[1]
    for depth in range(1, 4):
        source = torch.cat([by_depth[depth - 1].source for _, by_depth in here])
        assert source.equal(trained[depth - 1].flatten().nonzero()[:, 0])
        for teacher, by_depth in here:
            assert len(teacher) <= 16
            assert teacher[by_depth[depth - 1].position].equal(by_depth[depth - 1].source + depth)


class Wide(TorchDispatchMode):
    """Stands in for the overload of `addmm` that only CUDA has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.addmm.dtype_out:
            return func(*args, **(kwargs or {}))
        total, d_logits, hidden, dtype = args
        assert (total.dtype, d_logits.dtype, hidden.dtype) == (dtype, torch.bfloat16, torch.bfloat16)
        assert kwargs["out"] is total
        return total


def test_narrow_products_are_summed_in_fp32_on_a_device() -> None:
    """Their dtypes are those that CUDA asks for, and their operations are counted."""
    counter: Any = Flops
    with FakeTensorMode(), Wide(), counter() as count:
        weight = torch.empty(7, 4, device="cuda")
        gradient = GradientSum(weight)
        for _ in range(2):
            gradient.add(*(torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((7, 3), (3, 4))))
    assert gradient.total is not None
    assert (gradient.total.dtype, gradient.total.shape) == (torch.float32, weight.shape)
    assert count.total == 2 * 2 * 7 * 3 * 4


@pytest.mark.parametrize("case", MEMORY)
def test_the_loss_in_chunks_of_a_device_takes_a_sixth_of_all_rows_at_once(counts: dict[str, Any], case: str) -> None:
    whole, chunks = counts[case]
    assert whole >= 6 * chunks > 0


NAMES = [*HEADS, "block of DSpark", "eagle3 injected", "eagle pruned"]
DOCUMENTS, MICRO_BATCHES = (1, 2, 8), (1, 2)
CASES = [f"{name}:2:1" for name in NAMES] + [
    f"{name}:{documents}:{count}"
    for name in ("eagle pruned", "block of DSpark")
    for documents in DOCUMENTS
    for count in MICRO_BATCHES
]
# Tokens, documents and where they begin, the rows' weights, the chunks of the loss, the keys of the noise and the
# anchors; and once a step how many rows are trained.
SENT = 7


QUICK = ("eagle pruned:8:2", "block of DSpark:2:1")
EACH = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)


@EACH
def test_the_host_waits_once_a_step_and_sends_each_micro_batch_in_the_same_copies(case: str) -> None:
    """Whatever the head, the documents in a row, one of which fills it, and the micro-batches; the loss included."""
    others = [other for other in CASES if other not in QUICK]
    found = counted(*QUICK, *LOSSES)[case] if case in QUICK else counted(*others)[case]
    assert found["waits"] == ["step:read"]
    assert found["sent"] == 1 + SENT * int(case.split(":")[2])
