"""Medusa: the authors' `{i}.{j}.linear` with `{i}.{n}.weight`, and vLLM's `blocks.{i}.layers.{j}` with `lm_heads.{i}`.

vLLM runs it up to 0.32 and never shares the target's lm_head: `original_lm_head` gives it one copy for all heads. Its
heads may lack the blocks' biases, which then are zero, and may draft only the tokens of `token_map`. The authors'
"version 2" has no lm_heads and uses the target's. In their code all blocks of a head are one module, so they cannot
differ.
"""

import re

import torch

from heads.base import Embeddings, NamedTensors
from heads.common.typed import Json
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.formats.published.plan import PublishedHead, TensorMapping, check_width, drafted

AUTHORS, VLLM = "{0}.{1}.linear.{2}", "blocks.{0}.layers.{1}.{2}"
SIGNATURE = (r"0\.0\.linear\.weight|blocks\.0\.layers\.0\.weight",)
CLASS = EngineClass(["MedusaModel"], "medusa", {"vllm": "MedusaModel"})
LM_HEAD = {AUTHORS: "{{0}}.{layers}.weight", VLLM: "lm_heads.{{0}}.weight"}
BLOCK = re.compile(r"blocks\.(\d+)\.(\d+)\.linear\.(weight|bias)")


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping of the format's tensors; counts come from their names, since config files are often wrong."""
    block = AUTHORS if AUTHORS.format(0, 0, "weight") in source.tensors else VLLM
    check_width(source, block.format(0, 0, "weight"), embeddings)
    heads = source.count(_pattern(block, r"(\d+)", r"\d+"))
    layers = source.count(_pattern(block, r"\d+", r"(\d+)"))
    lm_head = LM_HEAD[block].format(layers=layers)
    original = bool(source.config.get("original_lm_head"))  # vLLM's key for one lm_head, the target's
    second = block is AUTHORS and not any(lm_head.format(i) in source.tensors for i in range(heads))
    ids = None
    if "token_map" in source.tensors:
        ids = drafted(source, source.tensors["token_map"], "token_map", embeddings)
    config = {
        "heads": heads,
        "layers": layers,
        "lm_head": "shared" if original or second else "own",
    }

    def rename(name: str) -> str:
        if match := BLOCK.fullmatch(name):
            return block.format(*match.groups())
        return re.sub(r"lm_heads\.(\d+)\.weight", lambda match: lm_head.format(match[1]), name)

    filled = {}
    if block is VLLM and source.count(_pattern(VLLM, r"(\d+)", r"\d+").replace("weight", "bias")) == 0:
        filled = {
            f"blocks.{i}.{j}.linear.bias": torch.zeros_like(source.tensor(block.format(i, j, "weight"))[:, 0])
            for i in range(heads)
            for j in range(layers)
        }
    unread = {"token_map"} | ({lm_head.format(0)} if original else set())
    return TensorMapping("medusa", config, rename, filled, unread & source.tensors.keys(), ids)


def _pattern(block: str, head: str, layer: str) -> str:
    return block.replace(".", r"\.").format(head, layer, "weight") + "$"


def engines(source: Export) -> ExportedHead:
    """Export the head for vLLM; refuse unsupported options."""
    source.refuse(draft_vocab=None)
    options, shared = source.config, source.config.lm_head == "shared"
    config = {
        "architectures": CLASS.architectures,
        "model_type": CLASS.model_type,
        "torch_dtype": source.dtype,
        "hidden_size": source.embeddings.hidden_size,
        "vocab_size": source.embeddings.vocab_size,
        "num_heads": options.heads,
        "num_hidden_layers": options.layers,
        "medusa_fc_bias": True,  # without this key vLLM drops the biases
        "original_lm_head": shared,
    }
    return _written(source, config, VLLM, 1 if shared else options.heads)


def authors(source: Export) -> ExportedHead:
    """Export the head for the authors' code; refuse unsupported options."""
    source.refuse(draft_vocab=None)
    options, tensors = source.config, _blocks(source, AUTHORS)
    for name, tensor in tensors.items():
        if not torch.equal(tensor, tensors[re.sub(r"^(\d+)\.\d+", r"\1.0", name)]):
            raise source.refusal(
                f"layers={options.layers}, of which each is its own",
                "and in the authors' code those of one depth are one and the same; train with head.layers=1",
            )
    config = {
        "medusa_num_heads": options.heads,
        "medusa_num_layers": options.layers,
        "base_model_name_or_path": source.served.name,
        "torch_dtype": source.dtype,
        "version": "2" if options.lm_head == "shared" else "1",
    }
    return _written(source, config, AUTHORS, options.heads if options.lm_head == "own" else 0)


def _blocks(source: Export, block: str) -> NamedTensors:
    return {block.format(*match.groups()): t for name, t in source.tensors.items() if (match := BLOCK.fullmatch(name))}


def _written(source: Export, config: Json, block: str, lm_heads: int) -> ExportedHead:
    """Export the head with `lm_heads` lm_heads, in the names of one of the two formats."""
    lm_head = LM_HEAD[block].format(layers=source.config.layers)
    return ExportedHead(
        config, _blocks(source, block) | {lm_head.format(i): source.read_out(f"lm_heads.{i}") for i in range(lm_heads)}
    )
