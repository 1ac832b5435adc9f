"""Loading a target by transformers, quantised if the user asks for it.

Quantisation applies to linear layers; embedding and lm_head are not quantised, since heads read them. All methods here
quantise each row of activations separately, so a token's logits do not depend on other nodes of the pass, and
verification keeps the quantised target's distribution.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils.tqdm import enable_progress_bars
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from heads.common.connection import check_reachable
from heads.common.errors import one_line, panicked
from heads.common.gguf import dequantised, gguf_file, resolve_gguf, tokenizer_of
from heads.common.target_config import UNFIT, has_text_tower, read_target_config, read_target_values, reason
from heads.common.typed import Json
from heads.common.untrusted import parse_json, parsed_file, regular, shown
from heads.formats import mtp_layouts
from heads.formats.checkpoint import tensor_files
from heads.formats.hub import REPO, downloaded
from heads.formats.weights import FEW, digest
from inference.target import checkpoint
from inference.target import placement as placing
from inference.target.checkpoint import RENAMED, check_files
from inference.target.embeddings import TargetEmbeddings
from inference.target.placement import HERE, Placed, Placement

log = logging.getLogger(__name__)
LISTING = ("modeling_utils", "distributed.tensor_parallel")  # transformers' modules that log lists of tensors

AS_IT_IS = "none"
MODELOPT = "hf_quant_config.json"  # older versions of ModelOpt describe a quantisation here
SCALE = re.compile(r"\.(weight_scale\w*|scales)$")  # tensors of a quantised linear layer next to its weight
REMEDY = "give the checkpoint that it was quantised from, or one with quant_method fp8 or compressed-tensors"


def _torchao(_dtype: torch.dtype) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def _llm_int8(_dtype: torch.dtype) -> Any:
    # With a threshold (6.0 in arXiv 2208.07339) columns with an outlier in any row stay in float, so a token's logits
    # would depend on other nodes of the pass.
    # It warns at every layer of every pass in another dtype than float16.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


# transformers' configuration of each method.
METHODS: dict[str, Callable[[torch.dtype], Any]] = {
    "int8": lambda _: transformers.QuantoConfig(weights="int8"),
    "torchao_int8": _torchao,
    "bnb_int8": _llm_int8,
    "bnb_nf4": lambda dtype: transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    ),
}


def check_method(quantize: str | None) -> None:
    """Refuse an unknown method; transformers reports a missing library."""
    if quantize not in (None, AS_IT_IS, *METHODS):
        raise ValueError(f"model.quantize is {quantize!r}: choose one of {AS_IT_IS}, {', '.join(METHODS)}")


def saved_quantization(configured: PreTrainedConfig) -> Json | None:
    """Return a checkpoint's quantisation config, None if its weights are not quantised."""
    saved = getattr(configured, "quantization_config", None)
    return saved if saved is None or isinstance(saved, dict) else dict(vars(saved))


def check_quantized(path: str, configured: PreTrainedConfig, quantize: str | None) -> str | None:
    """Return how a target's weights are quantised, None if they are not.

    Raises:
        ValueError: they are quantised already and `quantize` is set, or in a way that transformers does not know: it
            would load FP8 weights without their scales.
    """
    quantize, saved, name = None if quantize == AS_IT_IS else quantize, saved_quantization(configured), None
    if saved is None:
        folder, _ = resolve_gguf(path)  # or the Hub's cache
        file = cached_file(folder, MODELOPT, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        values = {} if file is None else parsed_file(Path(file), "download it again")
        described = values.get("quantization") if isinstance(values, dict) else None
        algorithm = described.get("quant_algo") if isinstance(described, dict) else None
        name = algorithm and f"{shown(algorithm)} ({MODELOPT})"
    elif not (saved.get("load_in_8bit") or saved.get("load_in_4bit")):  # older configs name no method
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # late: it imports all quantisers

        method = saved.get("quant_method")
        algorithm = saved.get("quant_algo")
        if method not in [*AUTO_QUANTIZATION_CONFIG_MAPPING]:
            name = f"quant_method={shown(method)}" + ("" if algorithm is None else f" quant_algo={shown(algorithm)}")
    if name is not None:
        raise ValueError(
            f"model.path={path}: its weights are quantised as {name}, which this transformers does not read: {REMEDY}"
        )
    if quantize is not None and saved is not None:
        name = saved.get("quant_method")
        raise ValueError(f"model.quantize={quantize}: {path} is quantised already ({name}); leave model.quantize out")
    return quantize if saved is None else "by its checkpoint"


def load(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    quantize: str | None,
    placement: Placement = HERE,
) -> tuple["transformers.PreTrainedModel", PreTrainedTokenizerBase]:
    """Load a causal LM and its tokenizer from a folder or the Hub, as `Target.load` does.

    Args:
        dtype: the dtype of weights that are not quantised.
        device: the device of the model, where weights are quantised.
        placement: of the weights; sharded or offloaded weights stay where transformers puts them.

    Raises:
        ValueError: it cannot be loaded, quantised or placed, and why.
    """
    check_method(quantize)
    configured = configuration(path, trust_remote_code)
    with _errors(path):
        path = dequantised(path)
        tokenizer = _tokenizer(path, trust_remote_code)
        cached_file(path, MODELOPT, _raise_exceptions_for_missing_entries=False)  # `check_quantized` reads the cache
    quantized = check_quantized(path, configured, quantize)
    placing.check(placement, quantized, None, device)
    with _errors(path):
        options = placing.options(placement, configured, device, dtype, trust_remote_code)
        if quantized and not options:
            options["device_map"] = {"": str(device)}
        placed = bool(options)
        if quantize in METHODS:
            options["quantization_config"] = METHODS[quantize](dtype)
        if trust_remote_code:  # remote code's configuration is not built here
            tensor_files(path)
        else:
            check_files(path, configured)
        options |= {"trust_remote_code": trust_remote_code, "use_safetensors": True}  # pickles may run code
        if getattr(configured.get_text_config(), "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = "eager"  # sdpa, transformers' choice before 5.24, ignores the soft cap
        values = read_target_values(path, trust_remote_code, cached_alone=False)
        if has_text_tower(values):
            options |= {"config": configured, "key_mapping": RENAMED}
        for name in LISTING:  # lists of unread tensors and unsharded norms
            logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
        transformers.logging.disable_progress_bar()
        if sys.stderr.isatty():
            enable_progress_bars()  # the Hub's
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **options
        )
        model, keys = loaded
        modules = {name for name, _ in model.named_modules()}
        left = (key for key in keys["unexpected_keys"] if SCALE.sub("", key) in modules and SCALE.search(key))
        if scale := min(left, default=None):  # a layer's scale that was not read
            raise ValueError(f"its weights are quantised with scales such as {scale}, which are not read: {REMEDY}")
        if missing := sorted(keys["missing_keys"]):  # transformers initialises them at random
            raise ValueError(f"its files hold no {missing[0]}, nor {len(missing) - 1} others; download it again")
        lost = checkpoint.lost_module(path, values)
    if lost is not None:
        log.warning("%s: %s; %s", path, lost, mtp_layouts.REMEDY)
    if quantized:  # the linear layers, and not the tables that heads read
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() == 1:
            raise ValueError(
                f"model.path={path}: its lm_head is quantised, but heads read it as it is; take a checkpoint that "
                "keeps it"
            )
        if quantize in METHODS and all(type(parameter) is nn.Parameter for parameter in model.parameters()):
            raise ValueError(
                f"model.quantize={quantize}: {path} has no layer that this quantises ({type(model).__name__}); choose "
                "another one, or leave model.quantize out"
            )
    if not placed:
        model.to(device)
    return model, tokenizer


def configuration(path: str, trust_remote_code: bool) -> PreTrainedConfig:
    """Load a model's configuration; refuse a path without one."""
    with _errors(path):
        return read_target_config(path, trust_remote_code)


def note_dtype(path: str, trust_remote_code: bool, dtype: torch.dtype) -> None:
    """Note that a model runs in another dtype than its checkpoint's, unless the user asked for it."""
    saved = getattr(configuration(path, trust_remote_code).get_text_config(), "dtype", None)
    if saved not in (None, dtype):
        theirs, ours = (str(kind).removeprefix("torch.") for kind in (saved, dtype))
        log.warning("%s: a checkpoint in %s, run in %s, fast here; model.dtype=%s keeps it", path, theirs, ours, theirs)


def load_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer; refuse a path without one."""
    with _errors(path, "tokenizer"):
        return _tokenizer(path, trust_remote_code)


def _tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    folder, given = resolve_gguf(path)
    tokenizer: PreTrainedTokenizerBase = tokenizer_of(folder, given, trust_remote_code)
    tokenizer.name_or_path = path  # not the folder that a GGUF file is dequantised to
    tokenizer("a b")  # a damaged tokenizer loads, and fails at a text
    return tokenizer


@contextmanager
def _errors(path: str, what: str = "causal LM with tokenizer") -> Iterator[None]:
    """Turn transformers' loading errors into one line: no such model, or a missing library."""
    try:
        regular(Path(path))
        if not Path(path).is_dir() and gguf_file(path) is None:
            check_reachable(path)
        yield
    except BaseException as error:
        if not (isinstance(error, UNFIT) or panicked(error)):
            raise
        raise ValueError(f"model.path={path}: no {what} loads from there ({reason(error)})") from error


def method_of(model: "transformers.PreTrainedModel") -> str | None:
    """Return transformers' name of a loaded model's quantisation; None for none."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return None
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_NUMBERS = (
    "r",
    "alpha",
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
)  # the keys that scale it


def check_adapter(adapter: str, quantize: str | None) -> Path:
    """Return an adapter's folder: one that peft saved, or OWNER/NAME on the Hub.

    Raises:
        ValueError: it is missing or not in safetensors, or the target is to be quantised.
    """
    if quantize not in (None, AS_IT_IS):
        raise ValueError(
            f"model.adapter={adapter} is merged into full weights, which model.quantize={quantize} does not keep: "
            "merge it, save the model, and give that as model.path with model.quantize"
        )
    folder = Path(adapter).expanduser()
    if not folder.is_dir():
        if not REPO.fullmatch(adapter):
            raise ValueError(f"model.adapter={adapter}: no such folder; give one that peft saved, or OWNER/NAME")
        folder = downloaded(adapter, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"model.adapter={adapter}: not an adapter as peft saves it, it holds no {name}")
    return folder


def merge_adapter(
    model: "transformers.PreTrainedModel", path: str, adapter: str, folder: Path
) -> tuple["transformers.PreTrainedModel", Placed]:
    """Merge an adapter into the model that is loaded from `path`, whose weights are on one device.

    Raises:
        ValueError: it is another model's or of a kind that cannot be merged, or the checkpoint is quantised.
    """
    if method_of(model) is not None:
        raise ValueError(
            f"model.adapter={adapter}: {path} is quantised, and an adapter is merged into full weights: merge it into "
            "those, save the model, quantise it and give that as model.path"
        )
    try:
        hashed = adapter_fingerprint(checkpoint.fingerprint(model, path), folder)
        import peft

        config = peft.PeftConfig.from_pretrained(str(folder))
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type.value} adds tokens, not weights, and cannot be merged")
        wrapped = peft.PeftModel(model, config)
        report = wrapped.load_adapter(str(folder), "default", torch_device=str(model.device))
        if odd := [*report.missing_keys, *report.unexpected_keys]:
            raise ValueError(f"only one of both has {odd[0]}")
        merged = wrapped.merge_and_unload()
    except (*UNFIT, re.error) as error:
        reason = one_line(error)[:300]
        raise ValueError(
            f"model.adapter={adapter} cannot be merged into model.path={path}: {reason}; give the model that it was "
            "trained for, or save it with peft again"
        ) from error
    return merged, Placed(merged.device, TargetEmbeddings(merged), hashed, adapter=adapter)


def adapter_fingerprint(base: str, folder: Path) -> str:
    """Hash the base model's fingerprint, a few values of each of the adapter's tensors, and their scales.

    Merged weights are not hashed, since they differ in bf16 and fp32. Refuse a tensor that cannot be merged.
    """
    config = parse_json((folder / ADAPTER_CONFIG).read_bytes())
    few = {}
    if not isinstance(config, dict):
        raise ValueError(f"its {ADAPTER_CONFIG} is {shown(config)}, expected a mapping")
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as opened:
        for name in sorted(opened.keys()):
            tensor = opened.get_tensor(name)
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
                raise ValueError(f"{name} is of {tensor.dtype} and holds a value that is not finite")
            few[name] = tensor.flatten()[:FEW].clone()
    return digest(few, base + json.dumps([config.get(name) for name in ADAPTER_NUMBERS]))
