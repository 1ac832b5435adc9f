"""A checkpoint's own multi-token-prediction module, in both namings, against formulas written out and transformers."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.drafters.head import MtpDrafter, load_mtp
from inference.target.checkpoint import lost_module
from inference.target.target import Target
from tests import families, published_mtp, toys
from tests.families import own_module

WIDTH, INNER, HEADS, GROUPS, HEAD = 32, 48, 4, 2, 8
DOUBLE = 1e-6  # frequencies of rotary positions stay fp32


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return a module for the toy Llama under the names of DeepSeek's block, large enough to draft varied tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "enorm": (WIDTH,), "hnorm": (WIDTH,), "eh_proj": (WIDTH, 2 * WIDTH), "norm": (WIDTH,),
        "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
        "self_attn.q_proj": (HEADS * HEAD, WIDTH), "self_attn.k_proj": (GROUPS * HEAD, WIDTH),
        "self_attn.v_proj": (GROUPS * HEAD, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * HEAD),
        "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
    }  # fmt: skip
    made = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor + 1 if tensor.ndim == 1 else tensor for name, tensor in made.items()}


def behind(name: str) -> str:
    return f"model.layers.3.{'shared_head.norm' if name == 'norm' else name}.weight"


def apart(name: str) -> str:
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
    return f"mtp.{own[name]}.weight" if name in own else f"mtp.layers.0.{name}.weight"


NAMINGS = {"behind": behind, "apart": apart}


def save(folder: Path, naming: str, sharded: bool = False) -> Path:
    """Write the toy Llama with a module, in one file or in two with an index."""
    target = toys.target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    extra = {NAMINGS[naming](name): tensor for name, tensor in weights().items()}
    if naming == "behind":  # published checkpoints repeat the shared ends
        embeddings = {
            "embed_tokens": target.embeddings.embedding.weight,
            "shared_head.head": target.embeddings.lm_head_weight(),
        }
        extra |= {f"model.layers.3.{name}.weight": tensor.clone() for name, tensor in embeddings.items()}
    main = load_file(folder / "model.safetensors")
    if not sharded:
        save_file(main | extra, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    (folder / "model.safetensors").unlink()
    index = {}
    for shard, part in (("model-1.safetensors", main), ("model-2.safetensors", extra)):
        save_file(part, folder / shard, metadata={"format": "pt"})
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_of_a_sharded_checkpoint_the_modules_shards_alone_are_read(tmp_path: Path) -> None:
    """So that of a model on the Hub no others are downloaded; the target is loaded without the module."""
    path = save(tmp_path, "behind", sharded=True)
    target = Target.load(str(path), "float32", "cpu")
    assert target.spec.fingerprint == toys.target().spec.fingerprint
    (path / "model-1.safetensors").unlink()
    assert torch.equal(load_mtp(target, str(path)).hnorm.weight, weights()["hnorm"])


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_that_the_index_leaves_out_is_read(tmp_path: Path, inside: bool) -> None:
    """In a file of its own, or inside a shard that the index names."""
    path = save(tmp_path, "behind", sharded=True)
    target = toys.target()
    expected = load_mtp(target, str(path)).state_dict()
    listed = path / "model.safetensors.index.json"
    index = json.loads(listed.read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if file == "model-1.safetensors"}
    listed.write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    if inside:
        parts = [path / f"model-{i}.safetensors" for i in (1, 2)]
        save_file(load_file(parts[0]) | load_file(parts[1]), parts[0], metadata={"format": "pt"})
        parts[1].unlink()
    found = load_mtp(target, str(path)).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def refused(target: Target, checkpoint: Path) -> str:
    with pytest.raises(ValueError, match=r"drafter\.mtp") as error:
        MtpDrafter(MtpDrafter.Config(str(checkpoint), toys.TREES["chain"]), target, "mtp")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_used_is_named_in_one_line(tmp_path: Path) -> None:
    target = toys.target()
    target.model.save_pretrained(tmp_path / "bare")
    assert "carries no module" in refused(target, tmp_path / "bare")
    assert "no readable model.safetensors" in refused(target, tmp_path / "absent")
    path = save(tmp_path / "whole", "behind")
    file = path / "model.safetensors"
    kept = load_file(file)
    for name, tensor in (
        ("model.layers.3.mlp.up_proj.weight_scale_inv", torch.ones(1)),
        ("model.layers.3.mlp.up_proj.weight", torch.ones(3, 3)),
    ):
        save_file(kept | {name: tensor}, file)
        assert "mlp.up_proj" in refused(target, path)
    save_file({name: tensor for name, tensor in kept.items() if "enorm" not in name}, file)
    assert "enorm" in refused(target, path)
    file.write_bytes(b"broken")
    assert "no readable model.safetensors" in refused(target, path)


def test_the_module_is_read_where_the_target_is(tmp_path: Path) -> None:
    """One whole file goes before the shards next to it, as in transformers; an index that names it adds to it."""
    target, path = toys.target(), save(tmp_path / "another", "behind", sharded=True)
    save_file(load_file(path / "model-1.safetensors"), path / "model.safetensors", metadata={"format": "pt"})
    assert "carries no module" in refused(target, path)
    path = save(tmp_path, "apart", sharded=True)
    whole = load_file(path / "model-1.safetensors") | load_file(path / "model-2.safetensors")
    name = apart("hnorm")
    save_file(whole | {name: whole[name] + 1}, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_mtp(target, str(path)).hnorm.weight, whole[name] + 1)
    (path / "model-1.safetensors").rename(path / "model.safetensors")
    index = (path / "model.safetensors.index.json").read_text()
    (path / "model.safetensors.index.json").write_text(index.replace("model-1.", "model."))
    assert torch.equal(load_mtp(target, str(path)).hnorm.weight, whole[name])


@pytest.mark.parametrize("fault", ["lost", "ragged"])
def test_a_module_that_is_damaged_is_named_in_one_line(tmp_path: Path, fault: str) -> None:
    path = save(tmp_path, "behind", sharded=True)
    file = path / "model-2.safetensors"
    kept, experts = load_file(file), "model.layers.3.mlp.experts"
    if fault == "lost":  # which the index still names
        del kept["model.layers.3.enorm.weight"]
    else:
        kept |= {f"{experts}.{i}.up_proj.weight": torch.ones(i + 2, 2) for i in range(2)}
        index = json.loads((path / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(kept, file.name)
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(kept, file)
    assert "is damaged" in refused(toys.target(), path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("gpt2", "rotary"), ("mistral", "sliding_window"), ("gemma2", "by itself"), ("gpt_neox", "no norm of one")),
        ("lfm2", "keeps a recurrent state"),
    ],
)
def test_a_layer_that_wants_more_is_refused(tmp_path: Path, name: str, said: str) -> None:
    target = toys.target(name) if name in toys.ARCHITECTURES else families.target(name)
    own_module(target, tmp_path / "model.safetensors")
    assert said in refused(target, tmp_path)


def test_a_module_that_a_fine_tune_lost_is_said_to_be_its_bases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    families.target("glm4_moe").model.save_pretrained(tmp_path)
    toys.tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        target = Target.load(str(tmp_path), "float32", "cpu")
    (line,) = (record.getMessage() for record in caplog.records if "promises" in record.getMessage())
    assert "its num_nextn_predict_layers promises an MTP module, and its files hold none; transformers" in line
    with pytest.raises(ValueError, match=r"its num_nextn_predict_layers promises one; .* base=BASE"):
        load_mtp(target, str(tmp_path))
    values, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    module = published_mtp.module("GLM-4.5", published_mtp.target("GLM-4.5", torch.float32))
    save_file(load_file(file) | module, file, metadata={"format": "pt"})
    assert lost_module(str(tmp_path), values) is None
    assert lost_module(str(tmp_path), {**values, "num_hidden_layers": 2}) is not None
    assert lost_module(str(tmp_path), {"text_config": values | {"num_nextn_predict_layers": 0}}) is None


@pytest.mark.parametrize("name", published_mtp.MODULES)
def test_a_familys_module_drafts_by_its_published_formulas(tmp_path: Path, name: str) -> None:
    with families.in_double():
        target = published_mtp.target(name, torch.float64)
        tensors = published_mtp.module(name, target)
        save_file(tensors, tmp_path / "model.safetensors")
        head, text = load_mtp(target, str(tmp_path)), toys.prompt(5, 12)
        token = torch.tensor([text])
        rows = target.features(token, torch.zeros_like(token), head.feature_layers)
        first, second = (draft.state[0] for draft in head.unroll(rows, 2))
    theirs = published_mtp.Formulas(name, target, tensors)
    states = rows.hidden[0, :, 0] if theirs.published.names is published_mtp.MIMO else rows.last_hidden[0]
    entered = theirs.entered(token[0, 1:], states[:-1])
    expected = theirs.states(entered)
    torch.testing.assert_close(first[:-1], expected, rtol=DOUBLE, atol=DOUBLE)
    for row in range(len(text) - 2):  # the next row's input is the state that the module has just made
        following = theirs.entered(token[0, row + 2], expected[row])
        again = theirs.states(torch.cat([entered[: row + 1], following[None]]))[-1]
        torch.testing.assert_close(second[row], again, rtol=DOUBLE, atol=DOUBLE)
