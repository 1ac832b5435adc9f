"""EAGLE-1 and 2, and HASS, which has their layout: `fc` and `layers.{i}`, the first without an input norm."""

from collections.abc import Set

from heads.base import Embeddings
from heads.formats.published.decoder import decoder
from heads.formats.published.plan import Plan, Source, check_width


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and not any("hidden_norm" in n for n in names)


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes: under its own name."""
    check_width(source, "fc.weight", embeddings)
    layers = source.count(r"layers\.(\d+)\.self_attn\.q_proj\.weight$")
    source.settle("num_hidden_layers", layers)
    config = {
        "layers": layers,
        "bias": "fc.bias" in source.tensors,
        "lm_head": "own" if "lm_head.weight" in source.tensors else "shared",
        "draft_vocab": None,
        **decoder(source, "layers.0.", embeddings),
    }
    return Plan("eagle", config, lambda name: name, {}, set(), None)
