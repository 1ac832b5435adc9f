"""What a process of a run does about its machine."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train import jobs
from train.distributed import control, processes
from train.distributed.control import ProcessControl
from train.distributed.processes import accelerator_for

# Of its own process: an allocator's settings and its state are the process's.
FRESH = """
import resource, torch
from train.distributed.processes import keep_freed, release_freed

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

def fill():
    several = [torch.ones(2**21) for _ in range(8)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed()
fill()
before = faults()
for _ in range(5):
    fill()
taken = faults() - before
blocks = [torch.ones(2**20) for _ in range(32)]
del blocks[::2]
before = resident()
release_freed()
print(taken, before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_memory_that_is_freed_is_taken_again_and_given_back_between_live_blocks() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], check=True, capture_output=True, text=True)
    taken, released = map(int, done.stdout.split())
    pages = 5 * 8 * 2**23 // 4096
    assert taken < pages / 10
    assert released > 0.9 * 16 * 4 * 2**10


def test_each_run_of_a_process_has_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "fast_dtype", lambda _: torch.float32)
    group, waits = processes.InitProcessGroupKwargs, list[timedelta]()
    monkeypatch.setattr(processes, "InitProcessGroupKwargs", lambda timeout: waits.append(timeout) or group())
    for asked, expected in (("bf16", "bf16"), ("fp32", "no"), ("bf16", "bf16"), ("auto", "no")):
        run = jobs.configured([f"trainer.precision={asked}", "model.device=cpu", "launcher=inline"])
        assert accelerator_for(run.launcher, run.trainer, run.model).mixed_precision == expected
        assert waits.pop() == timedelta(seconds=run.trainer.timeout)


def test_messages_wait_as_long_as_the_collectives_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(control.dist, "new_group", lambda **named: made.append(named))
    pair: Any = SimpleNamespace(process_index=0, num_processes=2)
    ProcessControl(pair, 7)
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=7)}]


def test_a_signal_stops_a_run_and_only_a_later_one_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher forwards the first one, which its processes have then twice."""
    now, killed, before = [100.0], list[Any](), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(control.os, "kill", lambda *given: killed.append(given))
    one: Any = SimpleNamespace(process_index=0, num_processes=1)
    stopping = ProcessControl(one, 7)
    with stopping.listening():
        assert not stopping.halted()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert (stopping.halted(), stopping.signal, killed) == (True, "SIGINT", [])
            now[0] += control.REPEATED
        signal.raise_signal(signal.SIGTERM)
        assert (stopping.signal, killed) == ("SIGINT", [(os.getpid(), signal.SIGTERM)])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("nccl", "gloo"),
    [
        ("eth", "eth0"),
        ("ib,ens", "ens3"),
        ("=eth1", "eth1"),
        ("^docker,eth", "ens3"),
        ("^=eth0,ens3", "eth1"),
        ("wlan", None),
        (None, None),
    ],
)
def test_gloo_takes_the_interface_of_nccl(nccl: str | None, gloo: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["lo", "docker0", "eth0", "ens3", "eth1"] if nccl != "^=eth0,ens3" else ["lo", "eth0", "ens3", "eth1"]
    monkeypatch.setattr(processes.socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    for name, value in (("NCCL_SOCKET_IFNAME", nccl), ("GLOO_SOCKET_IFNAME", None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    processes.follow_nccl()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "given")
    processes.follow_nccl()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "given"
