"""What a run's provenance says of its text: names, hashes, and who wrote the answers."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.config import DataConfig
from data.text.sources import Hub, open_sources

Make = Callable[..., DataConfig]


def source_records(config: DataConfig) -> list[dict[str, Any]]:
    """Return the provenance of each source."""
    return [source.provenance() for source in open_sources(config)]


def test_files_are_told_by_their_hash_and_their_writer(tmp_path: Path, config: Make) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"text": "one"}\n')
    settings = {"by": "engine", "target": {"fingerprint": "f00d"}, "data": {"sources": []}, "api_key": "s3cr3t-s3cr3t"}
    (tmp_path / "answers.jsonl.meta.json").write_text(json.dumps({"settings": settings, "counts": {}}))
    (found,) = source_records(config(str(file)))
    assert found == {
        "name": str(file),
        "files": 1,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "answers": {"by": "engine", "target": {"fingerprint": "f00d"}, "api_key": "[redacted]"},
    }


def test_a_folder_is_told_by_all_of_its_files(tmp_path: Path, config: Make) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    (before,) = source_records(config(str(tmp_path)))
    (tmp_path / "b.txt").write_text("c")
    (after,) = source_records(config(str(tmp_path)))
    assert before["files"] == after["files"] == 2
    assert before["sha256"] != after["sha256"]
    assert "answers" not in before
    for second, told in (("a", {"by": "a"}), ("b", {"by": "several"})):
        for name, writer in (("a", "a"), ("b", second)):
            (tmp_path / f"{name}.txt.meta.json").write_text(json.dumps({"settings": {"by": writer}}))
        assert source_records(config(str(tmp_path)))[0]["answers"] == told


def test_a_hub_data_set_is_told_by_its_revision() -> None:
    assert Hub("me/chats:en", [], "abc").provenance() == {"name": "me/chats:en", "revision": "abc"}


def test_damaged_provenance_of_answers_is_one_line(tmp_path: Path, config: Make) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"text": "one"}\n')
    (tmp_path / "answers.jsonl.meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json: damaged .*; restore it, or remove it") as caught:
        source_records(config(str(file)))
    assert "\n" not in str(caught.value)
