"""A checkpoint is whole or absent, and the newest whole one is found."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from train import checkpoint
from train.checkpoint import Checkpoint


def made(step: int) -> Checkpoint:
    return Checkpoint(
        step, {"w": torch.full((3,), float(step))}, {}, {"lr": 0.1, "t": torch.ones(2)}, {"best_tau": 1.5}
    )


def test_round_trip_and_keep(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        checkpoint.save(tmp_path, made(step), keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000008", "step-00000012"]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.progress, found.optimizer["lr"]) == (12, {"best_tau": 1.5}, 0.1)
    assert found.weights["w"].tolist() == [12.0] * 3


def test_a_damaged_newest_falls_back(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint.save(tmp_path, made(step), keep=2)
    weights = tmp_path / "step-00000008" / "head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 4


def test_none_and_none_good(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None
    checkpoint.save(tmp_path, made(4), keep=1)
    (tmp_path / "step-00000004" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="overwrite=true"):
        checkpoint.newest(tmp_path)


def test_a_full_disk_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, made(4), keep=1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match="free space"):
        checkpoint.save(tmp_path, made(8), keep=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 4
    assert len(list(tmp_path.iterdir())) == 1
