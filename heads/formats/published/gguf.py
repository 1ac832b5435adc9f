"""GGUF for llama.cpp: EAGLE-3, DFlash and DSpark, converted from the folder for other engines.

Names, keys and the order of rotary pairs are those of llama.cpp's own converter (conversion/llama.py and qwen.py in
llama-cpp-python 0.3.36), which also reads that folder. The tokenizer's keys are copied from the target's own GGUF
file, so that both have the same tokenizer.
"""

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from heads.base import NamedTensors
from heads.common.errors import one_line
from heads.common.rope import SCALINGS, Rope
from heads.common.typed import Json
from heads.common.untrusted import shown
from heads.formats.published import dflash, eagle3
from heads.formats.published.exporting import Export, ExportedHead
from heads.formats.published.plan import BLOCK_OUTPUTS, KNOWN, OFFSETS, STATES, as_states
from heads.formats.store import CONFIG, WEIGHTS
from heads.modules.fusion import EAGLE3_LAYERS

FILE = "head.gguf"
VERSION = 2  # version of GGUF's quantisation
TOKENIZER, MASK = "tokenizer.", "tokenizer.ggml.mask_token_id"  # prefix of the copied keys, and the head's own key
IN_LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
AT_TOP = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}  # fmt: skip
ROTATED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
SIZES = {  # the architecture's keys, and the matching keys of config.json
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
LAYER = re.compile(r"layers\.(\d+)\.(.*)")


def of_eagle3(source: Export) -> ExportedHead:
    """Export an EAGLE-3 head for llama.cpp; refuse unsupported options."""
    source.refuse(layers=1, feature_norm=False, norm_output=False)
    _check_yarn(source)
    if (count := len(source.head.feature_layers)) != EAGLE3_LAYERS:
        raise source.refusal(
            f"{count} feature layers", "and llama.cpp reads three; train with head.feature_layers=null"
        )
    return eagle3.engines(source)


def of_block(source: Export) -> ExportedHead:
    """Export a DFlash or DSpark head for llama.cpp; refuse unsupported and untested options."""
    source.refuse(domino=None, selector_rank=None, conv=None)
    _check_yarn(source)
    return dflash.engines(source)


def _check_yarn(source: Export) -> None:
    """Refuse YaRN with numbers that GGUF cannot hold: llama.cpp uses the paper's values."""
    scaling = source.config.rope_scaling or {}
    if scaling.get("rope_type") == "yarn" and (further := sorted(scaling.keys() - {"rope_type", *SCALINGS["yarn"]})):
        raise source.refusal(f"rope_scaling of type yarn with {further[0]}", "which is not written for llama.cpp")


def write(folder: Path, tokenizer: Json) -> None:
    """Write FILE into an exported folder, with the tokenizer fields that `tokenizer_of` returns."""
    library = _library()
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tensors = load_file(folder / WEIGHTS)
    kind = "eagle3" if STATES in config else "dflash"
    writer = library.GGUFWriter(folder / FILE, kind)
    writer.add_quantization_version(VERSION)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in _settings(kind, config, tensors).items():
        adders.get(type(value), writer.add_array)(f"{kind}.{key}", value)
    for key, field in tokenizer.items():
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    if kind == "dflash":
        writer.add_uint32(MASK, config["dflash_config"]["mask_token_id"])
    kinds = library.GGMLQuantizationType
    stored = {torch.bfloat16: kinds.BF16, torch.float16: kinds.F16}
    for name, tensor in _renamed(kind, config, tensors).items():
        if tensor.is_floating_point():  # llama.cpp needs matrices in their dtype and vectors in fp32
            as_written = stored.get(tensor.dtype, kinds.F32) if tensor.ndim > 1 else kinds.F32
            writer.add_tensor(name, library.quants.quantize(tensor.float().numpy(), as_written), raw_dtype=as_written)
        else:
            writer.add_tensor(name, tensor.numpy(), raw_dtype=kinds.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ValueError("format=gguf needs a library that is not installed: pip install gguf") from None


def _settings(kind: str, config: Json, tensors: NamedTensors) -> Json:
    """Return the architecture's keys without their prefix."""
    settings = {key: config[name] for key, name in SIZES.items() if name in config}
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        settings |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": float(scaling["factor"])}
    if scaling.get("rope_type") == "yarn":
        settings["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    if kind == "eagle3":
        read = {"target_layers": config[STATES], "target_hidden_size": config["hidden_size"]}
        return settings | read | {key: config[key] for key in ("norm_before_residual", "norm_before_fc")}
    block = config["dflash_config"]
    settings |= {"target_layers": as_states(block[BLOCK_OUTPUTS]), "block_size": config["block_size"]}
    settings["attention.causal"] = config["is_causal"]
    if "markov_rank" in config:
        settings["sample_from_anchor"] = block["sample_from_anchor"]
        settings["has_confidence_head"] = "confidence_head.proj.weight" in tensors
    return settings


def tokenizer_of(target: Path, size: int, ids: Mapping[str, int]) -> Json:
    """Return the tokenizer's fields of a target's GGUF file by key, for `size` tokens with padding.

    Refuse what is no GGUF, of an architecture that llama.cpp does not know, or of a tokenizer without these `ids`.
    """
    library = _library()
    try:
        fields = library.GGUFReader(target).fields
        tokens, architecture = (fields[key].contents() for key in ("tokenizer.ggml.tokens", "general.architecture"))
        count = len(tokens)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"gguf={target}: no GGUF file of a target ({one_line(error)}); give the file that llama.cpp serves"
        ) from None
    if architecture not in library.MODEL_ARCH_NAMES.values():
        raise ValueError(
            f"gguf={target}: of the architecture {shown(architecture)}, which llama.cpp does not know; or newer than "
            "the library: pip install -U gguf"
        )
    if count != size:
        raise ValueError(
            f"gguf={target}: a vocabulary of {count} tokens, and the head's is {size}; give its own target's file"
        )
    # The same tokenizer may differ in a few tokens: the converter writes the whitespace of added tokens differently.
    if 2 * sum(index < size and tokens[index] == token for token, index in ids.items()) < len(ids):
        raise ValueError(
            f"gguf={target}: most of its tokens are not those of the target's tokenizer; give its own target's file"
        )
    return {key: field for key, field in fields.items() if key.startswith(TOKENIZER) and key != MASK}


def _renamed(kind: str, config: Json, tensors: NamedTensors) -> NamedTensors:
    renamed = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if name == OFFSETS:
            renamed[OFFSETS] = tensor + torch.arange(len(tensor))
        elif match := LAYER.fullmatch(module):
            heads = ROTATED.get(match[2]) if kind == "eagle3" else None
            as_read = (
                tensor if heads is None else tensor.unflatten(0, (config[heads], 2, -1)).transpose(1, 2).flatten(0, 2)
            )
            renamed[f"blk.{match[1]}.{IN_LAYER[match[2]]}.{last}"] = as_read
        elif name != KNOWN:
            renamed[f"{AT_TOP[module]}.{last}"] = tensor
    scaling = config["rope_scaling"] or {}
    if scaling.get("rope_type") == "llama3":
        unscaled = {"rope_type": "linear", "factor": 1.0}  # transformers rounds this scaling as it rounds the others
        ropes = (Rope(config["rope_theta"], kind) for kind in (unscaled, scaling))
        plain, slow = (rope.frequency(config["head_dim"])[0] for rope in ropes)
        renamed["rope_freqs.weight"] = plain / slow
    return renamed
