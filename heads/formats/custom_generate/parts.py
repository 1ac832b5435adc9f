"""What draft heads are made of: norms, rotary positions, a decoder layer; each reads its tensors by their names.

Rows of one sequence, no batch. Shapes: T rows, S keys, H query heads, G key-value heads, E head width, D model width.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries (H, T, E), keys and values (G, T, E) to (H, T, E)
KeyValue = tuple[Tensor, Tensor]  # (G, S, E) each


class Weights:
    """Tensors by name, those under a prefix."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix

    def under(self, name: str) -> "Weights":
        """Return those of a part."""
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise ValueError(f"the head's model.safetensors holds no {self.prefix}{name}; download or publish it again")
        return self.tensors[self.prefix + name]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor, None where there is none."""
        return self.tensors.get(self.prefix + name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply a linear layer, with its bias if it has one."""
        return functional.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        """Apply an RMSNorm, computed in fp32."""
        weight, wide = self[f"{name}.weight"], x if x.dtype == torch.float64 else x.float()
        return weight * functional.rms_norm(wide, weight.shape, eps=eps).to(x.dtype)


class Rotary:
    """Rotary positions in the half-split layout of Llama, plain, linear or llama3, from a table that grows."""

    def __init__(self, width: int, theta: float, scaling: dict[str, Any] | None) -> None:
        plain = theta ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        self.width, self.frequency, self.table = width, _scaled(plain, scaling), torch.zeros(2, 0, width)

    def __call__(self, x: Tensor, position: Tensor, end: int) -> Tensor:
        """Rotate queries or keys (H, T, E) to positions (T,) that lie before `end`."""
        if end > self.table.shape[1] or self.table.dtype != x.dtype or self.table.device != x.device:
            angle = torch.arange(2 * end + 64, dtype=torch.float64)[:, None] * self.frequency
            angle = torch.cat([angle, angle], -1)
            self.table = torch.stack([angle.cos(), angle.sin()]).to(x.device, x.dtype)
        cos, sin = self.table[:, position]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


def _scaled(plain: Tensor, scaling: dict[str, Any] | None) -> Tensor:
    """Return the angle of each pair of dimensions a position, in radians."""
    if scaling is None:
        return plain
    kind, slow = scaling["rope_type"], plain / scaling["factor"]
    if kind == "linear":
        return slow
    if kind != "llama3":
        raise ValueError(f"the head's rope_scaling is of type {kind}, which this code does not know")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((waves - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * slow


def attention(query: Tensor, pair: KeyValue, mask: Tensor) -> Tensor:
    """Attend where mask (T, S) is true; query heads share the keys of their group."""
    group = len(query) // len(pair[0])
    key, value = (each.repeat_interleave(group, 0) if group > 1 else each for each in pair)
    return functional.scaled_dot_product_attention(query[None], key[None], value[None], mask)[0]


def joined(before: KeyValue | None, new: KeyValue) -> KeyValue:
    """Return keys and values with new rows behind the earlier ones."""
    return new if before is None else (torch.cat([before[0], new[0]], 1), torch.cat([before[1], new[1]], 1))


class Layer:
    """A Llama decoder layer; one without an input norm in its tensors, as EAGLE's first, has none."""

    def __init__(self, weights: Weights, rotary: Rotary, width: int, eps: float) -> None:
        self.weights, self.rotary, self.width, self.eps = weights, rotary, width, eps

    def __call__(self, x: Tensor, position: Tensor, end: int, attend: Attend) -> Tensor:
        """Return the layer's output (T, D)."""
        normed = "input_layernorm.weight" in self.weights
        y = self.weights.norm("input_layernorm", x, self.eps) if normed else x
        return self.feed_forward(x + self.attend(y, position, end, attend))

    def attend(self, x: Tensor, position: Tensor, end: int, attend: Attend) -> Tensor:
        """Return what attention makes of (T, X), without the residual."""
        query = self.rotary(self._heads("q_proj", x, "q_norm"), position, end)
        out = attend(query, *self.key_value(x, position, end))
        return self.weights.linear("self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def key_value(self, x: Tensor, position: Tensor, end: int, by: str = "proj") -> KeyValue:
        """Return keys and values of states; `by` inject, by the projections that the true rows have of their own."""
        key = self.rotary(self._heads(f"k_{by}", x, "k_norm"), position, end)
        return key, self._heads(f"v_{by}", x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the gated feed-forward part, residual included."""
        y = self.weights.norm("post_attention_layernorm", x, self.eps)
        gate = functional.silu(self.weights.linear("mlp.gate_proj", y))
        return x + self.weights.linear("mlp.down_proj", gate * self.weights.linear("mlp.up_proj", y))

    def _heads(self, name: str, x: Tensor, norm: str = "") -> Tensor:
        split = self.weights.linear(f"self_attn.{name}", x).view(len(x), -1, self.width).transpose(0, 1)
        if norm and f"self_attn.{norm}.weight" in self.weights:
            return self.weights.norm(f"self_attn.{norm}", split, self.eps)
        return split
