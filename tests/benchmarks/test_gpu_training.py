"""The training measurements at toy size: what holds at any size."""

from pathlib import Path

import pytest

from tests.benchmarks.gpu_scripts import toy


@pytest.mark.slow
def test_training_is_measured_beside_its_plan(tmp_path: Path) -> None:
    found = toy("training", tmp_path, "--heads", "eagle3", "medusa", "--steps", "2", "--lengths", "64")
    steps, fits = found["numbers"]["steps"], found["numbers"]["fits"]
    assert list(steps) == ["eagle3, 4 x 64", "medusa, 4 x 64"]
    for each in steps.values():
        assert 0 < each["mfu"] < 1
        assert 0 < each["head_mfu"] < 1
        assert sum(each["seconds"].values()) == pytest.approx(4 * 64 / each["tokens_per_second"], rel=0.5)
        assert 0.5 < each["planned_bytes"] / each["peak_bytes"] < 1.5
    assert found["numbers"]["features"]["64"]["ratio"] > 0.5
    rows = [each["rows"] for each in fits.values()]
    assert rows == sorted(rows)  # more memory, no fewer rows
    assert rows[0] >= 1
    assert {each["runs"] for each in fits.values()} == {None}  # a CPU's memory is not cut
    assert [len(table["rows"]) for table in found["tables"]] == [2, 1, 3]
