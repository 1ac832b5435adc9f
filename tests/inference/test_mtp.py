"""A checkpoint's own multi-token-prediction module, in both namings, against formulas written out and transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from heads.base import Features
from inference.drafters.head import MtpDrafter, load_mtp
from inference.target.target import Target
from tests import drafting, families, toys
from tests.families import own_module

WIDTH, INNER, HEADS, GROUPS, HEAD = 32, 48, 4, 2, 8
ROTARY = 1e-5  # transformers' rotary tables and norms are fp32 in every dtype


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


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def features(target: Target, token: list[int]) -> Features:
    return target.features(torch.tensor([token]), torch.zeros(1, len(token), dtype=torch.long), ())


@pytest.mark.parametrize(("naming", "sharded"), [("behind", True), ("apart", False)])
def test_the_module_drafts_as_the_trainable_head_of_its_weights(tmp_path: Path, naming: str, sharded: bool) -> None:
    path = save(tmp_path, naming, sharded)
    target = Target.load(str(path), "float64", "cpu")
    assert target.spec.fingerprint == toys.target().spec.fingerprint  # the target itself is loaded without the module
    loaded, ours = load_mtp(target, str(path)), toys.head("mtp", target)
    own = ("enorm", "hnorm", "eh_proj", "norm")
    ours.load_state_dict({f"{name if name in own else f'block.{name}'}.weight": w for name, w in weights().items()})
    for norm in (m for m in ours.modules() if hasattr(m, "eps")):
        norm.eps = 1e-6
    text = toys.prompt(5, 9)
    packed, rows = features(target, text), features(target, text[:-1])
    found: list[list[Tensor]] = []
    for head in (loaded, ours):
        state, level = drafting.extend(head, None, rows, torch.tensor(text[1:]))
        found.append([*(draft.state for draft in head.unroll(packed, 3)), level.logits])
        for depth in range(1, 3):
            token, seen = level.logits[0, 0].argmax()[None], torch.ones(1, depth, dtype=torch.bool)
            level = drafting.expand(head, state, level, token, torch.zeros(1, dtype=torch.long), seen)
            found[-1].append(level.logits)
    torch.testing.assert_close(*found, rtol=ROTARY, atol=ROTARY)


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


SINGLE = 1e-4
MOE = {
    **toys.SIZES, "num_hidden_layers": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 12,
    "n_routed_experts": 12, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write experts one by one, as checkpoints hold them."""
    made = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = tensor.clone()
            continue
        stem, part = name.rsplit(".", 1)
        for i, expert in enumerate(tensor):
            halves = expert.chunk(2) if part == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            made |= {f"{stem}.{i}.{n}.weight": half.clone() for n, half in zip(names, halves, strict=True)}
    return made


def mixture(folder: Path, model: torch.nn.Module, layer: torch.nn.Module) -> tuple[Target, dict[str, Tensor]]:
    """Save a mixture of experts and a module of its own kind; return the target and the module's norms."""
    torch.manual_seed(3)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made = {name: torch.rand(WIDTH) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    made["eh_proj"] = 0.3 * torch.randn(WIDTH, 2 * WIDTH)
    extra = {f"model.layers.2.{name}.weight": tensor for name, tensor in made.items()}
    extra |= {f"model.layers.2.{name}": tensor for name, tensor in split_experts(layer.state_dict()).items()}
    model.save_pretrained(folder)
    toys.tokenizer().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    return Target.load(str(folder), "float32", "cpu"), made  # its experts' kernel takes no fp64


def deepseek() -> DeepseekV3ForCausalLM:
    torch.manual_seed(1)
    latent = {"q_lora_rank": None, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    sizes = {key: value for key, value in MOE.items() if key not in ("head_dim", "num_key_value_heads")}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **latent, num_key_value_heads=4))


def glm() -> Glm4MoeForCausalLM:
    torch.manual_seed(1)
    return Glm4MoeForCausalLM(Glm4MoeConfig(**MOE, use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=1))


def test_a_module_that_a_fine_tune_lost_is_said_to_be_its_bases(tmp_path: Path) -> None:
    glm().save_pretrained(tmp_path)
    toys.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its num_nextn_predict_layers promises one, .* init=checkpoint base=BASE"):
        load_mtp(Target.load(str(tmp_path), "float32", "cpu"), str(tmp_path))


@pytest.mark.parametrize("make", [deepseek, glm])
def test_a_mixture_of_experts_is_the_targets_own_layer(tmp_path: Path, make: object) -> None:
    assert callable(make)
    model = make()
    layer = type(model.model.layers[-1])(model.config, 1)
    target, made = mixture(tmp_path, model, layer)
    text = toys.prompt(5, 9)
    rows = features(target, text[:-1])
    _, level = drafting.extend(load_mtp(target, str(tmp_path)), None, rows, torch.tensor(text[1:]))
    # transformers' layer under its own causal attention, between the formulas written out.
    embedding = rms(target.embeddings.embed(torch.tensor(text[1:])), made["enorm"])
    x = torch.cat([embedding, rms(rows.last_hidden[0], made["hnorm"])], -1) @ made["eh_proj"].T
    rotary = target.base.rotary_emb(x[None], torch.arange(8)[None])
    shut = torch.full((1, 1, 8, 8), float("-inf")).triu(1)
    out = layer.eval()(x[None], attention_mask=shut, position_embeddings=rotary)
    expected = target.embeddings.logits(rms(out[0, -1], made["shared_head.norm"]))
    torch.testing.assert_close(level.logits[0, 0], expected, rtol=SINGLE, atol=SINGLE)
