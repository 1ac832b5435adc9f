"""Targets that carry a PEFT adapter: merged as peft computes, told apart from their base, trained for and evaluated."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from eval.inputs.drafters import model_of
from heads.common.resolvers import ROOT, register_resolvers
from heads.formats.store import load_head, read_config, save_head
from inference.api import GenerateConfig, loaded
from inference.target import adapter as adapters
from inference.target import loading
from inference.target.target import Target
from tests import assistants, toys
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
    assert target.embeddings.head_weight().shape == (toys.VOCAB, 32)


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
        found.add(adapters.fingerprint("base", stronger))
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
    register_resolvers()
    values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "generate.yaml"))
    assert isinstance(values, dict)
    known = {key: values[key] for key in values if key in GenerateConfig.__dataclass_fields__}
    given: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    found, _ = loaded(GenerateConfig(**{**known, "run": str(tmp_path), "fallback": base, "model": given, "tree": {}}))
    assert found.spec == target.spec


def test_refusals_are_one_line(base: str, carried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(words: str, name: object, path: str = base, quantize: str | None = None) -> None:
        with pytest.raises(ValueError, match=words) as error:
            Target.load(path, "float32", "cpu", quantize=quantize, adapter=str(name))
        assert f"model.adapter={name}" in str(error.value)
        assert "\n" not in str(error.value)

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
    refused(
        "Target modules .* not found",
        carried,
        assistants.save(toys.target("gpt2").model, toys.tokenizer(), tmp_path / "g"),
    )
    deeper = LlamaConfig(**{**toys.SIZES, "num_hidden_layers": 4})
    path = assistants.save(AutoModelForCausalLM.from_config(deeper), toys.tokenizer(), tmp_path / "deeper")
    refused(r"only one of both has .*layers\.3\.", carried, path)
    refused(r"only one of both has .*layers\.3\.", adapter(path, tmp_path / "deep"))
    wider = LlamaConfig(**{**toys.SIZES, "hidden_size": 64})
    path = assistants.save(AutoModelForCausalLM.from_config(wider), toys.tokenizer(), tmp_path / "wider")
    refused("size mismatch", carried, path)
    monkeypatch.setattr(loading, "method_of", lambda _: "awq")
    refused("is quantised, and an adapter is merged into full weights", carried)


def test_an_adapter_whose_product_overflows_is_named(base: str, carried: str, tmp_path: Path) -> None:
    name = shutil.copytree(carried, tmp_path / "huge") / "adapter_model.safetensors"
    save_file({key: torch.full_like(value, 3e38) for key, value in load_file(name).items()}, name)
    with pytest.raises(ValueError, match=f"with model.adapter={tmp_path / 'huge'}: .* no finite number"):
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


EVIL = "(([a-z_.0-9]+)+)+!"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target_modules": EVIL}, "do not end"),
        ({"exclude_modules": EVIL}, "do not end"),
        ({"rank_pattern": {EVIL: 4}}, "do not end"),
        ({"alpha_pattern": {EVIL: 4}}, "do not end"),
        ({"layers_to_transform": [1], "layers_pattern": [EVIL]}, "do not end"),
        ({"modules_to_save": [EVIL]}, "do not end"),
        ({"target_modules": "((("}, r"is no regular expression .*unterminated subpattern"),
        ({"layer_replication": [[0, 10**9]]}, "more than 2000 layers"),
        ({"layer_replication": [[0, 9]]}, "cannot be merged"),
        ({"r": 5 * 10**6}, "a rank is 5000000, and no tensor"),
        ({"r": float("nan")}, "a rank is nan"),
        ({"rank_pattern": {"q_proj": 10**7}}, "a rank is 10000000"),
        ({"init_lora_weights": "pissa_niter_1000000000"}, "more than 100 rounds"),
        ({"trainable_token_indices": [10**12]}, "cannot be merged"),
    ],
)
def test_an_adapter_from_outside_has_a_size_and_an_end(
    base: str, carried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(adapters, "SECONDS", 1)
    folder = shutil.copytree(carried, tmp_path / "evil")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))
    with pytest.raises(ValueError, match=words) as error:
        Target.load(base, "float32", "cpu", adapter=str(folder))
    assert "\n" not in str(error.value)


def test_patterns_of_an_adapter_are_read_as_peft_reads_them(base: str, tmp_path: Path) -> None:
    """Flags stand at the beginning of a whole pattern alone, and a list holds names, which need be no pattern."""
    found = adapter(base, tmp_path / "a", target_modules="(?i).*Q_PROJ", rank_pattern={r"layers\.1\..*": 2})
    assert Target.load(base, "float32", "cpu", adapter=found).takes_trees
    assert adapters._forms("target_modules", ["c++"]) == []


@pytest.mark.parametrize("value", [float("nan"), 10**9])
def test_an_adapters_weights_are_finite_numbers(base: str, carried: str, tmp_path: Path, value: float) -> None:
    folder = shutil.copytree(carried, tmp_path / "odd")
    weights = load_file(folder / "adapter_model.safetensors")
    name = min(weights)
    weights[name] = torch.full(weights[name].shape, value)  # an integer makes a tensor of integers
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds what is no finite number of a weight"):
        Target.load(base, "float32", "cpu", adapter=str(folder))
