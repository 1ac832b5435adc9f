"""Medusa: the authors' `{i}.{j}.linear` with `{i}.{n}.weight`, and vLLM's `blocks.{i}.layers.{j}` with `lm_heads.{i}`.

"Version 2" of the authors has no lm_heads: the target's are used. vLLM's heads may lack the blocks' biases, which is
the same as zeros, and may draft some tokens alone, those that `token_map` names.
"""

import re
from collections.abc import Set

import torch

from heads.base import Embeddings
from heads.formats.published.plan import Plan, Source, check_width, drafted

AUTHORS, VLLM = "{0}.{1}.linear.{2}", "blocks.{0}.layers.{1}.{2}"
BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")


def matches(names: Set[str]) -> bool:
    """Say whether the names are of this format."""
    return AUTHORS.format(0, 0, "weight") in names or VLLM.format(0, 0, "weight") in names


def read(source: Source, embeddings: Embeddings) -> Plan:
    """Return where each tensor goes; the counts come from the names, for config files are wrong about them."""
    block = AUTHORS if AUTHORS.format(0, 0, "weight") in source.tensors else VLLM
    check_width(source, block.format(0, 0, "weight"), embeddings)
    heads = source.count(_pattern(block, r"(\d+)", r"\d+"))
    layers = source.count(_pattern(block, r"\d+", r"(\d+)"))
    for key, found in (("num_heads", heads), ("num_hidden_layers", layers), ("num_layers", layers)):
        source.settle(key, found)
        source.settle(f"medusa_{key}", found)
    lm_head = f"{{0}}.{layers}.weight" if block is AUTHORS else "lm_heads.{0}.weight"
    original = bool(source.config.get("original_lm_head"))  # vLLM's: one lm_head, and that is the target's
    second = block is AUTHORS and not any(lm_head.format(i) in source.tensors for i in range(heads))
    ids = None
    if "token_map" in source.tensors:
        ids = drafted(source, source.tensors["token_map"], "token_map", embeddings)
    config = {
        "heads": heads,
        "layers": layers,
        "lm_head": "shared" if original or second else "own",
        "lm_head_rank": None,
        "draft_vocab": None if ids is None else len(ids),
    }

    def rename(name: str) -> str:
        if found := BLOCK.fullmatch(name):
            return block.format(*found.groups())
        return re.sub(r"lm_heads\.(\d+)\.weight", lambda found: lm_head.format(found[1]), name)

    made = {}
    if block is VLLM and not _any_bias(source):
        names = {(i, j): block.format(i, j, "weight") for i in range(heads) for j in range(layers)}
        made = {f"blocks.{i}.{j}.linear.bias": torch.zeros_like(source.tensor(n)[:, 0]) for (i, j), n in names.items()}
    unread = {"token_map"} | ({lm_head.format(0)} if original else set())
    return Plan("medusa", config, rename, made, unread & source.tensors.keys(), ids)


def _pattern(block: str, head: str, layer: str) -> str:
    return block.replace(".", r"\.").format(head, layer, "weight") + "$"


def _any_bias(source: Source) -> bool:
    found = source.count(_pattern(VLLM, r"(\d+)", r"\d+").replace("weight", "bias")) > 0
    source.settle("medusa_fc_bias", found)
    return found
