"""The profiles: what a trace is made into, on planted ones of a device and of a CPU."""

from typing import Any

import pytest

from benchmarks.gpu.traces import OWN, STEP, digest, own_times

MAIN = {"pid": 1, "tid": 1}


def event(name: str, cat: str, start: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": length, **MAIN, **more}


def step(start: float, length: float) -> dict[str, Any]:
    return event(STEP, "user_annotation", start, length)


def on_device() -> list[dict[str, Any]]:
    """Two steps of 1,000 us each; in the second nothing happens but the copy."""
    return [
        {"ph": "M", "name": "process_name"},
        step(0, 1000),
        event("aten::mm", "cpu_op", 0, 100),
        event("cudaLaunchKernel", "cuda_runtime", 10, 5),
        event("cuLaunchKernelEx", "cuda_driver", 20, 5),
        event("cudaGraphLaunch", "cuda_runtime", 30, 5),
        event("cudaStreamSynchronize", "cuda_runtime", 40, 50),
        event("gemm", "kernel", 100, 300, pid=0, tid=7),
        event("gemm", "kernel", 200, 300, pid=0, tid=8),  # at the same time, on another stream
        event("add", "kernel", 600, 100, pid=0, tid=7),
        step(1000, 1000),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 1100, 100, pid=0, tid=7),
        event("aten::_local_scalar_dense", "cpu_op", 1100, 100),
        event("cudaDeviceSynchronize", "cuda_runtime", 1500, 10),
        event(OWN, "user_annotation", 1900, 50),
        event("cudaDeviceSynchronize", "cuda_runtime", 1910, 10),  # the measurement waits, not the step
        event("gemm", "kernel", 2500, 300, pid=0, tid=7),  # after the steps
    ]


def test_a_device_is_busy_while_anything_runs_and_counts_are_of_one_step() -> None:
    found = digest(on_device())
    assert found["steps"] == 2
    assert found["device"]
    assert (found["wall"], found["busy"]) == (1.0, 0.3)  # 400 + 100 + 100 us of 2,000
    assert found["idle"] == pytest.approx(0.7)
    assert (found["kernels"], found["launches"], found["graph_launches"]) == (2, 1, 0.5)
    assert found["syncs"] == {"cudaDeviceSynchronize": 0.5, "cudaStreamSynchronize": 0.5}
    assert (found["reads"], found["copies"]) == (0.5, 0.5)
    assert found["largest"][0] == ["gemm", 0.3, 1.0]
    assert [name for name, _, _ in found["largest_host"]] == ["aten::_local_scalar_dense", "aten::mm"]


def test_on_a_cpu_operations_count_without_what_is_within_them() -> None:
    events = [
        step(0, 1000),
        event("aten::linear", "cpu_op", 100, 400),
        event("aten::mm", "cpu_op", 150, 300),
        event("aten::empty", "cpu_op", 150, 10),  # begins with what holds it
        event("aten::mm", "cpu_op", 150, 300, tid=2),  # another thread holds nothing of this one
        event("aten::mm", "cpu_op", 500, 100),
    ]
    found = digest(events)
    assert not found["device"]
    assert found["busy"] == 0.5
    assert found["kernels"] == 5
    assert found["largest"] == [["aten::mm", 0.69, 3.0], ["aten::linear", 0.1, 1.0], ["aten::empty", 0.01, 1.0]]
    assert sum(spent for _, spent in own_times(events[1:])) == pytest.approx(400 + 300 + 100)
