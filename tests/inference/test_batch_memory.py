"""The memory of a batch is what it says before anything is allocated; nothing grows or moves while it decodes."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import HEADS
from inference.batch import Batch, batch_of
from inference.decode import Settings
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.limits import check_memory
from inference.protocol import Drafter
from inference.target.cache import GRAIN
from inference.verification.sample import GREEDY
from tests import toys

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "batch_memory.py"


def buffers(batch: Batch) -> list[Tensor]:
    """Return all keys and values that are allocated."""
    cache = getattr(batch.drafts, "cache", None)
    return [*batch.cache.storage.blocks, *(half for pair in (cache.layers if cache else ()) for half in pair)]


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 8) for name in ("plain", *HEADS, "eagle3 injected")), ("plain", 32), ("eagle3", 32)]
)
def test_keys_and_values_are_those_of_the_lengths_asked_for(name: str, size: int) -> None:
    target = toys.target("llama")
    head: Any = None if name == "plain" else toys.head(name, target)
    drafter: Drafter = Plain(CPU) if head is None else HeadDrafter(head, toys.TREES["dynamic"], name)
    requests = [(toys.prompt(i, 3 + i % 17), Settings(6 + 2 * (i % 5), GREEDY)) for i in range(size + 5)]
    batch = batch_of(target, drafter, size, requests)
    planned, waiting, addresses = batch.nbytes, list(enumerate(requests)), list[int]()
    assert buffers(batch) == []
    longest = max(len(prompt) + settings.max_new_tokens for prompt, settings in requests)
    entry = 2 * 3 * 2 * 8 * 4  # bytes: keys and values, layers, groups, width, fp32
    assert 0 <= batch.cache.storage.nbytes[CPU] / (size * entry) - longest - 64 < GRAIN
    while waiting or batch.running:
        if waiting and batch.free:
            number, request = waiting.pop(0)
            batch.admit(number, *request)
        else:
            batch.step()
            addresses = addresses or [buffer.data_ptr() for buffer in buffers(batch)]
        batch.release()
    assert planned == batch.nbytes == Counter({CPU: sum(buffer.nbytes for buffer in buffers(batch))})
    assert [buffer.data_ptr() for buffer in buffers(batch)] == addresses


def test_a_batch_beyond_the_devices_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10**9)
    check_memory({CUDA: 4 * 10**9, CPU: 10**15}, "a target", 32)
    line = r"^a target: the keys and values of a batch of 32 take 4\.1 GB, and cuda:0 has 4\.0 GB free: give a smaller"
    with pytest.raises(ValueError, match=line):
        check_memory({CUDA: 41 * 10**8}, "a target", 32)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8", "32"])
def test_a_process_takes_what_is_planned(size: str) -> None:
    run = subprocess.run([sys.executable, BENCHMARK, "--batch", size], capture_output=True, text=True, check=True)
    planned, peak = (float(word) for word in run.stdout.split()[-2:])
    assert 0.9 < peak / planned < 1.1
