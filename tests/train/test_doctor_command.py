"""The doctor as a command: what it prints and its exit status, heads that are damaged, the Hub, and bad input."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.text.template import template_sha256
from heads.common.resolvers import ROOT
from heads.formats.store import save_head
from tests import toys
from tests.train.doctoring import TREE, Ward, asked, change, examine, faults, rope, set_to, turned, without
from tests.train.hub_server import Hub, Repo, become
from tests.train.publishing import VALUES
from train import publish
from train.publish import PublishConfig, write_folder
from train.release.doctor import examined, report
from train.release.doctor.examined import read
from train.release.doctor.finding import OK, UNKNOWN, WRONG, Finding, meant_for, written


def untrained(ward: Ward, folder: Path, form: str | None = "vllm") -> Path:
    """Write a head that nothing was measured of; not trained, which files do not show."""
    return ward.published(folder, "eagle3", form, {}, steps=0)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(ROOT / "train" / "publish.py"), *words]
    return subprocess.run(script, env=dict(os.environ), capture_output=True, text=True, check=False)


def test_the_command_needs_no_run_and_says_by_its_status_that_something_is_wrong(tmp_path: Path, ward: Ward) -> None:
    folder = untrained(ward, tmp_path / "head")
    text, status = report(asked(folder, ward.target, False))
    assert status == 0
    assert ", 0 wrong, 1 not known" in text
    change(folder, config=rope(max_position_embeddings=2048))
    done = command(f"doctor={folder}", f"target={ward.target.name}", "checkup.measure=false")
    assert done.returncode == 1, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("wrong"))
    assert "length" in lines[at]
    assert lines[at + 1].strip().startswith("costs: older vLLM caps the context that it serves at 2048")
    assert lines[at + 2].strip() == 'remedy: set "max_position_embeddings": 4096 in config.json'
    assert ", 1 wrong, " in lines[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["doctor={empty}", "target={target}"], "no head in it"),
        (["doctor={empty}/nowhere", "target={target}"], "no such folder"),
        (["doctor={head}", "target={empty}"], "no model there"),
        (["doctor={head}", "target={empty}/nowhere"], "no model there (no such folder"),
        (["doctor={bare}"], "do not say its target; give target="),
        (["doctor={head}", "target={target}", "format=onnx"], "format is 'onnx'"),
        (["doctor={head}", "target={target}", "checkup.prompts=0"], "checkup.prompts is 0"),
        (["doctor={head}", "target={target}", "checkup.depth=deep"], "checkup.depth"),
        (["doctor={head}", "target={target}", "checkup.workload={empty}/none.jsonl"], "none.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, tmp_path: Path, ward: Ward, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    bare = untrained(ward, tmp_path / "bare")
    change(bare, config=without("speculators_config"))
    places = {
        "empty": str(tmp_path / "empty"), "target": ward.target.name, "bare": str(bare),
        "head": str(untrained(ward, tmp_path / "head", None)),
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["publish.py", *[word.format(**places) for word in words]])
    with pytest.raises(SystemExit) as ended:
        publish.main()
    assert ended.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert told in said[0]


def test_a_repository_is_examined_with_what_lies_beside_the_head(
    tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = untrained(ward, tmp_path / "head")
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path / "cache")
        hub.repos["me/tiny-eagle-3"] = Repo(False)
        hub.repos["me/tiny-eagle-3"].commit({path.name: path.read_bytes() for path in folder.iterdir()})
        found = {each.check: each for each in examine(asked(Path("me/tiny-eagle-3"), ward.target, False))}
        assert found["name"].verdict == WRONG
        assert "taken for eagle, and it is eagle3" in found["name"].says
        assert "tiny-eagle3" in found["name"].remedy
        assert found["tokenizer"].verdict == OK
        assert found["target"].verdict == OK
        with pytest.raises(ValueError, match=r"me/none: the Hub refused downloading \(404\)"):
            examine(asked(Path("me/none"), ward.target, False))


DAMAGES: dict[str, tuple[Any, str, str]] = {
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "files", "config.json: damaged"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "files", "holds no mapping"),
    "half the weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:900]), "files",
        "truncated",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "files", "no weights"),
    "a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "files", "a pickle, which can hold code",
    ),
    "other tensors": (
        lambda f: change(f, tensors=lambda t: [t.clear(), t.update(x=torch.ones(2))]), "loads",
        "are of no published head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_head_is_examined_as_far_as_it_goes(name: str, tmp_path: Path, ward: Ward) -> None:
    damage, check, told = DAMAGES[name]
    folder = untrained(ward, tmp_path / "head")
    damage(folder)
    found = examine(asked(folder, ward.target, True))
    assert any(told in each.says for each in found if each.check == check and each.verdict == WRONG), written(found)
    if check == "files":
        assert {each.check for each in found if each.verdict == WRONG} == {"files", "loads"}
    assert next(each for each in found if each.check == "tokenizer").verdict == OK
    assert next(each for each in found if each.check == "acceptance").verdict == UNKNOWN


@pytest.mark.parametrize("value", [None, "x", [], [None], {"a": []}, -1, 1e300, True])
@pytest.mark.parametrize("form", ["vllm", None])
def test_no_value_of_another_kind_stops_it(
    value: Any, form: str | None, tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = untrained(ward, tmp_path / "head", form)
    whole, load = (folder / "config.json").read_text(), examined.load_target
    loaded = load(ward.target.name, read(str(folder)), "float32", False)
    for key in json.loads(whole):
        if key != "format":
            change(folder, config=set_to(**{key: value}))
            names_target = key in ("target", "speculators_config")
            monkeypatch.setattr(examined, "load_target", load if names_target else lambda *_: loaded)
            assert examine(asked(folder, ward.target, False))
            (folder / "config.json").write_text(whole)
    (folder / "report.json").write_text(json.dumps(value))
    (folder / "tokenizer_reference.json").write_text(json.dumps(value))
    assert examine(asked(folder, ward.target, False))


def test_what_is_not_recorded_or_cannot_be_loaded_is_not_known(tmp_path: Path, ward: Ward) -> None:
    folder = untrained(ward, tmp_path / "head")
    for name in ("report.json", "tokenizer_reference.json"):
        (folder / name).unlink()
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_bytes((Path(ward.target.name) / "config.json").read_bytes())
    config = asked(folder, ward.target, True)
    found = examine(replace(config, target=str(target)))
    assert [each for each in found if each.verdict == WRONG] == []
    unsure = {each.check: each.says for each in found if each.verdict == UNKNOWN}
    assert {"target", "tokenizer", "chat template", "acceptance"} <= unsure.keys()
    assert "the target does not load" in unsure["acceptance"]


def test_one_engine_is_not_told_of_what_harms_another(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle", "sglang", {}, steps=0)
    change(folder, tensors=turned("fc.bias", lambda bias: bias + 1))
    assert [each.check for each in faults(folder, ward.target)] == ["biases"]
    assert [each.check for each in faults(folder, ward.target, form="vllm")] == ["biases"]
    assert faults(folder, ward.target, form="sglang") == []
    harmless = meant_for(Finding(WRONG, "x", "y", "z", ("vllm",), "biases"), "sglang")
    assert harmless == Finding(OK, "x, which harms vLLM alone", check="biases")


def test_another_dtype_than_the_targets_harms_those_alone_that_do_not_cast(tmp_path: Path, ward: Ward) -> None:
    target = Path(shutil.copytree(ward.target.name, tmp_path / "target"))
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, "dtype": "bfloat16"}))
    for name, kind, form, harmed in (
        ("eagle3", "eagle3", "vllm", {None, "sglang"}), ("medusa", "medusa", "vllm", set()),
        ("eagle", "eagle", "eagle", set()),
    ):  # fmt: skip
        folder = ward.published(tmp_path / name, kind, form, {}, steps=0)
        for engine in (None, "vllm", "sglang"):
            config = replace(asked(folder, ward.target, False, engine), target=str(target))
            (found,) = [each for each in examine(config) if each.check == "dtype"]
            assert (found.verdict == WRONG) == (engine in harmed), (name, engine)


def test_a_target_is_not_asked_whether_its_code_may_run(
    tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, target = untrained(ward, tmp_path / "head"), tmp_path / "target"
    target.mkdir()
    said = {"model_type": "own", "auto_map": {"AutoConfig": "configuration.Own"}}
    (target / "config.json").write_text(json.dumps(said))
    (target / "configuration.py").write_text("raise SystemExit")
    asks = list[str]()
    monkeypatch.setattr("builtins.input", lambda line="": asks.append(line) or "n")
    with pytest.raises(ValueError, match=r"no model there"):
        examine(replace(asked(folder, ward.target, False), target=str(target)))
    assert asks == []


def test_a_run_is_examined_on_its_own_prompts_and_its_records_are_published(tmp_path: Path, ward: Ward) -> None:
    run = tmp_path / "run"
    save_head(run / "head", ward.head("eagle3", {}, steps=0), ward.target.spec, TREE)
    (run / "prompts.jsonl").write_bytes((Path(ward.target.name) / "prompts.jsonl").read_bytes())
    tokenizer: Any = ward.target.tokenizer
    origin = {"chat_template_sha256": template_sha256(tokenizer)}
    (run / "provenance.json").write_text(json.dumps(origin))
    assert read(str(run)).prompts == str(run / "prompts.jsonl")
    found = {each.check: each for each in examine(asked(run, ward.target, False))}
    assert (found["chat template"].verdict, found["tokenizer"].verdict) == (OK, UNKNOWN)
    out = run / "publish"
    said = {**VALUES, "run": str(run), "repo": "me/t-eagle3", "dtype": "float32"}
    write_folder(run, out, PublishConfig(**said))
    assert json.loads((out / "tokenizer_reference.json").read_text()).items() >= origin.items()
    assert read(str(out)).prompts == str(run / "prompts.jsonl")
    template = Path(ward.target.name) / "chat_template.jinja"
    kept = template.read_text()
    try:
        template.write_text("another")
        assert [each.check for each in faults(out, ward.target)] == ["chat template"]
    finally:
        template.write_text(kept)


def test_a_template_has_a_hash_of_its_own() -> None:
    tokenizer: Any = toys.tokenizer()
    assert template_sha256(tokenizer) is None
    tokenizer.chat_template = "a"
    one = template_sha256(tokenizer)
    tokenizer.chat_template = {"default": "a", "tools": "b"}
    assert len({one, template_sha256(tokenizer), None}) == 3
