"""EAGLE-3 and 3.1: one folder for vLLM, SGLang, TensorRT-LLM and speculators, and one for the authors' own code.

vLLM and speculators read the layers at the top level and SGLang within `eagle_config`, each counting in its own way
(heads/formats/layer_ids.py). Layers after the first have their norm
before attention under two names, because vLLM reads the one and SGLang and TensorRT-LLM the other. The lm_head is
always there, the target's where the head shares it: without one SGLang may make a random one.
"""

import re
from typing import Any

from torch import Tensor

from heads.formats.export.files import KNOWN, OFFSETS, Foreign, Shapes
from heads.formats.export.source import Source, layer_shapes
from heads.formats.layer_ids import STATES, as_states
from heads.modules.fusion import EAGLE3, default_layers

NORMED_RESIDUAL = ("vllm", "speculators")  # the formats of engines that know it
# Targets for which SGLang takes ids for outputs, as otherwise, only if the first is 1, and else for inputs.
COUNTED_BY_FIRST = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"}
VERSION = "0.9.0"  # of speculators, whose format this is


def engines(source: Source) -> Foreign:
    """Return the head for all engines at once.

    Raises:
        ValueError: it has options that they, or the one asked for, do not run.
    """
    options = source.config
    source.refuse(kv_injection=False, qk_norm=False)
    if options.norm_before_residual and source.form not in NORMED_RESIDUAL:
        raise source.refusal(
            "norm_before_residual=true", "which vLLM alone runs; train with head.norm_before_residual=false"
        )
    outputs, order = source.outputs()
    shifted = COUNTED_BY_FIRST & set(source.served.config.get("architectures") or [])
    if source.form == "sglang" and shifted and outputs[0] != 1:
        raise source.refusal(
            f"feature_layers={outputs}", f"and SGLang counts those of {min(shifted)} as we do only from layer 1 on"
        )
    decoder = {"num_hidden_layers": options.layers, **source.decoder()}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": source.dtype,
        **decoder,
        "draft_vocab_size": source.draft_vocab(),
        "tie_word_embeddings": False,
        "norm_before_residual": options.norm_before_residual,
        "norm_before_fc": False,
        **({"fc_norm": True} if options.feature_norm else {}),
        **({"norm_output": True} if options.norm_output else {}),
        "num_aux_hidden_states": len(outputs),
        STATES: as_states(outputs),
        "eagle_config": {"use_aux_hidden_state": True, STATES: outputs},
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "transformer_layer_config": {"model_type": "llama", **decoder},
        "speculators_config": _proposal(source),
    }
    return Foreign(config, _tensors(source, "layers.0.", order), shapes(config, "layers.0."))


def authors(source: Source) -> Foreign:
    """Return the head for the authors' code, which has one layer and always reads the same three of the target.

    Raises:
        ValueError: it has options that their code does not run.
    """
    source.refuse(
        layers=1, kv_injection=False, qk_norm=False, norm_before_residual=False, feature_norm=False, norm_output=False
    )
    outputs, order = source.outputs()
    if outputs != (fixed := default_layers(EAGLE3, source.embeddings.num_layers)):
        raise source.refusal(f"feature_layers={outputs}", f"and the authors' code reads {fixed}, whatever is said")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": source.dtype,
        "num_hidden_layers": 1,
        "bias": False,
        **source.decoder(),
        "draft_vocab_size": source.draft_vocab(),
        "tie_word_embeddings": False,
    }
    return Foreign(config, _tensors(source, "midlayer.", order), shapes(config, "midlayer."))


def shapes(config: dict[str, Any], first: str) -> Shapes:
    """Return the shapes; where config.json does not count the features there are three."""
    width, full, drafted = (config[key] for key in ("hidden_size", "vocab_size", "draft_vocab_size"))
    count = config.get("num_aux_hidden_states", EAGLE3)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found: Shapes = {"fc.weight": (width, count * width), "norm.weight": (width,), "lm_head.weight": (drafted, width)}
    for i in range(config["num_hidden_layers"]):
        found |= layer_shapes(config, f"layers.{i}." if i else first, width if i else 2 * width, norms)
    if config.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": (width,) for i in range(count)}
    return found | ({OFFSETS: (drafted,), KNOWN: (full,)} if drafted < full else {})


def _tensors(source: Source, first: str, order: list[int]) -> dict[str, Tensor]:
    tensors = source.tensors
    found = {
        "fc.weight": source.in_order(tensors.pop("fusion.fc.weight"), order),
        **{f"fc_norm.{i}.weight": tensors.pop(f"fusion.norms.{at}.weight") for i, at in _normed(source, order)},
        "lm_head.weight": source.read_out("lm_head"),
        **source.vocabulary(),
    }
    for name, tensor in tensors.items():
        if inner := re.match(r"layers\.(\d+)\.(.*)", name):
            deeper = f"layers.{int(inner[1]) + 1}."
            found[deeper + inner[2]] = tensor
            if inner[2] == "input_layernorm.weight":
                found[f"{deeper}hidden_norm.weight"] = tensor
        elif name.startswith("first."):
            found[first + name.removeprefix("first.")] = tensor
        elif name not in ("vocab.ids", "lm_head.weight"):
            found[name] = tensor
    return found


def _normed(source: Source, order: list[int]) -> list[tuple[int, int]]:
    return list(enumerate(order)) if source.config.feature_norm else []


def _proposal(source: Source) -> dict[str, Any]:
    """Return what `vllm serve` of the repository alone starts: the target, and how many tokens are drafted."""
    way = {
        "proposal_type": "greedy",
        "speculative_tokens": source.served.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    architectures = source.served.config.get("architectures") or []
    return {
        "algorithm": "eagle3",
        "default_proposal_method": way["proposal_type"],
        "proposal_methods": [way],
        "verifier": {"name_or_path": source.served.name, "architectures": architectures},
    }
