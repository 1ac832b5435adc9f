"""Toy targets of the families that people run, made by transformers' own configuration classes with random weights.

Weights are scaled so that greedy text varies. `FAMILIES` holds for each its class, its values and what becomes of it.
"""

import contextlib
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from inference.drafters.host import DrafterState, HostDrafter
from inference.protocol import DraftContext, Proposal
from inference.target.target import Target
from inference.verification.tree import DraftTree
from tests import toys

SIZES = toys.SIZES
DENSE = {key: value for key, value in SIZES.items() if key != "head_dim"}
WINDOW = {"sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],  # a module for MTP is as the last
}  # fmt: skip
LOCAL_FIRST = ["sliding_attention", "sliding_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_chunk_size": 8}
GEMMA = SIZES | WINDOW | {"query_pre_attn_scalar": 8, "tie_word_embeddings": False}
GPT = {
    "vocab_size": toys.VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 160, "initializer_range": 0.4,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


class Family(NamedTuple):
    """A configuration's class, its values, and whether its layers are recurrent."""

    kind: str
    values: dict[str, Any]
    recurrent: bool = False


HYBRID = ["linear_attention", "full_attention", "linear_attention"]
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": toys.VOCAB, "global_head_dim": 8}
SHARED = {"shared_expert_intermediate_size": 16}
NEMOTRON = {
    "ssm_state_size": 4, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8,
    "layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "time_step_min": 1e-9,  # transformers bounds the step sizes in passes over several tokens alone
}  # fmt: skip
KIMI = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16,
    "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4, "layer_types": HYBRID,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
FALCON = {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}
GRANITE = {"logits_scaling": 2.0, "residual_multiplier": 0.7}
GRANITE4 = {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 16, "logits_scaling": 2.0}
FAMILIES = {
    "llama": Family("LlamaConfig", SIZES),
    "qwen2": Family("Qwen2Config", DENSE),
    "qwen3": Family("Qwen3Config", SIZES),
    "mistral": Family("MistralConfig", SIZES | WINDOW),
    "ministral3": Family("Ministral3Config", SIZES),
    "gemma2": Family("Gemma2Config", GEMMA | {"final_logit_softcapping": 5.0}),
    "gemma3": Family("Gemma3TextConfig", GEMMA | {"layer_types": LOCAL_FIRST}),
    "gemma4": Family("Gemma4TextConfig", GEMMA | GEMMA4 | {"layer_types": LOCAL_FIRST}),
    "phi3": Family("Phi3Config", DENSE | {"sliding_window": None}),
    "phi4": Family("Phi3Config", DENSE | {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "olmo2": Family("Olmo2Config", DENSE),
    "olmo3": Family("Olmo3Config", DENSE | WINDOW),
    "glm4": Family("Glm4Config", SIZES),
    "glm4_moe": Family("Glm4MoeConfig", DENSE | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "granite": Family("GraniteConfig", DENSE | GRANITE),
    "gpt_neox": Family("GPTNeoXConfig", DENSE),
    "gpt2": Family("GPT2Config", GPT),
    "mixtral": Family("MixtralConfig", SIZES | LOCAL | {"sliding_window": None}),
    "qwen3_moe": Family("Qwen3MoeConfig", SIZES | EXPERTS),
    "gpt_oss": Family("GptOssConfig", SIZES | LOCAL | WINDOW),
    "deepseek_v3": Family("DeepseekV3Config", DENSE | MLA | {"num_key_value_heads": 4}),
    "llama4": Family("Llama4TextConfig", SIZES | LOCAL | {"intermediate_size_mlp": 48, "attention_chunk_size": 8}),
    "qwen3_next": Family("Qwen3NextConfig", SIZES | EXPERTS | DELTA | SHARED, recurrent=True),
    "qwen3_5": Family("Qwen3_5TextConfig", SIZES | DELTA, recurrent=True),
    "qwen3_5_moe": Family("Qwen3_5MoeTextConfig", SIZES | EXPERTS | DELTA | SHARED, recurrent=True),
    "lfm2": Family("Lfm2Config", DENSE | {"layer_types": ["conv", "full_attention", "conv"]}, recurrent=True),
    "granitemoehybrid": Family("GraniteMoeHybridConfig", DENSE | MAMBA | LOCAL | GRANITE4, recurrent=True),
    "falcon_h1": Family("FalconH1Config", SIZES | MAMBA | FALCON, recurrent=True),
    "nemotron_h": Family("NemotronHConfig", SIZES | NEMOTRON, recurrent=True),
    "kimi_linear": Family("KimiLinearConfig", DENSE | LOCAL | KIMI, recurrent=True),
    "bamba": Family("BambaConfig", DENSE | MAMBA | {"attn_layer_indices": [1]}, recurrent=True),
}


def config(name: str, **more: Any) -> PreTrainedConfig:
    """Return a family's configuration, with further values."""
    family = FAMILIES[name]
    return getattr(transformers, family.kind)(**family.values | more)


@functools.cache
def target(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Target:
    """Return a toy target of a family, the same weights every time."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(name, **more))
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # their kernels take no fp64
    return Target(model.to(dtype), toys.tokenizer(), name)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Let transformers compute in fp64 what it computes in fp32 at any dtype: states, norms, routers, softmaxes."""
    doubles = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with doubles, mock.patch.object(Tensor, "float", Tensor.double):
        yield


class Erring(HostDrafter, DrafterState):
    """Drafts chains of what the target will write, wrong from a random place on."""

    name, tree = "erring", "chain"

    def __init__(self, text: list[int]) -> None:
        self.text, self.random = text, random.Random(0)

    def start(self, prompt: list[int]) -> "Erring":
        self.prompt = len(prompt)
        return self

    def propose(self, context: DraftContext) -> Proposal:
        begin, size = len(context.token) - self.prompt, max(0, min(5, context.max_draft_depth))
        right = self.random.randrange(6)
        ahead = [(token + (i >= right)) % toys.VOCAB for i, token in enumerate(self.text[begin : begin + size])]
        return Proposal(DraftTree(torch.tensor([context.token[-1], *ahead]), torch.arange(-1, len(ahead))))


def generated(target: Target, prompt: list[int], tokens: int) -> list[int]:
    """Return the greedy text as transformers writes it."""
    generate: Any = target.model.generate
    token = torch.tensor([prompt])
    text = generate(token, attention_mask=torch.ones_like(token), max_new_tokens=tokens, do_sample=False)
    return text[0, len(prompt) :].tolist()


def own_module(target: Target, file: Path) -> None:
    """Write a module made of the target's own last layer, between norms and a projection at random."""
    extra = {"mtp.fc": (32, 64), "mtp.norm": (32,), "mtp.pre_fc_norm_embedding": (32,), "mtp.pre_fc_norm_hidden": (32,)}
    tensors = {f"{part}.weight": torch.randn(shape) for part, shape in extra.items()}
    layer = target.decoder_layers[-1].state_dict()
    file.parent.mkdir(exist_ok=True)
    save_file(tensors | {f"mtp.layers.0.{part}": tensor.clone() for part, tensor in layer.items()}, file)
