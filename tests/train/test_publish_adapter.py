"""A head that LoRA adapted, published as its factors alone: readers merge them into the head that they name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load, load_file, save, save_file
from torch import nn

from heads import HEADS
from heads.common.resolvers import ROOT
from heads.formats import lora
from heads.formats.hub import load_found, resolve_head
from heads.formats.store import save_head
from inference.drafters.head import load_mtp
from inference.target.embeddings_only import EmbeddingsOnly
from tests import published_mtp, toys
from tests.train.hub_server import START, Hub, Repo
from tests.train.publishing import config
from train.publish import publish
from train.start import LoraAdapterConfig, adapt, merged_copy

BASE, REPO = "me/base-eagle", "me/adapted-eagle"
RANK = 4
TREE = {"kind": "chain", "depth": 2, "top_k": 0, "nodes": 0, "paths": [], "widths": []}


@pytest.fixture(scope="module")
def target() -> EmbeddingsOnly:
    return EmbeddingsOnly.load(str(ROOT / "examples" / "tiny"), "float32", "cpu", False)


def eagle(target: EmbeddingsOnly) -> nn.Module:
    torch.manual_seed(0)
    kind: Any = HEADS["eagle"]
    head: nn.Module = kind(kind.Config(name="eagle", **toys.HEAD_CONFIGS["eagle"]), target.embeddings)
    return head


@pytest.fixture
def run(hub: Hub, target: EmbeddingsOnly, tmp_path: Path) -> Path:
    """Return a run that adapted the head in bf16 that is on the Hub."""
    save_head(tmp_path / "base", eagle(target).to(torch.bfloat16), target.spec, TREE)
    hub.repos[BASE] = Repo(private=True)
    hub.repos[BASE].commit({**START, **{file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}})
    head = eagle(target).to(torch.bfloat16).float()
    adapt(head, LoraAdapterConfig("lora", RANK, 8, 0.0, False, None))
    for name, parameter in head.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.05)
    save_head(tmp_path / "run" / "head", merged_copy(head, head.state_dict()), target.spec, TREE)
    origin = {"init": "outputs/base", "peft": {"method": "lora", "rank": RANK, "alpha": 8}}
    (tmp_path / "run" / "provenance.json").write_text(json.dumps(origin))
    return tmp_path / "run"


def test_the_factors_alone_come_back_as_the_head_that_was_trained(run: Path, hub: Hub, target: EmbeddingsOnly) -> None:
    publish(config(run, repo=REPO, base=BASE), HfApi())
    files = hub.repos[REPO].files
    assert set(files) == {*START, "config.json", *lora.FILES, "README.md", "tokenizer_reference.json"}
    assert f"adapt `{BASE}`" in files["README.md"].decode()
    sizes = {name: len(data) for name, data in files.items()}
    assert 3 * sizes[lora.WEIGHTS] < (run / "head" / "model.safetensors").stat().st_size
    back = load_found(resolve_head(REPO), target.embeddings, target.spec).state_dict()
    trained = load_file(run / "head" / "model.safetensors")
    assert back.keys() == trained.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_module_that_lora_adapted_is_published_for_its_model(hub: Hub, tmp_path: Path) -> None:
    """The factors name the model; its module's shard alone is downloaded; merged, the target's folder gets it."""
    toy = published_mtp.target("GLM-4.5", torch.float32)
    toy.model.save_pretrained(tmp_path / "target")
    toy.tokenizer.save_pretrained(tmp_path / "target")
    module = published_mtp.module("GLM-4.5", toy)
    index = dict.fromkeys(module, "mtp.safetensors") | {"model.norm.weight": "layers.safetensors"}
    files = {"config.json": b"{}", "model.safetensors.index.json": json.dumps({"weight_map": index}).encode()}
    hub.repos["me/model"] = Repo(private=True)
    hub.repos["me/model"].commit({**START, **files, "mtp.safetensors": save(module), "layers.safetensors": b"large"})
    save_file(module, tmp_path / "model.safetensors")
    base = load_mtp(toy, str(tmp_path))
    head = merged_copy(base, base.state_dict())
    adapt(head, LoraAdapterConfig("lora", RANK, 8, 0.0, False, None))
    for name, parameter in head.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.05)
    trained = merged_copy(head, head.state_dict())
    target = EmbeddingsOnly.load(str(tmp_path / "target"), "float32", "cpu", False)
    save_head(tmp_path / "run" / "head", trained, target.spec, TREE)
    (tmp_path / "run" / "provenance.json").write_text(json.dumps({"peft": {"method": "lora", "rank": RANK}}))
    publish(config(tmp_path / "run", repo=REPO, base="me/model", verify_prompts=0), HfApi())
    back = load_found(resolve_head(REPO), target.embeddings, target.spec).state_dict()
    assert not any("layers.safetensors" in str(request) for request in hub.requests)
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=1e-5, atol=1e-6)
    whole: dict[str, Any] = {"repo": "me/x", "format": "checkpoint", "dry_run": True, "out": str(tmp_path / "whole")}
    publish(config(Path(REPO), **whole, target=str(tmp_path / "target")), HfApi())
    merged = load_mtp(toy, str(tmp_path / "whole")).state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in back.items())


def test_peft_reads_the_same_adapter(run: Path, hub: Hub, target: EmbeddingsOnly, tmp_path: Path) -> None:
    from peft import PeftConfig, PeftModel

    out = publish(config(run, repo=REPO, base=BASE, dry_run=True, out=str(tmp_path / "out")), HfApi())
    assert PeftConfig.from_pretrained(str(out)).base_model_name_or_path == BASE
    merged: Any = PeftModel.from_pretrained(eagle(target).to(torch.bfloat16).float(), str(out)).merge_and_unload()
    trained = load_file(run / "head" / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [RANK, 3 * RANK])
def test_an_adapter_counts_for_alpha_over_its_rank(alpha: int, tmp_path: Path) -> None:
    """Ours are written with an alpha of their rank; those that peft trains have any."""
    head = nn.Sequential(nn.Linear(4, 3))
    before, change = head[0].weight.detach().clone(), torch.ones(3, 4)
    name = "0.weight"
    for file, content in lora.adapter_files(BASE, {name: before}, {name: before + change}, RANK).items():
        (tmp_path / file).write_bytes(content)
    said = json.loads((tmp_path / lora.CONFIG).read_text()) | {"lora_alpha": alpha}
    (tmp_path / lora.CONFIG).write_text(json.dumps(said))
    merged = lora.merge(head, lora.read_adapter(tmp_path), tmp_path).state_dict()[name]
    torch.testing.assert_close(merged, before + alpha / RANK * change)


def test_a_whole_model_for_a_base_is_refused_before_it_is_downloaded(
    run: Path, hub: Hub, target: EmbeddingsOnly
) -> None:
    publish(config(run, repo=REPO, base=BASE), HfApi())
    index = b'{"weight_map": {"model.layers.0.mlp.up_proj.weight": "model-1.safetensors"}}'
    files = {"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b"large"}
    hub.repos[BASE].commit({**START, **files})
    with pytest.raises(ValueError, match="of no published head known here"):
        load_found(resolve_head(REPO), target.embeddings, target.spec)
    assert not any("model-1" in str(request) for request in hub.requests)


def test_what_is_no_adapter_is_not_published(run: Path, hub: Hub, target: EmbeddingsOnly, tmp_path: Path) -> None:
    other = eagle(target).to(torch.bfloat16).float()
    with torch.no_grad():
        other.get_parameter("fc.weight").add_(torch.randn(other.get_parameter("fc.weight").shape))
    save_head(tmp_path / "other", other, target.spec, TREE)
    hub.repos["me/other"] = Repo(private=True)
    hub.repos["me/other"].commit({**START, **{file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()}})
    for name, complaint in {"me/other": "by more than rank 4", "me/none": "the Hub refused"}.items():
        with pytest.raises(ValueError, match=complaint):
            publish(config(run, repo=REPO, base=name), HfApi())
    for base, form in ((BASE, "vllm"), ("outputs", None)):
        with pytest.raises(ValueError, match=r"base is .*: give OWNER/NAME"):
            config(run, base=base, format=form)
    (run / "provenance.json").unlink()
    with pytest.raises(ValueError, match="has not adapted a head by peft=lora"):
        publish(config(run, repo=REPO, base=BASE), HfApi())
    assert REPO not in hub.repos


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "not a head's adapter"),
    ({"r": -4}, "not a head's adapter"),
    ({"r": 8}, "has not two factors of rank 8"),
    ({"use_dora": True}, "use_dora is True"),
    ({"lora_alpha": -(1 << 21)}, "not a head's adapter"),
    ({"lora_alpha": ""}, "not a head's adapter"),
    ({"rank_pattern": {"(a+)+b": 8}}, "rank_pattern"),
    ({"base_model_name_or_path": "/etc"}, "no name of the Hub"),
    ({"base_model_name_or_path": REPO}, "an adapter itself"),
]
DAMAGE: list[tuple[str, Any, str]] = [
    (lora.UP, lambda up: up[:, :2], "two factors of rank 4"),
    (lora.DOWN, lambda down: down[:, 1:], "lacks in that shape"),
    (lora.DOWN, lambda down: down / 0, "not finite"),
    (lora.UP, None, "is no factor"),
]


def test_an_adapter_from_outside_is_refused_in_a_line(run: Path, hub: Hub, target: EmbeddingsOnly) -> None:
    publish(config(run, repo=REPO, base=BASE, verify_prompts=0), HfApi())
    files = hub.repos[REPO].files
    tensors, said = load(files[lora.WEIGHTS]), json.loads(files[lora.CONFIG])
    broken = [({lora.CONFIG: json.dumps(said | changes).encode()}, complaint) for changes, complaint in CHANGES]
    for end, change, complaint in DAMAGE:
        name = next(name for name in tensors if name.endswith(end))
        other = {"x": tensors[name].clone()} if change is None else {name: change(tensors[name]).contiguous()}
        broken.append(({lora.WEIGHTS: save(tensors | other)}, complaint))
    for changed, complaint in broken:
        hub.repos[REPO].commit({**files, **changed})
        with pytest.raises(ValueError, match=complaint) as error:
            load_found(resolve_head(REPO), target.embeddings, target.spec)
        assert "\n" not in str(error.value)
