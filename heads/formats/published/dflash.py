"""DFlash, and DSpark with its `markov_head` and `confidence_head`: `fc`, `hidden_norm`, `layers.{i}`, `norm`.

Their mask slots hold the target's embedding of one token, where our head has a parameter. A block of DFlash drafts from
its mask slots alone; in DSpark the chosen token's slot drafts too.
"""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from heads.base import Embeddings
from heads.formats.layer_ids import BLOCK_OUTPUTS, BLOCK_STATES, as_outputs
from heads.formats.published.decoder import decoder
from heads.formats.published.plan import Plan, Source, check_width, drafted_by_offsets
from heads.modules.fusion import DFLASH

NAMES = {
    "fusion.fc.weight": "fc.weight",
    "before.weight": "markov_head.markov_w1.weight",
    "bias.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_proj.weight"} <= names


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes."""
    told = source.config | (source.config.get("dflash_config") or {})
    check_width(source, "fc.weight", embeddings)
    if told.get("markov_head_type") not in (None, "vanilla"):
        raise source.refusal(f"markov_head_type={told['markov_head_type']}")
    if told.get("use_swa"):
        raise source.refusal("a sliding window (use_swa)")
    if not isinstance(told.get("block_size"), int):
        raise source.error("config.json does not say block_size; download it again")
    ids = drafted_by_offsets(source, embeddings)
    markov = source.tensors.get(NAMES["before.weight"])
    anchor = told.get("sample_from_anchor", markov is not None)
    layers = source.count(r"layers\.(\d+)\.self_attn\.q_proj\.weight$")
    source.settle("num_hidden_layers", layers)
    made = {"mask": _mask(source, told, embeddings)} | _confidence(source, markov)
    config = {
        "depths": told["block_size"] - (0 if anchor else 1),
        "layers": layers,
        "feature_layers": _layers(source, told, embeddings),
        "causal": bool(told.get("is_causal", told.get("causal_head") or told.get("causal"))),
        "from_anchor": bool(anchor),
        "markov_rank": None if markov is None else markov.shape[1],
        "confidence": NAMES["confidence.weight"] in source.tensors,
        "mask_token": told["mask_token_id"],
        "qk_norm": "layers.0.self_attn.q_norm.weight" in source.tensors,
        "lm_head": "own" if "lm_head.weight" in source.tensors else "shared",
        "draft_vocab": None if ids is None else len(ids),
        **decoder(source, "layers.0.", embeddings),
    }
    unread = {"d2t", "t2d", *(NAMES[name] for name in made if name in NAMES)} & source.tensors.keys()
    return Plan("block", config, lambda name: NAMES.get(name, name), made, unread, ids)


def _layers(source: Source, told: dict[str, Any], embeddings: Embeddings) -> list[int] | None:
    """Return the layers whose outputs are read."""
    ids = told.get(BLOCK_OUTPUTS)
    if ids is None and told.get(BLOCK_STATES) is not None:
        ids = as_outputs(told[BLOCK_STATES])
    if ids is None and source.tensors["fc.weight"].shape[1] != DFLASH * embeddings.hidden_size:
        raise source.error(f"config.json does not say {BLOCK_OUTPUTS}, and fc.weight does not join the default five")
    return ids


def _mask(source: Source, told: dict[str, Any], embeddings: Embeddings) -> Tensor:
    """Return the target's embedding of the mask token."""
    token = told.get("mask_token_id")
    if not isinstance(token, int) or not 0 <= token < embeddings.vocab_size:
        raise source.error(f"mask_token_id is {token}, not one of the target's {embeddings.vocab_size} tokens")
    place = embeddings.head_weight().device
    return embeddings.embed(torch.tensor(token, device=place)).detach().to("cpu", source.tensors["fc.weight"].dtype)


def _confidence(source: Source, markov: Tensor | None) -> dict[str, Tensor]:
    """Return the confidence's weights with zeros for the Markov state, where it does not read that."""
    name = NAMES["confidence.weight"]
    if (
        markov is None
        or name not in source.tensors
        or source.tensors[name].shape[1] != len(source.tensors["fc.weight"])
    ):
        return {}
    weight = source.tensors[name]
    return {"confidence.weight": torch.cat([weight, weight.new_zeros(1, markov.shape[1])], 1)}
