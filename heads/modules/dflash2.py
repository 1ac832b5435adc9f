"""DFlash2 (z-lab's; vllm#52816, speculators#1006): convolutions inside a block, and a selector among candidates."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec


class GroupedConv(nn.Module):
    """Two causal convolutions over a block's positions, before and after a sublayer.

    The kernel is a learned weight for each channel plus a weight for each group of channels that is computed from the
    sublayer's input. Both start as the identity.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, x: Float[Tensor, "*n S D"]) -> Float[Tensor, "2 *n S k g c"]:
        """Return the kernels before and after a sublayer with input `x`."""
        taps = self.base_kernel.shape[1]
        added = self.kernel_projection(x).unflatten(-1, (2, taps, -1))
        base = self.base_kernel.unflatten(-1, (added.shape[-1], -1))
        return torch.stack([base[i] + added[..., i, :, :, None] for i in range(2)])


def convolve(x: Float[Tensor, "*n S D"], kernel: Float[Tensor, "*n S k g c"]) -> Float[Tensor, "*n S D"]:
    """Return each position's sum over itself and earlier positions, weighted by its own kernel."""
    groups = x.unflatten(-1, kernel.shape[-2:])
    shifted = [
        functional.pad(groups, (0, 0, 0, 0, tap, 0))[..., : x.shape[-2], :, :] for tap in range(kernel.shape[-3])
    ]
    return (torch.stack(shifted, -3) * kernel).sum(-3).flatten(-2)


class ConvDecoderLayer(DecoderLayer):
    """A decoder layer over blocks of `size` positions, with convolutions around attention and MLP."""

    def __init__(self, spec: LayerSpec, *, size: int, taps: int, group: int) -> None:
        super().__init__(spec)
        self.size = size
        self.attention_conv, self.mlp_conv = (GroupedConv(spec.width, taps, group) for _ in range(2))

    def forward(self, x: Float[Tensor, "B T D"], inputs: LayerInputs) -> Float[Tensor, "B T D"]:
        """Apply the layer with the caller's attention pattern."""
        x = x + self.between(self.attention_conv, self.input_layernorm(x), self.self_attn, inputs)
        return x + self.between(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)

    def between(self, conv: GroupedConv, x: Float[Tensor, "B T D"], layer: Any, *args: Any) -> Float[Tensor, "B T D"]:
        """Apply a sublayer between its two convolutions."""
        x = x.unflatten(1, (-1, self.size))
        before, behind = conv.kernels(x)
        out: Tensor = layer(convolve(x, before).flatten(1, 2), *args)
        return convolve(out.unflatten(1, (-1, self.size)), behind).flatten(1, 2)


class Selector(nn.Module):
    """A score of each candidate token c after token p: <A[p] * P(h), B[c]>, added to the candidate's logit.

    Candidates are the position's `top_k` tokens by logits. All others, which the authors do not draft, keep their order
    below the last candidate, so that they are trained too.
    """

    def __init__(self, width: int, rank: int, top_k: int, size: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor = nn.Embedding(size, rank)
        self.projection = nn.Linear(width, rank, bias=False)
        self.successor = nn.Embedding(size, rank)
        nn.init.normal_(self.predecessor.weight, std=0.02)
        nn.init.normal_(self.successor.weight, std=0.02)

    def context(self, hidden: Float[Tensor, "*#n D"], token: Int[Tensor, "*n"]) -> Float[Tensor, "*n R"]:
        """Return A[p] * P(h) of a position's state h and the token p before it."""
        return self.predecessor(token).to(hidden.dtype) * self.projection(hidden)

    def forward(self, logits: Float[Tensor, "*#n W"], context: Float[Tensor, "*n R"]) -> Float[Tensor, "*n W"]:
        """Return the selector's logits."""
        best = logits.topk(min(self.top_k, logits.shape[-1]), -1)
        scores = best.values + (self.successor(best.indices) * context[..., None, :]).sum(-1)
        below = logits - best.values[..., -1:] + scores.amin(-1, keepdim=True)
        return below.scatter(-1, best.indices.expand_as(scores), scores)
