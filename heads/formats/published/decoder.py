"""The numbers of a Llama-like decoder layer, from the shapes of its tensors and the keys that only config.json has."""

from collections.abc import Mapping
from typing import Any

from heads.base import Embeddings
from heads.formats.published.plan import Source
from heads.modules.rope import SCALINGS, Rope, scaling_of

# The defaults of transformers for a Llama's config.json; published heads are, and run on these.
THETA, EPS = 10000.0, 1e-6
ACTIVATIONS = (None, "silu", "swish")


def decoder(source: Source, layer: str, embeddings: Embeddings) -> dict[str, Any]:
    """Return the numbers of the decoder layers for a head's configuration.

    Args:
        source: the folder.
        layer: the prefix of a layer's tensors, with its point.
        embeddings: the target, whose head count is taken where the config is silent.

    Raises:
        ValueError: a tensor is missing, the rows are no whole heads, or the layer does what ours cannot.
    """
    _check_options(source, layer)
    config = source.config
    rows, kv_rows = (len(source.tensor(f"{layer}self_attn.{name}_proj.weight")) for name in "qk")
    normed = source.tensors.get(f"{layer}self_attn.q_norm.weight")
    width = (
        len(normed)
        if normed is not None
        else config.get("head_dim") or rows // (config.get("num_attention_heads") or embeddings.layer.num_heads)
    )
    if not width or rows % width or kv_rows % width or (rows // width) % (kv_rows // width or 1):
        raise source.error(f"{layer}self_attn.q_proj.weight has {rows} rows, k_proj {kv_rows}: no heads of {width}")
    sizes = {
        "num_heads": rows // width,
        "num_kv_heads": kv_rows // width,
        "head_dim": width,
        "intermediate_size": len(source.tensor(f"{layer}mlp.gate_proj.weight")),
    }
    source.compare("num_attention_heads", sizes["num_heads"])
    source.compare("num_key_value_heads", sizes["num_kv_heads"])
    source.compare("intermediate_size", sizes["intermediate_size"])
    return {**sizes, "length": None, **_rope(source), "norm_eps": float(config.get("rms_norm_eps", EPS))}


def positions_of(config: Mapping[str, Any], default: float | None = None) -> Rope | None:
    """Return the rotary positions of a config.json, `default` being the base where it names none; None without one.

    Base and scaling stand side by side in older files and together in newer ones.
    """
    parameters = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or parameters.get("rope_theta") or default
    return None if theta is None else Rope(float(theta), scaling_of(config.get("rope_scaling") or parameters))


def _rope(source: Source) -> dict[str, Any]:
    rope = positions_of(source.config, THETA)
    assert rope is not None
    if rope.scaling is not None and rope.scaling["rope_type"] not in SCALINGS:
        raise source.refusal(f"rope_scaling of type {rope.scaling['rope_type']}")
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling}


def _check_options(source: Source, layer: str) -> None:
    """Refuse options that the shared decoder layer lacks."""
    config = source.config
    for name in sorted(source.tensors):
        if name.startswith(layer) and name.endswith("_proj.bias"):
            raise source.refusal(f"a bias in its layer, {name} (attention_bias, qkv_bias)")
    if config.get("hidden_act") not in ACTIVATIONS:
        raise source.refusal(f"hidden_act={config['hidden_act']}")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise source.refusal("a sliding window (layer_types, use_sliding_window)")
    if config.get("logit_scale", 1.0) != 1.0:
        raise source.refusal(f"logit_scale={config['logit_scale']}")
