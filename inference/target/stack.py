"""Passes through parts of the target's decoder stack: first layers, remaining layers, or all but skipped sub-layers.

No modeling code is copied. The base model runs with its own masks, positions and cache; during a pass the skipped
modules return their input, or zeros. A layer whose attention is skipped gets no entries in the cache, so the layers'
lengths differ until the caller evens them out.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from inference.target.cache import TargetCache
from inference.target.model import TargetModel, TargetOutput, forwards_replaced
from inference.verification import tree
from inference.verification.tree import DraftTree

Stub = Callable[[Tensor], Tensor]


class FirstLayersOutput(NamedTuple):
    """The hidden states of a tree's nodes after the first `layers` decoder layers.

    The cache of those layers ends with the nodes' entries, in order.
    """

    layers: int
    hidden: Float[Tensor, "N D"]


class Skips(NamedTuple):
    """The decoder layers whose attention is skipped, and those whose MLP is."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]


class Parts:
    """Passes through parts of one target's decoder stack.

    Raises:
        ValueError: its attention takes no mask of ours; these passes need one.
    """

    def __init__(self, target: TargetModel) -> None:
        target.check_masks("so parts of it cannot draft alone")
        self.target = target
        self.layers = target.decoder_layers
        self.num_outputs = self._count_outputs(
            [*self.layers, *(child for layer in self.layers for child in layer.children())]
        )

    @torch.inference_mode()
    def run_first_layers(
        self,
        layers: int,
        token: Int[Tensor, "N"],
        position: Int[Tensor, "N"],
        attn_mask: Bool[Tensor, "N S"],
        cache: TargetCache,
        earlier: Int[Tensor, "P"] | None = None,
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N V"]]:
        """Run rows through the first `layers` layers and append them to these layers' cache.

        `attn_mask` says which of the cached rows and of these each row attends to. `earlier` are the positions of the
        cached rows; None for 0, 1, 2, …

        Returns:
            The states after these layers, and their logits through the final norm and the lm_head.
        """
        left: list[Tensor] = []

        def note(hidden: Tensor) -> Tensor:
            left.append(hidden)
            return hidden

        stubs: dict[nn.Module, Stub] = dict.fromkeys(self.layers[layers:], lambda hidden: hidden)
        with self._replacing(stubs | {self.layers[layers]: note}):
            key_position = None if earlier is None else torch.cat([earlier, position])[None]
            out = self.target.run(token[None], position[None], attn_mask[None], cache, key_position=key_position)
        return left[0][0], self.target.embeddings.logits(out.last_hidden[0])

    @torch.inference_mode()
    def score_from(
        self, first_layers: FirstLayersOutput, drafted: DraftTree, cache: TargetCache, layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run a tree's nodes through the remaining layers; without the lm_head.

        The outputs of feature layers below `first_layers.layers` are wrong: these layers do not run.
        """
        prefix = cache.length - len(drafted.token)
        position, attn_mask = tree.layout(drafted, prefix)
        stubs: dict[nn.Module, Stub] = dict.fromkeys(self.layers[: first_layers.layers], lambda hidden: hidden)
        with self._replacing(stubs | {self.layers[0]: lambda _: first_layers.hidden[None]}):
            return self.target.run(drafted.token.clamp_min(0)[None], position[None], attn_mask[None], cache, layers)

    @torch.inference_mode()
    def run_skipping(
        self,
        skipped: Skips,
        token: Int[Tensor, "N"],
        position: Int[Tensor, "N"],
        attn_mask: Bool[Tensor, "N S"],
        cache: TargetCache,
    ) -> Float[Tensor, "N V"]:
        """Return the logits of rows that run through all layers except the skipped sub-layers.

        The rows are appended to the cache of layers whose attention runs; cached positions are 0, 1, 2, …
        """
        left_out = [_sublayers(self.layers[i])[0] for i in skipped.attention]
        left_out += [_sublayers(self.layers[i])[1] for i in skipped.mlp]
        with self._replacing(dict.fromkeys(left_out, torch.zeros_like)):
            out = self.target.run(token[None], position[None], attn_mask[None], cache)
        return self.target.embeddings.logits(out.last_hidden[0])

    def sizes(self) -> list[tuple[int, int]]:
        """Return the parameter counts of each layer's attention and MLP; refuse layers without one of each."""
        return [(_size(attention), _size(mlp)) for attention, mlp in map(_sublayers, self.layers)]

    def _replacing(self, stubs: dict[nn.Module, Stub]) -> AbstractContextManager[None]:
        """Replace modules' forward methods during a pass by functions of their first input."""
        return forwards_replaced(
            {module: _as_outputs(stub, self.num_outputs[module]) for module, stub in stubs.items()}
        )

    def _count_outputs(self, modules: Iterable[nn.Module]) -> dict[nn.Module, int | None]:
        """Return the length of each module's output tuple, None for a tensor."""
        num_outputs: dict[nn.Module, int | None] = {}

        def note(module: nn.Module, _args: Any, output: Any) -> None:
            num_outputs[module] = len(output) if isinstance(output, tuple) else None

        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_hook(note))
            self.target.prefill(torch.zeros(1, dtype=torch.long, device=self.target.device), self.target.cache())
        return num_outputs


def _as_outputs(stub: Stub, num_outputs: int | None) -> Callable[..., Any]:
    """Return a forward method that returns the stub's result where the module returns its hidden states."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = stub(args[0] if args else kwargs["hidden_states"])
        return hidden if num_outputs is None else (hidden, *[None] * (num_outputs - 1))

    return forward


def _sublayers(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a decoder layer's attention (the module with a layer index) and its MLP."""
    heavy = [child for child in layer.children() if any(p.ndim > 1 for p in child.parameters())]
    attention = [child for child in heavy if hasattr(child, "layer_idx")]
    mlp = [child for child in heavy if not hasattr(child, "layer_idx")]
    if len(attention) != 1 or len(mlp) != 1:
        raise ValueError(
            f"{type(layer).__name__} is not made of one attention and one MLP: its sub-layers cannot be skipped"
        )
    return attention[0], mlp[0]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
