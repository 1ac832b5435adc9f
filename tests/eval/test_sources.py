"""Where a run's head and target are, and what the user's own values change."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.inputs.drafters import find_heads, model_of
from inference.target.config import model_config
from tests.refusals import refuses
from tests.toys import HEAD_CONFIGS

OWN: dict[str, Any] = {
    "name": "mine", "path": "/models/mine", "dtype": "bfloat16", "device": "cpu", "prompts": "p.jsonl",
}  # fmt: skip
NOTHING: dict[str, Any] = dict.fromkeys(["name", "path", "dtype", "device", "trust_remote_code", "prompts"])


def published(folder: Path, kind: str = "eagle", target: str = "me/target") -> str:
    """Write a head's config.json as publishing leaves it."""
    spec = {"name": target, "vocab_size": 40, "hidden_size": 32, "num_layers": 3, "fingerprint": "f"}
    folder.mkdir(parents=True)
    content = {"format": 1, "head": {"name": kind, **HEAD_CONFIGS[kind]}, "target": spec, "tree": {}}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def trained(folder: Path, kind: str = "eagle", **model: Any) -> str:
    """Write a run's folder."""
    published(folder / "head", kind)
    (folder / "config.yaml").write_text(json.dumps({"model": OWN | model}), encoding="utf-8")
    return str(folder)


def test_a_head_is_found_in_a_run_and_in_a_folder_of_its_own(tmp_path: Path) -> None:
    assert find_heads([trained(tmp_path / "run")]) == {"eagle": tmp_path / "run" / "head"}
    assert find_heads([published(tmp_path / "alone")]) == {"eagle": tmp_path / "alone"}
    with pytest.raises(ValueError, match="nonesuch"):
        find_heads([str(tmp_path / "nonesuch")])


def test_heads_are_called_by_kind_and_by_run_where_that_is_not_enough(tmp_path: Path) -> None:
    a, b, c = (trained(tmp_path / run, kind) for run, kind in (("a", "eagle"), ("b", "medusa"), ("c", "eagle")))
    assert list(find_heads([a, b])) == ["eagle", "medusa"]
    assert list(find_heads([a, b, c])) == [f"eagle {a}", "medusa", f"eagle {c}"]
    assert list(find_heads([a, b], ["head", "eagle"])) == [f"eagle {a}", "medusa"]  # as drafter=[head,mtp] beside mtp


def test_the_target_is_the_runs_own_from_the_head_folder_too(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    assert model_of(run, NOTHING) == model_config(**OWN)
    assert model_of(f"{run}/head", NOTHING).path == OWN["path"]


def test_a_published_head_names_its_target(tmp_path: Path) -> None:
    found = model_of(published(tmp_path / "head"), NOTHING)
    assert (found.path, found.name, found.dtype, found.device) == ("me/target", "target", "auto", None)


def test_a_users_target_takes_over_with_its_own_name(tmp_path: Path) -> None:
    found = model_of(trained(tmp_path / "run"), NOTHING | {"path": "/models/other"})
    assert (found.path, found.name, found.prompts) == ("/models/other", "other", "p.jsonl")
    given = {"quantize": "int8", "adapter": "a", "placement": "offload", "memory_gb": 2.0}
    found = model_of(trained(tmp_path / "placed", **given), NOTHING | {"path": "/models/other"})
    assert {key: getattr(found, key) for key in given} == given


@pytest.mark.parametrize("placement", ["fsdp", "tensor_parallel"])
def test_a_target_of_several_processes_is_mapped_to_devices_here(tmp_path: Path, placement: str) -> None:
    assert model_of(trained(tmp_path / "run", placement=placement), NOTHING).placement == "device_map"


def test_foreign_code_runs_only_if_the_user_says_so(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", trust_remote_code=True)
    with pytest.raises(ValueError, match=r"trust_remote_code=true, which no file may say for you"):
        model_of(run, NOTHING)
    assert model_of(run, NOTHING | {"path": "/models/other"}).trust_remote_code is False
    assert model_of(run, NOTHING | {"trust_remote_code": False}).trust_remote_code is False
    assert model_of(run, NOTHING | {"trust_remote_code": True}).trust_remote_code is True


def test_no_target_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path"):
        model_of(None, NOTHING)
    run = trained(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="has no model"):
        model_of(run, NOTHING)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {path: x, _target_: os.system}", "names code to run by the key _target_"),
        ("model: {path: x}\nhead: {deep: [{auto_map: {a: b.C}}]}", "names code to run by the key auto_map"),
        ("model: {path: x}\ntrust_remote_code: true", "names code to run by the key trust_remote_code"),
        ("model: {path: x, pathe: y}", r"model\.pathe is not a known key"),
        ("model: {path: [x]}", r"model\.path: \['x'\] is not a text"),
        ("model: {path: '${oc.env:HOME}'}", "an interpolation is not allowed"),
        ("model: !!python/object/apply:os.mkdir [ran]", "damaged .*python/object"),
        ("a: &a [1]\nmodel: {path: x, devices: *a}", "damaged .*alias"),
        ("model:\n  path: /models/mine\n  na", "damaged"),
    ],
)
def test_a_config_from_outside_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(text, encoding="utf-8")
    assert "config.yaml" in refuses(told, model_of, run, NOTHING)
    assert not (tmp_path / "ran").exists()
