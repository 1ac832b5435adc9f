"""A target's ends without its layers: the same as the whole target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from inference.target.checkpoint import fingerprint
from inference.target.config import model_config
from inference.target.embeddings import TargetEmbeddings, final_norm
from inference.target.embeddings_only import EmbeddingsOnly, load_target
from inference.target.target import Target
from tests import assistants, families, toys


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ends_are_the_whole_targets(tmp_path: Path, name: str, dtype: str) -> None:
    path = assistants.save(toys.target(name).model, toys.tokenizer(), tmp_path / "target")
    whole, bare = Target.load(str(path), dtype, "cpu"), EmbeddingsOnly.load(str(path), dtype, "cpu", False)
    assert bare.spec == whole.spec
    assert (bare.dtype, bare.device) == (whole.dtype, whole.device)
    token = torch.arange(toys.VOCAB)
    assert torch.equal(bare.embeddings.embed(token), whole.embeddings.embed(token))
    state = torch.randn(3, 32, dtype=whole.dtype)
    assert torch.equal(bare.embeddings.logits(state), whole.embeddings.logits(state))
    count = whole.spec.num_layers
    assert torch.equal(bare.norm(state), final_norm(whole.base, count)(state))
    assert bare.tokenizer("w3 w5")["input_ids"] == whole.tokenizer("w3 w5")["input_ids"]


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "kimi_linear", "nemotron_h", "granitemoehybrid", "qwen3_moe"])
def test_the_ends_load_under_the_names_that_a_family_has_on_disk(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(families.config(name))
    path = assistants.save(model, toys.tokenizer(), tmp_path / "target")
    bare = EmbeddingsOnly.load(str(path), "float32", "cpu", False)
    assert bare.spec.fingerprint == fingerprint(model, str(path)), "each parameter's first values"
    assert torch.equal(bare.embeddings.head_weight(), model.get_output_embeddings().weight)
    assert torch.equal(bare.embeddings.embedding.weight, model.get_input_embeddings().weight)


def test_a_parameter_that_cannot_be_read_by_itself_is_named_in_words(tmp_path: Path) -> None:
    path = assistants.save(toys.target().model, toys.tokenizer(), tmp_path / "target")
    file, name = Path(path, "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    turned = tensors.pop(name).T.contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"\(its files hold no {name} that can be read by itself\)"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)
    save_file(tensors | {name: turned}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"\(its files hold {name} with rows and columns exchanged\)"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_the_final_norm_makes_the_last_state(name: str) -> None:
    target, token = toys.target(name), torch.tensor([toys.prompt(0)])
    made = target.features(token, torch.zeros_like(token), (2,))
    normed = final_norm(target.base, 3)(made.hidden[:, :, 0])
    assert torch.allclose(normed, made.last_hidden, atol=1e-5)
    assert not torch.allclose(made.hidden[:, :, 0], made.last_hidden, atol=1e-2)


def test_of_several_norms_beside_the_layers_the_final_one_is_the_last() -> None:
    base = torch.nn.Module()
    base.before, base.layers, base.norm = (
        torch.nn.LayerNorm(4),
        torch.nn.ModuleList([torch.nn.Linear(4, 4)]),
        torch.nn.LayerNorm(4),
    )
    assert final_norm(base, 1) is base.norm


def test_the_layers_stay_on_disk(tmp_path: Path) -> None:
    path = assistants.save(toys.target().model, toys.tokenizer(), tmp_path / "target")
    bare = EmbeddingsOnly.load(str(path), "float32", "cpu", False)
    held = {id(p): p.numel() for part in (bare.embeddings, bare.norm) for p in part.parameters() if not p.is_meta}
    assert sum(held.values()) == 2 * toys.VOCAB * 32 + 32


@pytest.mark.parametrize(
    ("given", "whole", "found"),
    [
        ({}, False, "ends"),
        ({}, True, "whole"),
        ({"quantize": "none", "adapter": "none"}, False, "ends"),
        ({"quantize": "int8"}, False, "whole"),
        ({"adapter": "a"}, False, "whole"),
    ],
)
def test_layers_are_loaded_where_they_or_other_weights_than_saved_are_wanted(
    given: dict[str, str], whole: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddingsOnly, "load", lambda *_: "ends")
    monkeypatch.setattr(Target, "of", lambda *_, **__: "whole")
    loaded: Any = load_target(model_config(path="x", **given), "cpu", whole=whole)
    assert loaded == found


def test_logits_of_some_tokens_have_their_bias_scale_and_cap() -> None:
    embeddings, state = TargetEmbeddings(toys.target().model), torch.randn(3, 32)
    ids = torch.tensor([3, 17, 39])
    assert embeddings.beyond_tables() is None
    embeddings.lm_head = torch.nn.Linear(32, toys.VOCAB)
    assert embeddings.beyond_tables() == "its logits have a bias, a cap or a scale"
    embeddings.factor, embeddings.softcap = 3.0, 2.0
    whole = embeddings.logits(state)
    torch.testing.assert_close(whole, 2 * (3 * embeddings.lm_head(state) / 2).tanh())
    torch.testing.assert_close(embeddings._traced(state, ids), embeddings.lm_head(state)[:, ids])
    torch.testing.assert_close(embeddings.logits(state, ids), whole[:, ids])


def test_what_cannot_be_loaded_so_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its embeddings cannot be loaded without its layers") as error:
        EmbeddingsOnly.load(str(tmp_path / "none"), "float32", "cpu", False)
    assert "\n" not in str(error.value)
    path = assistants.save(toys.target("gemma3").model, toys.tokenizer(), tmp_path / "gemma")
    with pytest.raises(ValueError, match="compute with more than weights"):
        EmbeddingsOnly.load(str(path), "float32", "cpu", False)
