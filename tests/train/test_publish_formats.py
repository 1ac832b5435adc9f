"""Publishing in a foreign format: what lies in the folder is the export, of the right target, or nothing is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from huggingface_hub import HfApi
from torch import nn

from heads import HEADS
from heads.common.resolvers import ROOT
from heads.common.typed import typed
from heads.formats.hub import kind_of, load_found, resolve_head
from heads.formats.published.openvino import convert
from heads.formats.store import TargetSpec, save_head
from inference.target.embeddings_only import EmbeddingsOnly
from tests import toys
from tests.train.publishing import VALUES
from train.publish import PublishConfig, publish
from train.release import folder
from train.release.folder import assert_served

TARGET = ROOT / "examples" / "tiny"
LAYER = {**toys.SINGLE, "length": None}
EAGLE3 = {
    "layers": 1, "feature_layers": None, "feature_norm": True, "joint_norm": False, "norm_output": True,
    "norm_before_residual": False, "qk_norm": False, "kv_injection": False, "lm_head": "own", "draft_vocab": 100,
    **LAYER,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> EmbeddingsOnly:
    return EmbeddingsOnly.load(str(TARGET), "float32", "cpu", False)


def run(folder: Path, target: EmbeddingsOnly, kind: str, options: dict[str, Any], **said: Any) -> Path:
    torch.manual_seed(0)
    head: Any = HEADS[kind](HEADS[kind].Config(name=kind, **options), target.embeddings)
    spec = TargetSpec(**{**vars(target.spec), **said})
    save_head(folder / "run" / "head", head.to(torch.bfloat16), spec, {"kind": "chain", "depth": 2})
    return folder / "run"


def config(run: Path, form: str | None, **changes: Any) -> PublishConfig:
    values = {**VALUES, "dry_run": True, "repo": "me/tiny-eagle3", "draft_tokens": 4, "format": form}
    return typed(PublishConfig, {"run": str(run), **values, **changes})


def test_the_published_folder_is_the_exported_one(tmp_path: Path, target: EmbeddingsOnly) -> None:
    made = run(tmp_path, target, "eagle3", EAGLE3)
    lines: list[str] = []
    out = publish(config(made, "vllm"), HfApi(), lines.append)
    assert out == made / "publish"
    assert lines[-1].endswith(f"says me/tiny-eagle3 give {out}, and the target's folder where it says path/to/tiny")
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "tokenizer_reference.json",
    }  # fmt: skip
    said = json.loads((out / "config.json").read_text())
    assert said["eagle_aux_hidden_state_layer_ids"] == [2, 12, 21]
    assert (said["torch_dtype"], said["max_position_embeddings"]) == ("bfloat16", 512)
    assert said["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert kind_of(resolve_head(str(out))) == "eagle3"
    loaded: nn.Module = load_found(out, target.embeddings, target.spec)
    head = load_found(made / "head", target.embeddings, target.spec)
    theirs = loaded.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in head.state_dict().items())
    assert "run=me/tiny-eagle3 model.path=path/to/tiny tree=chain workload=" in (out / "README.md").read_text()


def test_openvinos_models_are_converted_or_the_commands_said(
    tmp_path: Path, target: EmbeddingsOnly, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, target, "eagle3", EAGLE3 | {"feature_norm": False, "norm_output": False})
    lines: list[str] = []
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    out = publish(config(made, "openvino"), HfApi(), lines.append)
    assert [line.split()[0] for line in lines[1:4]] == ["optimum-cli", "optimum-cli", "sed"]
    assert '|&<hidden_layers_list value="1 11 20" />|' in lines[3]
    converter = tmp_path / "optimum-cli"
    made_by = 'for to; do :; done; mkdir -p $to; printf "\\n\\t<rt_info>" >$to/openvino_model.xml'
    converter.write_text(f"#!/bin/sh\n{made_by}\n")
    converter.chmod(0o755)
    publish(config(made, "openvino"), HfApi(), lines.append)
    written = out.with_name("publish-openvino") / "head" / "openvino_model.xml"
    assert written.read_text() == '\n\t<rt_info><hidden_layers_list value="1 11 20" />'
    converter.write_text("#!/bin/sh\necho no class >&2\nexit 3\n")
    with pytest.raises(ValueError, match=r"publish .*/head: exit status 3 \(no class\)"):
        publish(config(made, "openvino"), HfApi())
    again = publish(config(out, "vllm", target=str(TARGET), out=str(tmp_path / "vllm")), HfApi())
    loaded: list[Any] = [load_found(each, target.embeddings, target.spec) for each in (out, again)]
    assert loaded[0].config == loaded[1].config
    assert all(torch.equal(a, b) for a, b in zip(*(each.state_dict().values() for each in loaded), strict=True))
    (out / "tokenizer_reference.json").write_text('{"tokenizer_sha256": "another"}')
    with pytest.raises(ValueError, match=r"tiny: its tokenizer.json is not .*/tokenizer_reference.json,"):
        publish(config(out, "openvino", target=str(TARGET), out=str(tmp_path / "other")), HfApi())


def test_what_cannot_be_exported_is_one_line_and_leaves_no_folder(tmp_path: Path, target: EmbeddingsOnly) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"form": "vllm", "target": "/nowhere"}, "model.path=/nowhere"),
        ({"kv_injection": True}, {"form": "vllm"}, "kv_injection=true"),
        ({}, {"form": "medusa"}, "of eagle3 heads: they are written as vllm, sglang, gguf, trtllm, speculators"),
        ({}, {"form": "gguf"}, "engine=llamacpp: .*norm"),  # refused with any file
        ({"feature_norm": False, "norm_output": False}, {"form": "gguf"}, "the target's own GGUF file: give gguf=FILE"),
    ]
    for options, changes, named in cases:
        made = run(tmp_path, target, "eagle3", EAGLE3 | options)
        with pytest.raises(ValueError, match=named) as caught:
            publish(config(made, **changes), HfApi())
        assert "\n" not in str(caught.value)
        assert not (made / "publish").exists()


def test_another_targets_gguf_is_refused_before_the_head_is_written(
    tmp_path: Path, target: EmbeddingsOnly, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, target, "eagle3", EAGLE3 | {"feature_norm": False, "norm_output": False})
    tokens = sorted(vocab := target.tokenizer.get_vocab(), key=vocab.__getitem__)
    for name, listed in (("own", tokens), ("other", tokens[::-1])):
        writer = GGUFWriter(tmp_path / name, "llama")
        writer.add_token_list(listed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    out = publish(config(made, "gguf", gguf=str(tmp_path / "own")), HfApi())
    written = (out / "head.gguf").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(folder, "gguf_file", lambda _: tmp_path / "own")  # a target that is one itself
        assert (publish(config(made, "gguf"), HfApi()) / "head.gguf").read_bytes() == written
    monkeypatch.setattr(folder, "export", lambda *_: pytest.fail("the head was written"))
    with pytest.raises(ValueError, match="most of its tokens are not those"):
        publish(config(made, "gguf", gguf=str(tmp_path / "other")), HfApi())


def test_a_head_that_engines_would_feed_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    head = toys.head("block", toys.target())
    assert_served(head, "target")
    monkeypatch.setattr(head.embeddings, "extra_ops", lambda: ["a scaled embedding"])
    with pytest.raises(ValueError, match=r"target: the target has a scaled embedding, .*head=block; publish without"):
        assert_served(head, "target")


@pytest.mark.parametrize("tag", ["rt_info>x</rt_info", "runtime"])
def test_a_converted_head_names_its_layers_or_the_conversion_fails(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "optimum-cli"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nfor last; do :; done\nmkdir -p "$last"\nprintf "<net>\\n\\t<%s>\\n" ' + repr(tag)
                      + ' > "$last/openvino_model.xml"\n')  # fmt: skip
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    served = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}}
    if tag == "runtime":
        with pytest.raises(ValueError, match="no rt_info to name the head's layers in"):
            convert(tmp_path / "pub", served, "target", print)
        return
    convert(tmp_path / "pub", served, "target", print)
    written = (tmp_path / "pub-openvino" / "head" / "openvino_model.xml").read_text()
    assert '<rt_info><hidden_layers_list value="1 7 12" />x</rt_info>' in written
