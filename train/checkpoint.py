"""Training checkpoints: written whole or not at all, the newest good one found again, the old ones removed.

A checkpoint is a folder `step-N` with the head's weights, the optimiser's state and a JSON of the rest. The data
position is the step number, and all other randomness is derived from seeds and step, so N is all there is to resume.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


class Checkpoint(NamedTuple):
    """Everything that continues a run after `step` optimiser steps."""

    step: int
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    optimizer: dict[str, Any]
    progress: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write `folder/step-N` atomically and remove all but the newest `keep`.

    Raises:
        ValueError: the disk refused; what was there before still loads.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    partial = folder / f".partial-{checkpoint.step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_file({k: v.cpu().contiguous() for k, v in checkpoint.weights.items()}, partial / "head.safetensors")
        if checkpoint.average:
            save_file({k: v.cpu().contiguous() for k, v in checkpoint.average.items()}, partial / "average.safetensors")
        torch.save(checkpoint.optimizer, partial / "optimizer.pt")
        state = {"step": checkpoint.step, "progress": checkpoint.progress}
        (partial / "state.json").write_text(json.dumps(state))
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(
            f"{final}: the checkpoint could not be written ({error}); free space and resume=true"
        ) from error
    for old in _steps(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint that loads, None if there is none at all.

    Raises:
        ValueError: there are checkpoints and none of them loads.
    """
    found, reason = _steps(folder), ""
    for path in reversed(found):
        try:
            return _load(path)
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, EOFError) as error:
            reason = f"{path.name}: {error}"
    if found:
        raise ValueError(f"{folder}: no checkpoint loads ({reason}); start again with overwrite=true")
    return None


def _load(path: Path) -> Checkpoint:
    state = json.loads((path / "state.json").read_text())
    average = path / "average.safetensors"
    return Checkpoint(
        int(state["step"]),
        load_file(path / "head.safetensors"),
        load_file(average) if average.exists() else {},
        torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu"),
        state["progress"],
    )


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))
