"""Extraction of the features of all packed rows into a store, by any number of processes, once they are known to fit.

Shard k holds rows k·R to (k+1)·R - 1, always computed in the same groups: shards that a killed extraction lacks are
written by the next one, and the store has the bytes of an undisturbed one. Each process claims the shards that it
writes, first every world-th one, then the remaining ones, so any number of them share a store, started together or not.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.progress import track

from data.features.coding import join
from data.features.source import FeaturesConfig
from data.features.store import META, MUST_AGREE, FeatureStore, Row, StoreSpec
from data.features.store_files import claim

GB, MB = 10**9, 10**6
Make = Callable[[list[int]], Row]


class Estimate(NamedTuple):
    """The work of an extraction: rows and their bytes, and the bytes that the disk has free."""

    rows: int
    bytes: int
    free: int

    def line(self, seconds: float, world: int) -> str:
        """Describe the work in a line, given the seconds that one row took."""
        time_left = int(seconds * self.rows / world)
        clock = f"{time_left // 3600}:{time_left // 60 % 60:02d}:{time_left % 60:02d}"
        return (
            f"{self.rows} rows to extract: {self.bytes / GB:.3f} GB of {self.free / GB:.3f} GB free, "
            f"about {clock} h on {world} process{'es' if world > 1 else ''}"
        )


def shard_rows(config: FeaturesConfig, row_bytes: int) -> int:
    """Return the number of rows in a shard of about `shard_mb`."""
    return max(1, config.shard_mb * MB // row_bytes)


def spec_there(folder: Path, spec: StoreSpec) -> StoreSpec:
    """Return the spec of the store in a folder, which may have more layers, or the given one for a new store.

    Raises:
        ValueError: the folder holds a store of other features.
    """
    if not (folder / META).exists():
        return spec
    store = FeatureStore(folder)
    store.check(spec, tuple(MUST_AGREE))
    return store.spec


def estimate(folder: Path, spec: StoreSpec, budget_gb: float | None) -> Estimate:
    """Return the rows still to extract into a folder, with their size; nothing is written.

    Raises:
        ValueError: it does not fit the disk or the budget.
    """
    left, held = spec.rows, 0
    if (folder / META).exists():
        store = FeatureStore(folder)
        left, held = len(store.missing()), store.bytes()
    parent = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    work = Estimate(left, left * spec.row_bytes, shutil.disk_usage(parent).free)
    smaller = "give features.dtype=int8, fewer layers or less data (data.limit), or more room"
    if work.bytes > work.free:
        raise ValueError(
            f"{folder}: {work.rows} rows take {work.bytes / GB:.3f} GB, and the disk has {work.free / GB:.3f} GB "
            f"free; {smaller}"
        )
    if budget_gb is not None and held + work.bytes > budget_gb * GB:
        raise ValueError(
            f"{folder}: the store takes {(held + work.bytes) / GB:.3f} GB, over features.budget_gb={budget_gb:g}; "
            f"{smaller}"
        )
    return work


def timed(make: Make, spec: StoreSpec, micro: int) -> float:
    """Measure the seconds that a row takes, by a second forward pass: the first one warms up."""
    rows = list(range(min(micro, spec.rows)))
    make(rows)
    begin = time.perf_counter()
    make(rows)
    return (time.perf_counter() - begin) / len(rows)


def extract(store: FeatureStore, make: Make, micro: int, rank: int, world: int) -> int:
    """Write the shards that the store lacks, and return how many this process wrote.

    Args:
        store: the store to write to.
        make: computes the tensors of these rows, at most `micro` at a time.
        micro: the largest number of rows in one call of `make`.
        rank: the rank of this process.
        world: the number of processes.

    Raises:
        ValueError: the disk refused; written shards stay.
    """
    spec, written = store.spec, 0
    mine = list(range(rank, spec.shards, world))
    others = [number for number in range(spec.shards) if number % world != rank]
    for number in track(mine + others, description="shards", disable=rank > 0):
        name = f"{number:06d}"
        rows = spec.shard(number)
        if all(map(store.has, rows)):
            continue
        with claim(store.lock(name), wait=False) as free:
            store.refresh()
            if not free or all(map(store.has, rows)):
                continue
            groups = [rows[start : start + micro] for start in range(0, len(rows), micro)]
            store.write(name, rows, join(make(group) for group in groups))
            written += 1
    return written
