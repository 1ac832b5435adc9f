"""Passes through a part of the target's decoder stack: all but skipped layers or sub-layers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
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


def sublayers(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a decoder layer's attention (the module with a layer index) and its MLP; refuse one without these."""
    heavy = [child for child in layer.children() if any(p.ndim > 1 for p in child.parameters())]
    parts = {hasattr(child, "layer_idx"): child for child in heavy}
    if not len(heavy) == len(parts) == 2:
        raise ValueError(f"{type(layer).__name__} is not made of one attention and one MLP: nothing can be skipped")
    return parts[True], parts[False]


class Thinned:
    """A target whose skipped modules return their input, or zeros, during a pass; no modeling code is copied.

    `cost` is that of a drafted token in target passes: the share of the weights, lm_head included, that it reads.

    Raises:
        ValueError: its attention takes no mask of ours, or a layer is of other parts.
    """

    def __init__(self, target: TargetModel, skips: Skips) -> None:
        target.check_masks("so parts of it cannot draft alone")
        self.target, self.forwards = target, dict[nn.Module, Callable[..., Any]]()
        whole = {*skips.attention} & {*skips.mlp}
        stubs: dict[nn.Module, Stub] = {target.decoder_layers[i]: Tensor.contiguous for i in whole}
        for which, indices in enumerate(skips):
            stubs |= {sublayers(target.decoder_layers[i])[which]: torch.zeros_like for i in indices if i not in whole}
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
        token: Int[Tensor, "N"],
        position: Int[Tensor, "N"],
        attn_mask: Bool[Tensor, "N S"],
        cache: TargetCache,
        key_position: Int[Tensor, "1 S"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """Append rows to the cache of the layers whose attention runs, and return their logits.

        `attn_mask` says which of the cached rows and of these each row attends to. `key_position` are the positions of
        all these; None for 0, 1, 2, … The layers' lengths differ until the caller evens them out.
        """
        with forwards_replaced(self.forwards):
            out = self.target.run(token[None], position[None], attn_mask[None], cache, key_position=key_position)
        return self.target.embeddings.logits(out.last_hidden[0])
