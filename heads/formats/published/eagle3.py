"""EAGLE-3 and 3.1: the authors' `midlayer` or `layers.0`, `fc`, `norm`, its own lm_head, `d2t` and `t2d`.

One folder serves vLLM, SGLang, TensorRT-LLM and speculators, another one the authors' code. vLLM and speculators read
the feature layers at the top level, SGLang in `eagle_config`; they count differently (plan.py), and published files
have either count under either key. By default both read the same three layers. In layers after the first, the norm
before attention has two names: vLLM reads one, SGLang and TensorRT-LLM the other. The lm_head is always written, also
if the head shares the target's: without one SGLang may initialise it at random.
"""

import logging
import re

import torch

from heads.base import Embeddings, NamedTensors, draft_size
from heads.formats.published import plan
from heads.formats.published.exporting import EngineClass, Export, ExportedHead
from heads.modules.fusion import EAGLE3_LAYERS, default_layers

log = logging.getLogger(__name__)

SIGNATURE = (r"(midlayer|layers\.0)\.hidden_norm\.weight",)
JOINT = "input_norm"  # name of the norm of the concatenated features, before fc
MIDDLE, FIRST = "midlayer.", "layers.0."  # prefix of the first layer's tensors: the authors', and that of all others
NORMED_RESIDUAL = ("vllm", "speculators", "gguf")  # formats whose engines support `norm_before_residual`
# For these targets SGLang counts outputs, as for others, only if the first id is 1; otherwise it counts inputs.
COUNTED_BY_FIRST = {
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM", "KimiK25ForConditionalGeneration",
}  # fmt: skip
VERSION = "0.9.0"  # version of the speculators format
CLASS = EngineClass(["LlamaForCausalLMEagle3"], "llama", {
    "vllm": r"(Eagle3)?(Llama|Qwen2_5vl|Qwen3|Qwen3vl|MiniMaxM2|DeepseekV[23])ForCausalLM|LlamaForCausalLMEagle3|"
    r"PEagleDraftModel|PeagleLlamaForCausalLM",  # vLLM prepends Eagle3 to names without it
    "sglang": r"LlamaForCausalLMEagle3|Eagle3DeepseekV2ForCausalLM",
    "trtllm": r"(Eagle3)?(Llama|DeepseekV3)ForCausalLM|(Llama|DeepseekV3)ForCausalLMEagle3",  # it drops Eagle3
    "gguf": r"LlamaForCausalLMEagle3|Eagle3(LlamaForCausalLM|DraftModel|Speculator)",
    "openvino": r"LlamaForCausalLMEagle3|Eagle3LlamaForCausalLM",
})  # fmt: skip


def their_name(name: str, first: str) -> str:
    """Return the format's name of one of our tensors; `first` is the prefix of the first layer's names."""
    if deeper := re.match(r"layers\.(\d+)\.(.*)", name):
        return f"layers.{int(deeper[1]) + 1}.{deeper[2]}"
    for ours, theirs in ((r"^fusion\.norms\.", "fc_norm."), (r"^fusion\.joint_norm", JOINT), (r"^fusion\.fc\.", "fc.")):
        name = re.sub(ours, theirs, name)
    return re.sub(r"^first\.", first, name)


def read(source: plan.PublishedHead, embeddings: Embeddings, *, sliding: bool = False) -> plan.TensorMapping:
    """Return the mapping of the format's tensors; `sliding` allows a sliding window."""
    given, tensors = source.config, source.tensors
    first = next(first for first in (MIDDLE, FIRST) if f"{first}hidden_norm.weight" in tensors)
    nested = given.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise source.refusal("features of the last layer alone (use_aux_hidden_state=false)")
    if given.get("parallel_drafting") and "mask_hidden" not in tensors:
        raise source.error("config.json says parallel_drafting (P-EAGLE), and the tensor mask_hidden is missing")
    plan.check_width(source, "fc.weight", embeddings)
    joined = tensors["fc.weight"].shape[1] // embeddings.hidden_size
    layers = 1 + source.count(r"layers\.([1-9]\d*)\.self_attn\.q_proj\.weight$")
    normed = source.count(r"fc_norm\.(\d+)\.weight$") > 0
    if "next_layer_regular" in nested and tensors[f"{first}input_layernorm.weight"].std() > 0:
        log.warning("%s: NVIDIA modelopt, which wrote it, trains with a second norm of the state, input_layernorm, "
                    "that no engine has: it drafts worse than in its training", source.folder)  # fmt: skip
    joint = f"{JOINT}.weight" in tensors or any(where.get("norm_before_fc") for where in (given, nested))
    ids = plan.drafted_by_offsets(source, embeddings)
    if given.get("fc_norm"):
        source.tensor("fc_norm.0.weight", "fc_norm")
    value = given.get("norm_before_residual")
    if value is None and "speculators_model_type" in given:
        log.warning("%s: config.json leaves norm_before_residual open, false is taken; vLLM takes true", source.folder)
    # EAGLE-3.1 feeds its normed output back; the first key is TensorRT-LLM's. SpecForge has the second by default,
    # for the norm before the lm_head (specforge/modeling/draft/llama3_eagle.py, compute_logits).
    fed, flag = nested.get("return_hidden_post_norm"), given.get("norm_output")
    if flag and not (fed or normed or joint or "speculators_model_type" in given):
        log.warning("%s: norm_output=true without fc_norm is SpecForge's norm before the lm_head, and read so; engines "
                    "feed the normed output back: set it to false for them", source.folder)  # fmt: skip
        flag = False
    config = {
        "layers": layers,
        "feature_layers": feature_layers(source, joined, embeddings),
        "feature_norm": normed,
        "joint_norm": joint,
        "norm_output": bool(fed or flag),
        "norm_before_residual": bool(value),
        "qk_norm": f"{first}self_attn.q_norm.weight" in tensors,
        "kv_injection": False,
        "lm_head": "own" if ids is not None or "lm_head.weight" in tensors else "shared",
        **plan.decoder(source, first, embeddings, sliding=sliding),
    }
    renamed, duplicates = {}, set()
    for i in range(1, layers):
        one, other = f"layers.{i}.input_layernorm.weight", f"layers.{i}.hidden_norm.weight"
        if one not in tensors:
            renamed[one] = other
        elif other in tensors:
            if not torch.equal(tensors[one], tensors[other]):
                raise source.error(f"{one} and {other} differ, and which of them is meant is not said; leave one")
            duplicates.add(other)

    def rename(name: str) -> str:
        theirs = their_name(name, first)
        return renamed.get(theirs, theirs)

    unread = {plan.OFFSETS, plan.KNOWN, *duplicates} & tensors.keys()
    return plan.TensorMapping("eagle3", config, rename, unread=unread, ids=ids)


def feature_layers(source: plan.PublishedHead, joined: int, embeddings: Embeddings) -> list[int] | None:
    """Return the feature layers, `joined` of which fc reads, None for the default three; refuse contradictions."""
    nested = source.config.get("eagle_config") or {}
    states, outputs = source.config.get(plan.STATES), nested.get(plan.STATES)
    if states is None and outputs is None:
        states = nested.get("layer_ids")
    listed = states if states is not None else outputs
    if listed is None:
        if joined != EAGLE3_LAYERS:
            raise source.error(f"fc.weight joins {joined} layers and config.json does not name them in {plan.STATES}")
        return None
    meant = plan.as_outputs(states) if states is not None else list(listed)
    if states is not None and outputs is not None and outputs not in (meant, states):
        raise source.error(
            f"{plan.STATES} is {states} and within eagle_config {outputs}: not the same layers; correct it"
        )
    default = default_layers(EAGLE3_LAYERS, embeddings.num_layers)
    usual = listed == default or plan.as_outputs(listed) == default
    if states is not None and states == outputs and not usual:
        raise source.error(f"{plan.STATES} is {states} at both places, which count differently; leave one")
    if usual and meant != default:
        log.warning("%s: %s is %s, the default layers as the other convention counts them; these are taken",
                    source.folder, plan.STATES, listed)  # fmt: skip
    chosen = default if usual else meant
    if min(chosen) < 0:
        raise source.refusal(f"the target's embedding among its layers, {plan.STATES}={listed}")
    return chosen


def engines(source: Export) -> ExportedHead:
    """Export the head for all engines at once; refuse options that they, or the requested engine, do not support."""
    options = source.config
    source.refuse(kv_injection=False, qk_norm=False)
    if options.norm_before_residual and source.format_name not in NORMED_RESIDUAL:
        raise source.refusal(
            "norm_before_residual=true",
            "which vLLM and llama.cpp alone run; train with head.norm_before_residual=false",
        )
    outputs, order = source.outputs()
    shifted = COUNTED_BY_FIRST & set(source.served.config.get("architectures") or [])
    if source.format_name == "sglang" and shifted and outputs[0] != 1:
        raise source.refusal(
            f"feature_layers={outputs}", f"and SGLang counts those of {min(shifted)} as we do only from layer 1 on"
        )
    way = {
        "proposal_type": "greedy",
        "speculative_tokens": source.served.draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    joint = {"norm_before_fc": options.joint_norm}  # TensorRT-LLM reads this key only in eagle_config
    config = {
        **source.engine_config(CLASS, options.layers),
        "draft_vocab_size": draft_size(source.head),
        "norm_before_residual": options.norm_before_residual,
        **joint,
        **({"fc_norm": True} if options.feature_norm else {}),
        **({"norm_output": True} if source.head.feeds_normed else {}),
        "num_aux_hidden_states": len(outputs),
        plan.STATES: plan.as_states(outputs),
        "eagle_config": {"use_aux_hidden_state": True, plan.STATES: outputs, **joint},
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "transformer_layer_config": {"model_type": "llama", "num_hidden_layers": options.layers, **source.decoder()},
        "speculators_config": {  # read by `vllm serve REPOSITORY`: the target, and the number of drafted tokens
            "algorithm": "eagle3",
            "default_proposal_method": way["proposal_type"],
            "proposal_methods": [way],
            "verifier": {
                "name_or_path": source.served.name,
                "architectures": source.served.config.get("architectures") or [],
            },
        },
    }
    return ExportedHead(config, _tensors(source, FIRST, order))


def authors(source: Export) -> ExportedHead:
    """Export the head for the authors' code or for OpenVINO, which run one layer and the features of three layers.

    OpenVINO reads the layers from its converted file, into which format=openvino writes them; without d2t it reads
    uninitialised memory. The authors' code has fixed layers. Options that either does not support are refused.
    """
    source.refuse(
        layers=1,
        kv_injection=False,
        qk_norm=False,
        norm_before_residual=False,
        feature_norm=False,
        joint_norm=False,
        norm_output=False,
    )
    outputs, order = source.outputs()
    fixed, size = default_layers(EAGLE3_LAYERS, source.embeddings.num_layers), draft_size(source.head)
    config = source.engine_config(CLASS, 1) | {"bias": False, "draft_vocab_size": size}
    tensors = _tensors(source, MIDDLE, order)
    if source.format_name == "openvino":
        if len(outputs) != EAGLE3_LAYERS:
            raise source.refusal(
                f"feature_layers={outputs}", "and OpenVINO reads three; leave head.feature_layers null"
            )
        config["eagle_config"] = {plan.STATES: outputs}
        whole = {plan.OFFSETS: torch.zeros(size, dtype=torch.long), plan.KNOWN: torch.ones(size, dtype=torch.bool)}
        return ExportedHead(config, whole | tensors)
    if outputs != fixed:
        raise source.refusal(f"feature_layers={outputs}", f"and the authors' code reads {fixed}, whatever is said")
    return ExportedHead(config, tensors)


def _tensors(source: Export, first: str, order: list[int]) -> NamedTensors:
    tensors = {their_name(name, first): tensor for name, tensor in source.weights().items()}
    for i in range(1, source.config.layers):
        tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"]
    normed = enumerate(order if source.config.feature_norm else [])
    return tensors | {
        **{name: source.in_order(tensors[name], order) for name in ("fc.weight", f"{JOINT}.weight") if name in tensors},
        **{f"fc_norm.{i}.weight": tensors[f"fc_norm.{at}.weight"] for i, at in normed},
        "lm_head.weight": source.read_out("lm_head"),
        **source.vocabulary(),
    }
