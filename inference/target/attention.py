"""The attention of the target's passes: without a copy of keys and values under a mask, and over packed rows.

transformers repeats keys and values for every query head of a group as soon as a mask is given, which reads a long
cache as many times. Here the query heads of a group become queries of one head (`grouped_attention`).
Packed rows attend each document by itself, so that neither a mask nor scores over a whole row are made.

A row of T tokens under a mask costs memory and time in T x T, whatever is packed in it. Here every linear layer sees
all rows at once, and scaled_dot_product_attention each document alone, causally: its kernels need memory linear in the
document, and the time is that of the documents. A sliding window goes over a document in blocks of queries.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from heads.modules.layers import grouped_attention

SDPA, GROUPED = "sdpa", "headstart_grouped"
OTHER = ("position_bias", "softcap", "s_aux")  # what an attention may add, of which this one knows nothing
ATTENTION = "headstart_documents"
BLOCK = 1024  # queries at a time, under a window
FULL, SLIDING = "full_attention", "sliding_attention"


class Span(NamedTuple):
    """A document: its row, its first token there, and the one behind its last."""

    row: int
    begin: int
    end: int


class Packing(NamedTuple):
    """What each attention layer of a target sees of a document: as many tokens back as its window, None for all."""

    config: Any
    windows: tuple[int | None, ...]

    def needed(self, spans: list[Span], rows: int) -> bool:
        """Whether a pass without a mask of ours would see too much, or make a mask by itself."""
        longest = max(span.end - span.begin for span in spans)
        return len(spans) > rows or any(window is not None and window < longest for window in self.windows)


def packing(model: "transformers.PreTrainedModel") -> Packing | None:
    """Return how a model's attention runs over documents; None where it does something of its own."""
    config: Any = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * count
    able = getattr(model, "_supports_attention_backend", False) and config._attn_implementation in (SDPA, GROUPED)
    if not able or not {*kinds} <= {FULL, SLIDING} or (SLIDING in kinds and window is None):
        return None
    transformers.AttentionInterface.register(ATTENTION, _attend)
    return Packing(config, tuple(window if kind == SLIDING else None for kind in kinds))


def spans_of(document: Int[Tensor, "B T"]) -> list[Span]:
    """Return the documents of packed rows, padding as one."""
    first = torch.ones_like(document, dtype=torch.bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    starts = first.flatten().nonzero()[:, 0].tolist()
    length = document.shape[1]
    stops = [*starts[1:], document.numel()]
    return [Span(a // length, a % length, (b - 1) % length + 1) for a, b in zip(starts, stops, strict=True)]


_HERE: ContextVar[tuple[Packing, list[Span]]] = ContextVar("documents")


@contextmanager
def by_documents(packing: Packing, spans: list[Span]) -> Iterator[None]:
    """Let the target's attention run over these documents for a while; transformers then makes no mask."""
    config, before, token = packing.config, packing.config._attn_implementation, _HERE.set((packing, spans))
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
        _HERE.reset(token)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend within the documents, under transformers' signature."""
    if odd := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"its attention has a {odd[0]}")
    packing, spans = _HERE.get()
    layer: Any = module.layer_idx
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
    for row, begin, end in spans:
        q, k, v = (tensor[row : row + 1, :, begin:end] for tensor in (query, key, value))
        attended = within(q, k, v, kwargs.get("scaling"), packing.windows[layer])
        out[row, begin:end] = attended[0].transpose(0, 1)
    return out, None


def within(
    query: Float[Tensor, "1 H N E"],
    key: Float[Tensor, "1 G N E"],
    value: Float[Tensor, "1 G N F"],
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "1 H N F"]:
    """Return one document's causal attention, over the last `window` tokens if that is given."""
    length = query.shape[2]
    masked = window is not None and length > window
    if query.shape[1] != key.shape[1] and not takes_groups(query, masked=masked):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    if window is None or not masked:
        return attend(query, key, value, is_causal=True)
    parts = []
    for begin in range(0, length, BLOCK):
        end, least = min(begin + BLOCK, length), max(0, begin - window + 1)
        back = torch.arange(begin, end, device=query.device)[:, None] - torch.arange(least, end, device=query.device)
        seen = (back >= 0) & (back < window)
        parts.append(attend(query[:, :, begin:end], key[:, :, least:end], value[:, :, least:end], attn_mask=seen))
    return torch.cat(parts, 2)


def takes_groups(query: Tensor, *, masked: bool) -> bool:
    """Whether a kernel in linear memory takes groups; CUDA's only such one takes them without a mask, in 16 bits."""
    return query.device.type != "cuda" or (query.dtype in (torch.float16, torch.bfloat16) and not masked)


def use_kernels(device: torch.device) -> None:
    """Rule out cuDNN's attention, which builds a plan, for tens of milliseconds, at every new length of a text."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def group_attention(config: Any) -> None:
    """Let a model whose query heads share keys and values attend in groups, if it attends by torch's own kernels."""
    if config._attn_implementation == SDPA:
        from transformers.masking_utils import sdpa_mask

        transformers.AttentionInterface.register(GROUPED, attend_in_groups)
        transformers.AttentionMaskInterface.register(GROUPED, sdpa_mask)
        config._attn_implementation = GROUPED


def attend_in_groups(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend under transformers' signature; what is not grouped or has no mask runs as transformers runs it."""
    plain = attention_mask is None and query.shape[2] > 1
    ungrouped = query.shape[1] == key.shape[1] or (attention_mask is not None and attention_mask.shape[1] > 1)
    if plain or ungrouped or dropout or any(kwargs.get(name) is not None for name in OTHER):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = grouped_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None
