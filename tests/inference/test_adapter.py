"""Targets that carry a PEFT adapter: merged as peft computes, told apart from their base, trained for and evaluated."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from eval.inputs.drafters import model_of
from heads.common.resolvers import ROOT
from heads.formats.store import load_head, read_config, save_head
from inference.target import loading
from inference.target import loading as adapters
from inference.target.target import Target
from tests import assistants, toys
from tests.refusals import refuses
from tests.train import jobs

TREE = {"kind": "dynamic", "depth": 4, "top_k": 3, "nodes": 9, "paths": [], "widths": []}


def adapter(base: str, folder: Path, seed: int = 0, **options: Any) -> str:
    """Save a LoRA adapter of a model whose factors are large enough to change what it writes."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return assistants.save(toys.target().model, toys.tokenizer(), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def carried(base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return adapter(base, tmp_path_factory.mktemp("adapter"))


def test_the_logits_are_pefts(base: str, carried: str) -> None:
    token = torch.tensor([toys.prompt(0, 12)])
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), carried)
    target = Target.load(base, "float32", "cpu", adapter=carried)
    plain = Target.load(base, "float32", "cpu", adapter="none")
    torch.testing.assert_close(target.model(token).logits, theirs(token).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(target.model(token).logits, plain.model(token).logits, atol=0.1)
    assert not [name for name, _ in target.model.named_modules() if "lora" in name]
    assert target.takes_trees


def test_modules_that_an_adapter_replaces_are_replaced(base: str, tmp_path: Path) -> None:
    target = Target.load(base, "float32", "cpu", adapter=adapter(base, tmp_path, modules_to_save=["lm_head"]))
    assert not [name for name, _ in target.model.named_modules() if "modules_to_save" in name]
    assert target.embeddings.lm_head_weight().shape == (toys.VOCAB, 32)


def test_a_target_is_told_from_its_base_and_from_other_adapters(base: str, carried: str, tmp_path: Path) -> None:
    plain = Target.load(base, "float32", "cpu").spec
    spec = Target.load(base, "float32", "cpu", adapter=carried).spec
    assert Target.load(base, "bfloat16", "cpu", adapter=carried).spec == spec
    assert (spec.name, spec.adapter, plain.adapter) == (base, carried, None)
    other = adapter(base, tmp_path / "other", seed=1)
    stronger = shutil.copytree(carried, tmp_path / "stronger")
    config = json.loads((stronger / "adapter_config.json").read_text())
    (stronger / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16}))
    specs = [plain, spec, *(Target.load(base, "float32", "cpu", adapter=str(each)).spec for each in (other, stronger))]
    assert len({each.fingerprint for each in specs}) == 4
    found = set()
    for key in ("r", "alpha", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_dropout"):
        (stronger / "adapter_config.json").write_text(json.dumps(config | {key: 99}))
        found.add(adapters.adapter_fingerprint("base", stronger))
    assert len(found) == 8, "what scales it and, of the last one, what does not"


def test_a_head_belongs_to_the_target_with_its_adapter(base: str, carried: str, tmp_path: Path) -> None:
    target, plain = Target.load(base, "float32", "cpu", adapter=carried), Target.load(base, "float32", "cpu")
    save_head(tmp_path / "head", toys.head("eagle", target), target.spec, TREE)
    load_head(tmp_path / "head", target.embeddings, target.spec)
    with pytest.raises(ValueError, match=rf"with adapter {carried}: .* with model\.path and model\.adapter") as error:
        load_head(tmp_path / "head", plain.embeddings, plain.spec)
    assert "\n" not in str(error.value)
    content = json.loads((tmp_path / "head" / "config.json").read_text())
    assert content["target"].pop("adapter") == carried
    (tmp_path / "head" / "config.json").write_text(json.dumps(content))
    read_config(tmp_path / "head")  # as heads were saved before targets had adapters


def test_the_run_says_which_adapter_unless_the_user_does(base: str, carried: str, tmp_path: Path) -> None:
    target = Target.load(base, "float32", "cpu", adapter=carried)
    save_head(tmp_path / "head", toys.head("eagle", target), target.spec, TREE)
    nothing: dict[str, Any] = {"adapter": None}
    assert model_of(str(tmp_path), nothing).adapter == carried  # published alone: from the head itself
    (tmp_path / "config.yaml").write_text(f"model: {{path: {base}, adapter: {carried}}}")
    assert model_of(str(tmp_path), nothing).adapter == carried
    assert model_of(str(tmp_path), {"path": "/a/copy"}).adapter == carried
    assert model_of(str(tmp_path), {"adapter": "none"}).adapter == "none"


def test_refusals_are_one_line(base: str, carried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, name: object, path: str = base, quantize: str | None = None) -> None:
        line = refuses(words, Target.load, path, "float32", "cpu", quantize=quantize, adapter=str(name))
        assert f"model.adapter={name}" in line

    refused(r"merge it, save the model, and give that as model\.path with model\.quantize", carried, quantize="int8")
    refused("no such folder", tmp_path / "nowhere")
    refused("holds no adapter_config.json", base)
    shutil.copytree(carried, tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    refused("holds no adapter_model.safetensors", tmp_path / "pickled")
    shutil.copytree(carried, tmp_path / "damaged")
    (tmp_path / "damaged" / "adapter_model.safetensors").write_bytes(b"\x08\x00\x00")
    refused("cannot be merged into", tmp_path / "damaged")
    prompts = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    prompts.save_pretrained(tmp_path / "prompts")
    refused("PROMPT_TUNING adds tokens, not weights", tmp_path / "prompts")
    gpt2 = assistants.save(toys.target("gpt2").model, toys.tokenizer(), tmp_path / "g")
    refused("Target modules .* not found", carried, gpt2)
    deeper = LlamaConfig(**{**toys.SIZES, "num_hidden_layers": 4})
    path = assistants.save(AutoModelForCausalLM.from_config(deeper), toys.tokenizer(), tmp_path / "deeper")
    refused(r"only one of both has .*layers\.3\.", carried, path)
    refused(r"only one of both has .*layers\.3\.", adapter(path, tmp_path / "deep"))
    odd = shutil.copytree(carried, tmp_path / "odd") / "adapter_config.json"
    config = json.loads(odd.read_text())
    for values in ({"target_modules": "((("}, {"layer_replication": [[0, 9]]}):
        odd.write_text(json.dumps(config | values))
        refused("cannot be merged into", odd.parent)
    monkeypatch.setattr(loading, "method_of", lambda _: "awq")
    refused("is quantised, and an adapter is merged into full weights", carried)


def test_an_adapter_whose_product_overflows_is_named(base: str, carried: str, tmp_path: Path) -> None:
    name = shutil.copytree(carried, tmp_path / "huge") / "adapter_model.safetensors"
    save_file({key: torch.full_like(value, 3e38) for key, value in load_file(name).items()}, name)
    with pytest.raises(ValueError, match=f"with model.adapter={tmp_path / 'huge'}: .* a value that is not finite"):
        Target.load(base, "float32", "cpu", adapter=str(tmp_path / "huge"))


@pytest.mark.slow
def test_a_head_of_the_base_is_the_start_for_the_target_with_an_adapter(tmp_path: Path) -> None:
    """The whole path: train for the adapted target from the base's head, pass the gate, evaluate by the run alone."""
    overrides = jobs.make(tmp_path)
    plain = Target.load(str(tmp_path / "target"), "float32", "cpu")
    save_head(tmp_path / "base" / "head", toys.head("eagle", plain), plain.spec, TREE)
    name, out = adapter(str(tmp_path / "target"), tmp_path / "adapter"), tmp_path / "run"
    start = [f"model.adapter={name}", f"init={tmp_path / 'base'}", "peft=lora", "trainer.steps=8", f"out={out}"]
    printed = " ".join(jobs.finish(jobs.start([*overrides, *start])).split())
    assert f"trained on for those of {tmp_path / 'target'} with adapter {name}" in printed
    assert read_config(out / "head")["target"]["adapter"] == name
    report = json.loads((out / "report.json").read_text())
    assert report["target"]["adapter"] == name
    row = report["rows"][-1]
    assert row["lossless"]["identical"] == row["lossless"]["checked"] > 0
    words = [sys.executable, str(ROOT / "eval" / "run.py"), f"run={out}", "prompts=1", "max_new_tokens=8", "hf=false"]
    again, base = (
        subprocess.run([*words, "repeats=1", *extra], capture_output=True, text=True, check=False)
        for extra in ([], ["model.adapter=none"])
    )
    assert again.returncode == 0, again.stderr
    assert base.returncode == 2
    assert "made for another target" in base.stderr


@pytest.mark.parametrize("value", [float("nan"), 10**9])
def test_an_adapters_weights_are_finite_numbers(carried: str, tmp_path: Path, value: float) -> None:
    file = shutil.copytree(carried, tmp_path / "odd") / "adapter_model.safetensors"
    weights = load_file(file)
    name = min(weights)
    save_file(weights | {name: torch.full(weights[name].shape, value)}, file)  # an integer makes a tensor of integers
    with pytest.raises(ValueError, match="holds a value that is not finite"):
        adapters.adapter_fingerprint("base", file.parent)
