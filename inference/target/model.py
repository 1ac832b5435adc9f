"""The forward passes of the frozen target, any AutoModelForCausalLM: tokens to features and logits.

All facts about the target's layers are here: the module of the decoder stack, the feature layers, the format of masks.
`Target` (target.py) checks them on the loaded model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from heads import rows
from heads.base import Features, Layers, to_device
from heads.common.target_config import EXPERTS, cache_argument, context_of
from heads.modules import tree_attention
from heads.shapes import LayerRows, Nodes, Rows, Sequences
from inference.target import loading
from inference.target.attention import (
    ATTENTION,
    DOCUMENTS,
    LAYOUT,
    RAGGED,
    Documents,
    Packing,
    Ragged,
    Spans,
    attention_as,
    group_attention,
    spans_of,
)
from inference.target.cache import BatchCache, BatchPass, Layout, RecurrentCache, Storage, TargetCache, recurrence
from inference.target.checkpoint import fingerprint
from inference.target.embeddings import TargetEmbeddings
from inference.target.placement import Placed, run_in_turns
from inference.verification import tree
from inference.verification.tree import DraftTree, Forward, PerNode

LayerStates = tuple[Tensor, Tensor]  # of the feature layers, and the last one after the final norm


class TargetOutput(NamedTuple):
    """The output of a target pass: hidden states of the feature layers, the final-normed last one, and logits."""

    hidden: LayerRows
    last_hidden: Rows
    logits: Float[Tensor, "B R V"] | None


class LongropeSwitch(NamedTuple):
    """The switch of longrope (arXiv 2402.13753): passes beyond `length` tokens use its long factors.

    So a pass never crosses `length`. With `recomputed` the model's `generate` recomputes the whole KV cache with the
    long factors; else it appends to the entries of the short ones.
    """

    length: int
    recomputed: bool

    def recomputes(self, prefix: int) -> bool:
        """Whether the pass after `prefix` entries recomputes them."""
        return self.recomputed and prefix == self.length

    def max_draft_depth(self, prefix: int, max_draft_depth: int) -> int:
        """Return the depth limit of a tree after `prefix` rows, at most `max_draft_depth`."""
        if self.recomputes(prefix):
            return 0
        return min(max_draft_depth, self.length - 1 - prefix) if prefix < self.length else max_draft_depth


def switch_of(model: "transformers.PreTrainedModel") -> LongropeSwitch | None:
    """Return the switch of a model's longrope; None without one."""
    config: Any = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # some have one for a kind of layer
    lengths = [kind["original_max_position_embeddings"] for kind in ropes if kind.get("rope_type") == "longrope"]
    if not lengths:
        return None
    model_type: Any = type(model)
    recomputes = (
        model_type.prepare_inputs_for_generation is not transformers.GenerationMixin.prepare_inputs_for_generation
    )
    return LongropeSwitch(min(lengths), recomputes and hasattr(config, "original_max_position_embeddings"))


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Replace modules' forward methods for a while."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, own_forward in before.items():
            del vars(module)["forward"]
            if own_forward is not None:
                vars(module)["forward"] = own_forward


class LayerOutputs:
    """Records the decoder layers' outputs in order, while there is a list to record them in.

    Layers that are not requested give None, since a long pass cannot hold all outputs. In a compiled graph unread
    outputs cost nothing, and all are recorded.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.outputs: list[Tensor | None] | None = None
        self.wanted: Layers = ()
        for layer in layers:
            layer.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Record a layer's output."""
        if self.outputs is not None:
            is_read = torch.compiler.is_compiling() or len(self.outputs) in self.wanted
            self.outputs.append((output[0] if isinstance(output, tuple) else output) if is_read else None)


@cache
def mask_of(tokens: frozenset[int], size: int, device: torch.device) -> Bool[Tensor, "1 V"]:
    """Return the mask of some tokens of a vocabulary."""
    mask = torch.zeros(1, size, dtype=torch.bool, device=device)
    mask[:, sorted(tokens)] = True
    return mask


class TargetModel:
    """A frozen causal LM with its tokenizer: the forward passes.

    Attributes:
        packing: how its attention runs over packed documents without a mask; None if it needs one.
        takes_trees: whether its attention honours a tree's or a batch's mask; else only chains are verified, one
            sequence at a time. `Target` checks it.
        takes_ragged: whether a batch's pass may leave out padding (`Ragged`).
        incompatibility: the reason if `takes_trees` is false.
        compiled: the compiled verification passes; None if they are not compiled.
        compiles_drafts: whether heads' drafting is compiled.
        longrope: the switch of its longrope; None without one.
        max_model_len: the most tokens that a sequence may have.
        eos: the tokens that end an answer.
        quantized: how its weights are quantised, None if they are not.
        recurrence: its recurrent layers; None if it has only attention.
        captures: whether decoding steps are captured in CUDA graphs: not with experts, several devices or a library's
            quantised layers, where the host may read.
        whole: whether its weights are on one device, not quantised, and without experts.
        sibling: whether heads of another checkpoint of the same architecture and sizes may draft for it.
        idle: batches that wait for more requests, by drafter (inference/batch.py).
    """

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        placed: Placed | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.architecture = type(model).__name__
        self.tokenizer, self.name = tokenizer, name
        self.config = model.config.get_text_config()
        self.placed = placed = placed or Placed(model.device, TargetEmbeddings(model), fingerprint(model, name))
        self.device, self.dtype, self.embeddings = placed.device, model.dtype, placed.embeddings
        self.base: nn.Module = model.base_model
        count = self.config.num_hidden_layers
        lists = (module for module in self.base.modules() if isinstance(module, nn.ModuleList))
        layers = next((stack for stack in lists if len(stack) == count), None)
        if layers is None:
            raise ValueError(f"{self.architecture}: no stack of {count} decoder layers found; choose another target")
        self.decoder_layers = layers
        if self.device.type == "cuda":  # cuDNN's attention takes tens of milliseconds to plan for each new length
            torch.backends.cuda.enable_cudnn_sdp(False)
            tree_attention.prepare(self.device)
        # Dynamic NTK scaling changes frequencies only beyond the context, where no sequence goes; else the host would
        # read the positions of every pass from the device.
        module: Any
        for module in model.modules():
            kind = getattr(module, "rope_type", None)  # some have one for a kind of layer
            if isinstance(kind, dict):
                module.rope_type = {name: "default" if one == "dynamic" else one for name, one in kind.items()}
            elif kind == "dynamic":
                module.rope_type = "default"
        if getattr(model, "_supports_attention_backend", False):
            group_attention(self.config)
        self._cache_argument = cache_argument(self.base)
        self._noted = LayerOutputs(self.decoder_layers)
        self.max_model_len: int = context_of(self.config)
        eos = model.generation_config.eos_token_id if model.generation_config else None
        ends = [*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id]
        # A configuration may have others.
        self.eos = frozenset(t for t in ends if isinstance(t, int) and t < self.embeddings.vocab_size)
        self.quantized = loading.method_of(model)
        here = all(weights.device == self.device for weights in model.parameters())
        routed = any(getattr(self.config, key, None) for key in (*EXPERTS, "ffn_config"))
        self.idle: dict[Any, Any] = {}
        self.sibling = False
        self.whole = here and not routed and self.quantized is None
        self.captures = self.device.type == "cuda" and self.whole
        self.spec = self.embeddings.spec(name, placed.fingerprint, placed.adapter)
        self.compiled: Callable[..., LayerStates] | None = None
        self.compiles_drafts = False
        self.recurrence = recurrence(self.config, self.decoder_layers)
        self.layout: Layout = {}
        self.few_sizes = False  # whether caches have few capacities, for compiled passes
        self.packing: Packing | None = None
        self.longrope = switch_of(model)
        self.incompatibility = f"its attention ignores custom masks ({self.architecture})"
        self.takes_trees = False
        self.takes_ragged = False

    @property
    def eos_mask(self) -> Bool[Tensor, "1 V"]:
        """Mask of the EOS tokens."""
        return mask_of(self.eos, self.embeddings.vocab_size, self.device)

    def check_masks(self, consequence: str) -> None:
        """Refuse a target whose attention ignores a custom mask; the error names the consequence."""
        if not self.takes_trees:
            raise ValueError(f"{self.name}: {self.incompatibility}, {consequence}")

    def cache(self, capacity: int = 0) -> TargetCache:
        """Return an empty cache for one sequence of `capacity` entries; it grows if needed."""
        cache = self.batch_cache(1).allocate()
        cache.storage.reserve(capacity)
        return cache

    def batch_cache(self, size: int) -> BatchCache:
        """Return an empty cache for up to `size` sequences."""
        make = TargetCache if self.recurrence is None else partial(RecurrentCache, config=self.config)
        return BatchCache(Storage(size, self.layout, self.few_sizes), make)

    @torch.no_grad()
    def features(self, token: Sequences, document: Sequences, layers: Layers) -> Features:
        """Return the features of packed sequences; documents do not see each other and each starts at position 0.

        `layers` are the decoder layers to return, here and in every pass below.

        If passes need all processes, all must call this equally often, each with its own sequences.
        """
        spans = spans_of(document)  # read on the host, where training has them, without waiting for the device
        token = to_device(token, self.device)
        document = to_device(document, self.device)
        if self.placed.group is None:
            return self.own_features(token, document, layers, spans)
        return run_in_turns(
            self.placed.group,
            lambda token, document, on_host: self.own_features(token, document, layers, spans_of(on_host)),
            token,
            document,
        )

    def own_features(self, token: Tensor, document: Tensor, layers: Layers, spans: Spans) -> Features:
        """Return the features of packed sequences that are equal in all processes of a pass."""
        position = rows.positions(document)
        if self.recurrence is not None:
            return self._unpacked(token, document, layers, spans)
        # Else transformers would read the positions from the device to find packed documents.
        waits = self.device.type != "cpu"
        if self.packing is not None and (waits or self.packing.needed(spans, len(token))):
            documents = Documents(self.packing.windows, spans, position)
            with attention_as(self.packing.config, ATTENTION, DOCUMENTS, documents):
                out = self.run(token, position, None, None, layers)
        else:  # one document a sequence is causal, without a mask
            out = self.run(token, position, None if len(spans) == len(token) else rows.visible(document), None, layers)
        return Features(token, out.hidden, out.last_hidden, document)

    def _unpacked(self, token: Tensor, document: Tensor, layers: Layers, spans: Spans) -> Features:
        """Return the features of documents that run unpacked, since recurrent states would cross documents.

        Padding follows a document, unseen. No pass has more tokens than the packed sequences or the longest document.
        """
        whole: list[Tensor] = []  # the outputs in the packed rows
        groups: list[Spans] = []
        for span in sorted(spans, key=lambda span: span.begin - span.end):  # longest first
            if groups and (len(groups[-1]) + 1) * (groups[-1][0].end - groups[-1][0].begin) <= token.numel():
                groups[-1].append(span)
            else:
                groups.append([span])
        for group in groups:
            padded = pad_sequence([token[span.row, span.begin : span.end] for span in group], batch_first=True)
            position = torch.arange(padded.shape[1], device=self.device).expand_as(padded)
            out = self.run(padded, position, None, None, layers)
            states = out.hidden, out.last_hidden
            whole = whole or [one.new_zeros(*token.shape, *one.shape[2:]) for one in states]
            for row, span in enumerate(group):
                for packed, one in zip(whole, states, strict=True):
                    packed[span.row, span.begin : span.end] = one[row, : span.end - span.begin]
        hidden, last = whole
        return Features(token, hidden, last, document)

    @torch.inference_mode()
    def prefill(self, token: Int[Tensor, "T"], cache: TargetCache, layers: Layers = ()) -> TargetOutput:
        """Append a sequence of committed tokens; return the logits of the last one (R = 1)."""
        position = torch.arange(cache.length, cache.length + len(token), device=self.device)
        out = self.run(token[None], position[None], None, cache, layers)
        return out._replace(logits=self.embeddings.logits(out.last_hidden[:, -1:]))

    @torch.inference_mode()
    def score(self, drafted: DraftTree, cache: TargetCache, layers: Layers = ()) -> TargetOutput:
        """Score a tree in one pass: append its N nodes to the cache; return all logits.

        The caller then compacts the cache to the accepted path.
        """
        cache.snapshot()
        position, seen = tree.layout(drafted, cache.length)
        out = self.run(drafted.token[None], position[None], seen[None] if self.takes_trees else None, cache, layers)
        return out._replace(logits=self.embeddings.logits(out.last_hidden))

    def run(
        self,
        token: Sequences,
        position: Sequences,
        attn_mask: Bool[Tensor, "B T S"] | None,
        cache: TargetCache | BatchPass | None,
        layers: Layers = (),
        key_position: Int[Tensor, "B S"] | None = None,
        stack: Forward | None = None,
    ) -> TargetOutput:
        """Run the decoder stack without the lm_head.

        Args:
            attn_mask: which of the S rows, cached and new, each row attends to; None for causal attention.
            cache: the rows are appended to it.
            layers: the decoder layers to return; a `stack` returns none.
            key_position: the positions of all S rows; None if the cached ones have 0, 1, 2, …
            stack: a function to run in place of the decoder stack.
        """
        layers = layers if stack is None else ()
        if self.compiled is not None and stack is None and isinstance(cache, BatchPass):
            return TargetOutput(*self.compiled(token, position, attn_mask, cache, key_position, layers), None)
        mask = None if attn_mask is None else self.attention_mask(attn_mask, position, key_position)
        return TargetOutput(*self.forward(token, position, mask, cache, layers, stack), None)

    def run_ragged(
        self,
        layout: Ragged,
        token: Nodes,
        position: Nodes,
        attn_mask: Bool[Tensor, "B N S"],
        cache: BatchPass,
        layers: Layers,
        key_position: Int[Tensor, "B S"],
    ) -> TargetOutput:
        """Run the rows of a layout; return the outputs and logits of all nodes, an absent one has those of the root."""
        nodes, row_of = (torch.tensor(index, device=self.device) for index in layout.rows(*token.shape))
        rows = cache._replace(write_index=cache.write_index.flatten()[nodes][None], slot=nodes[None] // token.shape[1])
        mask = self.attention_mask(attn_mask, position, key_position)
        with attention_as(self.config, RAGGED, LAYOUT, layout):
            out = self.forward(token.flatten()[nodes][None], position.flatten()[nodes][None], mask, rows, layers)
        return TargetOutput(*(states[0, row_of] for states in (*out, self.embeddings.logits(out[1]))))

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        mask: Any,
        cache: TargetCache | BatchPass | None,
        layers: Layers,
        stack: Forward | None = None,
    ) -> LayerStates:
        """Run the decoder stack with a mask in transformers' format; return the outputs of `layers` and the last."""
        outputs: list[Any] = []
        self._noted.outputs = outputs if layers else None
        self._noted.wanted = layers
        out = (stack or self.base)(
            input_ids=token,
            attention_mask=mask,
            position_ids=position,
            use_cache=cache is not None,
            **{self._cache_argument: cache.hf if cache else None},
        )
        self._noted.outputs = None
        last = out.last_hidden_state.to(self.device)
        if not layers:
            return last.new_zeros((*last.shape[:2], 0, last.shape[2])), last
        return torch.stack([outputs[i].to(self.device) for i in layers], 2), last

    def attention_mask(self, attn_mask: Tensor, position: Tensor, key_position: Tensor | None) -> Any:
        """Return a mask in transformers' format: additive and 4-d, one for each kind of layer if the kinds differ."""
        window: int | None = getattr(self.config, "sliding_window", None)
        kinds = set(getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
        if "sliding_attention" not in kinds or window is None:
            return self._additive(attn_mask)
        if key_position is None:
            cached = torch.arange(attn_mask.shape[2] - attn_mask.shape[1], device=self.device).expand(len(position), -1)
            key_position = torch.cat([cached, position], 1)
        near = position[:, :, None] - key_position[:, None] < window
        if kinds == {"sliding_attention"}:
            return self._additive(attn_mask & near)
        return {"full_attention": self._additive(attn_mask), "sliding_attention": self._additive(attn_mask & near)}

    def _additive(self, attn_mask: Tensor) -> Tensor:
        shut = torch.finfo(self.dtype).min
        return torch.zeros_like(attn_mask, dtype=self.dtype).masked_fill_(~attn_mask, shut)[:, None]


Stub = Callable[[Tensor], Tensor]


class SkipSet(NamedTuple):
    """The decoder layers whose attention is skipped, and those whose MLP is."""

    attention: Layers
    mlp: Layers


class LayerSkippedTarget:
    """A target whose skipped modules return their input, or zeros, during a pass; no modeling code is copied.

    `cost` is the cost of a drafted token in target passes: the share of the weights, lm_head included, that it reads.

    Raises:
        ValueError: its attention ignores a custom mask, or a layer has other parts.
    """

    def __init__(self, target: TargetModel, skips: SkipSet) -> None:
        target.check_masks("so parts of it cannot draft alone")
        self.target, self.forwards = target, dict[nn.Module, Forward]()
        whole = {*skips.attention} & {*skips.mlp}
        stubs: dict[nn.Module, Stub] = {target.decoder_layers[i]: Tensor.contiguous for i in whole}
        for which, indices in enumerate(skips):
            for i in {*indices} - whole:
                layer = target.decoder_layers[i]
                heavy = [child for child in layer.children() if any(p.ndim > 1 for p in child.parameters())]
                parts = {hasattr(child, "layer_idx"): child for child in heavy}  # the attention has a layer index
                if not len(heavy) == len(parts) == 2:
                    raise ValueError(
                        f"{type(layer).__name__} is not made of one attention and one MLP: nothing can be skipped"
                    )
                stubs[parts[which == 0]] = torch.zeros_like
        with ExitStack() as hooks:  # a pass shows whether a module returns a tuple
            for module, stub in stubs.items():
                hooks.enter_context(module.register_forward_hook(partial(self.replace, stub)))
            target.prefill(torch.zeros(1, dtype=torch.long, device=target.device), target.cache())
        skipped, read = (
            sum(weight.numel() for module in modules for weight in module.parameters())
            for modules in (self.forwards, (target.decoder_layers, target.embeddings.lm_head))
        )
        self.cost = 1 - skipped / read

    def replace(self, stub: Stub, module: nn.Module, _args: Any, output: Any) -> None:
        """Make the forward method that returns the stub's result where the module returns its hidden states."""
        others = (None,) * (len(output) - 1) if isinstance(output, tuple) else None

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = stub(args[0] if args else kwargs["hidden_states"])
            return hidden if others is None else (hidden, *others)

        self.forwards[module] = forward

    @torch.inference_mode()
    def run(
        self,
        token: PerNode,
        position: PerNode,
        attn_mask: Bool[Tensor, "N S"],
        cache: TargetCache,
        key_position: Int[Tensor, "1 S"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """Append rows to the cache of the layers whose attention runs, and return their logits.

        `attn_mask` has the cached and new rows that each row attends to, `key_position` the positions of all these;
        None for 0, 1, 2, … The layers' cache lengths differ until the caller truncates them.
        """
        with forwards_replaced(self.forwards):
            out = self.target.run(token[None], position[None], attn_mask[None], cache, key_position=key_position)
        return self.target.embeddings.logits(out.last_hidden[0])
