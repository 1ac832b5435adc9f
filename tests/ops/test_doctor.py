"""The doctor on healthy heads, on heads with one planted fault each, and as a command."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from data.text.template import template_sha256
from heads.formats.store import save_head
from ops import doctor
from ops import examine as files
from ops.doctor import examine
from ops.examine import OK, UNKNOWN, WRONG, Finding, meant_for, read, written
from tests.ops.doctoring import (
    FULL,
    IDS,
    TREE,
    Ward,
    asked,
    change,
    faults,
    prefixed,
    rope,
    set_to,
    turned,
    within,
    without,
)
from tests.train.hub_server import Hub, Repo, become
from tests.train.publishing import VALUES
from train.publish import PublishConfig, write_folder


class Fault(NamedTuple):
    """What is planted into which head, the check that finds it, and parts of what it says and of its remedy."""

    edits: dict[str, Callable[[dict[str, Any]], object]]
    check: str
    says: str
    remedy: str
    kind: str = "eagle3"
    form: str | None = "vllm"
    full: bool = False  # a head that drafts all tokens, by the target's lm_head


OUTPUTS = f"eagle_config.{IDS}"
FAULTS = {
    "layer ids of SGLang counted as vLLM's": Fault(
        {"config": within("eagle_config", **{IDS: [2, 4, 5]})}, OUTPUTS, "[2, 4, 5]", "to [1, 3, 4]"
    ),
    "layer ids for vLLM": Fault(
        {"config": lambda c: c.update({IDS: [3, 4, 6], "eagle_config": {}})}, OUTPUTS, "[1, 3, 4]", "to [2, 3, 5]"
    ),
    "layer ids for SGLang": Fault(
        {"config": lambda c: [c.pop(IDS), c["eagle_config"].update({IDS: [2, 3, 5]})]}, IDS, "[2, 4, 5]",
        f'set "{IDS}" to [3, 4, 6]',
    ),
    "other layers than were trained, to vLLM": Fault(
        {"run": set_to(head={"name": "eagle3", "feature_layers": [0, 2, 5], "rope_theta": 1e4})}, IDS, "[2, 4, 5]",
        f'set "{IDS}" to [1, 3, 6]',
    ),
    "another theta than was trained": Fault(
        {"run": set_to(head={"name": "eagle3", "rope_theta": 5e5, "rope_scaling": None})}, "rope",
        "the training's config.yaml theta 500000", 'set "rope_theta": 500000',
    ),
    "positions over half of the width": Fault(
        {"config": rope(partial_rotary_factor=0.5)}, "loads", "0.5", "it would draft something else"
    ),
    "theta said twice": Fault(
        {"config": set_to(rope_parameters={"rope_type": "default", "rope_theta": 5e5})}, "rope",
        "rope_parameters says theta 500000", "theta 10000",
    ),
    "2048 positions": Fault(
        {"config": rope(max_position_embeddings=2048)}, "max_position_embeddings", "2048",
        'set "max_position_embeddings" to 4096',
    ),
    "d2t of ids": Fault(
        {"tensors": turned("d2t", lambda d2t: d2t + torch.arange(len(d2t)))}, "loads",
        "d2t does not name 30 different tokens of the target's 40", "download it again",
    ),
    "no draft_vocab_size": Fault({"config": without("draft_vocab_size")}, "draft_vocab_size", "missing", "to 30"),
    "no lm_head over all tokens": Fault(
        {"tensors": without("lm_head.weight")}, "draft_vocab_size", "40", 'set "draft_vocab_size" to null', full=True
    ),
    "tied embeddings": Fault(
        {"config": set_to(tie_word_embeddings=True)}, "tie_word_embeddings", "true",
        'set "tie_word_embeddings" to false',
    ),
    "an lm_head in EAGLE-1": Fault(
        {"tensors": set_to(**{"lm_head.weight": torch.ones(40, 32)})}, "lm_head.weight", "there", "remove it", "eagle"
    ),
    "a random embedding": Fault(
        {"tensors": set_to(**{"embed_tokens.weight": torch.randn(40, 32)})}, "embed_tokens.weight",
        "another than the target's", "remove it",
    ),
    "no dtype": Fault({"config": without("torch_dtype")}, "torch_dtype", "missing", 'to "float32"'),
    "another chat template": Fault(
        {"reference": set_to(chat_template_sha256="f" * 64)}, "chat template", "f" * 64, "--chat-template"
    ),
    "another tokenizer": Fault({"reference": set_to(tokenizer_sha256="f" * 64)}, "tokenizer", "f" * 64, "training's"),
    "another target's weights": Fault(
        {"report": within("target", fingerprint="0" * 32)}, "target", f"made for the weights {'0' * 32}", "target=…"
    ),
    "another target's head": Fault(
        {"config": within("target", fingerprint="0" * 32)}, "loads", "0" * 32, "sibling=true", form=None
    ),
    "a bias that vLLM drops": Fault(
        {"tensors": turned("fc.bias", lambda bias: bias + 1)}, "fc.bias", "not zero", "head.bias=false", "eagle"
    ),
    "no bias": Fault({"tensors": without("fc.bias")}, "fc.bias", "missing", "32 zeros", "eagle"),
    "a bias that nothing fills": Fault({"config": set_to(bias=True)}, "bias", "true", 'set "bias" to false'),
    "a normed residual": Fault(
        {"config": set_to(norm_before_residual=True)}, "norm_before_residual", "true", "head.norm_before_residual=false"
    ),
    "SpecForge's norm of the output": Fault(
        {"config": lambda c: [c.update(norm_output=True), c.pop("speculators_model_type")]}, "norm_output", "true",
        'set "norm_output" to false',
    ),
    "Medusa without its biases": Fault(
        {"config": without("medusa_fc_bias")}, "medusa_fc_bias", "false", 'set "medusa_fc_bias" to true', "medusa"
    ),
    "names of a whole model": Fault({"tensors": prefixed}, "model.*", "there", "take model. from the front"),
    "an unknown class": Fault(
        {"config": set_to(architectures=["Qwen2ForCausalLMEagle3"])}, "architectures", "Qwen2", "LlamaForCausalLMEagle3"
    ),
    "one of two classes": Fault(
        {"config": set_to(architectures=["LlamaForCausalLM"])}, "architectures", "LlamaForCausalLM",
        '["LlamaForCausalLMEagle", "LlamaForCausalLM"]', "eagle",
    ),
    "no model_type": Fault({"config": without("model_type")}, "model_type", "missing", 'set "model_type" to "llama"'),
    "layers where SGLang does not look": Fault(
        {"config": lambda c: c.update(dflash_config={"mask_token_id": 7}, aux_hidden_state_layer_ids=[2, 4, 6])},
        "dflash_config.target_layer_ids", "missing", "to [1, 3, 5]", "block", "dflash",
    ),
}  # fmt: skip


MODELOPT = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"rope_theta": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            "theta 500000 where the target has theta 10000: right only if it was trained so",
        ),
        ({"rope_scaling": MODELOPT}, "NVIDIA modelopt adds this scaling to heads that were trained without it"),
        ({"rope_scaling": {**MODELOPT, "factor": 4.0}}, "right only if it was trained so"),
    ],
)
def test_positions_are_compared_as_they_are_used(keys: dict[str, Any], says: str, tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, config=rope(**keys))
    (found,) = [each for each in examine(asked(folder, ward.target, False)) if each.check == "rope"]
    assert found.verdict == UNKNOWN
    assert says in found.says


@pytest.mark.parametrize(("form", "verdict"), [(None, OK), ("vllm", OK), ("gguf", OK), ("sglang", WRONG)])
def test_a_name_that_some_engines_know_is_wrong_for_the_others(
    form: str | None, verdict: str, tmp_path: Path, ward: Ward
) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, config=set_to(architectures=["Eagle3LlamaForCausalLM"]))
    (found,) = [each for each in examine(asked(folder, ward.target, False, form)) if each.check == "architectures"]
    assert found.verdict == verdict
    assert "Eagle3LlamaForCausalLM, which SGLang does not know as a head" in found.says
    assert 'set "architectures": ["LlamaForCausalLMEagle3"]' in found.remedy


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_remedy(name: str, tmp_path: Path, ward: Ward) -> None:
    fault = FAULTS[name]
    options = FULL if fault.full else {}
    folder = ward.published(tmp_path / "head", fault.kind, fault.form, options)
    change(folder, **fault.edits)
    found = [each for each in faults(folder, ward.target) if each.check == fault.check]
    assert len(found) == 1
    assert fault.says in found[0].says
    assert fault.remedy in found[0].remedy
    assert found[0].costs
    assert "\n" not in "".join(map(str, found[0]))


def test_another_checkpoint_of_the_same_model_is_no_fault_where_it_is_said(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", None, {})
    change(folder, config=within("target", fingerprint="0" * 32))
    findings = {finding.check: finding for finding in examine(asked(folder, ward.target, False, sibling=True))}
    assert not [finding for finding in findings.values() if finding.verdict == WRONG]
    assert findings["target"].verdict == UNKNOWN
    assert findings["loads"].verdict == OK


FORMS: list[tuple[str, str | None, dict[str, Any]]] = [
    ("eagle3", "vllm", {}), ("eagle3", "vllm", FULL), ("eagle3", "eagle", {}), ("eagle", "vllm", {}),
    ("medusa", "vllm", {}), ("hydra", "hydra", {}), ("block", "dflash", {}), ("eagle3", None, {}),
    ("peagle", "speculators", {"embedding": "own"}),
    ("eagle3", "speculators", {"feature_norm": False, "joint_norm": True, "norm_output": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "form", "options"), FORMS)
def test_a_healthy_head_has_no_finding(
    kind: str, form: str | None, options: dict[str, Any], tmp_path: Path, ward: Ward
) -> None:
    folder = ward.published(tmp_path / "head", kind, form, options)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    found = examine(asked(folder, ward.target, True))
    assert [each for each in found if each.verdict != OK] == [], written(found)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_for_the_plug_ins_of_eagle4_is_no_foreign_layout(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle4", "eagle4", {}, steps=0)
    (found,) = [each for each in examine(asked(folder, ward.target, False)) if each.check == "architectures"]
    assert found.says.startswith("format=eagle4, for EAGLE-4's plug-ins")


MEASURED: dict[str, tuple[dict[str, Any], str, str]] = {
    "layers": (
        {"config": lambda c: [c.update({IDS: [3, 5, 6]}), c["eagle_config"].update({IDS: [2, 4, 5]})]},
        " is more", "python eval/run.py",
    ),
    "theta": ({"config": rope(rope_theta=1.0)}, " is more", "python eval/run.py"),
    "card": (
        {"report": lambda r: r["rows"][0].update(tau=9.0, tau_ci=[8.5, 9.5])},
        "the card's 9.00 [8.50, 9.50] is more", "python eval/run.py",
    ),
    "random weights": (
        {"tensors": turned("lm_head.weight", lambda w: w.flip(0))}, "next to nothing is accepted",
        "fix what is wrong above",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_a_fault_that_files_do_not_show_is_measured(name: str, tmp_path: Path, ward: Ward) -> None:
    edits, says, remedy = MEASURED[name]
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    change(folder, **edits)
    found = [each for each in faults(folder, ward.target, True) if each.check == "acceptance"]
    assert says in found[0].says
    assert remedy in found[0].remedy
    assert found[0].costs


def test_without_a_card_acceptance_is_measured_and_not_judged(tmp_path: Path, ward: Ward) -> None:
    folder = ward.published(tmp_path / "head", "eagle3", "vllm", {})
    (folder / "report.json").unlink()
    found = {each.check: each for each in examine(asked(folder, ward.target, True))}["acceptance"]
    assert found.verdict == UNKNOWN
    assert re.match(r"τ \d\.\d\d \[.*\] on 3 prompts of prompts.jsonl, tree chain-3; no report.json says", found.says)


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


def test_a_target_without_the_module_that_it_promises_is_said(tmp_path: Path, ward: Ward) -> None:
    target = shutil.copytree(ward.target.name, tmp_path / "target")
    change(target, config=set_to(num_nextn_predict_layers=1))
    (fault,) = examine(asked(target, ward.target, False))
    assert (fault.verdict, "base=BASE" in fault.remedy) == (WRONG, True)
    assert "num_nextn_predict_layers promises an MTP module, and its files hold none" in fault.says


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run={empty}", "target={target}"], "no head in it"),
        (["run={head}", "target={empty}"], "target={empty}: no tokenizer loads from there"),
        (["run={head}", "target={empty}/nowhere"], "no such folder"),
        (["run={bare}"], "do not say its target; give target="),
        (["run={head}", "target={target}", "format=onnx"], "format is 'onnx'"),
        (["run={head}", "target={target}", "prompts=0"], "prompts is 0"),
        (["run={head}", "target={target}", "workload={empty}/none.jsonl"], "none.jsonl"),
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
    "half the weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:900]), "truncated"
    ),
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


@pytest.mark.parametrize(("value", "form"), [(None, "vllm"), ([None], "vllm"), ({"a": []}, None), (1e300, "vllm")])
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


def test_records_that_name_no_target_and_no_number_of_tokens(tmp_path: Path, ward: Ward) -> None:
    folder = untrained(ward, tmp_path / "head")
    change(folder, report=within("settings", max_new_tokens=["many"]))
    assert examine(asked(folder, ward.target, True))
    change(folder, config=set_to(base_model_name_or_path=["me/target"], speculators_config=[]))
    (folder / "tokenizer_reference.json").unlink()
    with pytest.raises(ValueError, match="its files do not say its target"):
        examine(replace(asked(folder, ward.target, False), target=None))


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
