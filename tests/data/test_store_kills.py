"""Writers that are killed, and writers that share a store."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data.features.coding import Copying
from data.features.extraction import extract
from data.features.store import FeatureStore
from tests.data import stores
from tests.data.test_store import contents, filled

SPEC = stores.spec(rows=24)


def slowly(rows: list[int]) -> Copying:
    time.sleep(0.002)
    return stores.ready(rows)


def forked(work: Callable[[], None]) -> int:
    """Do something in a child of this process, which shares all that is imported."""
    child = os.fork()
    if child:
        return child
    try:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def write(folder: Path, rank: int = 0, world: int = 1) -> None:
    extract(FeatureStore.create(folder, SPEC), slowly, 2, rank, world)


@pytest.mark.parametrize("points", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_anywhere_is_taken_up_where_it_was(tmp_path: Path, points: int) -> None:
    begin = time.perf_counter()
    assert os.waitpid(forked(lambda: write(tmp_path / "whole")), 0)[1] == 0
    seconds, whole = time.perf_counter() - begin, contents(tmp_path / "whole")
    draw, left = random.Random(0), []
    for point in range(points):
        folder = tmp_path / f"killed{point}"
        child = forked(lambda folder=folder: write(folder))
        time.sleep(draw.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (folder / "meta.json").exists():
            found = FeatureStore(folder)
            held = [row for row in range(SPEC.rows) if found.has(row)]
            assert all(torch.equal(found.read(row)["last"], stores.made([row])["last"]) for row in held)
            left.append(len(held))
        filled(folder, SPEC)
        assert contents(folder) == whole
    if points > 3:
        assert any(0 < held < SPEC.rows for held in left), "no kill struck a store that was being written"


def test_writers_share_a_store_and_leave_what_one_leaves(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    children = [forked(lambda rank=rank: write(tmp_path / "shared", rank, 2)) for rank in (0, 1)]
    children += [forked(lambda: write(tmp_path / "shared"))]  # another command, which knows nothing of the two
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert contents(tmp_path / "shared") == contents(tmp_path / "whole")


def test_what_a_dead_writer_left_half_done_is_written_by_the_others(tmp_path: Path) -> None:
    write(tmp_path / "whole")

    def stuck(rows: list[int]) -> Copying:
        if 6 in rows:  # the shard is claimed by now; its lock file is there a moment before it is
            (tmp_path / "stuck").touch()
            time.sleep(60)
        return stores.ready(rows)

    folder = tmp_path / "store"
    child = forked(lambda: extract(FeatureStore.create(folder, SPEC), stuck, 2, 0, 1) and None)
    while not (tmp_path / "stuck").exists():
        time.sleep(0.005)
    write(folder)
    assert FeatureStore(folder).missing() == [6, 7], "the claimed shard is its writer's"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write(folder)
    assert contents(folder) == contents(tmp_path / "whole")
