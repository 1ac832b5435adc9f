"""A target's configuration, checked before transformers reads it, and its context length.

The file is untrusted: transformers builds a module for every layer that a config.json claims, and runs code from the
Hub that the file names as an attention. So the file must describe a model of possible size and name no code.
"""

import inspect
import math
import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from heads.common import gguf
from heads.common.connection import check_reachable
from heads.common.errors import one_line
from heads.common.typed import LARGEST, Json
from heads.common.untrusted import entries, parse_json, regular, shown

DEEP = 20  # target layers from which on one decoder layer per drafted token is cheap
SHARE = 10  # head=best trains at most one SHARE-th of the target's parameters
LM_HEAD_SHARE, MIN_DRAFTS = 20, 8192  # its lm_head has at most one LM_HEAD_SHARE-th of them, and at least these tokens
UNBOUNDED = 2**31  # the context length if the configuration states none
MOST_PARTS = 2_000  # limit of modules built one by one, such as layers: more than any existing target has
PARTS = re.compile(r"layers?$|blocks?$|^depths?$|_depth$|^num_labels$")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Implementations of attention and experts in torch and transformers. Other names could be code from the Hub.
OURS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
# Errors that transformers, its modeling code and a head's own raise at unexpected values.
UNFIT = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, ArithmeticError,
    AssertionError, MemoryError, StrictDataclassError, SafetensorError,
)  # fmt: skip
TOWERS = ("vision_config", "audio_config")  # keys next to `text_config` in a multimodal checkpoint
# Model types for text towers without a causal LM in transformers; without images their positions are plain.
TOWER_TYPES = {
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
ABOVE = ("architectures", "dtype", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")


def read_target_config(path: str, trust_remote_code: bool, cached_alone: bool = False) -> PreTrainedConfig:
    """Return a target's configuration from a folder or Hub name; `cached_alone` downloads nothing.

    For a multimodal checkpoint this is the text tower's configuration, a complete causal LM. Refuse a name without one,
    or one of which no target can be built, in one line without the path.
    """
    values = read_target_values(path, trust_remote_code, cached_alone)
    try:
        folder, given = gguf.resolve_gguf(path)
        options = {"trust_remote_code": trust_remote_code, "local_files_only": cached_alone}
        loader = transformers.AutoConfig
        config = loader.for_model(**values) if given else loader.from_pretrained(folder, **options)
        config = text_tower(config) if has_text_tower(values) else config
        text = config.get_text_config()
    except UNFIT as error:
        raise ValueError(reason(error)) from error
    for name in SIZES:
        size = getattr(text, name, None)
        if size is not None and not (isinstance(size, int) and 1 <= size <= LARGEST):
            raise ValueError(f"{name} is {shown(size)} in its config.json, of which no model can be made")
    return config


def has_text_tower(values: Json) -> bool:
    """Return whether a config.json belongs to a multimodal checkpoint: images or sound next to text."""
    return isinstance(values.get("text_config"), dict) and any(values.get(tower) for tower in TOWERS)


def text_tower(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the text tower's configuration, completed by the whole model's class, dtype and special tokens."""
    text: Any = config.get_text_config()
    if text.model_type in TOWER_TYPES:
        rope = {key: value for key, value in text.rope_parameters.items() if not key.startswith("mrope")}
        shape = text.to_dict() | {"rope_parameters": rope} | TOWER_TYPES[text.model_type]
        text = transformers.AutoConfig.for_model(**shape)
        text.model_type = config.model_type  # the type by which transformers converts the stored weights
    for key in ABOVE:
        if getattr(text, key, None) is None and getattr(config, key, None) is not None:
            setattr(text, key, getattr(config, key))
    # tie_word_embeddings is at the top level, where transformers reads it.
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    text.name_or_path = config.name_or_path
    return text


def read_target_values(path: str, trust_remote_code: bool, cached_alone: bool) -> Json:
    """Return the values of a config.json as a dict, without importing transformers, which takes two seconds.

    A missing or refused config.json raises a ValueError in one line, without the path.
    """
    try:
        regular(Path(path))
        folder, given = gguf.resolve_gguf(path)
        if given:
            values = gguf.metadata(folder, **given)
        elif (file := Path(folder) / "config.json").is_file():
            values = parse_json(file.read_bytes())
        else:
            if not cached_alone:
                check_reachable(path)
            values, _ = PreTrainedConfig.get_config_dict(path, local_files_only=cached_alone)
        if not isinstance(values, dict):
            raise ValueError(f"its config.json is {shown(values)}, expected a mapping")
        for key, value in entries(values):
            if PARTS.search(key.rpartition(".")[2]) and isinstance(value, int | float) and not value <= MOST_PARTS:
                raise ValueError(f"{key} is {shown(value)} in its config.json, at most {MOST_PARTS} are made")
            if "_implementation" in key and isinstance(value, str) and value not in OURS and not trust_remote_code:
                raise ValueError(
                    f"its config.json names code to run by the key {key}, {shown(value)}: remove the key, or trust it "
                    "with model.trust_remote_code=true"
                )
    except UNFIT as error:
        raise ValueError(reason(error)) from error
    return values


def cache_argument(module: Any) -> str:
    """Return the name of the KV cache's argument in transformers: `past_key_values` before 5.24, `cache` since."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def reason(error: BaseException) -> str:
    """Return the first line of transformers' error, or for mismatched shapes the message that it logged."""
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json says"
    return one_line(ValueError(str(error).strip().split("\n")[0] or type(error).__name__))


def context_of(config: Any) -> int:
    """Return a model's context length: the maximum number of tokens of a sequence."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else UNBOUNDED


def logit_factor(config: Any) -> float:
    """Return the scale of a model's logits, from the keys of Cohere, Falcon-H1 and Granite."""
    factors = (getattr(config, key, None) or 1.0 for key in ("logit_scale", "lm_head_multiplier"))
    return math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)


def experts_of(config: Any) -> tuple[int, int] | None:
    """Return the experts per layer and the active experts per token; None for a dense model."""
    available = next((count for key in EXPERTS if isinstance(count := getattr(config, key, None), int) and count), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
    return (available, chosen) if 0 < chosen <= available else None


def sequence_length(path: str, length: int) -> int:
    """Return the length of packed sequences: `length`, or the target's context length if that is known and shorter.

    The context of a target that is not downloaded yet is unknown; `check_sequence_length` checks it later.
    """
    try:
        return min(length, context_of(read_target_config(path, trust_remote_code=False, cached_alone=True)))
    except ValueError:
        return length


def up_to_width(path: str, rank: int) -> int:
    """Return the rank of a low-rank lm_head: `rank`, or the target's hidden size if that is known and smaller.

    Above that rank the correction has more parameters than the lm_head that it corrects.
    """
    try:
        return min(
            rank, read_target_config(path, trust_remote_code=False, cached_alone=True).get_text_config().hidden_size
        )
    except (ValueError, AttributeError):
        return rank


def best_head(path: str, shape: Any, trust_remote_code: bool) -> tuple[Json, str]:
    """Return the options of the recommended head for a target (docs/heads.md, "Which head"), and the reason in words.

    A target with few layers gets mlp, unless mlp trains more than a tenth of the target's parameters and more than mtp.
    A draft vocabulary limits mtp's lm_head, which every draft runs, to a twentieth of the target's parameters. `shape`
    holds the target's dimensions as in conf/model, so that no download is needed.
    """
    try:
        reads_files = shape is None or shape.of != path
        text = read_target_config(path, trust_remote_code).get_text_config() if reads_files else shape
        layers, width, vocab = (getattr(text, name) for name in SIZES[:3])
    except UNFIT as error:
        raise ValueError(f"model.path={path}: {reason(error)}") from error
    target = 12 * layers * width**2 + vocab * width  # parameters of a dense target, approximately
    # mlp: a table, an lm_head and a projection for each of four depths; mtp: a decoder layer and a projection.
    trained = {"mlp": 4 * (2 * vocab * width + width**2), "mtp": 14 * width**2}
    serving = "engine=NAME takes one that an engine loads"
    drafts = max(MIN_DRAFTS, 1 << (target // (LM_HEAD_SHARE * width)).bit_length() - 1)
    mtp = {"name": "mtp"} | ({"draft_vocab": drafts} if drafts < vocab else {})
    if layers >= DEEP:
        return mtp, f"since it drafts best for a target of {layers} layers; {serving}"
    if trained["mlp"] <= max(target // SHARE, trained["mtp"]):
        why = f"since a pass of this target, {layers} layers, costs little more than a layer of a head"
        return {"name": "mlp"}, f"{why}; {serving}"
    prices = f"{trained['mlp'] / 1e6:,.0f}M parameters for a target of {target / 1e6:,.0f}M"
    return mtp, f"since mlp would train about {prices}; {serving}"


def check_sequence_length(length: int, context: int, name: str) -> None:
    """Refuse packed sequences longer than the target's context length."""
    if length > context:
        raise ValueError(f"data.length is {length}, but {name} reads at most {context} tokens: give {context} or less")
