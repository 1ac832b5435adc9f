"""Toy targets with random weights, and the tokenizer they share.

A random model easily falls into one repeating token, which makes every parity test vacuous: `lively` says so.
"""

import copy
import functools
import itertools
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from heads import HEADS
from heads.modules.vocab import choose_draft_vocab
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target

VOCAB = 40
COUNTS = torch.randint(100, (VOCAB,), generator=torch.Generator().manual_seed(3))  # of each token in a text
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 160, "initializer_range": 0.4,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6, query_pre_attn_scalar=8, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=6, query_pre_attn_scalar=8, sliding_window_pattern=2),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=160, initializer_range=0.4,
        eos_token_id=None, bos_token_id=None,
    ),
}  # fmt: skip
# Whose experts or positions follow from what is decoded; not among those that every test goes through.
EXPERTS = ("mixtral", "qwen3 moe")
ROUTED: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "dynamic rope": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
}
LAYER = {
    "length": 12, "num_heads": None, "num_kv_heads": None, "head_dim": None, "intermediate_size": None,
    "rope_theta": 10000.0, "rope_scaling": None, "norm_eps": 1e-5,
}  # fmt: skip
SINGLE = {**LAYER, "candidates": None, "candidate_rank": 6}  # a head with one lm_head
HEAD_CONFIGS: dict[str, dict[str, Any]] = {
    "eagle": {"layers": 2, "bias": True, "lm_head": "shared", "draft_vocab": None, **SINGLE},
    "hass": {"layers": 1, "bias": False, "lm_head": "shared", "draft_vocab": 30, **SINGLE},
    "eagle3": {
        "layers": 1, "feature_layers": [0, 1, 2], "feature_norm": False, "joint_norm": False, "norm_output": False,
        "norm_before_residual": False, "qk_norm": False, "kv_injection": False, "lm_head": "own", "draft_vocab": 30,
        **SINGLE,
    },
    "medusa": {"heads": 4, "layers": 1, "lm_head": "own", "lm_head_rank": None, "draft_vocab": None},
    "hydra": {
        "heads": 4, "layers": 2, "tied": False, "prefix": True, "lm_head": "own", "lm_head_bias": False,
        "lm_head_rank": None, "draft_vocab": None, **LAYER,
    },
    "mlp": {"heads": 4, "inner": 24, "tied": False, "scale_input": True, "draft_vocab": None},
    "mtp": {
        "layer": "llama", "raw_state": False, "qk_norm": False, "feature_layers": None, "lm_head": "shared",
        "draft_vocab": None, **SINGLE, "length": None,
    },
    "block": {
        "depths": 4, "layers": 2, "feature_layers": [0, 2], "causal": True, "from_anchor": False, "mask_token": None,
        "markov_rank": None, "domino": None, "domino_rank": 5, "selector_rank": None, "selector_top_k": 7, "conv": None,
        "conv_group": 8, "confidence": False, "qk_norm": True, "lm_head": "shared", "draft_vocab": None, **LAYER,
    },
    "peagle": {
        "layers": 2, "feature_layers": [0, 1, 2], "feature_norm": True, "joint_norm": False,
        "norm_before_residual": False, "qk_norm": False, "lm_head": "own", "draft_vocab": 30,
        "depths": 4, "mask_token": 7, "embedding": "shared", **SINGLE,
    },
}  # fmt: skip
HEAD_CONFIGS["eagle4"] = HEAD_CONFIGS["eagle3"] | {"feature_norm": True, "norm_output": True, "draft_vocab": None}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle pruned": ("eagle", {"lm_head": "own", "draft_vocab": 25}),
    "eagle3.1": ("eagle3", {"feature_norm": True, "norm_output": True}),
    "eagle3 injected": ("eagle3", {"layers": 2, "kv_injection": True, "qk_norm": True, "norm_before_residual": True}),
    "eagle3 deep": (
        "eagle3",
        {"layers": 2, "feature_layers": [2, 0], "joint_norm": True, "lm_head": "shared", "draft_vocab": None},
    ),
    "eagle4 with candidates": ("eagle4", {"candidates": 9, "draft_vocab": 30}),
    "mtp with candidates": ("mtp", {"candidates": 9}),
    "medusa of low rank": ("medusa", {"lm_head_rank": 8, "draft_vocab": 30}),
    "medusa shared": ("medusa", {"lm_head": "shared", "layers": 2}),
    "hydra plain": ("hydra", {"prefix": False, "tied": True, "layers": 3, "lm_head_bias": True, "draft_vocab": 30}),
    "mlp tied": ("mlp", {"tied": True, "scale_input": False, "inner": None, "draft_vocab": 30}),
    "mtp of Qwen3": (
        "mtp",
        {"qk_norm": True, "feature_layers": [2, 0], "length": 5, "lm_head": "own", "draft_vocab": 30},
    ),
    "mtp of the target's kind": ("mtp", {"layer": "target", "raw_state": True}),
    "block both ways": ("block", {"causal": False, "length": None, "qk_norm": False}),
    "block of Domino": ("block", {"domino": 12, "draft_vocab": 30}),
    "block of DFlash2": ("block", {"causal": False, "selector_rank": 6, "conv": 2}),
    "block of DSpark": ("block", {"from_anchor": True, "markov_rank": 6, "confidence": True, "draft_vocab": 30}),
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
LAYERED: dict[str, tuple[Any, ...]] = {
    "length": (5, None), "num_heads": (None, 2), "num_kv_heads": (None, 1), "head_dim": (None, 4),
    "intermediate_size": (None, 24), "rope_theta": (1e4, 30.0), "rope_scaling": (None, LINEAR), "norm_eps": (1e-5, 0.3),
    "lm_head": ("shared", "own"), "draft_vocab": (None, 25),
}  # fmt: skip
CHOSEN = LAYERED | {"candidates": (None, 9), "candidate_rank": (6, 16)}
FUSED: dict[str, tuple[Any, ...]] = {
    "layers": (1, 2), "feature_layers": ([0, 1, 2], [2, 0]), "feature_norm": (False, True),
    "joint_norm": (False, True), "norm_before_residual": (False, True), "qk_norm": (False, True), **CHOSEN,
}  # fmt: skip
# The values of every option of each head, which `PAIRS` tries together.
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "eagle": {"layers": (1, 2), "bias": (False, True), **CHOSEN},
    "eagle3": FUSED | {"norm_output": (False, True), "kv_injection": (False, True)},
    "medusa": {
        "heads": (4,), "layers": (1, 2), "lm_head": ("own", "shared"), "lm_head_rank": (None, 8),
        "draft_vocab": (None, 25),
    },
    "hydra": {
        "heads": (4,), "layers": (1, 3), "tied": (False, True), "prefix": (False, True),
        "lm_head_bias": (False, True), "lm_head_rank": (None, 8), **LAYERED,
    },
    "mlp": {
        "heads": (4,), "inner": (None, 24), "tied": (False, True), "scale_input": (False, True),
        "draft_vocab": (None, 25),
    },
    "mtp": {
        "layer": ("llama", "target"), "raw_state": (False, True), "qk_norm": (False, True),
        "feature_layers": (None, [2, 0]), **CHOSEN,
    },
    "block": {
        "depths": (4,), "layers": (1, 2), "feature_layers": ([0, 2], None), "causal": (False, True),
        "from_anchor": (False, True), "mask_token": (None, 7), "markov_rank": (None, 6), "domino": (None, 12),
        "domino_rank": (5, 3), "selector_rank": (None, 6), "selector_top_k": (7, 3), "conv": (None, 2),
        "conv_group": (8, 16), "confidence": (False, True), "qk_norm": (False, True), **LAYERED,
    },
    "peagle": FUSED | {"depths": (4,), "mask_token": (7, -1), "embedding": ("shared", "own")},
}  # fmt: skip


def all_pairs(
    values: Mapping[str, Sequence[Any]], allows: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Return few choices of one value a name, in which every pair of values is that is allowed at all."""
    draw, rows = random.Random(0), list[dict[str, Any]]()
    keys = [(name, i) for name, these in values.items() for i in range(len(these))]
    left = {pair for pair in itertools.combinations(keys, 2) if pair[0][0] != pair[1][0]}
    while left:
        pair = min(left)
        found = [{name: draw.randrange(len(these)) for name, these in values.items()} | dict(pair) for _ in range(60)]
        found = [row for row in found if allows({name: values[name][i] for name, i in row.items()})]
        covered = [left.intersection(itertools.combinations(row.items(), 2)) for row in found]
        best = max(range(len(found)), key=lambda i: len(covered[i]), default=None)
        left -= {pair} if best is None else covered[best]
        rows += [] if best is None else [{name: values[name][i] for name, i in found[best].items()}]
    return rows


def allowed(kind: str, options: dict[str, Any]) -> bool:
    """Whether a head takes these options together."""
    try:
        HEADS[kind].Config(name=kind, **options)
    except ValueError:
        return False
    ignored = ("qk_norm", *LAYERED.keys() - {"length", "lm_head", "draft_vocab"})  # by a layer of the target's kind
    return not (
        (options.get("layer") == "target" and any(options[key] != VALUES[kind][key][0] for key in ignored))
        or (options.get("raw_state") and options["feature_layers"])
        or (options.get("lm_head_rank") and options["lm_head"] == "shared")
    )


PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind} {i}": (kind, options)
    for kind, values in VALUES.items()
    for i, options in enumerate(all_pairs(values, functools.partial(allowed, kind)))
}
PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]
TREES = {
    "chain": TreeConfig("chain", 4, 0, 0, [], []),
    "static": TreeConfig("static", 0, 0, 0, PATHS, []),
    "dynamic": TreeConfig("dynamic", 4, 3, 9, [], []),
    "best_first": TreeConfig("best_first", 5, 0, 9, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [3, 2, 1]),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i reads "wi"."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@functools.cache
def target(name: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    """Return a toy target of an architecture, the same weights every time."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy((ARCHITECTURES | ROUTED)[name]))  # saving one changes it
    if name in EXPERTS and dtype == torch.float64:
        model.set_experts_implementation("eager")  # their kernels take no fp64
    return Target(model.to(dtype), tokenizer(), name)


def head(name: str, of: Target) -> torch.nn.Module:
    """Return a toy head, or one of `OPTIONS`, whose weights are large enough that it drafts varied tokens."""
    if name in PAIRS:
        return head_of(*PAIRS[name], of)
    torch.manual_seed(2)
    kind, options = OPTIONS.get(name, (name, {}))
    made = HEADS[kind](HEADS[kind].Config(name=kind, **HEAD_CONFIGS[kind] | options), of.embeddings)
    choose_draft_vocab(made, COUNTS)
    for parameter in made.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return made.to(of.dtype).eval().requires_grad_(False)


def drafter(name: str, of: Target, tree: str) -> HeadDrafter:
    """Return a toy head as a draft source."""
    own: Any = head(name, of)
    return HeadDrafter(own, TREES[tree], name)


def head_of(kind: str, options: dict[str, Any], of: Target) -> torch.nn.Module:
    """Return a head with these options, whose weights, norms and biases too, follow from their names and shapes."""
    made = HEADS[kind](HEADS[kind].Config(name=kind, **options), of.embeddings)
    choose_draft_vocab(made, COUNTS)
    for key, parameter in made.named_parameters():
        if parameter.requires_grad:
            seed = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            torch.nn.init.normal_(parameter, float("norm" in key), 0.3, seed)
    return made.to(of.dtype).eval().requires_grad_(False)


def prompt(seed: int, length: int = 7) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


def lively(tokens: list[int]) -> bool:
    """Whether a text is varied enough for a parity test to mean something."""
    return len(set(tokens)) >= min(8, len(tokens) // 3)
