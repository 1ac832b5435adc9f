"""Heads in the layouts of serving engines and of their authors, by headstart's own names: a map of keys for each.

They are recognised by the names of their tensors. Layers are counted as outputs, from 0; vLLM and speculators count
them from the embedding, one higher.
"""

import re
from typing import Any

import torch
from torch import Tensor

from .target import Embeddings

IDS = "eagle_aux_hidden_state_layer_ids"
HYDRA = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.*)")
PREFIX = "prefix_embeding_layer."  # so spelt
DFLASH = {
    "fc.weight": "fusion.fc.weight",
    "markov_head.markov_w1.weight": "before.weight",
    "markov_head.markov_w2.weight": "bias.weight",
}
Read = tuple[dict[str, Any], dict[str, Tensor], int]


def ours(where: str, config: dict[str, Any], tensors: dict[str, Tensor], embeddings: Embeddings) -> Read:
    """Return a head's numbers and tensors by our names, and how many tokens to draft at once, 0 if that is not said.

    Raises:
        ValueError: the layout is unknown, or the head is of a model of another width or vocabulary.
    """
    config = {**(config.get("transformer_layer_config") or {}), **config}
    for name, size in (("hidden_size", embeddings.hidden_size), ("vocab_size", embeddings.vocab_size)):
        if config.get(name, size) != size:
            raise ValueError(
                f"{where}: made for another model: its {name} is {config[name]}, but the model's is {size}; load the "
                "model that the head was made for"
            )
    names = set(tensors)
    if {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & names:
        return _eagle3(where, config, tensors, embeddings)
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return _dflash(config, tensors, embeddings)
    if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names:
        return _eagle(config, tensors)
    if {"blocks.0.layers.0.weight", "0.0.linear.weight"} & names:
        return _medusa(config, tensors)
    if any(HYDRA.fullmatch(name) for name in names):
        return _hydra(config, tensors)
    raise ValueError(f"{where}: holds no draft head that this code knows")


def _layers(tensors: dict[str, Tensor]) -> int:
    """Return how many decoder layers there are, EAGLE-3's first among them, which config.json may not say."""
    return sum(name.endswith("self_attn.q_proj.weight") for name in tensors)


def _decoder(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the numbers of the decoder layers; a head's width by its own tensors, as it need not be the model's."""
    found = {name.rpartition("self_attn.")[2]: tensor for name, tensor in tensors.items() if "self_attn." in name}
    query, normed, heads = found.get("q_proj.weight"), found.get("q_norm.weight"), config.get("num_attention_heads")
    width = config.get("head_dim") if normed is None else len(normed)
    if width is None and query is not None and heads:
        width = len(query) // heads
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {
        "head_dim": width,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(config.get("rope_theta") or parameters.get("rope_theta") or 10000.0),
        "rope_scaling": None if kind == "default" else {**scaling, "rope_type": kind},
    }


def _vocabulary(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the drafted tokens: token i of the draft's vocabulary is i + d2t[i] of the model's."""
    offset = tensors.get("d2t")
    return {} if offset is None else {"vocab.ids": torch.arange(len(offset)) + offset.long()}


def _eagle(config: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    return {"name": "eagle", "layers": _layers(tensors), **_decoder(config, tensors)}, tensors, 0


def default_three(num_layers: int) -> list[int]:
    """Return the layers that EAGLE-3 reads by default."""
    return [1, num_layers // 2 - 1, num_layers - 4]


def _features(config: dict[str, Any], embeddings: Embeddings) -> list[int] | None:
    """Return the layers that EAGLE-3 reads, None for the default three, by whichever count they are said."""
    nested = config.get("eagle_config") or {}
    inputs, outputs = config.get(IDS), nested.get(IDS)
    if inputs is None and outputs is None:
        inputs = nested.get("layer_ids")
    said, three = outputs if inputs is None else inputs, default_three(embeddings.num_layers)
    if said is None or three in (said, [i - 1 for i in said]):
        return None
    return said if inputs is None else [i - 1 for i in said]


def _eagle3(where: str, config: dict[str, Any], tensors: dict[str, Tensor], embeddings: Embeddings) -> Read:
    nested = config.get("eagle_config") or {}
    for name in {"input_norm.weight", "mask_hidden"} & tensors.keys():
        raise ValueError(f"{where}: its {name} is of a kind of EAGLE-3 that this code does not know")
    found = _vocabulary(tensors)
    for name, tensor in tensors.items():
        if deeper := re.fullmatch(r"layers\.([1-9]\d*)\.(.*)", name):
            # vLLM reads the norm before attention by one name and SGLang by the other.
            inner = deeper[2].replace("hidden_norm", "input_layernorm")
            found[f"layers.{int(deeper[1]) - 1}.{inner}"] = tensor
        else:
            inner = re.sub(r"^(midlayer|layers\.0)\.", "first.", name)
            found[re.sub(r"^fc_norm\.", "fusion.norms.", inner).replace("fc.weight", "fusion.fc.weight")] = tensor
    own = {
        "name": "eagle3",
        "layers": _layers(tensors),
        "feature_layers": _features(config, embeddings),
        "feature_norm": "fc_norm.0.weight" in tensors,
        "norm_output": bool(config.get("norm_output") or nested.get("return_hidden_post_norm")),
        "norm_before_residual": bool(config.get("norm_before_residual")),
        **_decoder(config, tensors),
    }
    ways = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return own, found, int(ways[0].get("speculative_tokens") or 0)


def _medusa(config: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    authors = "0.0.linear.weight" in tensors
    place = re.compile(r"(\d+)\.(\d+)\.linear\.(.*)" if authors else r"blocks\.(\d+)\.layers\.(\d+)\.(.*)")
    found, places = dict[str, Tensor](), set[tuple[int, int]]()
    for name, tensor in tensors.items():
        if block := place.fullmatch(name):
            places.add((int(block[1]), int(block[2])))
            found[f"blocks.{block[1]}.{block[2]}.linear.{block[3]}"] = tensor
        elif not config.get("original_lm_head"):  # else it is a copy of the model's
            found[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    heads, layers = (1 + max(each) for each in zip(*places, strict=True))
    return {"name": "medusa", "heads": heads, "layers": layers}, found, heads


def _hydra(config: dict[str, Any], tensors: dict[str, Tensor]) -> Read:
    parts = {name: part for name in tensors if (part := HYDRA.fullmatch(name))}
    places = sorted({int(part[2]) for part in parts.values()})  # dropouts stand between them in Hydra++
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        if part := parts.get(name):
            at = places.index(int(part[2]))
            found[f"branches.{part[1]}." + (f"blocks.{at - 1}." if at else "entry.") + part[3]] = tensor
        elif name.startswith(PREFIX):
            found[name.replace(PREFIX, "prefix.").replace("layers.0.", "layer.")] = tensor
        else:
            found[re.sub(r"^hydra_lm_head\.(\d+)\.(?:1\.)?", r"lm_heads.\1.", name)] = tensor
    heads = 1 + max(int(part[1]) for part in parts.values())
    own = {"name": "hydra", "heads": heads, "layers": len(places), "tied": False, **_decoder(config, tensors)}
    return own | {"prefix": f"{PREFIX}norm.weight" in tensors}, found, heads


def _dflash(config: dict[str, Any], tensors: dict[str, Tensor], embeddings: Embeddings) -> Read:
    told = config | (config.get("dflash_config") or {})
    anchor = told.get("sample_from_anchor", "markov_head.markov_w1.weight" in tensors)
    token = torch.tensor([told["mask_token_id"]], device=embeddings.device)
    found = {DFLASH.get(name, name): tensor for name, tensor in tensors.items()}
    found |= {"mask": embeddings.embed(token)[0].detach(), **_vocabulary(tensors)}
    depths = int(told["block_size"]) - (0 if anchor else 1)
    inputs = told.get("aux_hidden_state_layer_ids")
    own = {
        "name": "block",
        "depths": depths,
        "layers": _layers(tensors),
        "feature_layers": told.get("target_layer_ids") or (None if inputs is None else [i - 1 for i in inputs]),
        "causal": bool(told.get("is_causal", told.get("causal_head") or told.get("causal"))),
        "from_anchor": bool(anchor),
        **_decoder(config, tensors),
    }
    return own, found, depths
