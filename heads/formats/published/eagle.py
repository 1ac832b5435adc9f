"""EAGLE-1 and 2, and HASS, which has their layout: `fc` and `layers.{i}`, the first without an input norm.

vLLM finds the head by the second of its architectures and SGLang by the first. Both read the lm_head of the target.
vLLM drops a bias of fc without a word, while SGLang makes one at random where the file has none.
"""

import torch
from torch import Tensor

from heads.base import Embeddings, embedding_of
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.formats.published.plan import EMBEDDING, PublishedHead, TensorMapping, check_width, decoder

SIGNATURE = (r"fc\.weight", r"layers\.0\.self_attn\.q_proj\.weight")  # and no hidden_norm, as the formats before it
CLASS = EngineClass(["LlamaForCausalLMEagle", "LlamaForCausalLM"], "llama", {
    "vllm": r"(Llama|Llama4|MiniCPM|Cohere|Mistral|MistralLarge3)ForCausalLM",  # which prepends Eagle to it
    "sglang": r".*ForCausalLMEagle",
})  # fmt: skip


def scaled(fc: Tensor, embeddings: Embeddings, power: int) -> Tensor:
    """Return fc for an embedding without the target's scale (Gemma), which engines do not read; power -1: back."""
    scale = torch.ones_like(fc[0])
    scale[: embeddings.hidden_size] = float(getattr(getattr(embeddings, "embedding", None), "embed_scale", 1.0))
    return fc * scale**power


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the plan that maps each tensor to its own name."""
    check_width(source, "fc.weight", embeddings)
    layers = source.count(r"layers\.(\d+)\.self_attn\.q_proj\.weight$")
    config = {
        "layers": layers,
        "bias": "fc.bias" in source.tensors,
        "lm_head": "own" if "lm_head.weight" in source.tensors else "shared",
        **decoder(source, "layers.0.", embeddings),
    }
    fc = {"fc.weight": scaled(source.tensors["fc.weight"], embeddings, -1)}
    return TensorMapping("eagle", config, lambda name: name, fc, {"fc.weight"}, None)


def engines(source: Export) -> ExportedHead:
    """Export the head for vLLM and SGLang; refuse options that they do not support."""
    source.refuse(lm_head="shared", draft_vocab=None)
    tensors = source.tensors
    bias = tensors.get("fc.bias")
    if source.format_name == "vllm" and bias is not None and (bias.is_meta or bias.any()):
        raise source.refusal("a bias of fc, bias=true", "which vLLM drops; train with head.bias=false")
    tensors["fc.weight"] = scaled(tensors["fc.weight"], source.embeddings, 1)
    tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0]) if bias is None else bias
    return ExportedHead(source.engine_config(CLASS, source.config.layers), tensors)


def authors(source: Export) -> ExportedHead:
    """Export the head for the authors' code, which loads strictly and so needs the target's embedding too.

    Options that their code does not support are refused.
    """
    source.refuse(lm_head="shared", draft_vocab=None)
    config = {
        "model_type": "llama",
        "torch_dtype": source.dtype,
        "num_hidden_layers": source.config.layers,
        "bias": source.config.bias,
        **source.decoder(),
    }
    return ExportedHead(config, {**source.tensors, EMBEDDING: embedding_of(source.embeddings)})
