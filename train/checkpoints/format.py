"""Checkpoints on disk: committed atomically, verified by checksums, written by all processes together.

    checkpoints/step-N/rank-R-of-W.safetensors   the tensors that process R wrote, a subset of the run's named tensors
    checkpoints/step-N/index.json                which shard holds which tensor, and the SHA-256 of every shard
    checkpoints/step-N/state.json                the step, the measurements so far, the settings that identify the run

Tensors are whole under their names (state.py), so the number of processes and the strategy that shards the head may
change on resume. A checkpoint is written to a folder `.partial-…`, where each process writes a note once its shard is
on the disk; the main process then renames the folder. The data position is the step number, and all other randomness
is derived from seeds and step, so nothing else is needed to resume.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.text.files import content_hash
from heads.common.errors import one_line
from heads.common.files import atomic_write, flush, read_checked, write_checked
from heads.common.untrusted import inside, shown

FORMAT = 2
NAME = re.compile(r"step-[0-9]{8,}")
INDEX, STATE = "index.json", "state.json"
PARTIAL, DAMAGED, FAILED = ".partial-", "damaged-", ".failed"


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, oldest first; folders of other names, such as a user's backup, are ignored."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def note_of(partial: Path, rank: int) -> Path:
    """Return the path of the note that a process writes once its shard is on the disk."""
    return partial / f"rank-{rank:05d}.json"


def write_shard(partial: Path, rank: int, world: int, tensors: dict[str, Tensor]) -> None:
    """Write a process's tensors and then its note: the shard's tensors and checksum.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    partial.mkdir(parents=True, exist_ok=True)
    shard = partial / f"rank-{rank:05d}-of-{world:05d}.safetensors"
    save_file(tensors, shard)
    flush(shard)
    note = {"shard": shard.name, "checksum": content_hash(shard), "tensors": list(tensors)}
    write_checked(note_of(partial, rank), note)


def write_failure(partial: Path, rank: int, reason: str) -> None:
    """Record that a process could not write its shard, after deleting the shard to free its space on the disk."""
    with contextlib.suppress(OSError):
        for shard in partial.glob(f"rank-{rank:05d}-of-*"):
            shard.unlink()
        atomic_write(note_of(partial, rank).with_suffix(FAILED), reason.encode())


def commit(partial: Path, final: Path, world: int, names: list[str], content: dict[str, Any]) -> None:
    """Commit the shards of all processes, whose notes exist in `partial`, as the checkpoint `final` by one rename.

    It replaces an earlier one of the same step. Tensors are read back in the order of `names`; `content` is state.json.
    """
    notes = [read_checked(note_of(partial, rank)) for rank in range(world)]
    tensors = {name: {"shard": note["shard"]} for note in notes for name in note["tensors"]}
    shards = {note["shard"]: {"sha256": note["checksum"]} for note in notes}
    index = {"format": FORMAT, "shards": shards, "tensors": {name: tensors[name] for name in names}}
    write_checked(partial / INDEX, index)
    write_checked(partial / STATE, content)
    for rank in range(world):
        note_of(partial, rank).unlink()
    flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    flush(final.parent)


def tidy(folder: Path, keep: int, best: int) -> None:
    """Remove all checkpoints but the newest `keep` and that of step `best`."""
    for old in checkpoints(folder)[:-keep]:
        if step_of(old) != best:
            shutil.rmtree(old, ignore_errors=True)


def clear(folder: Path) -> None:
    """Remove the unfinished checkpoints of a killed run."""
    for partial in folder.glob(f"{PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Rename the damaged checkpoints after a step, so that they do not count as the newest."""
    for path in checkpoints(folder):
        if step_of(path) > step:
            aside = path.with_name(DAMAGED + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)


def complaint(path: Path, rank: int, world: int) -> str:
    """Return the defect of a checkpoint, empty if intact; each process checks every `world`-th shard."""
    try:
        index = read_checked(path / INDEX)
        if index["format"] != FORMAT:
            return f"{path / INDEX}: format {index['format']!r} where this version reads {FORMAT}"
        if read_checked(path / STATE).get("step") != step_of(path):
            raise ValueError(f"{path / STATE}: damaged, it is of another step")
        for name, about in sorted(index["shards"].items())[rank::world]:
            if content_hash(inside(path, name)) != about["sha256"]:
                return f"{path / name}: damaged, its checksum is not that of its content"
        if lost := [name for name, about in index["tensors"].items() if about["shard"] not in index["shards"]]:
            return f"{path / INDEX}: damaged, no shard holds {shown(lost[0])}"
    except (KeyError, TypeError, AttributeError) as error:
        return f"{path / INDEX}: damaged ({one_line(error)})"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def state_of(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json; refuse a damaged one."""
    try:
        return read_checked(path / STATE)
    except OSError as error:
        raise ValueError(f"{path / STATE}: cannot be read ({error})") from error


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors, on every process in the same order; refuse a shard that cannot be read."""
    index = read_checked(path / INDEX)
    shards: dict[str, Any] = {}
    for shard in index["shards"]:
        try:
            shards[shard] = safe_open(inside(path, shard), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path / shard}: cannot be read ({error})") from error
    for name, about in index["tensors"].items():
        yield name, shards[about["shard"]].get_tensor(name)
