"""Assembling a head from a published folder: every tensor is mapped or refused."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heads import HEADS
from heads.base import Embeddings, NamedTensors, embedding_of
from heads.common.rope import Rope, positions_of
from heads.common.typed import Json, typed
from heads.common.untrusted import shown
from heads.formats.store import earlier
from heads.formats.weights import meta_state_dict

STATES = "eagle_aux_hidden_state_layer_ids"  # key of hidden states at the top level, of layer outputs in `eagle_config`
BLOCK_STATES, BLOCK_OUTPUTS = "aux_hidden_state_layer_ids", "target_layer_ids"  # keys of block heads


def as_states(outputs: Sequence[int]) -> list[int]:
    """Convert indices of layer outputs to indices of hidden states, in which the embedding is 0."""
    return [i + 1 for i in outputs]


def as_outputs(states: Sequence[int]) -> list[int]:
    """Convert indices of hidden states to indices of layer outputs, in which the embedding is -1."""
    return [i - 1 for i in states]


log = logging.getLogger(__name__)

OFFSETS, KNOWN = "d2t", "t2d"  # offset from a draft id to the target's id; mask over the target's vocabulary
EMBEDDING = "embed_tokens.weight"  # suffix of the name of a copy of the target's embedding
OVER_VOCABULARY = re.compile(r"lm_heads?\.|bias\.weight$|domino\.up\.")  # tensors of a head with one row per token
# transformers' defaults for a Llama's config.json, with which published heads run.
PLAIN, EPS = Rope(10000.0), 1e-6
ACTIVATIONS = (None, "silu", "swish")


class PublishedHead(NamedTuple):
    """A published head: its config.json, and its tensors by their names without a common prefix."""

    folder: Path
    config: Json
    tensors: NamedTensors

    def tensor(self, name: str, key: str | None = None) -> Tensor:
        """Return one tensor; refuse a folder without it, naming the `key` of config.json that implies it."""
        if name not in self.tensors:
            why = f", and config.json gives {key}" if key else ""
            raise self.error(f"the tensor {name} is missing{why}; download it again")
        return self.tensors[name]

    def error(self, what: str) -> ValueError:
        """Return the error `what` about this folder."""
        return ValueError(f"{self.folder}: {what}")

    def refusal(self, what: str) -> ValueError:
        """Return the error for an option that heads here do not support."""
        return self.error(
            f"the head has {what}, which heads here do not; loaded without it, it would draft something else"
        )

    def mask_token(self, token: Any, embeddings: Embeddings) -> int:
        """Return a masked position's token, by config.json; refuse one that the target has not."""
        if not isinstance(token, int) or not 0 <= token < embeddings.vocab_size:
            raise self.error(f"mask_token_id is {token}, not one of the target's {embeddings.vocab_size} tokens")
        return token

    def count(self, pattern: str) -> int:
        """Return the number of distinct values of the pattern's first group in the tensor names."""
        return len({match[1] for name in self.tensors if (match := re.match(pattern, name))})


class TensorMapping(NamedTuple):
    """The mapping of a published folder's tensors to a head's."""

    head: str  # a name in HEADS
    config: Json  # the head's configuration without its name and vocabulary size
    rename: Callable[[str], str] = str  # a tensor's name in the head to its name in the file, by default the same
    filled: Mapping[str, Tensor] = MappingProxyType({})  # tensors that the file does not hold as they are
    unread: Set[str] = frozenset()  # tensor names in the file that are ignored
    ids: Tensor | None = None  # the drafted tokens in the order of the lm_head's rows, None for the whole vocabulary


def assemble(source: PublishedHead, plan: TensorMapping, embeddings: Embeddings) -> nn.Module:
    """Return the head in the file's dtypes; refuse a tensor that is missing, unknown, misshapen or not finite."""
    # Embeddings that were not trained must equal the target's, which replaces them.
    tables = {name: tensor for name, tensor in source.tensors.items() if name.endswith(EMBEDDING)}
    table_shape = (embeddings.vocab_size, embeddings.hidden_size)
    for name, table in tables.items():
        if tuple(table.shape) != table_shape:
            raise source.error(
                f"{name} is {tuple(table.shape)}, expected {table_shape}, the target's own; choose the head's target "
                "with model.path"
            )
        if plan.config.get("embedding") != "own" and not is_targets_embedding(table, embeddings):
            log.warning(
                "%s: %s is not the target's embedding, which is read in its place: the head may draft worse than where "
                "its own is read; choose the head's own target with model.path if this is not it", source.folder, name,
            )  # fmt: skip
    kind: Any = HEADS[plan.head]
    try:
        drafts = None if plan.ids is None else len(plan.ids)
        config = typed(kind.Config, earlier(kind) | {"name": plan.head, "draft_vocab": drafts} | plan.config)
    except ValueError as error:
        raise source.error(f"head.{error}") from None
    expected_tensors = meta_state_dict(kind, config, embeddings, f"{source.folder}: ")
    filled, order = dict(plan.filled), None
    if plan.ids is not None:
        filled["vocab.ids"], order = plan.ids.sort()
    read = {name: plan.rename(name) for name in expected_tensors if name not in filled}
    given = source.tensors.keys() - plan.unread - tables.keys()
    missing, unknown = sorted(set(read.values()) - given), sorted(given - set(read.values()))
    if missing or unknown:
        raise source.error(
            f"the tensors are not those of the {plan.head} head in its config: missing {shown(missing)}, unknown "
            f"{shown(unknown)}"
        )
    loaded = {}
    for name, mine in expected_tensors.items():
        tensor = filled[name] if name in filled else source.tensors[read[name]]
        foreign = read.get(name, name)
        if tensor.shape != mine.shape or tensor.is_floating_point() != mine.is_floating_point():
            actual, expected = f"{tuple(tensor.shape)} {tensor.dtype}", f"{tuple(mine.shape)} {mine.dtype}"
            raise source.error(f"{foreign} is {actual}, expected {expected}; choose the head's own target (model.path)")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise source.error(f"{foreign} holds values that are not finite; download it again")
        if order is not None and name not in filled and OVER_VOCABULARY.match(name):
            tensor = tensor[order]
        loaded[name] = tensor.clone(memory_format=torch.contiguous_format)
    head = kind(config, embeddings)  # memory is allocated only after the checks of the file
    for name, parameter in head.state_dict(keep_vars=True).items():
        parameter.data = loaded[name]
    return head


def drafted(source: PublishedHead, ids: Tensor, what: str, embeddings: Embeddings) -> Tensor:
    """Return the draft vocabulary; refuse repeated tokens, and tokens outside the target's vocabulary."""
    ids = ids.long()
    if not len(ids) or len(ids.unique()) != len(ids) or int(ids.min()) < 0 or int(ids.max()) >= embeddings.vocab_size:
        raise source.error(f"{what} does not name {len(ids)} different tokens of the target's {embeddings.vocab_size}")
    return ids


def drafted_by_offsets(source: PublishedHead, embeddings: Embeddings) -> Tensor | None:
    """Return the draft vocabulary, i + d2t[i], None without d2t; refuse what t2d or the lm_head denies."""
    if OFFSETS not in source.tensors:
        lm_head = source.tensors.get("lm_head.weight")
        if lm_head is not None and len(lm_head) == source.config.get("draft_vocab_size") != embeddings.vocab_size:
            source.tensor(OFFSETS, "draft_vocab_size")
        return None
    offset, mask = source.tensors[OFFSETS].flatten().long(), source.tensors.get(KNOWN)
    ids = drafted(source, torch.arange(len(offset)) + offset, OFFSETS, embeddings)
    drafted_mask = torch.zeros(embeddings.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if mask is not None and not torch.equal(mask.flatten().bool(), drafted_mask):
        raise source.error(f"{OFFSETS} and {KNOWN} do not name the same tokens; download it again")
    return ids


def check_width(source: PublishedHead, name: str, embeddings: Embeddings, dim: int = 0) -> None:
    """Refuse a head whose hidden size, dimension `dim` of tensor `name`, is not the target's."""
    width = source.tensor(name).shape[dim]
    if width != embeddings.hidden_size:
        raise source.error(
            f"{name} has {width} {'columns' if dim else 'rows'}, expected {embeddings.hidden_size}, the width of the "
            "target; choose the head's own target with model.path"
        )


def decoder(source: PublishedHead, layer: str, embeddings: Embeddings, *, sliding: bool = False) -> Json:
    """Return the decoder layers' dimensions for a head's configuration, the target's where config.json gives none.

    `layer` is the prefix of a layer's tensors, with its dot; `sliding` allows one sliding window for all layers. Refuse
    missing tensors, rows that do not divide into attention heads, and options that heads here do not have.
    """
    config = source.config
    get, kinds = config.get, config.get("layer_types") or ()
    alike = sliding and set(kinds) == {"sliding_attention"}
    length = get("sliding_window") if alike else None
    for name in sorted(source.tensors):
        if name.startswith(layer) and name.endswith("_proj.bias"):
            raise source.refusal(f"a bias in its layer, {name} (attention_bias, qkv_bias)")
    if get("hidden_act") not in ACTIVATIONS:
        raise source.refusal(f"hidden_act={config['hidden_act']}")
    slides = get("use_sliding_window") or "sliding_attention" in kinds
    if slides and not isinstance(length, int):
        raise source.refusal("a sliding window (layer_types, use_sliding_window)")
    if get("logit_scale", 1.0) != 1.0:
        raise source.refusal(f"logit_scale={config['logit_scale']}")
    rows, kv_rows = (len(source.tensor(f"{layer}self_attn.{name}_proj.weight")) for name in "qk")
    normed = source.tensors.get(f"{layer}self_attn.q_norm.weight")
    width = get("head_dim") or rows // (get("num_attention_heads") or embeddings.layer_dims.num_heads)
    width = width if normed is None else len(normed)
    if not width or rows % width or kv_rows % width or (rows // width) % (kv_rows // width or 1):
        raise source.error(f"{layer}self_attn.q_proj.weight has {rows} rows, k_proj {kv_rows}: no heads of {width}")
    try:
        rope = positions_of(config) or PLAIN
    except ValueError as error:
        raise source.error(str(error)) from None
    if rope.unsupported is not None:
        raise source.refusal(rope.unsupported)
    return {
        "num_heads": rows // width,
        "num_kv_heads": kv_rows // width,
        "head_dim": width,
        "intermediate_size": len(source.tensor(f"{layer}mlp.gate_proj.weight")),
        "length": length,
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "norm_eps": float(get("rms_norm_eps", EPS)),
    }


def is_targets_embedding(table: Tensor, embeddings: Embeddings) -> bool:
    """Return whether a table (V, D) equals the target's embedding up to rounding and some targets' scale."""
    parts = torch.arange(len(table)).split(4096)  # in parts, since the whole table in fp32 may take gigabytes
    first = embedding_of(embeddings, parts[0]).float().cpu()
    scale, scatter = first.norm() / table[parts[0]].float().norm(), float(first.std())
    rows = ((table[ids].float() * scale, embedding_of(embeddings, ids).float().cpu()) for ids in parts)
    return all(torch.allclose(ours, theirs, rtol=2e-2, atol=2e-2 * scatter) for ours, theirs in rows)
