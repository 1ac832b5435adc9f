"""EAGLE-1, EAGLE-2 and HASS, all in one layout: `fc` and `layers.{i}`, the first layer without an input norm.

vLLM recognises the head by the second of its architectures, SGLang by the first. Both read the target's lm_head. vLLM
silently drops a bias of fc; SGLang initialises a missing one at random.
"""

import torch
from torch import Tensor

from heads.base import Embeddings, embedding_of
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.formats.published.plan import EMBEDDING, PublishedHead, TensorMapping, check_width, decoder

SIGNATURE = (r"fc\.weight", r"layers\.0\.self_attn\.q_proj\.weight")  # and no hidden_norm, unlike the formats before
CLASS = EngineClass(["LlamaForCausalLMEagle", "LlamaForCausalLM"], "llama", {
    "vllm": r"(Llama|Llama4|MiniCPM|Cohere|Mistral|MistralLarge3)ForCausalLM",  # vLLM prepends Eagle to the name
    "sglang": r".*ForCausalLMEagle",
})  # fmt: skip


def scaled(fc: Tensor, embeddings: Embeddings, power: int) -> Tensor:
    """Return fc for an embedding without the target's scale (Gemma), which engines ignore; power -1 inverts this."""
    scale = torch.ones_like(fc[0])
    scale[: embeddings.hidden_size] = float(getattr(getattr(embeddings, "embedding", None), "embed_scale", 1.0))
    return fc * scale**power


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping, of each tensor to its own name."""
    check_width(source, "fc.weight", embeddings)
    layers = source.count(r"layers\.(\d+)\.self_attn\.q_proj\.weight$")
    config = {
        "layers": layers,
        "bias": "fc.bias" in source.tensors,
        "lm_head": "own" if "lm_head.weight" in source.tensors else "shared",
        **decoder(source, "layers.0.", embeddings),
    }
    fc = {"fc.weight": scaled(source.tensors["fc.weight"], embeddings, -1)}
    return TensorMapping("eagle", config, filled=fc, unread={"fc.weight"})


def engines(source: Export) -> ExportedHead:
    """Export the head for vLLM and SGLang; refuse unsupported options."""
    source.refuse(lm_head="shared")
    tensors = source.weights()
    bias = tensors.get("fc.bias")
    if source.format_name == "vllm" and bias is not None and (bias.is_meta or bias.any()):
        raise source.refusal("a bias of fc, bias=true", "which vLLM drops; train with head.bias=false")
    tensors["fc.weight"] = scaled(tensors["fc.weight"], source.embeddings, 1)
    tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0]) if bias is None else bias
    return ExportedHead(source.engine_config(CLASS, source.config.layers), tensors)


def authors(source: Export) -> ExportedHead:
    """Export the head for the authors' code, which loads an embedding too; refuse options that it does not support."""
    source.refuse(lm_head="shared")
    config = {
        "model_type": "llama",
        "torch_dtype": source.dtype,
        "num_hidden_layers": source.config.layers,
        "bias": source.config.bias,
        **source.decoder(),
    }
    return ExportedHead(config, {**source.weights(), EMBEDDING: embedding_of(source.embeddings)})
