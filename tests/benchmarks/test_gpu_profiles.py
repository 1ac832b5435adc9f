"""The profiles: what a trace is made into, on planted ones of a device and of a CPU, and the script at toy size."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import profiles
from benchmarks.gpu.common import Asked
from benchmarks.gpu.traces import OWN, STEP, digest, own_times
from tests.benchmarks.gpu_scripts import toy

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


def test_work_that_outlasts_the_step_counts_up_to_its_end() -> None:
    found = digest([step(0, 100), event("gemm", "kernel", 50, 100, tid=7)])
    assert found["busy"] == 0.05
    assert found["idle"] == 0.5


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


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no span named 'step'"):
        digest(on_device()[2:10])


def test_what_was_before_stands_beside_what_is_now() -> None:
    now = {**digest(on_device()), "step": 0.9}
    before = {**now, "step": 1.8, "launches": 99.0, "largest": [["gemm", 1.25, 3.0]]}
    first, largest, host = profiles.tables({"training": now}, {"training": before})
    assert list(first.header) == ["figure", "training, before", "training"]
    rows = {row[0]: list(row[1:]) for row in first.rows}
    assert rows["step, ms"] == ["1.80", "0.90"]
    assert rows["kernel launches by the host"] == ["99", "1"]
    assert rows["device idle"] == ["83%", "67%"]
    assert rows["- cudaStreamSynchronize"] == ["0.5", "0.5"]
    assert largest.rows[0] == ["gemm", "0.300", "1.0", "1.250"]
    assert largest.rows[1][-1] == "not among them"
    assert host.rows[0][-1] == host.rows[0][1]
    assert [len(each.header) for each in profiles.tables({"training": now}, {})] == [2, 3, 3]


def test_a_case_that_failed_says_so_and_hides_no_other() -> None:
    found = profiles.tables({"a": {"failed": "out of memory"}, "b": {**digest(on_device()), "step": 0.9}}, {})
    assert [row[1] for row in found[0].rows][:3] == ["out of memory"] * 3
    assert [each.caption[0] for each in found[1:]] == ["b", "b"]


@pytest.mark.parametrize(("change", "said"), [({"name": "decoding"}, "a record of decoding"), ({"toy": True}, "toy")])
def test_another_record_is_no_before(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    asked, file = Asked(torch.device("cpu"), False, tmp_path), tmp_path / "old.json"
    kept = {"name": "profiles", "toy": False, "device": {"name": "a device"}, "numbers": {"cases": {"a": {}}}}
    file.write_text(json.dumps(kept))
    assert profiles.old_cases(file, asked, {"name": "a device"}) == {"a": {}}
    assert profiles.old_cases(None, asked, {"name": "a device"}) == {}
    with pytest.raises(SystemExit, match="measured on a device"):
        profiles.old_cases(file, asked, {"name": "another"})
    file.write_text(json.dumps(kept | change))
    with pytest.raises(SystemExit, match=said):
        profiles.old_cases(file, asked, {"name": "a device"})


@pytest.mark.slow
def test_the_whole_script_at_toy_size_and_again_beside_what_was_before(tmp_path: Path) -> None:
    old = toy("profiles", tmp_path)
    assert list(old["numbers"]["cases"]) == list(profiles.CASES)
    for each in old["numbers"]["cases"].values():
        assert each["steps"] == profiles.PROFILED
        assert 0 < each["busy"] <= each["wall"]
        assert 0 <= each["idle"] < 1
        assert len(each["largest"]) == 10
        assert any(name == "aten::mm" for name, _, _ in each["largest"])
        with gzip.open(tmp_path / each["trace"], "rt") as trace:
            assert digest(json.load(trace)["traceEvents"])["kernels"] == each["kernels"]
    kept = tmp_path / "old.json"
    kept.write_text(json.dumps(old))
    new = toy("profiles", tmp_path, "--cases", "decoding, eager", "--before", str(kept))
    assert new["numbers"]["before"] == old["numbers"]["cases"]
    assert list(new["numbers"]["cases"]) == list(profiles.CASES)
    eager = [each["numbers"]["cases"]["decoding, eager"]["step"] for each in (old, new)]
    assert eager[0] != eager[1]
    assert new["numbers"]["cases"]["training"] == old["numbers"]["cases"]["training"]
    names = [name for case in profiles.CASES for name in (f"{case}, before", case)]
    assert new["tables"][0]["header"] == ["figure", *names]
    assert len(new["tables"]) == 4
