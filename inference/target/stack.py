"""Passes through a part of the target's decoder stack: all but skipped layers or sub-layers.

No modeling code is copied. The base model runs with its own masks, positions and cache; during a pass the skipped
modules return their input, or zeros. A layer whose attention is skipped gets no entries in the cache, so the layers'
lengths differ until the caller evens them out.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from inference.target.cache import TargetCache
from inference.target.model import TargetModel, forwards_replaced

Stub = Callable[[Tensor], Tensor]


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
    def run_skipping(
        self,
        skipped: Skips,
        token: Int[Tensor, "N"],
        position: Int[Tensor, "N"],
        attn_mask: Bool[Tensor, "N S"],
        cache: TargetCache,
        key_position: Int[Tensor, "S"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """Return the logits of rows that run through all layers except the skipped ones.

        The rows are appended to the cache of layers whose attention runs. `attn_mask` says which of the cached rows and
        of these each row attends to. `key_position` are the positions of all these; None for 0, 1, 2, …
        """
        stubs: dict[nn.Module, Stub] = {
            self.layers[i]: (lambda hidden: hidden) for i in {*skipped.attention} & {*skipped.mlp}
        }
        for which, layers in enumerate(skipped):
            stubs |= {
                _sublayers(self.layers[i])[which]: torch.zeros_like for i in layers if self.layers[i] not in stubs
            }
        with forwards_replaced({module: _as_outputs(stub, self.num_outputs[module]) for module, stub in stubs.items()}):
            positions = None if key_position is None else key_position[None]
            out = self.target.run(token[None], position[None], attn_mask[None], cache, key_position=positions)
        return self.target.embeddings.logits(out.last_hidden[0])

    def sizes(self) -> list[tuple[int, int]]:
        """Return the parameter counts of each layer's attention and MLP; refuse layers without one of each."""
        parts = [[sum(p.numel() for p in module.parameters()) for module in _sublayers(layer)] for layer in self.layers]
        return [(attention, mlp) for attention, mlp in parts]

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
