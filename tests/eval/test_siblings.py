"""Heads measured on another checkpoint of the same shape: allowed where the user says so, and said in the report."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.run import evaluate
from heads.formats.hub import sibling_spec
from heads.formats.store import TargetSpec, save_head
from inference.api import loaded
from tests import toys
from tests.eval.small import small
from tests.inference.test_run import config as asked


def sibling(folder: Path, runs: Path, **changed: Any) -> Path:
    """Write the runs' toy target with its weights moved a little, as a fine-tune moves them."""
    shutil.copytree(runs / "target", folder)
    if changed:
        model = AutoModelForCausalLM.from_config(toys.ARCHITECTURES["llama"].__class__(**toys.SIZES | changed))
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def test_a_sibling_takes_the_heads_fingerprint_and_nothing_else(tmp_path: Path, caplog: Any) -> None:
    target = toys.target()
    save_head(tmp_path, toys.head("medusa", target), target.spec, {})
    tuned = replace(target.spec, name="tuned", fingerprint="another")
    assert sibling_spec(tmp_path, tuned, "drafts for") == replace(tuned, fingerprint=target.spec.fingerprint)
    assert f"made for the weights of {target.spec}; it drafts for those of tuned" in caplog.text
    caplog.clear()
    assert sibling_spec(tmp_path, target.spec, "drafts for") is target.spec
    assert not caplog.text
    assert isinstance(tuned, TargetSpec)


@pytest.mark.slow
def test_a_head_of_a_sibling_is_measured_with_a_warning(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = sibling(tmp_path / "tuned", runs)
    run = tmp_path / "eagle"
    shutil.copytree(runs / "eagle", run)
    model = {"path": str(tuned), "prompts": str(runs / "prompts.jsonl")}
    how = replace(small(runs, tmp_path / "out"), run=str(run), model=model)
    with pytest.raises(ValueError, match=r"made for another target.*model\.sibling=true") as refused:
        evaluate(how)
    assert "\n" not in str(refused.value)
    report = evaluate(replace(how, model=model | {"sibling": True}))
    assert report.passed
    (line,) = report.extras["warnings"]
    name = json.loads((run / "head" / "config.json").read_text())["target"]["name"]
    assert line == f"eagle was made for {name} and is measured on {tuned}"
    assert f"compare with care: {line}" in capsys.readouterr().err
    assert line in (tmp_path / "out" / "report.md").read_text()
    evaluate(replace(how, model=model | {"sibling": True}, out=None))
    assert (run / "tuned" / "report.json").exists()

    for size, what in (({"vocab_size": 48}, "vocabulary"), ({"hidden_size": 64}, "width")):
        other = sibling(tmp_path / what, runs, **size)
        with pytest.raises(ValueError, match=f"made for another target, .*: its {what} is") as refused:
            evaluate(replace(how, model={**model, "path": str(other), "sibling": True}))
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_sibling_decodes(runs: Path, tmp_path: Path) -> None:
    words = [f"run={runs / 'eagle'}", f"model.path={sibling(tmp_path / 'tuned', runs)}", "model.dtype=float32"]
    with pytest.raises(ValueError, match="made for another target"):
        loaded(asked(*words))
    assert loaded(asked(*words, "model.sibling=true"))[1].name == "head"
