"""What comes from outside is data: parsed under limits, and no way out of its folder."""

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from heads.common.untrusted import DEEPEST, inside, names_code, parse_json, parse_yaml, plain_name
from heads.formats.store import load_head, save_head, save_tree
from heads.formats.weights import header, read_weights
from tests import toys
from tests.refusals import refuses


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"[" * 101 + b"]" * 101, b"1" * 5000,
                                     b'{"a":' * 101 + b"1" + b"}" * 101])  # fmt: skip
def test_what_is_no_json_is_one_line(content: bytes) -> None:
    refuses(r"\S", parse_json, content)


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
def test_yaml_holds_plain_values_alone(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    events, parse = count(), yaml.parse
    monkeypatch.setattr(yaml, "parse", lambda *arguments: (event for event in parse(*arguments) if next(events) + 1))
    refuses(r"\S", parse_yaml, content)
    assert next(events) < 4 * DEEPEST  # PyYAML's own work grows with the square of the depth


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
    "name", ["", ".", "..", "/etc/passwd", "../x", "a/b", "a/", "a\n", "\0", "\ud800", "x" * 256, "é" * 128, 3]
)
def test_a_name_that_leads_out_is_refused(tmp_path: Path, name: Any) -> None:
    assert not plain_name(name)
    refuses("which is no file of that folder", inside, tmp_path, name)


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


TREE = {"kind": "chain", "depth": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(tmp_path / "head", toys.head("eagle", toys.target()), toys.target().spec, TREE)
    return tmp_path / "head"


def refusal(folder: Path) -> str:
    return refuses(r"\S", load_head, folder, toys.target().embeddings, toys.target().spec)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c["head"].update(_target_="os.system"), "names code to run by the key _target_"),
        (lambda c: c["tree"].update(auto_map={"a": "b.C"}), "names code to run by the key auto_map"),
        (lambda c: c["target"].update(trust_remote_code=True), "names code to run by the key trust_remote_code"),
        (lambda c: c.update(tree=[1]), "tree is [1], expected a mapping"),
        (lambda c: c["head"].update(name=[1]), "head.name is [1]"),
        (lambda c: c["head"].update(layers=10**9), "head.layers is 1000000000: give 256 or less"),
        (lambda c: c["head"].update(intermediate_size=10**6), "its config.json and the target make it"),
        (lambda c: c["head"].update(num_heads=-1), "head.num_heads is -1: give 1 or more"),
        (lambda c: c["head"].update(num_heads=7), "head.num_heads is 7 and head.num_kv_heads"),
    ],
)
def test_a_configuration_is_data(folder: Path, change: Callable[[dict[str, Any]], Any], told: str) -> None:
    content = json.loads((folder / "config.json").read_text())
    change(content)
    (folder / "config.json").write_text(json.dumps(content))
    assert told in refusal(folder)


@pytest.mark.parametrize("ids", [range(11, 41), range(-1, 29), [0, *range(29)], range(29, -1, -1), [2**62] * 30])
def test_drafted_tokens_are_tokens_of_the_target(tmp_path: Path, ids: Sequence[int]) -> None:
    save_head(tmp_path / "head", toys.head("eagle3", toys.target()), toys.target().spec, TREE)
    weights = tmp_path / "head" / "model.safetensors"
    save_file({**read_weights(weights), "vocab.ids": torch.tensor(ids)}, weights)
    assert "vocab.ids are not 30 different tokens of the target's 40" in refusal(tmp_path / "head")


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(4, dtype=torch.float8_e5m2), "is of type F8_E5M2; the types read are"),
        (torch.zeros(2, 1 << 41, 0), "which no head has"),
        (torch.zeros([1] * 9), "which no head has"),
    ],
)
def test_a_tensor_that_no_head_has(tmp_path: Path, tensor: torch.Tensor, told: str) -> None:
    save_file({"a": tensor}, tmp_path / "x.safetensors")
    for read in (header, read_weights):
        with pytest.raises(ValueError, match=told):
            read(tmp_path / "x.safetensors")


def test_a_link_in_a_heads_folder_is_not_written_through(folder: Path) -> None:
    precious = folder.parent / "precious"
    precious.write_text("mine")
    (folder / ".partial-config.json").symlink_to(precious)
    save_tree(folder, {**TREE, "depth": 5})
    assert precious.read_text() == "mine"
    assert json.loads((folder / "config.json").read_text())["tree"]["depth"] == 5
