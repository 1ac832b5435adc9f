"""A target's shape from its configuration alone: parameters, operations and memory of a forward pass."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from heads.base import LayerShape, shape_of
from heads.common.target_config import UNFIT, cache_argument, experts_of, read_target_config, reason
from inference.target.attention import packing
from inference.target.cache import recurrence
from inference.target.config import ModelConfig
from inference.target.embeddings import TargetEmbeddings
from inference.target.loading import saved_quantization

QUANTIZED = {"int8": 1.0, "torchao_int8": 1.0, "bnb_int8": 1.0, "bnb_nf4": 0.56}  # bytes a weight, scales included
# Of a checkpoint that is quantised already, by its quant_method where that alone says the bits.
BY_METHOD = {"fp8": 1.0, "fbgemm_fp8": 1.0, "eetq": 1.0, "mxfp4": 0.53}
BITS = ("bits", "w_bit", "num_bits")  # its keys for the bits of a weight
SCALES = 0.06  # bytes a weight of less than 8 bits takes in the scales of its group


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target; parameters are counted in numbers, not bytes."""

    layer: LayerShape  # of a decoder layer, which is also the default of a head's
    feed: int  # inner width of the MLP that a token passes through, summed over its experts
    layers: int
    width: int  # of hidden states
    vocab: int  # of the lm_head
    embeddings: int  # parameters of embedding and lm_head, counted once where they are tied
    inner: int  # all other parameters, those of the layers and norms
    active: int  # those of `inner` that a token passes through
    packs: bool  # whether attention runs document by document, without a mask of a row's length squared
    caching: int  # layers that keep keys and values
    states: int  # bytes of a sequence's recurrent states, in 16 bits where they follow the target's dtype
    apart: bool  # whether its embedding and lm_head are weights alone, which load without the layers
    beyond: str | None  # what it does beside reading its embedding and lm_head, as `beyond_tables`

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.embeddings + self.inner

    def flops(self, tokens: int, length: int) -> int:
        """Return the floating-point operations of a forward pass over rows of `length` tokens, without the lm_head.

        Attention counts every query with every key of its row, as if that were one document: the most it can be.
        """
        attention = 4 * tokens * length * self.layer.num_heads * self.layer.head_dim * self.layers
        return 2 * self.active * tokens + attention

    def working(self, tokens: int, length: int, item: int, features: int, group: int = 1) -> int:
        """Return the bytes of a forward pass without gradient, above weights and above the features that it returns.

        A layer frees the tensors of the one before it, so the peak of one layer counts: attention, with keys and values
        repeated for every query head and rotated ones beside the originals, or the MLP, with both its inner states and
        their product. Added are the kept states of the feature layers, and the mask of an attention that needs one. A
        value has `item` bytes, and a `group` of devices shares a layer's inner states.
        """
        queries, keys = self.layer.num_heads * self.layer.head_dim, self.layer.num_kv_heads * self.layer.head_dim
        attention = 2 * self.width + (6 * queries + 3 * keys) // group
        feed = 2 * self.width + 3 * self.feed // group
        norm = self.width * (2 + 8 // item)
        # Of the mask: same document, not later, both of them, and the additive form.
        mask = 0 if self.packs else tokens * length * (3 + item)
        return tokens * item * (max(attention, feed, norm) + features * self.width) + mask

    def cache(self, tokens: int, item: int) -> int:
        """Return the bytes of one sequence's cache of so many tokens, and of its states before a pass that verifies."""
        entries = 2 * self.caching * self.layer.num_kv_heads * self.layer.head_dim * tokens * item
        return entries + 2 * self.states * item // 2


_configurations: dict[tuple[str, bool, str, float], PretrainedConfig] = {}


def configuration(model: ModelConfig) -> PretrainedConfig:
    """Return a target's configuration, from its folder, the cache, `shape` or the Hub; refuse one that none has."""
    file = Path(model.path, "config.json")
    changed = file.stat().st_mtime if file.is_file() else 0.0
    key = model.path, model.trust_remote_code, repr(model.shape), changed
    if key not in _configurations:  # a choice of placements asks many times
        _configurations[key] = _configuration(model)
    return _configurations[key]


def _configuration(model: ModelConfig) -> PretrainedConfig:
    try:
        return read_target_config(model.path, model.trust_remote_code, cached_alone=True)
    except ValueError:
        pass
    shape = dict(model.shape or {})
    if shape.pop("of", None) == model.path:
        try:
            return transformers.AutoConfig.for_model(**shape)
        except UNFIT as error:
            raise ValueError(
                f"model.shape of {model.path}: no configuration of transformers ({reason(error)})"
            ) from error
    try:
        return read_target_config(model.path, model.trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"model.path={model.path}: its configuration cannot be read ({error}), and model.shape is not of it; give "
            "a folder that holds its config.json, or its values as model.shape, with of: the path"
        ) from None


def saved_bytes(model: ModelConfig) -> float | None:
    """Return the bytes of a weight of a quantised checkpoint, scales included; None where it is not, or names no bits.

    Layers that it keeps in 16 bits count as all others.
    """
    saved = saved_quantization(configuration(model)) or {}
    method, groups = saved.get("quant_method"), saved.get("config_groups")  # those of compressed-tensors
    if isinstance(method, str) and method in BY_METHOD:
        return BY_METHOD[method]
    inner = groups.values() if isinstance(groups, dict) else ()
    sections = [saved, *(group.get("weights") for group in inner if isinstance(group, dict))]
    values = [section.get(key) for section in sections if isinstance(section, dict) for key in BITS]
    values += [bits for bits in (4, 8) if saved.get(f"load_in_{bits}bit") is True]
    bits = max((value for value in values if type(value) is int and 0 < value <= 16), default=None)
    return None if bits is None else bits / 8 + (SCALES if bits < 8 else 0)


def weight_bytes(model: ModelConfig, item: float, device: str) -> float:
    """Return the bytes that a weight of a target's layers takes once it is loaded, `item` where it is not quantised."""
    saved = saved_bytes(model) if _unpacked(model, device) is None else None
    return QUANTIZED.get(model.quantize or "", item) if saved is None else saved


def _unpacked(model: ModelConfig, device: str) -> str | None:
    """Return why transformers makes whole weights of a quantised checkpoint, None where it keeps them as they are."""
    method = (saved_quantization(configuration(model)) or {}).get("quant_method")
    if method == "fp8" and device == "cpu":
        return "a CPU loads it whole"
    return "without the package kernels it is loaded whole" if method == "mxfp4" and not find_spec("kernels") else None


def quantization_note(model: ModelConfig, device: str) -> str | None:
    """Return how a quantised checkpoint is counted, None for one that is not quantised."""
    saved = saved_quantization(configuration(model))
    if saved is None:
        return None
    why, size = _unpacked(model, device), saved_bytes(model)
    counted = f"{size:.2f} bytes a weight" if size and not why else f"counted in full: {why or 'it names no bits'}"
    return f"{saved.get('quant_method')}, {counted}"


_shapes: dict[str, TargetShape] = {}


def target_shape(model: ModelConfig) -> TargetShape:
    """Return a target's shape, its parameters counted on the meta device; refuse one of which no model can be made."""
    key = f"{model.path} {configuration(model).to_json_string(use_diff=False)}"
    if key not in _shapes:  # a choice of placements asks many times
        _shapes[key] = _shape(model)
    return _shapes[key]


def _shape(model: ModelConfig) -> TargetShape:
    config = configuration(model)
    try:
        with torch.device("meta"):
            built = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        built.tie_weights()
    except UNFIT as error:
        raise ValueError(
            f"model.path={model.path}: no model can be made of its config.json ({reason(error)})"
        ) from error
    text: Any = config.get_text_config()
    ends = built.get_input_embeddings(), built.get_output_embeddings()
    embeddings = {id(module.weight): module.weight for module in ends}
    inner = {name: p.numel() for name, p in built.named_parameters() if id(p) not in embeddings}
    experts = sum(count for name, count in inner.items() if ".experts." in name)
    available, chosen = experts_of(text) or (1, 0)
    layer = shape_of(text)
    expert = getattr(text, "moe_intermediate_size", None) or layer.intermediate_size
    is_recurrent = recurrence(text, torch.nn.ModuleList()) is not None
    caching, states = cached(built) if is_recurrent else (text.num_hidden_layers, 0)
    return TargetShape(
        layer, chosen * expert if experts else layer.intermediate_size,
        text.num_hidden_layers, text.hidden_size, text.vocab_size,
        sum(weight.numel() for weight in embeddings.values()), sum(inner.values()),
        sum(inner.values()) - experts + experts * chosen // available, is_recurrent or packing(built) is not None,
        caching, states, not any(list(module.buffers()) for module in ends), TargetEmbeddings(built).beyond_tables(),
    )  # fmt: skip


@torch.no_grad()
def cached(built: Any) -> tuple[int, int]:
    """Return how many layers of a model on the meta device keep keys and values, and the bytes of all others' states.

    A pass over two tokens shows them; it changes the model's dtype to bf16, which experts' kernels ask for.
    """
    cache: Any = transformers.DynamicCache(config=built.config)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    built.to(torch.bfloat16)(input_ids=tokens, use_cache=True, **{cache_argument(built): cache})
    states = [
        state
        for layer in cache.layers
        for held in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for state in held.values()
        if state is not None
    ]
    caching = sum(getattr(layer, "keys", None) is not None for layer in cache.layers)
    return caching, sum(state.numel() * state.element_size() for state in states)
