"""format=checkpoint: the target's folder with a trained head as its own MTP module, all else byte for byte."""

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_layers import MtpModel

from heads.base import Features, NewRows
from heads.formats import checkpoint
from heads.formats.store import INDEX, save_head
from heads.mtp import Mtp
from inference.drafters.head import load_mtp
from inference.target.embeddings_only import EmbeddingsOnly
from inference.target.target import Target
from tests import families, published_mtp, toys
from tests.inference import test_loading as towers
from tests.inference.test_adapter import adapter
from tests.train import jobs
from tests.train.publishing import config
from train.publish import publish

ARCHITECTURES = {"qwen2": "MiMoForCausalLM"}  # MiMo is a Qwen2 for transformers
FAMILIES = ["qwen2", "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5 with vision"]


def target_of(folder: Path, name: str) -> Target:
    """Save a family's toy in several shards, and load it again."""
    if name == "qwen3_5 with vision":
        torch.manual_seed(1)
        model: Any = AutoModelForImageTextToText.from_config(towers.checkpoint("qwen3_5"))
    else:
        model = families.target(name).model
    model.save_pretrained(folder, max_shard_size="20KB")
    toys.tokenizer().save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = [ARCHITECTURES.get(name, values["architectures"][0])]
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "LICENSE").write_text("free")
    return Target.load(str(folder), "float32", "cpu")


def head_of(target: Target, **options: Any) -> Mtp:
    """Return a head of the target's own kind with random weights; MiMo's starts from the raw state."""
    values = toys.HEAD_CONFIGS["mtp"] | {"layer": "target", "raw_state": target.config.model_type == "qwen2"} | options
    torch.manual_seed(2)
    head = Mtp(Mtp.Config(name="mtp", **values), target.embeddings)
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return head.eval().requires_grad_(False)


def run_of(folder: Path, target: Target, head: nn.Module) -> Path:
    save_head(folder / "head", head, target.spec, {"kind": "chain", "depth": 1})
    return folder


def stitched(run: Path, out: Path, say: Callable[[str], object] = str, **options: Any) -> Path:
    publish(config(run, repo="me/x", format="checkpoint", dry_run=True, out=str(out), **options), HfApi(), say)
    return out


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor of a checkpoint, by its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sums = {}
    for shard in {*index["weight_map"].values()}:
        with safe_open(folder / shard, "pt") as opened:
            assert set(opened.keys()) == {name for name, file in index["weight_map"].items() if file == shard}
            for name in list(opened.keys()):
                tensor = opened.get_tensor(name).contiguous()
                sums[name] = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
    return sums


def features(target: Target, head: Mtp) -> Features:
    token = torch.tensor([toys.prompt(1, 9)])
    return target.features(token, torch.zeros(1, 9, dtype=torch.long), head.feature_layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_module_is_new_and_it_is_the_head(tmp_path: Path, name: str) -> None:
    target = target_of(tmp_path / "target", name)
    assert EmbeddingsOnly.load(str(tmp_path / "target"), "float32", "cpu", False).spec == target.spec
    head, before, out = head_of(target), hashes(tmp_path / "target"), tmp_path / "the copy"
    said: list[str] = []
    stitched(run_of(tmp_path / "run", target, head), out, said.append)
    after = hashes(out)
    assert {tensor: after[tensor] for tensor in before} == before
    assert (out / "LICENSE").read_text() == "free"
    total = json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for file in out.glob("*.safetensors") for tensor in load_file(file).values())
    again = Target.load(str(out), "float32", "cpu")
    assert again.spec.fingerprint == target.spec.fingerprint
    loaded = load_mtp(again, str(out))
    rows = features(target, head)
    for theirs, ours in zip(loaded.unroll(rows, 2), head.unroll(rows, 2), strict=True):
        torch.testing.assert_close(theirs.state, ours.state)
    config_values = json.loads((out / "config.json").read_text())
    section = config_values.get("text_config", config_values)
    assert section["mtp_num_hidden_layers" if "qwen3_5" in name else "num_nextn_predict_layers"] == 1
    words = shlex.split(said[-1])
    assert words[:4] == ["vLLM:", "vllm", "serve", str(out)]
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 1}


def test_a_module_for_an_adapter_goes_into_its_base(tmp_path: Path) -> None:
    base = target_of(tmp_path / "target", "glm4_moe")
    name = adapter(base.name, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    target, before = Target.load(base.name, "float32", "cpu", adapter=name), hashes(tmp_path / "target")
    said: list[str] = []
    out = stitched(run_of(tmp_path / "run", target, head_of(target)), tmp_path / "out", said.append)
    after = hashes(out)
    assert {tensor: after[tensor] for tensor in before} == before
    assert said[0].endswith(f"which drafts for {name}: serve that adapter with it")
    assert load_mtp(Target.load(str(out), "float32", "cpu", adapter=name), str(out)).eh_proj.weight.shape == (32, 64)


@pytest.mark.slow
def test_a_fine_tunes_lost_module_is_refreshed_measured_and_written_back(tmp_path: Path) -> None:
    """By the commands of docs/mtp.md."""
    toy, run = published_mtp.target("GLM-4.5", torch.float32), tmp_path / "run"
    base, tuned, out = (tmp_path / name for name in ("base", "tuned", "out"))
    file = base / "model.safetensors"
    for folder in (base, tuned):
        toy.model.save_pretrained(folder)
        toys.tokenizer().save_pretrained(folder)
    save_file(load_file(file) | published_mtp.module("GLM-4.5", toy), file, metadata={"format": "pt"})
    tensors = {name: 1.01 * tensor for name, tensor in load_file(tuned / file.name).items()}
    save_file(tensors, tuned / file.name, metadata={"format": "pt"})
    words = ["experiment=mtp_after_finetune", f"model.path={tuned}", f"base={base}", "trainer.steps=2", f"out={run}"]
    printed = jobs.finish(jobs.start([*jobs.make(tmp_path)[1:], *words]))
    assert "promises an MTP module, and its files hold none" in " ".join(printed.split())
    drafters = [f"run={run}", "drafter=[head,mtp]", f"drafter.mtp.checkpoint={base}", f"out={tmp_path}/e"]
    limits = ["prompts=2", "max_new_tokens=12", "repeats=1", "warmup=0", "hf=false"]
    subprocess.run([sys.executable, "eval/run.py", *drafters, *limits], cwd=jobs.ROOT, check=True)
    rows = json.loads((tmp_path / "e" / "report.json").read_text())["rows"]
    assert {row["drafter"] for row in rows} == {"plain", f"mtp {run}", "mtp"}
    stitched(run, out)
    held = {name: tensor for shard in out.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    assert load_mtp(Target.load(str(out), "float32", "cpu"), str(out)).eh_proj.weight.shape == (32, 64)


def test_a_module_that_is_there_is_replaced_in_its_shards(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "glm4_moe")
    run = run_of(tmp_path / "run", target, head_of(target))
    first = stitched(run, tmp_path / "first")
    file = first / "model-mtp.safetensors"
    extra = {"model.layers.3.embed_tokens.weight": torch.ones(2), "model.norm.copy": torch.arange(3.0)}
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()} | extra, first / "model-x.safetensors")
    file.unlink()
    index = json.loads((first / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(load_file(first / "model-x.safetensors"), "model-x.safetensors")
    (first / "model.safetensors.index.json").write_text(json.dumps(index))
    before = hashes(first)
    after = hashes(stitched(run, tmp_path / "second", target=str(first)))
    assert set(load_file(tmp_path / "second" / "model-x.safetensors")) == set(extra)
    original = hashes(tmp_path / "target")
    assert after == before | {name: after[name] for name in before.keys() - original.keys() - extra.keys()}
    assert all(after[name] != before[name] for name in before.keys() - original.keys() - extra.keys())


def test_what_is_written_anew_is_never_a_link_to_the_targets(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "qwen2")
    files = {file: file.read_bytes() for file in (tmp_path / "target").iterdir()}
    with mock.patch.object(checkpoint, "SMALL", 0):
        out = stitched(run_of(tmp_path / "run", target, head_of(target)), tmp_path / "out")
    assert all((out / file.name).samefile(file) for file in files if file.name == "LICENSE" or "model-0" in file.name)
    assert {file: file.read_bytes() for file in (tmp_path / "target").iterdir()} == files


def test_a_single_file_becomes_two_and_an_index(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "qwen2")
    whole: dict[str, Tensor] = {}
    for shard in (tmp_path / "target").glob("*.safetensors"):
        whole |= load_file(shard)
        shard.unlink()
    (tmp_path / "target" / "model.safetensors.index.json").unlink()
    save_file(whole, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    out = stitched(run_of(tmp_path / "run", target, head_of(target)), tmp_path / "out")
    assert {file.name for file in out.glob("*.safetensors")} == {"model-mtp.safetensors", "model-target.safetensors"}
    assert Target.load(str(out), "float32", "cpu").spec.fingerprint == target.spec.fingerprint
    assert set(hashes(out)) > set(whole)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_drafts_with_it(tmp_path: Path, name: str) -> None:
    """Its text stays what it is, and the first draft is ours; which layer it looks for is that of the published one."""
    target = target_of(tmp_path / "target", name)
    head = head_of(target)
    out = stitched(run_of(tmp_path / "run", target, head), tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = toys.prompt(1, 9)
    text = families.generated(target, prompt, 24)
    drafted: list[list[int]] = []
    forward = MtpModel.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        drafted.append(result[0][0].tolist())
        return result

    token = torch.tensor([prompt])
    behind = mock.patch.object(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    with mock.patch.object(MtpModel, "forward", noted), behind:
        made = model.generate(token, max_new_tokens=24, do_sample=False, use_mtp=True)
    assert made[0, 9:].tolist() == text
    rows = features(target, head)
    _, level = head.extend(None, NewRows(rows, torch.tensor([[*prompt[1:], text[0]]])))
    assert drafted[0] == [int(level.logits[0, 0].argmax())]


def refusal(run: Path, out: Path, **options: Any) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        stitched(run, out, **options)
    assert "\n" not in str(error.value)
    assert not out.exists()
    assert not list(out.parent.glob(".out*"))
    return str(error.value)


def test_bad_input_gets_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    target, out = target_of(tmp_path / "target", "qwen2"), tmp_path / "out"
    run = run_of(tmp_path / "run", target, head_of(target))
    with pytest.raises(ValueError, match=r"give out=FOLDER and dry_run=true"):
        config(run, repo="me/x", format="checkpoint", dry_run=False, out=str(out))
    other = run_of(tmp_path / "other", target, head_of(target, raw_state=False))
    assert "train with head.raw_state=" in refusal(other, out)
    assert f"target={tmp_path / 'lost'}: " in refusal(run, out, target=str(tmp_path / "lost"))
    with pytest.raises(ValueError, match="give format=checkpoint, and convert that folder"):
        publish(config(run, repo="me/x", format="gguf", dry_run=True, out=str(out)), HfApi())
    medusa = run_of(tmp_path / "medusa", target, toys.head("medusa", target))
    assert "is no form of medusa heads" in refusal(medusa, out)
    with (
        mock.patch("os.link", side_effect=OSError),
        mock.patch("shutil.copyfile", side_effect=OSError("no space")),
        pytest.raises(OSError, match="no space"),
    ):
        stitched(run, out)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
    stitched(run, out)
    stitched(run, out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "is a Qwen2ForCausalLM, in which engines look for no module"),
        ({"num_nextn_predict_layers": 2}, "has 2 modules"),
    ],
)
def test_a_target_that_has_no_place_for_it_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    target = target_of(tmp_path / "target", "qwen2")
    run, file = run_of(tmp_path / "run", target, head_of(target)), tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with mock.patch("train.release.folder._load", side_effect=AssertionError("its weights were asked for")):
        assert said in refusal(run, tmp_path / "out")


def test_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    target = target_of(tmp_path / "target", "qwen2")
    run, shard = run_of(tmp_path / "run", target, head_of(target)), next((tmp_path / "target").glob("model-00002*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    assert str(tmp_path / "target") in refusal(run, tmp_path / "out")
    shard.unlink()
    assert str(tmp_path / "target") in refusal(run, tmp_path / "out")
    shard.write_bytes(content)
    index = tmp_path / "target" / INDEX
    places = json.loads(index.read_text())
    other = next(name for name in places["weight_map"].values() if name != shard.name)
    moved = next(name for name, file in places["weight_map"].items() if file == shard.name)
    places["weight_map"][moved] = other
    index.write_text(json.dumps(places))
    assert f"its index names {moved}, which its file does not hold" in refusal(run, tmp_path / "out")
