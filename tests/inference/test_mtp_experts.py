"""A module whose decoder layer is a mixture of experts, or attends by latents: the target's own layer runs it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.modeling_layers import MtpModel

from heads.common.target_config import cache_argument
from inference.drafters.mtp import load_mtp
from inference.target.target import Target
from tests import drafting, toys
from tests.inference.test_mtp import WIDTH, features, rms

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


def test_the_module_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    model = glm()
    layer = type(model.model.layers[-1])(model.config, 1)
    target, made = mixture(tmp_path, model, layer)
    theirs = MtpModel(target.model, 1).eval()
    theirs.layers[0].mtp_block.load_state_dict(layer.state_dict())
    embeddings = {"enorm": "enorm", "hnorm": "hnorm", "shared_head.norm": "post_norm", "eh_proj": "eh_proj"}
    for name, own in embeddings.items():
        theirs.layers[0].get_parameter(f"{own}.weight").data = made[name]
    text = toys.prompt(5, 9)
    rows, head = features(target, text[:-1]), load_mtp(target, str(tmp_path))
    state, level = drafting.extend(head, None, rows, torch.tensor(text[1:]))
    position, embedding = torch.arange(8)[None], target.embeddings.embed(torch.tensor([text[1:]]))
    hidden = theirs.layers[0](
        embedding,
        rows.last_hidden,
        target.base.rotary_emb(embedding, position),
        None,
        position,
        **{cache_argument(theirs.layers[0]): None},
    )
    torch.testing.assert_close(level.hidden[0], hidden[0, -1:], rtol=SINGLE, atol=SINGLE)
    level = drafting.expand(head, state, level, torch.tensor([3]), torch.tensor([0]), torch.ones(1, 1).bool())
    assert level.logits.isfinite().all()
