"""The decoder layer that all heads share: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The caller supplies the attention: a layer projects and rotates, then calls an `attend` function with queries, keys and
values. Training, appending rows and expanding a tree differ only in that function (heads/modules/autoregressive.py).
Shape letters: B batch, T rows or queries, N of them that are queries, S keys, H query heads, G key-value heads, E head
width (F the values', where that differs), X input width, D model width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from heads.base import Embeddings, LayerDims, resolve_layer_dims
from heads.common.rope import Rope, Rotary
from heads.rows import gather_rows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# tree_attention.py, once a target lies on a device for which it has a kernel: heads are published without it.
masked_kernel: Any = None


class LayerInputs(NamedTuple):
    """A decoder layer's inputs besides the states of T rows."""

    position: Int[Tensor, "B T"]
    max_position: int  # an upper bound of the positions
    attend: Attend
    queries: Int[Tensor, "B N"] | None = None  # the rows whose output is needed; None for all, N = T


class LayerSpec(NamedTuple):
    """The dimensions and options of a decoder layer.

    `qk_norm` adds Qwen3's norms of queries and keys, `injects` separate projections of keys and values for injected
    states.
    """

    width: int
    dims: LayerDims
    rope: Rope
    eps: float
    qk_norm: bool = False
    injects: bool = False

    @classmethod
    def of(cls, config: Any, embeddings: Embeddings) -> "LayerSpec":
        """Return the spec of a head's configuration; refuse odd and uneven dimensions."""
        options = (getattr(config, name, False) for name in ("qk_norm", "kv_injection"))
        return cls(
            embeddings.hidden_size, resolve_layer_dims(config, embeddings), Rope.of(config), config.norm_eps, *options
        )


class Recomputing(nn.Module):
    """A module with activation checkpointing: under `recompute` the backward pass recomputes its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute = False

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of tensors; under `recompute` its activations are checkpointed."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


class RMSNorm(Recomputing):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Normalise the last dimension."""
        return self.checkpointed(self.apply_to, x)

    def apply_to(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Apply the norm, keeping its activations."""
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * functional.rms_norm(wide, self.weight.shape, eps=self.eps).to(x.dtype)


def grouped_attention(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B G S E"],
    value: Float[Tensor, "B G S F"],
    mask: Shaped[Tensor, "#B 1 T S"] | None,
    scale: float | None = None,
) -> Float[Tensor, "B H T F"]:
    """Grouped-query attention where a boolean mask is true, or with an additive mask; None attends to all keys.

    Keys and values are not repeated for the heads that share them: on CUDA our kernel reads them once
    (heads/modules/tree_attention.py), elsewhere the query heads of a group become queries of one head.
    """
    heads, groups = query.shape[1], key.shape[1]
    if mask is not None and masked_kernel is not None and masked_kernel.takes(query, key, value, mask):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = masked_kernel.tree_attention(query, key, value, mask, scale)
        return out
    if heads == groups:
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    folded = query.unflatten(1, (groups, -1)).flatten(2, 3)
    if mask is not None:
        mask = mask.expand(-1, heads // groups, -1, -1).flatten(1, 2)[:, None]
    out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=scale)
    return out.unflatten(2, (heads // groups, -1)).flatten(1, 2)


class Attention(Recomputing):
    """Grouped-query self-attention whose input may be wider than the model (EAGLE-3 feeds two states)."""

    def __init__(self, spec: LayerSpec, input_width: int) -> None:
        super().__init__()
        self.dims = dims = spec.dims
        self.rotary = Rotary(dims.head_dim, spec.rope)
        self.q_proj = nn.Linear(input_width, dims.num_heads * dims.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, dims.num_kv_heads * dims.head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, dims.num_kv_heads * dims.head_dim, bias=False)
        self.o_proj = nn.Linear(dims.num_heads * dims.head_dim, spec.width, bias=False)
        self.q_norm = RMSNorm(dims.head_dim, spec.eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dims.head_dim, spec.eps) if spec.qk_norm else nn.Identity()
        if spec.injects:
            self.k_inject = nn.Linear(spec.width, dims.num_kv_heads * dims.head_dim, bias=False)
            self.v_inject = nn.Linear(spec.width, dims.num_kv_heads * dims.head_dim, bias=False)

    def forward(self, x: Float[Tensor, "B T X"], inputs: LayerInputs) -> Float[Tensor, "B N D"]:
        """Project, rotate, attend by `attend(query, key, value)` and project back."""
        position, max_position, attend, queries = inputs
        out = self.apart(attend, *self.checkpointed(self.project, x, position, max_position, queries))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def apart(attend: Attend, *states: Tensor) -> Tensor:
        """Call `attend`, outside of the compiled part (`compile_layers`)."""
        return attend(*states)

    def project(
        self,
        x: Float[Tensor, "B T X"],
        position: Int[Tensor, "B T"],
        max_position: int,
        queries: Int[Tensor, "B N"] | None,
    ) -> tuple[Tensor, ...]:
        """Return the rotated queries of some rows, and all keys and values."""
        query, key, value = self.q_proj(gather_rows(x, queries)), self.k_proj(x), self.v_proj(x)
        query, key, value = self.q_norm(self.split(query)), self.k_norm(self.split(key)), self.split(value)
        if queries is not None:
            return (
                self.rotary(query, gather_rows(position, queries), max_position),
                self.rotary(key, position, max_position),
                value,
            )
        both = self.rotary(torch.cat([query, key], 1), position, max_position)
        return both[:, : query.shape[1]], both[:, query.shape[1] :], value

    def key_value(
        self, c: Float[Tensor, "B T C"], position: Int[Tensor, "B T"], max_position: int, *, inject: bool = False
    ) -> tuple[Float[Tensor, "B G T E"], Float[Tensor, "B G T E"]]:
        """Return keys and values of injected states, by the input's projections or separate ones."""
        k_proj, v_proj = (self.k_inject, self.v_inject) if inject else (self.k_proj, self.v_proj)
        return self.rotary(self.k_norm(self.split(k_proj(c))), position, max_position), self.split(v_proj(c))

    def split(self, x: Float[Tensor, "B T X"]) -> Float[Tensor, "B H T E"]:
        """Return a projection's output, split into heads."""
        return x.view(*x.shape[:2], -1, self.dims.head_dim).transpose(1, 2)


class SwiGLU(Recomputing):
    """Gated feed-forward layer (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Apply the layer."""
        return self.checkpointed(self.apply_to, x)

    def apply_to(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Apply the layer, keeping its activations."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama decoder layer; `input_norm=False` drops the norm before attention, as in EAGLE's first layer."""

    def __init__(self, spec: LayerSpec, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, spec.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(spec, spec.width)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.eps)
        self.mlp = SwiGLU(spec.width, spec.dims.intermediate_size)

    def forward(self, x: Float[Tensor, "B T D"], inputs: LayerInputs) -> Float[Tensor, "B N D"]:
        """Apply the layer with the caller's attention pattern."""
        x = gather_rows(x, inputs.queries) + self.self_attn(self.input_layernorm(x), inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


def compile_layers(head: nn.Module) -> bool:
    """Compile each decoder layer of a head, and return whether it has any.

    One compiled layer serves all depths. Attention differs from depth to depth and is a separate kernel, so it stays
    outside of the compiled parts.
    """
    layers = [layer for layer in head.modules() if any(isinstance(child, Attention) for child in layer.children())]
    for layer in layers:
        layer.compile()
        for child in layer.children():
            if isinstance(child, Attention):
                vars(child)["apart"] = torch.compiler.disable(Attention.apart)
    return bool(layers)
