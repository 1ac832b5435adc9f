"""Published heads: our own heads' weights under the names that other projects give them.

The names are written down once more here, apart from heads/published, from what each project's files hold.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heads import HEADS
from heads.base import DraftHead, LevelOutput
from heads.formats.published import load_published
from tests import drafting, toys
from tests.refusals import refuses

Tensors = dict[str, Tensor]
DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "rope_scaling": None,
}  # fmt: skip
VICUNA = {key: value for key, value in DECODER.items() if key not in ("num_key_value_heads", "rope_theta")}
NOT_LOOKING_BACK = {"length": None}


def made(name: str, **options: Any) -> nn.Module:
    """Return a toy head with other options, its vocabulary neither the first tokens nor without gaps."""
    kind, own = toys.OPTIONS.get(name, (name, {}))
    torch.manual_seed(5)
    config = {"name": kind, **toys.HEAD_CONFIGS[kind], **own, **options}
    if "length" in config:
        config |= NOT_LOOKING_BACK | {key: options[key] for key in ("length",) if key in options}
    head = HEADS[kind](HEADS[kind].Config(**config), toys.target().embeddings)
    vocab: Any = head.vocab
    if vocab is not None:
        vocab.choose(torch.randint(100, (toys.VOCAB,), generator=torch.Generator().manual_seed(3)))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head.requires_grad_(False)


def renamed(head: nn.Module, *pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> Tensors:
    """Return the head's tensors with their names rewritten, the vocabulary as an offset and a mask."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        for pattern, new in pairs:
            foreign, count = re.subn(pattern, new, name)
            if count:
                break
        else:
            foreign = name
        tensors[foreign] = tensor
    if (ids := tensors.pop("vocab.ids", None)) is not None:
        known = torch.zeros(toys.VOCAB, dtype=torch.bool)
        known[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    return tensors


def deeper(by: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"layers.{int(found[1]) + by}."


EAGLE3 = (
    (r"^fusion\.fc", "fc"),
    (r"^fusion\.norms", "fc_norm"),
    (r"^fusion\.joint_norm", "input_norm"),
    (r"^layers\.(\d+)\.", deeper(1)),
)
AUTHORS3, SGLANG3 = (*EAGLE3, (r"^first\.", "midlayer.")), (*EAGLE3, (r"^first\.", "layers.0."))
IDS3 = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
NESTED3 = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
MEDUSA = ((r"^blocks\.", ""), (r"^lm_heads\.(\d+)", r"\1.2"))
VLLM = ((r"^blocks\.(\d+)\.(\d+)\.linear", r"blocks.\1.layers.\2"),)
HYDRA = (
    (r"^branches\.(\d+)\.entry", r"hydra_mlp.\1.1"), (r"^branches\.(\d+)\.blocks\.0", r"hydra_mlp.\1.3"),
    (r"^lm_heads\.(\d+)", r"hydra_lm_head.\1.1"), (r"^prefix\.layer", "prefix_embeding_layer.layers.0"),
    (r"^prefix\.norm", "prefix_embeding_layer.norm"),
)  # fmt: skip
PLAIN_HYDRA = (
    (r"^branches\.(\d+)\.entry", r"hydra_mlp.\1.0"), (r"^branches\.(\d+)\.blocks\.(\d)",
    lambda found: f"hydra_mlp.{found[1]}.{int(found[2]) + 1}"), (r"^lm_heads\.(\d+)", r"hydra_lm_head.\1"),
)  # fmt: skip
DFLASH = (
    (r"^fusion\.", ""), (r"^domino\.gru\.(\w+)", r"prefix_gru.\1_l0"), (r"^domino\.down", "embed_proj.0"),
    (r"^domino\.up", "embed_proj.2"),
    (r"^selector\.(predecessor|successor)\.weight", r"candidate_selector.\1_codebook"),
    (r"^selector\.projection", "candidate_selector.hidden_projection"),
    (r"^before", "markov_head.markov_w1"), (r"^bias", "markov_head.markov_w2"),
    (r"^confidence", "confidence_head.proj"),
)  # fmt: skip
DFLASH_CONFIG = {
    **DECODER, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}  # fmt: skip


def embedding() -> Tensor:
    return toys.target().embeddings.embedding.weight.detach().clone()


def block(**options: Any) -> nn.Module:
    """Return a block head whose masked positions hold a token's embedding."""
    head = made("block", **{"causal": False} | options)
    head.state_dict()["mask"].copy_(embedding()[7])
    return head


def without_mask(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != "mask"}


def eagle_authors() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("eagle", layers=1)
    return head, {"embed_tokens.weight": embedding(), **renamed(head)}, {**VICUNA, "num_hidden_layers": 1}


def eagle3_authors() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("eagle3")
    return head, renamed(head, *AUTHORS3), {**DECODER, **IDS3, "draft_vocab_size": 30}


def peagle() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    """Return a head in the plain form, with two dimensions of its mask features, and no word of how many it drafts."""
    head = made("peagle", draft_vocab=None, depths=8)
    tensors = renamed(head, *SGLANG3)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    config = {**DECODER, **IDS3, "fc_norm": True, "parallel_drafting": True, "ptd_token_id": 7}
    return head, tensors, {**config, "num_hidden_layers": 2, "draft_vocab_size": 40}


def peagle_speculators() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("peagle", embedding="own", feature_norm=False, joint_norm=True, norm_before_residual=True)
    tensors = renamed(head, *SGLANG3, (r"^embedding", "embed_tokens"))
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    config = {**DECODER, **IDS3, "norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": 30}
    said = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    kind = {"speculators_model_type": "peagle", "speculators_config": said, "mask_token_id": 7}
    return head, tensors, {**config, **kind, "num_hidden_layers": 2}


def eagle3_sglang() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("eagle3.1", layers=2, qk_norm=True, draft_vocab=None)
    tensors = {"model.embed_tokens.weight": embedding(), **renamed(head, *SGLANG3)}
    tensors["layers.1.hidden_norm.weight"] = tensors["layers.1.input_layernorm.weight"].clone()
    return head, tensors, {**DECODER, **NESTED3, "fc_norm": True, "norm_output": True, "draft_vocab_size": 40}


def eagle4() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("eagle4", candidates=9, length=12)
    pairs = (r"lm_head\.candidate_up", "efficient_lm_head"), (r"lm_head\.candidate_down", "efficient_lm_head_down_proj")
    window = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 12}
    said = {"type": "low_rank", "rank": 6, "num_candidates": 9}
    config = {**DECODER, **NESTED3, "fc_norm": True, "norm_output": True, "num_hidden_layers": 1, **window}
    tensors = {"embed_tokens.weight": embedding(), **renamed(head, *pairs, *SGLANG3)}
    return head, tensors, config | {"efficient_lm_head_config": said}


def eagle3_speculators() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("eagle3", norm_before_residual=True)
    nested = {"transformer_layer_config": {**DECODER, "num_hidden_layers": 1}, "norm_before_residual": True}
    return head, renamed(head, *SGLANG3), {"speculators_model_type": "eagle3", **nested, **IDS3}


def medusa_first() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("medusa", heads=5, layers=2)
    return head, renamed(head, *MEDUSA), {"medusa_num_heads": 2, "medusa_num_layers": 1}


def medusa_second() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("medusa", lm_head="shared")
    return head, renamed(head, *MEDUSA), {"version": "2", "medusa_num_heads": 4, "medusa_num_layers": 1}


def medusa_vllm() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("medusa", draft_vocab=25)
    ids = head.state_dict()["vocab.ids"]
    tensors = {name: tensor for name, tensor in renamed(head, *VLLM).items() if name not in ("d2t", "t2d")}
    order = torch.randperm(25, generator=torch.Generator().manual_seed(0))  # the most frequent first, say
    for i in range(4):
        tensors[f"lm_heads.{i}.weight"] = tensors[f"lm_heads.{i}.weight"][order]
    return head, {**tensors, "token_map": ids[order]}, {"model_type": "medusa", "num_heads": 4, "medusa_fc_bias": True}


def medusa_vllm_without_bias() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("medusa", lm_head="shared")
    for name, tensor in head.state_dict().items():
        if name.endswith("bias"):
            tensor.zero_()
    tensors = {name: tensor for name, tensor in renamed(head, *VLLM).items() if not name.endswith("bias")}
    tensors["lm_heads.0.weight"] = toys.target().embeddings.lm_head_weight().clone()
    return head, tensors, {"model_type": "medusa", "num_heads": 4, "original_lm_head": True}


def hydra_prefix() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("hydra", layers=4, tied=True, lm_head_bias=True)
    tensors = renamed(head, *HYDRA)
    for name, tensor in list(tensors.items()):  # the later blocks are one module
        for again in (5, 7):
            tensors[re.sub(r"(hydra_mlp\.\d)\.3\.", rf"\1.{again}.", name)] = tensor
    tensors["prefix_embeding_layer.embed_tokens.weight"] = embedding()
    config = {"hydra_num_heads": 4, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp", "grounded_heads": True}
    return head, tensors, {**config, "hidden_state_offset": 0, "rms_norm_eps": 1e-5}


def hydra_plain() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("hydra plain", tied=False, draft_vocab=None)
    return head, renamed(head, *PLAIN_HYDRA), {"hydra_num_heads": 4, "hydra_num_layers": 3, "hydra_head_arch": "mlp"}


def mlp_speculator() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("mlp")
    config = {"n_predict": 4, "inner_dim": 24, "emb_dim": 32, "scale_input": True, "tie_weights": False}
    return head, renamed(head, ("^", "speculator.")), config


def mlp_tied() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = made("mlp tied", draft_vocab=None)
    tensors = renamed(head)
    for name, tensor in list(tensors.items()):
        kind, step, rest = name.split(".")
        if step == ("1" if kind == "proj" else "0"):
            tensors |= {f"{kind}.{i}.{rest}": tensor for i in range(int(step), 4)}
    return head, tensors, {"n_predict": 4, "scale_input": False, "tie_weights": True}


def mlp_tied_once() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head, _, config = mlp_tied()
    return head, renamed(head), config


def mimo() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    """Return a head as vLLM's class finds it: the state before the embedding, and biases, all zero."""
    head, layer = made("mtp", draft_vocab=None), "model.mtp_layers.0."
    tensors = renamed(
        head, ("^enorm", f"{layer}token_layernorm"), ("^hnorm", f"{layer}hidden_layernorm"),
        ("^norm", f"{layer}final_layernorm"), ("^eh_proj", f"{layer}input_proj"), (r"^block\.", layer),
    )  # fmt: skip
    projection = f"{layer}input_proj.weight"
    tensors[projection] = tensors[projection].roll(32, 1)
    for kind, size in (("q", 32), ("k", 16), ("v", 16)):
        tensors[f"{layer}self_attn.{kind}_proj.bias"] = torch.zeros(size)
    return head, tensors, {**DECODER, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}


def dflash() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = block()
    return head, without_mask(renamed(head, *DFLASH)), {**DFLASH_CONFIG, "block_size": 5}


def dspark() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = block(from_anchor=True, markov_rank=6, confidence=True, draft_vocab=30, lm_head="own")
    return head, without_mask(renamed(head, *DFLASH)), {**DFLASH_CONFIG, "block_size": 4, "markov_head_type": "vanilla"}


def dspark_of_states_alone() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = block(from_anchor=True, markov_rank=6, confidence=True, causal=True)
    weight = head.state_dict()["confidence.weight"]
    weight[:, 32:] = 0  # a confidence that does not read the token before
    tensors = without_mask(renamed(head, *DFLASH)) | {"confidence_head.proj.weight": weight[:, :32].clone()}
    config = {key: value for key, value in DFLASH_CONFIG.items() if key != "dflash_config"}
    flat = {"aux_hidden_state_layer_ids": [1, 3], "mask_token_id": 7, "block_size": 4, "is_causal": True}
    return head, tensors, {**config, **flat, "speculators_model_type": "dspark"}


def dflash2() -> tuple[nn.Module, Tensors, dict[str, Any]]:
    """Return a head whose layers look back at a window, as the authors' do."""
    head = block(selector_rank=6, conv=2, length=8)
    told = {**DFLASH_CONFIG["dflash_config"], "conv_kernel_size": 2, "selector_top_k": 7}
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}
    return (
        head,
        without_mask(renamed(head, *DFLASH)),
        {**DFLASH_CONFIG, **window, "dflash_config": told, "block_size": 5},
    )


def domino(**options: Any) -> tuple[nn.Module, Tensors, dict[str, Any]]:
    head = block(domino=12, from_anchor=True, **options)
    told = {
        **DFLASH_CONFIG["dflash_config"],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    }
    return head, without_mask(renamed(head, *DFLASH)), {**DFLASH_CONFIG, "dflash_config": told, "block_size": 4}


# By name: the format, what makes the head, its files' tensors and config.json, and one of the tensors.
CASES: dict[str, tuple[str, Callable[[], tuple[nn.Module, Tensors, dict[str, Any]]], str]] = {
    "EAGLE-1 of Vicuna": ("eagle", eagle_authors, "layers.0.post_attention_layernorm.weight"),
    "EAGLE-3 of the authors": ("eagle3", eagle3_authors, "midlayer.mlp.up_proj.weight"),
    "EAGLE-3.1 of SGLang": ("eagle3", eagle3_sglang, "fc_norm.1.weight"),
    "EAGLE-3 of speculators": ("eagle3", eagle3_speculators, "layers.0.input_layernorm.weight"),
    "EAGLE-4": ("eagle4", eagle4, "efficient_lm_head_down_proj.weight"),
    "P-EAGLE": ("peagle", peagle, "mask_hidden"),
    "P-EAGLE of speculators": ("peagle", peagle_speculators, "input_norm.weight"),
    "Medusa 1": ("medusa", medusa_first, "3.2.weight"),
    "Medusa 2": ("medusa", medusa_second, "2.0.linear.bias"),
    "Medusa of vLLM": ("medusa", medusa_vllm, "lm_heads.3.weight"),
    "Medusa of vLLM without bias": ("medusa", medusa_vllm_without_bias, "blocks.2.layers.0.weight"),
    "Hydra++": ("hydra", hydra_prefix, "hydra_lm_head.2.1.bias"),
    "Hydra": ("hydra", hydra_plain, "hydra_mlp.1.0.res_connection.weight"),
    "MLP speculator": ("mlp", mlp_speculator, "ln.2.bias"),
    "MLP speculator tied": ("mlp", mlp_tied, "proj.1.weight"),
    "MLP speculator tied, once": ("mlp", mlp_tied_once, "ln.0.weight"),
    "MTP of MiMo": ("mimo", mimo, "mtp_layers.0.token_layernorm.weight"),
    "DFlash": ("dflash", dflash, "layers.1.self_attn.k_norm.weight"),
    "DSpark": ("dflash", dspark, "markov_head.markov_w2.weight"),
    "DFlash2": ("dflash", dflash2, "candidate_selector.successor_codebook"),
    "Domino": ("dflash", domino, "embed_proj.2.weight"),
    "DSpark of speculators": ("dflash", dspark_of_states_alone, "confidence_head.proj.bias"),
}


def publish(folder: Path, tensors: Tensors, config: dict[str, Any], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def drafts(head: Any) -> list[Tensor]:
    """Return the logits of three levels of a small tree behind a prompt."""
    target, token = toys.target(), torch.tensor([toys.prompt(4, 9)])
    features = target.features(token, torch.zeros_like(token), head.feature_layers)
    drafted: DraftHead = head
    state, root = drafting.extend(drafted, None, features, torch.tensor([*token[0, 1:].tolist(), 3]))
    eye = torch.eye(2, dtype=torch.bool)
    first: LevelOutput = drafting.expand(drafted, state, root, torch.tensor([3, 5]), torch.tensor([0, 0]), eye)
    second = drafting.expand(
        drafted, state, first, torch.tensor([7, 8]), torch.tensor([1, 0]), torch.cat([eye.flip(0), eye], 1)
    )
    return [drafting.logits(drafted, level) for level in (root, first, second)]


def refusal(folder: Path) -> str:
    return refuses(r"\S", load_published, folder, toys.target().embeddings)


def refused(folder: Path, tensors: Tensors, config: dict[str, Any]) -> str:
    return refusal(publish(folder, tensors, config))
