"""What a process of a run does about its machine."""

import os
import signal
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train import jobs
from train.distributed import processes
from train.distributed.processes import ProcessControl, accelerator_for


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
    monkeypatch.setattr(processes.dist, "new_group", lambda **named: made.append(named))
    pair: Any = SimpleNamespace(process_index=0, num_processes=2)
    ProcessControl(pair, 7)
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=7)}]


def test_a_signal_stops_a_run_and_only_a_later_one_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher forwards the first one, which its processes have then twice."""
    now, killed, before = [100.0], list[Any](), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(processes.os, "kill", lambda *given: killed.append(given))
    one: Any = SimpleNamespace(process_index=0, num_processes=1)
    stopping = ProcessControl(one, 7)
    with stopping.listening():
        assert not stopping.halted()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert (stopping.halted(), stopping.signal, killed) == (True, "SIGINT", [])
            now[0] += processes.REPEATED
        signal.raise_signal(signal.SIGTERM)
        assert (stopping.signal, killed) == ("SIGINT", [(os.getpid(), signal.SIGTERM)])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("nccl", "gloo"), [("ib,ens", "ens3"), ("=eth1", "eth1"), ("^docker,eth", "ens3"), ("wlan", None)]
)
def test_gloo_takes_the_interface_of_nccl(nccl: str, gloo: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["lo", "docker0", "eth0", "ens3", "eth1"]
    monkeypatch.setattr(processes.socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # else what the call sets would stay
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    processes.follow_nccl()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == gloo
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "given")
    processes.follow_nccl()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "given"
