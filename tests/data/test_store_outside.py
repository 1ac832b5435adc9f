"""A feature store from outside: its files say rows that there are, lead nowhere else, and are not written through."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.features.store import INDEX, META, SHARDS, DamagedError, FeatureStore
from heads.common.files import CHECKSUM, atomic_write, claim, read_checked, write_checked
from tests.data import stores


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    opened = FeatureStore.create(tmp_path / "store", stores.spec())
    opened.write("a", [0, 1], stores.made([0, 1]))
    return tmp_path / "store"


def change(file: Path, **values: Any) -> None:
    """Write other values with a checksum that is right."""
    write_checked(file, {key: value for key, value in read_checked(file).items() if key != CHECKSUM} | values)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"rows": 3}, "does not list rows"),
        ({"rows": [0]}, "does not list rows"),
        ({"digests": [1, 2]}, "does not list rows"),
        ({"bytes": "many"}, "does not list rows"),
        ({"rows": [0, 0]}, "not different ones of 11"),
        ({"rows": [0, 11]}, "not different ones of 11"),
        ({"rows": [[], {}]}, "not different ones of 11"),
    ],
)
def test_an_entry_of_something_else_is_damaged(folder: Path, values: dict[str, Any], told: str) -> None:
    change(folder / INDEX / "a.json", **values)
    opened = FeatureStore(folder)
    assert told in opened.damaged["a"]
    assert str(folder / INDEX / "a.json") in opened.damaged["a"]
    assert not opened.has(0)


@pytest.mark.parametrize(
    "values",
    [{"shard_rows": 0}, {"rows": -1}, {"dtype": "x"}, {"width": 0}, {"layers": [[]]}, {"x": 1}],
)
def test_a_meta_file_of_something_else_is_refused(folder: Path, values: dict[str, Any]) -> None:
    change(folder / META, **values)
    with pytest.raises(ValueError, match=r"meta\.json: .*; put a copy in its place") as error:
        FeatureStore(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [f"{SHARDS}/a.safetensors", f"{INDEX}/a.json"])
def test_a_link_out_of_a_store_is_not_read(folder: Path, part: str) -> None:
    shutil.move(folder / part, folder.parent / "elsewhere")
    (folder / part).symlink_to(folder.parent / "elsewhere")
    assert "a link out of its folder" in FeatureStore(folder).damaged["a"]


def test_a_shard_of_an_impossible_shape_is_damaged(folder: Path) -> None:
    shard = folder / SHARDS / "a.safetensors"
    header = json.dumps({"hidden": {"dtype": "F32", "shape": [2**64 - 1, 0], "data_offsets": [0, 0]}}).encode()
    shard.write_bytes(len(header).to_bytes(8, "little") + header)
    change(folder / INDEX / "a.json", bytes=shard.stat().st_size)
    with pytest.raises(DamagedError, match="row 0"):
        FeatureStore(folder).read(0)


def test_links_are_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".partial-x").symlink_to(precious)
    atomic_write(tmp_path / "x", b"new")
    assert ((tmp_path / "x").read_bytes(), precious.read_text()) == (b"new", "mine")
    (tmp_path / "lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match=os.strerror(40)), claim(tmp_path / "lock", wait=False):
        pass
    assert not (tmp_path / "made").exists()
