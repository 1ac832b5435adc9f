"""Hydra and Hydra++ (`prefix-mlp`): `hydra_mlp.{i}`, `hydra_lm_head.{i}`, `prefix_embeding_layer` (so spelt).

A head's blocks stand in a Sequential, with dropouts between them in Hydra++: only their order counts. All of them after
the first are one module, written once for each place.
"""

import re
from collections.abc import Set

import torch

from heads.base import Embeddings
from heads.formats.published.decoder import EPS, THETA, decoder
from heads.formats.published.plan import Plan, Source, check_width

PREFIX = "prefix_embeding_layer."
LINEAR = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
BLOCK = re.compile(r"branches\.(\d+)\.blocks\.(\d+)\.linear\.(weight|bias)")


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return any(LINEAR.fullmatch(name) for name in names)


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes."""
    config = source.config
    if config.get("grounded_heads") is False or source.count(r"hydra_mlp\.(\d+)\.\d+\.res_connection\.weight") == 0:
        raise source.refusal("no eyes for the tokens it drafts after (grounded_heads=false)")
    if config.get("hidden_state_offset"):
        raise source.refusal(f"hidden_state_offset={config['hidden_state_offset']}")
    found = [LINEAR.fullmatch(name) for name in source.tensors]
    places = sorted({int(each[2]) for each in found if each})
    heads = len({each[1] for each in found if each})
    check_width(source, f"hydra_mlp.0.{places[0]}.linear.weight", embeddings)
    source.settle("hydra_num_heads", heads)
    source.settle("hydra_num_layers", len(places))
    prefix = any(name.startswith(PREFIX) for name in source.tensors)
    lm_head = "hydra_lm_head.{}.1." if "hydra_lm_head.0.1.weight" in source.tensors else "hydra_lm_head.{}."
    copies = [f"hydra_mlp.{i}.{j}.linear.{k}" for i in range(heads) for j in places[2:] for k in ("weight", "bias")]
    tied = bool(copies) and all(_is_copy(source, name, places[1]) for name in copies)
    numbers = {
        "heads": heads,
        "layers": len(places),
        "tied": tied,
        "prefix": prefix,
        "lm_head": "own",
        "lm_head_bias": lm_head.format(0) + "bias" in source.tensors,
        "lm_head_rank": None,
        "draft_vocab": None,
    }

    def rename(name: str) -> str:
        if block := BLOCK.fullmatch(name):
            return f"hydra_mlp.{block[1]}.{places[1 + int(block[2])]}.linear.{block[3]}"
        if entry := re.fullmatch(r"branches\.(\d+)\.entry\.(.*)", name):
            return f"hydra_mlp.{entry[1]}.{places[0]}.{entry[2]}"
        if out := re.fullmatch(r"lm_heads\.(\d+)\.(.*)", name):
            return lm_head.format(out[1]) + out[2]
        return re.sub(r"^prefix\.", PREFIX, name).replace(f"{PREFIX}layer.", f"{PREFIX}layers.0.")

    unread = set(copies) if tied else set()
    return Plan("hydra", numbers | _layer(source, embeddings, prefix), rename, {}, unread, None)


def _layer(source: Source, embeddings: Embeddings, prefix: bool) -> dict[str, object]:
    """Return the numbers of the prefix layer, which is of the target's own shape; config.json is silent on it."""
    if prefix:
        return decoder(source, f"{PREFIX}layers.0.", embeddings)
    none = dict.fromkeys(("length", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"))
    return {**none, "rope_theta": THETA, "rope_scaling": None, "norm_eps": EPS}


def _is_copy(source: Source, name: str, first: int) -> bool:
    original = re.sub(r"(hydra_mlp\.\d+)\.\d+\.", rf"\1.{first}.", name)
    return torch.equal(source.tensor(name), source.tensor(original))
