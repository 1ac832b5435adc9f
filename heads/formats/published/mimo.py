"""MiMo's MTP module: `model.mtp_layers.0`, a Qwen2 layer after `input_proj`, which reads the state first.

vLLM (`method: mtp`) and SGLang (NEXTN) run it from a separate folder, for any target whose model class returns its
normed last states, such as Llama and Qwen3. vLLM builds the module from the target's config.json, completed by
`hf_overrides` (`overrides`), and not from the head's. Both engines drop the embedding of the row at position 0, which
affects only that row. Their layer has biases of queries, keys and values, which are written as zeros; vLLM's heads are
as wide as the state divided by their number.
"""

import re

import torch

from heads.base import Embeddings, resolve_layer_dims
from heads.common.rope import positions_of
from heads.common.typed import Json
from heads.formats.mtp_layouts import COUNT, LAYOUTS, swapped
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.formats.published.plan import PublishedHead, TensorMapping, check_width, decoder

LAYER = "mtp_layers.0."
SIGNATURE = (r"mtp_layers\.0\.input_proj\.weight",)
RENAMED = LAYOUTS["mimo"].renamed
BIASED = re.compile(r"self_attn\.[qkv]_proj\.bias$")
CLASS = EngineClass(["MiMoForCausalLM"], "qwen2", {"vllm": "MiMoForCausalLM", "sglang": "MiMoForCausalLM"})


def their_name(name: str) -> str:
    """Return the format's name of one of our tensors, without `model.`."""
    return LAYER + (RENAMED.get(name) or name.removeprefix("block."))


def read(source: PublishedHead, embeddings: Embeddings) -> TensorMapping:
    """Return the mapping of the format's tensors; refuse biases that are not zero."""
    check_width(source, f"{LAYER}input_proj.weight", embeddings)
    if source.count(r"mtp_layers\.(\d+)\.") > 1:
        raise source.refusal("several MTP modules")
    zero = {name for name, tensor in source.tensors.items() if BIASED.search(name) and not tensor.any()}
    unbiased = source._replace(tensors={name: source.tensors[name] for name in source.tensors.keys() - zero})
    config = {
        "qk_norm": f"{LAYER}self_attn.q_norm.weight" in source.tensors,
        **decoder(unbiased, LAYER, embeddings),
    }
    filled = {"eh_proj.weight": swapped(source.tensor(f"{LAYER}input_proj.weight"))}
    return TensorMapping("mtp", config, their_name, filled, zero | {f"{LAYER}input_proj.weight"})


def engines(source: Export) -> ExportedHead:
    """Export the head for vLLM and SGLang; refuse unsupported options."""
    source.refuse(layer="llama", raw_state=False, feature_layers=None, lm_head="shared")
    if source.format_name == "sglang":
        source.refuse(qk_norm=False)
    config = source.engine_config(CLASS, 1) | {COUNT: 1, "qk_norm": source.config.qk_norm}
    if source.format_name == "vllm":
        target = source.served.config
        positions = positions_of(config)
        if any(isinstance(value, dict) for value in (target.get("rope_parameters") or {}).values()):
            raise source.refusal(
                "positions of one kind", "and vLLM takes the target's, which has them by kind of layer, in a class "
                "that cannot read those; export it with format=sglang"
            )  # fmt: skip
        eps, dims = config["rms_norm_eps"], resolve_layer_dims(source.config, source.embeddings)
        ours = {**dims._asdict(), "positions": positions, "norm_eps": eps}
        theirs = {
            **source.embeddings.layer_dims._asdict(),
            "head_dim": config["hidden_size"] // config["num_attention_heads"],
            "positions": positions_of(target) or positions,
            "norm_eps": target.get("rms_norm_eps", eps),
        }
        if other := next((name for name, value in ours.items() if value != theirs[name]), None):
            raise source.refusal(
                f"{other} {ours[other]}",
                f"and vLLM takes {theirs[other]}; train with init=auto and sizes of null, train head=eagle3, or export "
                "it with format=sglang",
            )
    tensors = {f"model.{their_name(name)}": tensor for name, tensor in source.weights().items()}
    projection = f"model.{LAYER}input_proj.weight"
    tensors[projection] = swapped(tensors[projection])
    for letter in "qkv":
        name = f"model.{LAYER}self_attn.{letter}_proj"
        tensors[f"{name}.bias"] = torch.zeros_like(tensors[f"{name}.weight"][:, 0])
    return ExportedHead(config, tensors)


def overrides(config: Json) -> Json:
    """Return the keys that vLLM needs in the target's config.json to build this module (`--hf-overrides`)."""
    return {COUNT: 1} | ({"qk_norm": True} if config.get("qk_norm") else {})
