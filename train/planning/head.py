"""A head's size and the cost of a micro-batch of it, in closed form from its modules on the meta device.

Of each row the backward pass needs a linear layer's input and output, a gated MLP's product, a norm's input in fp32 and
its result, and on CUDA the keys and values that attention reads, joined at every depth. The sum over a head's modules,
each times the rows that it computes, is what the unrolled head keeps. The loss adds the gradients of all drafts and one
chunk of logits. All rows are trained, the most that there can be.

Operations are 6 per weight and row, 8 where activations are recomputed, and those of attention.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from heads import HEADS
from heads.block import Block
from heads.common.target_config import experts_of
from heads.medusa import Medusa
from heads.modules.autoregressive import Recurrent
from heads.modules.dflash2 import GroupedConv
from heads.modules.layers import Attention, Recomputing, SwiGLU
from heads.modules.own_layer import OwnLayer
from heads.modules.vocab import SummedGradient
from heads.peagle import PEagle
from inference.target.embeddings import TargetEmbeddings
from train import optim
from train.adapt import adapt
from train.config import RunConfig
from train.losses import NOT_OF_LOGITS, READ_P
from train.objective import TEACHER_ROWS, chunk_rows

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


def head_cost(run: RunConfig, config: Any, rows: int, device: str, *, bf16: bool, accumulates: bool) -> HeadCost:
    """Return the cost of a micro-batch of `rows` rows on a type of device.

    Args:
        run: the run.
        config: the target's (text) configuration.
        rows: of `run.data.length` tokens each.
        device: cpu or cuda.
        bf16: whether products are in bf16 (autocast).
        accumulates: whether a step has further micro-batches.

    Raises:
        ValueError: the head does not fit the target, or its depths the objective's.
    """
    head, whole = head_of(run, config)
    depths, anchors, tokens = run.objective.depths, run.objective.anchors, rows * run.data.length
    if head.max_depth < depths or not isinstance(head, Recurrent):
        head.check_depths(depths)
    drafted = tokens if anchors is None else min(tokens, rows * anchors)
    batch = Batch(head, tokens, drafted, depths, device, 2 if bf16 else 4, run.trainer.recompute)
    saved, operations = _unrolled(batch, run)
    trained = [p.numel() for p in head.parameters() if p.requires_grad]
    parameters, count = sum(p.numel() for p in head.parameters()), sum(trained)
    lm_heads = [module for module in head.modules() if isinstance(module, SummedGradient)]
    lm_weights = sum(
        module.weight.numel() for module in lm_heads if module.weight is not None and module.weight.requires_grad
    )
    tables = [m.weight.numel() for m in head.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
    draft = _draft_bytes(batch, run)
    saved += 0 if isinstance(head, Medusa) else draft  # whose drafts are what its last blocks keep
    loss = draft * (2 if isinstance(head, Recurrent) and head.predicts else 1) + _chunk_bytes(batch, run)
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
    size, width = _drafts(head), head.embeddings.hidden_size
    shared = 2 / 3 * width * size if any(getattr(module, "weight", 0) is None for module in lm_heads) else 0
    operations += 6 * drafted * depths * (lm_weights / per_depth + shared)
    operations += 2 * min(tokens, depths * drafted) * width * config.vocab_size  # the teacher's logits
    vectors = count - sum(p.numel() for p in optim.hidden_matrices(head))
    return HeadCost(
        whole, count, parameters - count, vectors, max(trained), head.feature_layers, round(saved), round(loss),
        round(operations),
    )  # fmt: skip


def _drafts(head: Any) -> int:
    """Return how many tokens a head drafts."""
    size: int = head.embeddings.vocab_size if head.vocab is None else len(head.vocab.ids)
    return size


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
            if isinstance(layer, (Attention, OwnLayer)):
                shape = getattr(layer, "shape", head.embeddings.layer)
                operations += 14 * keys * count * shape.num_heads * shape.head_dim
                saved += _copied(batch) * 2 * shape.num_kv_heads * shape.head_dim * batch.item
    return saved, operations


def _draft_bytes(batch: Batch, run: RunConfig) -> int:
    """Return the bytes of the states of all drafts, which the loss reads."""
    head = batch.head
    corrections = [getattr(run.head, key, None) or 0 for key in ("markov_rank", "domino", "selector_rank")]
    wide = 4 if any(hasattr(head, name) for name in ("norm", "ln")) else batch.item  # norms give fp32
    draft: int = batch.depths * batch.tokens * (head.embeddings.hidden_size + max(corrections)) * wide
    return draft


def _chunk_bytes(batch: Batch, run: RunConfig) -> int:
    """Return the bytes of the logits of one chunk of the loss, of the target's and of the head's."""
    head, size = batch.head, _drafts(batch.head)
    teachers = min(batch.tokens, batch.depths * batch.drafted)
    chunk = min(teachers, chunk_rows(head, batch.device, batch.depths * batch.tokens))
    further = sum(name not in READ_P | NOT_OF_LOGITS for name in run.objective.losses)
    scored = (LOGIT + LOSS * further) * size * chunk * batch.drafted // teachers
    taught = TEACHER * head.embeddings.vocab_size * (chunk if head.vocab is None else min(chunk, TEACHER_ROWS))
    return PROB * size * chunk + max(taught, scored)


def computed(batch: Batch) -> Iterator[tuple[Any, float]]:
    """Yield the modules of a head with the rows that they compute at all depths together, its lm_heads left out."""
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
    """Return the rows of keys that an attention layer copies: on CUDA joined for one kernel, else shared out to slots.

    Block by block, each slot of a row has its own copy of all slots.
    """
    head, tokens, drafted, depths = batch[:4]
    slots = head.size if isinstance(head, Block) else depths - 1 if isinstance(head, PEagle) else 0
    if batch.device != "cuda":
        return drafted * slots * slots
    return 2 * tokens + drafted * slots if slots else depths * tokens + drafted * depths * (depths - 1) // 2


def per_row(module: nn.Module, item: int, chosen: int, *, recompute: bool) -> tuple[float, float]:
    """Return the bytes that a module keeps of a row, and the weights that the row is multiplied with.

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
        saved += item * module.o_proj.in_features + 4 * module.shape.num_heads
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
