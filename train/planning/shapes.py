"""The cost of a run in closed form: a target's shape from its configuration, a head's cost from its modules.

For each row the backward pass saves a linear layer's input and output, a gated MLP's product, a norm's input in fp32
and its result, and on CUDA the keys and values of attention at every depth. The activations are the sum over a head's
modules, each times its rows. The loss adds the gradients of all drafts and one chunk of logits. All rows count as
trained.

Operations are 6 per weight and row, 8 with recomputed activations, and those of attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from heads import HEADS
from heads.base import HeadModule, LayerDims, layer_dims_of
from heads.block import Block, GroupedConv
from heads.common.target_config import UNFIT, experts_of, read_target_config, reason
from heads.medusa import Medusa
from heads.modules.autoregressive import Recurrent
from heads.modules.layers import Attention, Recomputing, SwiGLU, TargetLayer
from heads.modules.vocab import SummedGradient
from heads.peagle import PEagle
from inference.target.attention import packing
from inference.target.cache import recurrence
from inference.target.config import ModelConfig
from inference.target.embeddings import TargetEmbeddings
from inference.target.loading import saved_quantization
from train import optim
from train.config import RunConfig
from train.losses import NOT_OF_LOGITS, READ_P
from train.objective import TEACHER_ROWS, chunk_rows
from train.start import adapt

QUANTIZED = {"int8": 1.0, "torchao_int8": 1.0, "bnb_int8": 1.0, "bnb_nf4": 0.56}  # bytes a weight, scales included
# Of a checkpoint that is quantised already, by its quant_method where that alone says the bits.
BY_METHOD = {"fp8": 1.0, "fbgemm_fp8": 1.0, "eetq": 1.0, "mxfp4": 0.53}
BITS = ("bits", "w_bit", "num_bits")  # its keys for the bits of a weight
SCALES = 0.06  # bytes a weight of less than 8 bits takes in the scales of its group


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a target; parameters are counted in numbers, not bytes."""

    layer_dims: LayerDims  # of a decoder layer, which is also the default of a head's
    feed: int  # inner width of the MLP that a token passes through, summed over its experts
    layers: int
    width: int  # of hidden states
    vocab: int  # of the lm_head
    embeddings: int  # parameters of embedding and lm_head, counted once where they are tied
    inner: int  # all other parameters, those of the layers and norms
    active: int  # those of `inner` that a token passes through
    packs: bool  # whether attention runs over documents, without a mask of quadratic size
    apart: bool  # whether its embedding and lm_head are weights alone, which load without the layers
    beyond: list[str]  # its `beyond_tables`

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.embeddings + self.inner

    def flops(self, tokens: int, length: int) -> int:
        """Return the operations of a forward pass over sequences of `length` tokens, without the lm_head.

        Attention counts every query with every key of its sequence, an upper bound.
        """
        attention = 4 * tokens * length * self.layer_dims.num_heads * self.layer_dims.head_dim * self.layers
        return 2 * self.active * tokens + attention

    def working(self, tokens: int, length: int, item: int, features: int, group: int = 1) -> int:
        """Return the temporary bytes of a forward pass without gradient, besides the returned features.

        A layer frees the tensors of the one before it, so the peak of one layer counts: attention, with keys and values
        repeated for every query head and rotated ones beside the originals, or the MLP, with both its inner states and
        their product. Added are the kept states of the feature layers, and the mask of an attention that needs one. A
        value has `item` bytes, and a `group` of devices shares a layer's inner states.
        """
        dims = self.layer_dims
        queries, keys = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        attention = 2 * self.width + (6 * queries + 3 * keys) // group
        feed = 2 * self.width + 3 * self.feed // group
        norm = self.width * (2 + 8 // item)
        # Of the mask: same document, not later, both of them, and the additive form.
        mask = 0 if self.packs else tokens * length * (3 + item)
        return tokens * item * (max(attention, feed, norm) + features * self.width) + mask


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


def weight_bytes(model: ModelConfig, item: float, device: str) -> float:
    """Return the bytes that a weight of a target's layers takes once it is loaded, `item` where it is not quantised.

    Of a quantised checkpoint its `quantization_config` names the bits; layers that it keeps in 16 bits count as all
    others. It counts in full where it names none, and where transformers makes whole weights of it: of fp8 on a CPU, of
    mxfp4 without the package kernels.
    """
    saved = saved_quantization(configuration(model)) or {}
    method, groups = saved.get("quant_method"), saved.get("config_groups")  # those of compressed-tensors
    if (method == "fp8" and device == "cpu") or (method == "mxfp4" and not find_spec("kernels")):
        return item
    if isinstance(method, str) and method in BY_METHOD:
        return BY_METHOD[method]
    inner = groups.values() if isinstance(groups, dict) else ()
    sections = [saved, *(group.get("weights") for group in inner if isinstance(group, dict))]
    values = [section.get(key) for section in sections if isinstance(section, dict) for key in BITS]
    values += [bits for bits in (4, 8) if saved.get(f"load_in_{bits}bit") is True]
    bits = max((value for value in values if type(value) is int and 0 < value <= 16), default=None)
    if bits is None:
        return QUANTIZED.get(model.quantize or "", item)
    return bits / 8 + (SCALES if bits < 8 else 0)


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
    layer = layer_dims_of(text)
    expert = getattr(text, "moe_intermediate_size", None) or layer.intermediate_size
    packs = recurrence(text, torch.nn.ModuleList()) is not None or packing(built) is not None
    return TargetShape(
        layer, chosen * expert if experts else layer.intermediate_size,
        text.num_hidden_layers, text.hidden_size, text.vocab_size,
        sum(weight.numel() for weight in embeddings.values()), sum(inner.values()),
        sum(inner.values()) - experts + experts * chosen // available, packs,
        not any(list(module.buffers()) for module in ends), TargetEmbeddings(built).beyond_tables(),
    )  # fmt: skip


ONCE = ("fusion", "hidden_norm", "inject_norm", "prefix")  # modules that read the target's rows, once
# Bytes of each logit of a chunk: of the draft (as it is and in fp32, its log-probs, gradients), of each further loss,
# of the target while its probabilities are computed, and of those.
LOGIT, LOSS, TEACHER, PROB = 12, 12, 10, 4
HALF_BLOCK = 64  # keys: attention works in blocks of 128 queries, half of whose pairs are masked


class HeadCost(NamedTuple):
    """The parameters of a head, and what a micro-batch of it takes: bytes, and operations of both passes."""

    whole: int  # parameters without adapters
    trained: int
    frozen: int
    vectors: int  # trained parameters that have two moments under Muon
    largest: int  # parameters of the largest trained tensor
    feature_layers: tuple[int, ...]  # of the target, that the head reads
    activations: int  # kept from the forward to the backward pass, with copies of the weights in bf16
    loss: int  # a chunk of logits, the gradients of all drafts
    flops: int


class Batch(NamedTuple):
    """A head and a micro-batch of it, of `tokens` rows, of which `drafted` are drafted from at each depth."""

    head: Any
    tokens: int
    drafted: int
    depths: int
    device: str  # its type
    item: int  # bytes of a value of a product
    recompute: bool


_heads: dict[str, tuple[Any, int]] = {}


def embeddings_of(config: Any, dtype: torch.dtype) -> TargetEmbeddings:
    """Return the embeddings of a target that is not loaded, by its (text) configuration."""
    table = nn.Embedding(config.vocab_size, config.hidden_size)
    lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    parts = {"get_input_embeddings": lambda: table, "get_output_embeddings": lambda: lm_head}
    model: Any = SimpleNamespace(config=config, **parts)
    return TargetEmbeddings(model).to(dtype).requires_grad_(False)


def head_of(run: RunConfig, config: Any) -> tuple[Any, int]:
    """Return a run's head on the meta device, and its number of parameters without adapters.

    Args:
        run: the run.
        config: the target's (text) configuration.
    """
    key = repr((run.head, run.peft, config))  # configurations are not hashable
    if key not in _heads:  # a choice of placements asks many times
        with torch.device("meta"):
            head: Any = HEADS[run.head.name](run.head, embeddings_of(config, torch.float32))
            whole = sum(p.numel() for p in head.parameters())
            adapt(head, run.peft)
        _heads[key] = head, whole
    return _heads[key]


def head_cost(
    run: RunConfig, config: Any, micro_batch_size: int, device: str, *, bf16: bool, accumulates: bool
) -> HeadCost:
    """Return the cost of a micro-batch on a type of device.

    Args:
        run: the run.
        config: the target's (text) configuration.
        micro_batch_size: packed sequences of `run.data.length` tokens.
        device: cpu or cuda.
        bf16: whether products are in bf16 (autocast).
        accumulates: whether a step has further micro-batches.

    Raises:
        ValueError: the head does not fit the target, or its depths the objective's.
    """
    head, whole = head_of(run, config)
    depths, anchors, tokens = run.objective.depths, run.objective.anchors, micro_batch_size * run.data.length
    if isinstance(head, HeadModule) and (head.max_depth < depths or not isinstance(head, Recurrent)):
        head.check_depths(depths)
    drafted = tokens if anchors is None else min(tokens, micro_batch_size * anchors)
    batch = Batch(head, tokens, drafted, depths, device, 2 if bf16 else 4, run.trainer.recompute)
    saved, operations = _unrolled(batch, run)
    trained = [p.numel() for p in head.parameters() if p.requires_grad]
    parameters, count = sum(p.numel() for p in head.parameters()), sum(trained)
    lm_heads = [module for module in head.modules() if isinstance(module, SummedGradient)]
    lm_weights = sum(
        module.weight.numel() for module in lm_heads if module.weight is not None and module.weight.requires_grad
    )
    tables = [m.weight.numel() for m in head.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    size, width = head.embeddings.vocab_size if head.vocab is None else len(head.vocab.ids), head.embeddings.hidden_size
    # The states of all drafts, which the loss reads; norms give fp32.
    corrections = [getattr(run.head, key, None) or 0 for key in ("markov_rank", "domino", "selector_rank")]
    draft = depths * tokens * (width + max(corrections))
    draft *= 4 if any(hasattr(head, name) for name in ("norm", "ln")) else batch.item
    saved += 0 if isinstance(head, Medusa) else draft  # whose drafts are what its last blocks keep
    # The logits of one chunk, of the target's and of the head's.
    teachers = min(tokens, depths * drafted)
    chunk = min(teachers, chunk_rows(head, device, depths * tokens))
    further = sum(name not in READ_P | NOT_OF_LOGITS for name in run.objective.losses)
    scored = (LOGIT + LOSS * further) * size * chunk * drafted // teachers
    taught = TEACHER * head.embeddings.vocab_size * (chunk if head.vocab is None else min(chunk, TEACHER_ROWS))
    loss = draft * (2 if isinstance(head, Recurrent) and head.predicts else 1)
    loss += PROB * size * chunk + max(taught, scored)
    if bf16:
        saved, loss = saved + 2 * (parameters - lm_weights - sum(tables)), loss + 2 * lm_weights
    # All gradients count as resident. Those of a first micro-batch come later, but for the lm_heads'.
    loss = loss + 4 * lm_weights if accumulates else max(loss - 4 * (count - lm_weights), 0)
    if len(tables) == 1 and depths > 1:  # each depth has a gradient of the whole table, which is added to the others'
        loss = max(loss, 8 * tables[0])
    lists = [submodule for submodule in head.children() if isinstance(submodule, nn.ModuleList)]
    per_depth = max(
        (len(submodule) for submodule in lists if any(module in lm_heads for module in submodule)), default=1
    )
    shared = 2 / 3 * width * size if any(getattr(module, "weight", 0) is None for module in lm_heads) else 0
    operations += 6 * drafted * depths * (lm_weights / per_depth + shared)
    operations += 2 * teachers * width * config.vocab_size  # the teacher's logits
    vectors = count - sum(p.numel() for p in optim.hidden_matrices(head))
    return HeadCost(
        whole, count, parameters - count, vectors, max(trained), head.feature_layers, round(saved), round(loss),
        round(operations),
    )  # fmt: skip


def _unrolled(batch: Batch, run: RunConfig) -> tuple[float, float]:
    """Return the bytes that the unrolled head keeps, its drafts left out, and the operations of both passes."""
    head, length = batch.head, run.data.length
    chosen = (experts_of(head.embeddings.config) or (1, 1))[1]
    reach = min(length, getattr(run.head, "length", None) or length)
    keys = min(length, reach - reach * reach / (2 * length) + HALF_BLOCK)
    saved = operations = 0.0
    for submodule, count in computed(batch):
        size, weights = per_row(submodule, batch.item, chosen, recompute=batch.recompute)
        saved, operations = saved + count * size, operations + (8 if batch.recompute else 6) * count * weights
        for layer in submodule.modules():
            if isinstance(layer, (Attention, TargetLayer)):
                dims = getattr(layer, "dims", head.embeddings.layer_dims)
                operations += 14 * keys * count * dims.num_heads * dims.head_dim
                saved += _copied(batch) * 2 * dims.num_kv_heads * dims.head_dim * batch.item
    return saved, operations


def computed(batch: Batch) -> Iterator[tuple[Any, float]]:
    """Yield a head's modules except lm_heads, with the rows that they compute at all depths."""
    head, tokens, drafted, depths = batch[:4]
    for name, submodule in head.named_children():
        if name in ONCE:
            yield submodule, tokens
        elif isinstance(head, Recurrent):
            yield submodule, tokens + (depths - 1) * drafted
        elif isinstance(head, Block):
            yield submodule, drafted * head.size
        elif isinstance(submodule, nn.ModuleList):  # one a depth, or a few that all depths share
            yield submodule, drafted * depths / len(submodule)
    if isinstance(head, Block):
        attentions: list[Any] = [layer.self_attn for layer in head.layers]
        yield from (
            (submodule, tokens) for attention in attentions for submodule in (attention.k_proj, attention.v_proj)
        )


def _copied(batch: Batch) -> int:
    """Return the rows of keys that attention copies: on CUDA concatenated for one kernel, else for masked blocks.

    Block by block, each position of a masked block has its own copy of the block.
    """
    head, tokens, drafted, depths = batch[:4]
    slots = head.size if isinstance(head, Block) else depths - 1 if isinstance(head, PEagle) else 0
    if batch.device != "cuda":
        return drafted * slots * slots
    return 2 * tokens + drafted * slots if slots else depths * tokens + drafted * depths * (depths - 1) // 2


def per_row(module: nn.Module, item: int, chosen: int, *, recompute: bool) -> tuple[float, float]:
    """Return a module's saved bytes per row, and the weights that a row is multiplied with.

    Args:
        module: with all that is in it.
        item: bytes of a value of a product.
        chosen: the experts that a row passes through.
        recompute: whether a gated MLP and norms keep their input and no more.
    """
    if isinstance(module, SummedGradient):
        return 0, 0
    if isinstance(module, nn.Linear):
        return item * (module.in_features + module.out_features), module.weight.numel()
    inner = [per_row(child, item, chosen, recompute=recompute) for child in module.children()]
    saved, weights = (sum(values) for values in zip((0.0, 0.0), *inner, strict=True))
    repeat: int = getattr(module, "repeat", 1)  # of a tied block
    saved, weights = saved * repeat, weights * repeat
    if isinstance(module, SwiGLU) and recompute:
        return 4 * module.gate_proj.in_features, weights
    if isinstance(module, Attention):  # its output as it is and as o_proj reads it, the sums of exponentials
        saved += item * module.o_proj.in_features + 4 * module.dims.num_heads
        saved -= 2 * item * module.q_proj.in_features if recompute else 0  # queries, keys and values share it
    norm = item if recompute and isinstance(module, Recomputing) else 4 + item
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 1 and not isinstance(module, nn.GRUCell):
            saved += norm * parameter.numel()
        elif parameter.ndim == 2 and isinstance(module, nn.GRUCell):
            saved, weights = saved + 8 * parameter.shape[0], weights + parameter.numel()
        elif isinstance(module, GroupedConv):
            saved += 8 * parameter.numel()
        elif parameter.ndim == 3:  # experts
            saved += chosen * item * sum(parameter.shape[1:])
            weights += chosen * parameter[0].numel()
    if hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Linear):
        saved += item * module.down_proj.in_features
    for name in ("q", "k"):
        if any(True for _ in getattr(module, f"{name}_norm", nn.Identity()).parameters()):
            saved += (norm + item) * getattr(module, f"{name}_proj").out_features
    return saved, weights
