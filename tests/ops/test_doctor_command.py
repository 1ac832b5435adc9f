"""The doctor as a command: what it prints and its exit status, heads that are damaged, the Hub, and bad input."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.text.template import template_sha256
from heads.formats.store import save_head
from ops import doctor
from ops.doctor import examine
from ops.examine import files
from ops.examine.files import read
from ops.examine.finding import OK, UNKNOWN, WRONG, Finding, meant_for
from tests.ops.doctoring import TREE, Ward, asked, change, faults, rope, set_to, turned, without
from tests.train.hub_server import Hub, Repo, become
from tests.train.publishing import VALUES
from train.publish import PublishConfig, write_folder


def untrained(ward: Ward, folder: Path, form: str | None = "vllm") -> Path:
    """Write a head that nothing was measured of; not trained, which files do not show."""
    return ward.published(folder, "eagle3", form, {}, steps=0)


def status(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words])
    with pytest.raises(SystemExit) as ended:
        doctor.main()
    return ended.value.code


def test_the_command_says_by_its_status_that_something_is_wrong(
    tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = untrained(ward, tmp_path / "head")
    words = [f"run={folder}", f"target={ward.target.name}", "measure=false"]
    assert status(monkeypatch, *words) == 0
    assert ", 0 wrong, 1 not known" in capsys.readouterr().out
    change(folder, config=rope(max_position_embeddings=2048))
    assert status(monkeypatch, *words) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("wrong"))
    assert lines[at].split() == ["wrong", "max_position_embeddings", "2048"]
    assert lines[at + 1].strip().startswith("costs: vLLM before 0.32 caps the context")
    assert lines[at + 2].strip() == 'remedy: set "max_position_embeddings" to 4096 in config.json'
    assert ", 1 wrong, " in lines[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run={empty}", "target={target}"], "no head in it"),
        (["run={empty}/nowhere", "target={target}"], "no such folder"),
        (["run={head}", "target={empty}"], "target={empty}: its embeddings cannot be loaded"),
        (["run={head}", "target={empty}/nowhere"], "no such folder"),
        (["run={bare}"], "do not say its target; give target="),
        (["run={head}", "target={target}", "format=onnx"], "format is 'onnx'"),
        (["run={head}", "target={target}", "prompts=0"], "prompts is 0"),
        (["run={head}", "target={target}", "depth=deep"], "depth"),
        (["run={head}", "target={target}", "workload={empty}/none.jsonl"], "none.jsonl"),
        (["run={head}", "prompt=4"], "prompt is not a known key: do you mean prompts?"),
        ([], "run"),
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
    assert status(monkeypatch, *[word.format(**places) for word in words]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
    assert told.format(**places) in line


def test_a_repository_is_examined_with_what_lies_beside_the_head(
    tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = untrained(ward, tmp_path / "head")
    with Hub() as hub:
        become(hub, monkeypatch, tmp_path / "cache")
        hub.repos["me/tiny-eagle3"] = Repo(False)
        hub.repos["me/tiny-eagle3"].commit({path.name: path.read_bytes() for path in folder.iterdir()})
        found = {each.check: each for each in examine(asked(Path("me/tiny-eagle3"), ward.target, False))}
        assert found["tokenizer"].verdict == OK
        assert found["target"].verdict == OK
        with pytest.raises(ValueError, match=r"me/none: the Hub refused downloading \(404\)"):
            examine(asked(Path("me/none"), ward.target, False))


DAMAGES: dict[str, tuple[Any, str]] = {
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: damaged"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json: not the config of"),
    "half the weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:900]), "truncated"
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "a pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "a pickle, which can hold code"
    ),
    "other tensors": (
        lambda f: change(f, tensors=lambda t: [t.clear(), t.update(x=torch.ones(2))]), "are of no published head"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_head_has_one_finding(name: str, tmp_path: Path, ward: Ward) -> None:
    damage, told = DAMAGES[name]
    folder = untrained(ward, tmp_path / "head")
    damage(folder)
    (found,) = examine(asked(folder, ward.target, True))
    assert (found.verdict, found.check) == (WRONG, "loads")
    assert told in found.says


@pytest.mark.parametrize("value", [None, "x", [], [None], {"a": []}, -1, 1e300, True])
@pytest.mark.parametrize("form", ["vllm", None])
def test_no_value_of_another_kind_stops_it(
    value: Any, form: str | None, tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = untrained(ward, tmp_path / "head", form)
    whole, loaded = (
        (folder / "config.json").read_text(),
        files.EmbeddingsOnly.load(ward.target.name, "float32", "cpu", False),
    )
    monkeypatch.setattr(files.EmbeddingsOnly, "load", lambda *_: loaded)
    for key in json.loads(whole):
        if key != "format":
            change(folder, config=set_to(**{key: value}))
            assert examine(asked(folder, ward.target, False))
            (folder / "config.json").write_text(whole)
    (folder / "report.json").write_text(json.dumps(value))
    (folder / "tokenizer_reference.json").write_text(json.dumps(value))
    assert examine(asked(folder, ward.target, False))


def test_what_is_not_recorded_is_not_known(tmp_path: Path, ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = untrained(ward, tmp_path / "head")
    for name in ("report.json", "tokenizer_reference.json"):
        (folder / name).unlink()
    monkeypatch.setattr(files.Target, "load", refuse)
    found = examine(asked(folder, ward.target, True))
    assert [each for each in found if each.verdict == WRONG] == []
    unsure = {each.check: each.says for each in found if each.verdict == UNKNOWN}
    assert unsure.keys() == {"target", "tokenizer", "chat template", "acceptance"}
    assert unsure["acceptance"] == "the target does not load (out of memory)"


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("out of memory")


def test_one_engine_is_not_told_of_what_harms_another(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle", "sglang", {}, steps=0)
    change(folder, tensors=turned("fc.bias", lambda bias: bias + 1))
    assert [each.check for each in faults(folder, ward.target)] == ["fc.bias"]
    assert [each.check for each in faults(folder, ward.target, form="vllm")] == ["fc.bias"]
    assert faults(folder, ward.target, form="sglang") == []
    harmless = meant_for(Finding(WRONG, "bias", "x", "y", "z", ("vllm",)), "sglang")
    assert harmless == Finding(OK, "bias", "x, which harms vLLM")


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
    with pytest.raises(ValueError, match=r"give target=FOLDER"):
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
