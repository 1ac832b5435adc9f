"""Hydra and Hydra++ as the authors' own code reads them; no engine runs them.

A head's blocks stand in a Sequential, in Hydra++ with dropouts between them, which count as places. All of them after
the first are one module there, written once for each place, and every lm_head has a bias. The prefix layer of Hydra++
is a layer of the target's own shape and positions, for its config.json does not describe it.
"""

import re
from typing import Any

import torch
from torch import Tensor

from heads.base import LayerShape
from heads.formats.export.files import Foreign, Shapes
from heads.formats.export.source import EMBEDDING, Source, layer_shapes
from heads.modules.rope import Rope

PREFIX = "prefix_embeding_layer."
BRANCH = re.compile(r"branches\.(\d+)\.(entry|blocks\.(\d+))\.(.*)")
LM_HEAD = {True: "hydra_lm_head.{}.1.", False: "hydra_lm_head.{}."}  # with dropouts, and without


def authors(source: Source) -> Foreign:
    """Return the head for the authors' code.

    Raises:
        ValueError: it has options that their code does not run.
    """
    source.refuse(draft_vocab=None)
    options, served = source.config, source.served.config
    if options.layers > 2 and not options.tied:
        raise source.refusal(
            f"layers={options.layers} with tied=false",
            "and in the authors' code all after the first are one and the same; train with head.tied=true",
        )
    config = {
        "hydra_num_heads": options.heads,
        "hydra_num_layers": options.layers,
        "hydra_head_arch": "prefix-mlp" if options.prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": source.served.name,
        "torch_dtype": source.dtype,
    }
    if options.prefix:
        positions = Rope(options.rope_theta, options.rope_scaling)
        own = (*source.shape, *positions, options.norm_eps)
        target = (*source.embeddings.layer, *source.target_positions(), served.get("rms_norm_eps", options.norm_eps))
        for name, mine, theirs in zip(
            (*LayerShape._fields, "rope_theta", "rope_scaling", "norm_eps"), own, target, strict=True
        ):
            if mine != theirs:
                raise source.refusal(f"{name}={mine}", f"and the authors' code takes {theirs}, the target's own")
        config |= source.decoder()
    return Foreign(config, _tensors(source), _shapes(source, config))


def _tensors(source: Source) -> dict[str, Tensor]:
    options, found = source.config, dict[str, Tensor]()
    lm_head, step = LM_HEAD[options.prefix], 2 if options.prefix else 1
    for name, tensor in source.tensors.items():
        if branch := BRANCH.fullmatch(name):
            copies = 1 if branch[2] == "entry" or not options.tied else options.layers - 1
            first = 0 if branch[2] == "entry" else 1 + int(branch[3])
            for place in range(first, first + copies):
                found[f"hydra_mlp.{branch[1]}.{place * step + step - 1}.{branch[4]}"] = tensor
        elif name.startswith("prefix."):
            found[PREFIX + name.removeprefix("prefix.").replace("layer.", "layers.0.", 1)] = tensor
    for i in range(options.heads):
        weight = source.read_out(f"lm_heads.{i}")
        found[lm_head.format(i) + "weight"] = weight
        bias = source.tensors.get(f"lm_heads.{i}.bias")
        found[lm_head.format(i) + "bias"] = torch.zeros_like(weight[:, 0]) if bias is None else bias
    return found | ({PREFIX + EMBEDDING: source.embedding()} if options.prefix else {})


def _shapes(source: Source, config: dict[str, Any]) -> Shapes:
    width, full, prefix = (
        source.embeddings.hidden_size,
        source.embeddings.vocab_size,
        config["hydra_head_arch"] == "prefix-mlp",
    )
    step, found = 2 if prefix else 1, Shapes()
    for i in range(config["hydra_num_heads"]):
        for j in range(config["hydra_num_layers"]):
            place, joined = f"hydra_mlp.{i}.{j * step + step - 1}.", width if j else (i + 2) * width
            for name in ("linear", "res_connection")[: 1 if j else 2]:
                found |= {f"{place}{name}.weight": (width, joined), f"{place}{name}.bias": (width,)}
        lm_head = LM_HEAD[prefix].format(i)
        found |= {f"{lm_head}weight": (full, width), f"{lm_head}bias": (full,)}
    if prefix:
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= layer_shapes(config, f"{PREFIX}layers.0.", width, norms)
        found |= {f"{PREFIX}norm.weight": (width,), PREFIX + EMBEDDING: (full, width)}
    return found
