"""The tests and the gate at toy size."""

from pathlib import Path

import pytest

from tests.benchmarks.gpu_scripts import toy


@pytest.mark.slow
def test_the_tests_of_the_device_run_and_every_gate_is_green(tmp_path: Path) -> None:
    found = toy("smoke", tmp_path)["numbers"]
    (tests,) = found["tests"].values()
    assert (tests["status"], tests["failed"], tests["skipped"]) == (0, 0, 0)
    assert tests["passed"] > 50
    gates = {name.removeprefix("gate: "): each for name, each in found.items() if name != "tests"}
    assert list(gates) == ["eagle, float32", "suffix, float32", "eagle, bfloat16", "suffix, bfloat16"]
    for name, each in gates.items():
        assert each["checked"] == each["identical"] + each["near_tie"] == 6
        assert each["tokens"] >= each["asked"] == 40
        assert each["tau"] > 1
        assert each["near_tie"] == 0 or "bfloat16" in name
