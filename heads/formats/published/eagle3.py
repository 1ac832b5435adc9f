"""EAGLE-3 and 3.1: the authors' `midlayer` or `layers.0`, `fc`, `norm`, a lm_head of its own, `d2t` and `t2d`.

Which layers it reads stands in config.json in two conventions (heads/formats/layer_ids.py), and either of them is found
in either place. The defaults of both are the same three layers.
"""

import logging
import re
from collections.abc import Set
from typing import Any

import torch

from heads.base import Embeddings
from heads.formats.layer_ids import STATES, as_outputs
from heads.formats.published.decoder import decoder
from heads.formats.published.plan import Plan, Source, check_width, drafted_by_offsets
from heads.modules.fusion import EAGLE3, default_layers

log = logging.getLogger(__name__)

FIRST = ("midlayer.", "layers.0.")


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return any(f"{first}hidden_norm.weight" in names for first in FIRST)


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes."""
    first = next(first for first in FIRST if f"{first}hidden_norm.weight" in source.tensors)
    _check_options(source)
    check_width(source, "fc.weight", embeddings)
    joined = source.tensors["fc.weight"].shape[1] // embeddings.hidden_size
    layers = 1 + source.count(r"layers\.([1-9]\d*)\.self_attn\.q_proj\.weight$")
    normed = source.count(r"fc_norm\.(\d+)\.weight$") > 0
    ids = drafted_by_offsets(source, embeddings)
    source.settle("num_hidden_layers", layers)
    source.settle("fc_norm", normed)
    source.settle("draft_vocab_size", embeddings.vocab_size if ids is None else len(ids))
    nested = source.config.get("eagle_config") or {}
    config = {
        "layers": layers,
        "feature_layers": feature_layers(source, joined, embeddings),
        "feature_norm": normed,
        "norm_output": bool(source.config.get("norm_output") or nested.get("return_hidden_post_norm")),
        "norm_before_residual": _norm_before_residual(source),
        "qk_norm": f"{first}self_attn.q_norm.weight" in source.tensors,
        "kv_injection": False,
        "lm_head": "own" if ids is not None or "lm_head.weight" in source.tensors else "shared",
        "draft_vocab": None if ids is None else len(ids),
        **decoder(source, first, embeddings),
    }
    deep, unread = _deeper(source, layers)

    def rename(name: str) -> str:
        if name.startswith("first."):
            return first + name.removeprefix("first.")
        if found := re.match(r"layers\.(\d+)\.(.*)", name):
            inner = f"layers.{int(found[1]) + 1}.{found[2]}"
            return deep.get(inner, inner)
        return re.sub(r"^fusion\.norms\.", "fc_norm.", name).replace("fusion.fc.", "fc.")

    return Plan("eagle3", config, rename, {}, {"d2t", "t2d", *unread} & source.tensors.keys(), ids)


def feature_layers(source: Source, joined: int, embeddings: Embeddings) -> list[int] | None:
    """Return the layers whose outputs are read, None for the default three.

    Args:
        source: the folder.
        joined: how many the fc joins.
        embeddings: the target, whose depth tells what the defaults are.

    Raises:
        ValueError: config.json contradicts itself, or is silent where the fc does not join three.
    """
    nested: dict[str, Any] = source.config.get("eagle_config") or {}
    inputs, outputs = source.config.get(STATES), nested.get(STATES)
    if inputs is None and outputs is None:
        inputs = nested.get("layer_ids")
    said = inputs if inputs is not None else outputs
    if said is None:
        if joined != EAGLE3:
            raise source.error(f"fc.weight joins {joined} layers and config.json does not name them in {STATES}")
        return None
    meant = as_outputs(inputs) if inputs is not None else list(said)
    if inputs is not None and outputs is not None and outputs not in (meant, inputs):
        raise source.error(f"{STATES} is {inputs} and within eagle_config {outputs}: not the same layers; correct it")
    default = default_layers(EAGLE3, embeddings.num_layers)
    usual = said == default or as_outputs(said) == default
    if inputs is not None and inputs == outputs and not usual:
        raise source.error(f"{STATES} is {inputs} at both places, which count differently; leave one")
    if usual and meant != default:
        log.warning("%s: %s is %s, the default layers as the other convention counts them; these are taken",
                    source.folder, STATES, said)  # fmt: skip
    found = default if usual else meant
    if min(found) < 0:
        raise source.refusal(f"the target's embedding among its layers, {STATES}={said}")
    return found


def _norm_before_residual(source: Source) -> bool:
    said = source.config.get("norm_before_residual")
    if said is None and "speculators_model_type" in source.config:
        log.warning("%s: config.json leaves norm_before_residual open, false is taken; vLLM takes true", source.folder)
    return bool(said)


def _check_options(source: Source) -> None:
    nested: dict[str, Any] = source.config.get("eagle_config") or {}
    if source.config.get("norm_before_fc") or nested.get("norm_before_fc") or "input_norm.weight" in source.tensors:
        raise source.refusal("one norm of all features before fc (norm_before_fc, input_norm.weight)")
    if nested.get("use_aux_hidden_state") is False:
        raise source.refusal("features of the last layer alone (use_aux_hidden_state=false)")
    if source.config.get("parallel_drafting") or "mask_hidden" in source.tensors:
        raise source.refusal("all its depths in one pass (P-EAGLE: parallel_drafting, mask_hidden)")


def _deeper(source: Source, layers: int) -> tuple[dict[str, str], set[str]]:
    """Return what the norms before attention of the layers after the first are called, and copies to leave.

    vLLM reads `input_layernorm` there and SGLang `hidden_norm`; files hold one of them, or both alike.
    """
    renamed, copies = {}, set()
    for i in range(1, layers):
        one, other = f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"
        if one not in source.tensors:
            renamed[one] = other
        elif other in source.tensors:
            if not torch.equal(source.tensors[one], source.tensors[other]):
                raise source.error(f"{one} and {other} differ, and which of them is meant is not said; leave one")
            copies.add(other)
    return renamed, copies
