"""The attention of the target's passes: grouped-query attention under a mask, and attention over packed documents.

With a mask, transformers repeats keys and values for every query head of a group, which reads a long cache as many
times. Here they are not repeated (`grouped_attention`).

A packed sequence of T tokens under a mask would cost memory and time in T x T. Here linear layers run over all tokens,
and attention runs causally over each document, without a mask, in memory linear in T. On CUDA one kernel a layer
serves all documents: in 16 bits torch's variable-length flash attention (`attend_varlen`), else flex_attention
(`attend_flex`). Elsewhere each document goes through scaled_dot_product_attention, the reference of both
(`attend_in_loop`); a sliding window is computed in blocks of queries.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from heads.base import to_device
from heads.modules import flex
from heads.modules.attention import pattern
from heads.modules.layers import grouped_attention
from heads.shapes import Sequences

T = TypeVar("T")
Attended = tuple[Tensor, None]  # without the weights that transformers' signature asks for
Window = int | None  # tokens of a sliding window; None for all of a document
SDPA, GROUPED, RAGGED = "sdpa", "headstart_grouped", "headstart_ragged"
SPLIT, TAIL = 8, 4  # the cost of a ragged pass, and of each attention call in it, in rows (benchmarks/batches.py)
CALL = 256  # the cost of an attention call, in keys (benchmarks/answers.py)
OTHER = ("position_bias", "softcap", "s_aux")  # options of an attention that are not supported here
ATTENTION = "headstart_documents"
BLOCK = 1024  # queries at a time, with a window
FULL, SLIDING = "full_attention", "sliding_attention"
VARLEN, FLEX, LOOP = "varlen", "flex", "loop"
HALF = (torch.float16, torch.bfloat16)
NEEDED = {"scale", "window_size"}  # options of variable-length attention; before torch 2.12 it has no grouped queries


class Span(NamedTuple):
    """A document: its packed sequence, its first token there, and the one after its last."""

    row: int
    begin: int
    end: int


Spans = list[Span]


class Packing(NamedTuple):
    """The sliding window of each attention layer of a target, None for all tokens of a document."""

    config: Any
    windows: tuple[Window, ...]

    def needed(self, spans: Spans, rows: int) -> bool:
        """Whether a pass needs this attention: a row has several documents, or a window is shorter than a document."""
        longest = max(span.end - span.begin for span in spans)
        return len(spans) > rows or any(window is not None and window < longest for window in self.windows)


def packing(model: "transformers.PreTrainedModel") -> Packing | None:
    """Return how a model's attention runs over documents; None if it has unsupported options."""
    config: Any = model.config.get_text_config()
    window: Window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    able = getattr(model, "_supports_attention_backend", False) and config._attn_implementation in (SDPA, GROUPED)
    if not able or not {*kinds} <= {FULL, SLIDING} or (SLIDING in kinds and window is None):
        return None
    uncompiled: Any = torch.compiler.disable(_attend)  # documents differ from pass to pass
    transformers.AttentionInterface.register(ATTENTION, uncompiled)
    return Packing(config, tuple(window if kind == SLIDING else None for kind in kinds))


def spans_of(document: Sequences) -> Spans:
    """Return the documents of packed sequences, padding as one."""
    spans = []
    for row, ids in enumerate(document.tolist()):
        begin = 0
        for _, same in groupby(ids):
            spans.append(Span(row, begin, begin + len([*same])))
            begin = spans[-1].end
    return spans


class Documents:
    """The documents of a forward pass; a kernel's inputs are made once for all layers on a device."""

    def __init__(self, windows: tuple[Window, ...], spans: Spans, position: Sequences) -> None:
        self.windows, self.spans, self.position = windows, spans, position
        self.longest = max(span.end - span.begin for span in spans)
        self._cu_seqlens: dict[torch.device, Tensor] = {}
        self._masks: dict[tuple[Window, torch.device], Any] = {}

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, "N"]:
        """Return the cumulative sequence lengths: each document's start in the flattened batch, and the end."""
        if device not in self._cu_seqlens:
            starts = [span.row * self.position.shape[1] + span.begin for span in self.spans]
            cu_seqlens = torch.tensor([*starts, self.position.numel()], dtype=torch.int32)
            self._cu_seqlens[device] = to_device(cu_seqlens, device)
        return self._cu_seqlens[device]

    def mask(self, window: Window, device: torch.device) -> Any:
        """Return flex_attention's mask of the documents under a window."""
        if (window, device) not in self._masks:
            self._masks[window, device] = pattern(self.position.to(device), window).mask(self.position.shape[1], 0)
        return self._masks[window, device]


DOCUMENTS: ContextVar[Documents] = ContextVar("documents")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> Attended:
    """Attend within the documents; the signature is transformers'."""
    if odd := [name for name in OTHER if kwargs.get(name) is not None]:
        raise ValueError(f"its attention has a {odd[0]}")
    documents = DOCUMENTS.get()
    layer: Any = module.layer_idx
    window = documents.windows[layer]
    if window is not None and window >= documents.longest:
        window = None
    attend = KERNELS[route(query, value, varlen_options(query.device))]
    return attend(query, key, value, kwargs.get("scaling"), window, documents), None


def route(query: Tensor, value: Tensor, options: frozenset[str]) -> str:
    """Return the key of KERNELS to use; `options` are those of variable-length attention on the device."""
    if query.device.type != "cuda":
        return LOOP
    width = query.shape[-1]
    if options >= NEEDED and query.dtype in HALF and value.shape[-1] == width and width % 8 == 0 and width <= 256:
        return VARLEN
    return FLEX if flex.takes(query, value) else LOOP


@cache
def varlen_options(device: torch.device) -> frozenset[str]:
    """Return the options of torch's variable-length attention, empty on a device without its kernel."""
    available = device.type == "cuda" and torch.backends.cuda.is_flash_attention_available()
    if not available or torch.cuda.get_device_capability(device) < (8, 0):
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: Window, documents: Documents
) -> Float[Tensor, "B T H E"]:
    """Attend by one variable-length call for all documents, in 16 bits."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in varlen_options(query.device):
        options["enable_gqa"] = True
    else:
        key, value = repeated(key, value, query.shape[1])
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    cu_seqlens = documents.cu_seqlens(query.device)
    longest = documents.longest
    out: Any = varlen.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out.unflatten(0, documents.position.shape)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: Window, documents: Documents
) -> Float[Tensor, "B T H F"]:
    """Attend by one call of flex_attention for all documents, with a block mask."""
    mask = documents.mask(window, query.device)
    grouped = query.shape[1] != key.shape[1]
    return flex.kernel()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped).transpose(1, 2)


def attend_in_loop(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: Window, documents: Documents
) -> Float[Tensor, "B T H F"]:
    """Attend by a call for each document."""
    out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))
    for row, begin, end in documents.spans:
        q, k, v = (states[row : row + 1, :, begin:end] for states in (query, key, value))
        out[row, begin:end] = within(q, k, v, scale, window)[0].transpose(0, 1)
    return out


KERNELS: dict[str, Callable[..., Tensor]] = {VARLEN: attend_varlen, FLEX: attend_flex, LOOP: attend_in_loop}


def within(
    query: Float[Tensor, "1 H N E"],
    key: Float[Tensor, "1 G N E"],
    value: Float[Tensor, "1 G N F"],
    scale: float | None,
    window: Window,
) -> Float[Tensor, "1 H N F"]:
    """Return one document's causal attention, over the last `window` tokens if given."""
    heads, length = query.shape[1:3]
    masked = window is not None and length > window
    if heads != key.shape[1] and not takes_groups(query, masked=masked):
        key, value = repeated(key, value, heads)
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=heads != key.shape[1])
    if window is None or not masked:
        return attend(query, key, value, is_causal=True)
    parts = []
    for begin in range(0, length, BLOCK):
        end, least = min(begin + BLOCK, length), max(0, begin - window + 1)
        back = torch.arange(begin, end, device=query.device)[:, None] - torch.arange(least, end, device=query.device)
        attn_mask = (back >= 0) & (back < window)
        parts.append(attend(query[:, :, begin:end], key[:, :, least:end], value[:, :, least:end], attn_mask=attn_mask))
    return torch.cat(parts, 2)


def repeated(
    key: Float[Tensor, "B G N E"], value: Float[Tensor, "B G N F"], heads: int
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N F"]]:
    """Return keys and values repeated for every query head."""
    return key.repeat_interleave(heads // key.shape[1], 1), value.repeat_interleave(heads // value.shape[1], 1)


def takes_groups(query: Tensor, *, masked: bool) -> bool:
    """Whether a memory-linear kernel supports grouped queries: on CUDA only without a mask, in 16 bits."""
    return query.device.type != "cuda" or (query.dtype in HALF and not masked)


class RowGroup(NamedTuple):
    """Rows `begin` to `size` of the slots from `first` to `stop`, which attend together to keys up to `end`."""

    first: int
    stop: int
    begin: int
    size: int
    end: int


class Ragged(NamedTuple):
    """A pass without most of the padding: groups of the first rows of all slots, then further rows of one each."""

    groups: list[RowGroup]

    @classmethod
    def of(cls, sizes: Sequence[int], lengths: Sequence[int]) -> "Ragged":
        """Return the fastest layout for trees of these sizes after caches of these lengths."""

        def cost(width: int) -> int:
            tails = [size - width + TAIL for size in sizes if size > width]
            return len(sizes) * width + sum(tails) + SPLIT * bool(tails)

        width = min({*sizes}, key=cost)
        groups: list[RowGroup] = []
        for slot, length in enumerate(lengths):
            groups.append(RowGroup(slot, slot + 1, 0, width, length + width))
            first, end = groups[-2:][0], max(group.end for group in groups[-2:])
            if end * (slot + 1 - first.first) <= first.end * (slot - first.first) + length + width + CALL:
                groups[-2:] = [first._replace(stop=slot + 1, end=end)]
        slots = enumerate(zip(sizes, lengths, strict=True))
        return cls(groups + [RowGroup(b, b + 1, width, size, n + size) for b, (size, n) in slots if size > width])

    def rows(self, sequences: int, size: int) -> tuple[list[int], list[list[int]]]:
        """Return for each row its index among "B N" nodes, and for each node its row; an absent node has the root's."""
        nodes, row_of = list[int](), [[0] * size for _ in range(sequences)]
        for first, stop, begin, end, _ in self.groups:
            for slot in range(first, stop):
                if not begin:
                    row_of[slot] = [len(nodes)] * size
                row_of[slot][begin:end] = range(len(nodes), len(nodes) + end - begin)
                nodes += range(slot * size + begin, slot * size + end)
        return nodes, row_of


LAYOUT: ContextVar[Ragged] = ContextVar("layout")


@contextmanager
def attention_as(config: Any, name: str, variable: ContextVar[T], value: T) -> Iterator[None]:
    """Use a registered attention during a pass, with its input in a context variable."""
    token, before = variable.set(value), config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
        variable.reset(token)


def attend_ragged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> Attended:
    """Attend from rows laid out by `Ragged`, with the keys of all slots and the mask "B 1 N S" of the padded pass."""
    row, outputs = 0, list[Tensor]()
    for first, stop, begin, size, end in LAYOUT.get().groups:
        at, count = slice(first, stop), (stop - first) * (size - begin)
        nodes = query[0, :, row : row + count].unflatten(1, (stop - first, -1)).transpose(0, 1)
        mask = attention_mask[at, :, begin:size, :end]
        out, _ = attend_in_groups(module, nodes, key[at, :, :end], value[at, :, :end], mask, **kwargs)
        outputs.append(out.flatten(0, 1))
        row += count
    return torch.cat(outputs)[None], None


def group_attention(config: Any) -> None:
    """Use `attend_in_groups` in a model with grouped queries, if its attention is torch's."""
    if config._attn_implementation == SDPA:
        from transformers.masking_utils import sdpa_mask

        for name, attend in ((GROUPED, attend_in_groups), (RAGGED, attend_ragged)):
            transformers.AttentionInterface.register(name, attend)
            transformers.AttentionMaskInterface.register(name, sdpa_mask)
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
) -> Attended:
    """Attend without repeated keys and values; without groups or without a mask as transformers does."""
    plain = attention_mask is None and query.shape[2] > 1
    ungrouped = query.shape[1] == key.shape[1] or (attention_mask is not None and attention_mask.shape[1] > 1)
    if plain or ungrouped or dropout or any(kwargs.get(name) is not None for name in OTHER):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
