"""What comes from outside is data: parsed under limits, and no way out of its folder."""

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from heads.common.untrusted import inside, names_code, parse_json, parse_yaml, plain_name


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[" * 101 + b"]" * 101, b"1" * 5000])
def test_what_is_no_json_is_one_line(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        parse_json(content)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"a: !!python/object/apply:os.getcwd []",
        b"a: !!python/name:os.system",
        b"a: &a [1]\nb: *a",
        b"[" * 5000 + b"]" * 5000,
        b"- " * 5000,
        b"\n".join(b" " * depth + b"a:" for depth in range(2000)),
        b"a: !!timestamp x",
        b"? [a]\n: b",
        b"\x00",
        b"a: 1\n" * 300_000,
    ],
)
def test_yaml_holds_plain_values_alone(content: bytes) -> None:
    before = process_time()
    with pytest.raises(ValueError, match=r"\S") as error:
        parse_yaml(content)
    assert "\n" not in str(error.value)
    assert process_time() - before < 1  # PyYAML's own work grows with the square of the depth


def test_plain_values_are_read() -> None:
    assert parse_json(b'{"a": [1, null]}') == parse_yaml(b"a: [1, null]") == {"a": [1, None]}
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    assert parse_json(json.dumps(deep).encode()) == deep


def test_code_is_seen_at_any_depth_unless_it_is_switched_off() -> None:
    assert names_code({"a": [1, {"b": {"_target_": "os.system"}}]}) == "_target_"
    assert names_code({"auto_map": {"AutoModel": "x.Y"}}) == "auto_map"
    assert names_code({"trust_remote_code": True}) == "trust_remote_code"
    assert names_code({"trust_remote_code": False, "a": ["_target_", {"x": "auto_map"}]}) is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/etc/passwd", "../x", "a/b", "a/", "a\n", "\0", "\ud800", "x" * 256, 3]
)
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: Any) -> None:
    assert not plain_name(name)
    with pytest.raises(ValueError, match="which is no file of that folder") as error:
        inside(tmp_path, name)
    assert "\n" not in str(error.value)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own").write_text("")
    (folder / "near").symlink_to("own")
    (folder / "far").symlink_to(tmp_path / "other")
    assert plain_name("x" * 255)
    assert inside(folder, "near") == folder / "near"
    assert inside(folder, "not there yet") == folder / "not there yet"
    with pytest.raises(ValueError, match="a link out of its folder"):
        inside(folder, "far")
