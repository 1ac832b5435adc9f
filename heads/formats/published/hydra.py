"""Hydra and Hydra++ (`prefix-mlp`): `hydra_mlp.{i}`, `hydra_lm_head.{i}`, `prefix_embeding_layer` (sic).

Only the authors' own code runs them. A head's blocks are entries of a Sequential; Hydra++ has dropouts in between,
which shift the numbers, so reading uses only the order of the blocks. All blocks after the first are one module,
written once per number, and every lm_head has a bias. The prefix layer of Hydra++ has the target's own shape and
positions, since its config.json does not describe it.
"""

import re
from functools import partial

import torch

from heads.base import Embeddings, LayerDims, embedding_of, resolve_layer_dims
from heads.common.rope import ROPE_KEYS, Rope, positions_of
from heads.formats.published.exporting import Export, ExportedHead
from heads.formats.published.plan import EMBEDDING, EPS, PLAIN, PublishedHead, TensorMapping, check_width, decoder

PREFIX = "prefix_embeding_layer."
LINEAR = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
SIGNATURE = (LINEAR.pattern,)
BRANCH = re.compile(r"branches\.(\d+)\.(?:entry|blocks\.(\d+))\.(.*)")
LM_HEAD = {True: "hydra_lm_head.{}.1.", False: "hydra_lm_head.{}."}  # an lm_head's prefix: with dropouts, without


def their_name(name: str, block_numbers: list[int], lm_head: str) -> str:
    """Return the format's name of a tensor, given the blocks' numbers and the lm_heads' prefix."""
    if branch := BRANCH.fullmatch(name):
        return f"hydra_mlp.{branch[1]}.{block_numbers[0 if branch[2] is None else 1 + int(branch[2])]}.{branch[3]}"
    if out := re.fullmatch(r"lm_heads\.(\d+)\.(.*)", name):
        return lm_head.format(out[1]) + out[2]
    return re.sub(r"^prefix\.", PREFIX, name).replace(f"{PREFIX}layer.", f"{PREFIX}layers.0.")


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping of the format's tensors."""
    config = source.config
    if config.get("grounded_heads") is False or source.count(r"hydra_mlp\.(\d+)\.\d+\.res_connection\.weight") == 0:
        raise source.refusal("no eyes for the tokens it drafts after (grounded_heads=false)")
    if config.get("hidden_state_offset"):
        raise source.refusal(f"hidden_state_offset={config['hidden_state_offset']}")
    matched = [LINEAR.fullmatch(name) for name in source.tensors]
    block_numbers = sorted({int(match[2]) for match in matched if match})
    heads = len({match[1] for match in matched if match})
    check_width(source, f"hydra_mlp.0.{block_numbers[0]}.linear.weight", embeddings)
    prefix = any(name.startswith(PREFIX) for name in source.tensors)
    lm_head = LM_HEAD[LM_HEAD[True].format(0) + "weight" in source.tensors]
    duplicates = _duplicates(heads, block_numbers)
    pairs = ((source.tensor(name), source.tensor(first)) for name, first in duplicates.items())
    tied = bool(duplicates) and all(torch.equal(*pair) for pair in pairs)
    numbers = {
        "heads": heads,
        "layers": len(block_numbers),
        "tied": tied,
        "prefix": prefix,
        "lm_head": "own",
        "lm_head_bias": lm_head.format(0) + "bias" in source.tensors,
    }
    rename = partial(their_name, block_numbers=block_numbers, lm_head=lm_head)
    layer = dict.fromkeys(("length", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"))
    layer |= {"rope_theta": PLAIN.theta, "rope_scaling": None, "norm_eps": EPS}
    if prefix:  # values that config.json lacks are the target's
        target = embeddings.config.to_dict()
        taken = ["rms_norm_eps", *(() if positions_of(config) else ROPE_KEYS)]
        config = {key: target[key] for key in taken if key in target} | config
        layer = decoder(source._replace(config=config), f"{PREFIX}layers.0.", embeddings)
    return TensorMapping("hydra", numbers | layer, rename, unread=set(duplicates) if tied else set())


def _duplicates(heads: int, block_numbers: list[int]) -> dict[str, str]:
    """Return the other names of a tied block's tensors, each with its first name."""
    kinds = [(i, kind) for i in range(heads) for kind in ("weight", "bias")]
    name = "hydra_mlp.{}.{}.linear.{}".format
    return {name(i, j, k): name(i, block_numbers[1], k) for j in block_numbers[2:] for i, k in kinds}


def authors(source: Export) -> ExportedHead:
    """Export the head for the authors' code; refuse unsupported options."""
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
        values = (*resolve_layer_dims(options, source.embeddings), *Rope.of(options), options.norm_eps)
        rope = positions_of(served) or PLAIN
        target = (*source.embeddings.layer_dims, *rope, served.get("rms_norm_eps", options.norm_eps))
        names = (*LayerDims._fields, "rope_theta", "rope_scaling", "partial_rotary_factor", "norm_eps")
        for name, mine, theirs in zip(names, values, target, strict=True):
            if mine != theirs:
                raise source.refusal(f"{name}={mine}", f"and the authors' code takes {theirs}, the target's own")
        config |= source.decoder()
    lm_head = LM_HEAD[options.prefix]
    block_numbers = list(range(1, 2 * options.layers, 2) if options.prefix else range(options.layers))
    renamed = {
        their_name(name, block_numbers, lm_head): tensor
        for name, tensor in source.tensors.items()
        if not name.startswith("lm_heads.")
    }
    if options.tied:
        renamed |= {name: renamed[first] for name, first in _duplicates(options.heads, block_numbers).items()}
    for i in range(options.heads):
        weight = source.read_out(f"lm_heads.{i}")
        renamed[lm_head.format(i) + "weight"] = weight
        bias = source.tensors.get(f"lm_heads.{i}.bias")
        renamed[lm_head.format(i) + "bias"] = torch.zeros_like(weight[:, 0]) if bias is None else bias
    embedding = {PREFIX + EMBEDDING: embedding_of(source.embeddings)} if options.prefix else {}
    return ExportedHead(config, renamed | embedding)
