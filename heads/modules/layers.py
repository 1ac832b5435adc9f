"""The decoder layer that all heads share: RMSNorm, rotary positions, grouped-query attention, a target's layer.

The caller supplies the attention: a layer projects and rotates, then calls an `attend` function with queries, keys and
values. Training, appending rows and expanding a tree differ only in that function (heads/modules/autoregressive.py).
Shape letters: B batch, T rows or queries, N of them that are queries, S keys, H query heads, G key-value heads, E head
width (F the values', where that differs), X input width, D model width.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from heads.base import Embeddings, LayerDims, resolve_layer_dims
from heads.common.errors import one_line
from heads.common.rope import Rope, Rotary
from heads.common.target_config import UNFIT
from heads.rows import gather_rows, scatter_rows
from heads.shapes import HeadOutputs, HeadRows, KeyRows, Nodes, NodeStates, RowInputs, Rows, Sequences, States

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# Set by tree_attention.py once the target is on a device with a kernel; published heads run without that module.
masked_kernel: Any = None
ATTENTION = "headstart"  # name of our attention function in transformers


class LayerInputs(NamedTuple):
    """A decoder layer's inputs, except the states of T rows."""

    position: Sequences
    max_position: int  # an upper bound of the positions
    attend: Attend
    queries: Nodes | None = None  # the rows whose output is needed; None for all, N = T


class LayerSpec(NamedTuple):
    """The dimensions and options of a decoder layer."""

    width: int
    dims: LayerDims
    rope: Rope
    eps: float
    qk_norm: bool = False  # Qwen3's norms of queries and keys
    injects: bool = False  # separate projections of keys and values for injected states

    @classmethod
    def of(cls, config: Any, embeddings: Embeddings) -> "LayerSpec":
        """Return the spec of a head's configuration; refuse odd or uneven dimensions."""
        options = (getattr(config, name, False) for name in ("qk_norm", "kv_injection"))
        return cls(
            embeddings.hidden_size, resolve_layer_dims(config, embeddings), Rope.of(config), config.norm_eps, *options
        )


class Recomputing(nn.Module):
    """A module with activation checkpointing: under `recompute` the backward pass recomputes its activations."""

    recompute = False

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of tensors; under `recompute` its activations are checkpointed."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False)
        return function(*inputs)


class Checkpointed(Recomputing):
    """A module of one state whose forward pass, `apply_to`, is checkpointed."""

    apply_to: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module."""
        return self.checkpointed(self.apply_to, x)


class RMSNorm(Checkpointed):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def apply_to(self, x: States) -> States:
        """Normalise the last dimension."""
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * functional.rms_norm(wide, self.weight.shape, eps=self.eps).to(x.dtype)


def grouped_attention(
    query: HeadRows,
    key: Float[Tensor, "B G S E"],
    value: Float[Tensor, "B G S F"],
    mask: Shaped[Tensor, "#B 1 T S"] | None,
    scale: float | None = None,
) -> HeadOutputs:
    """Grouped-query attention where a boolean mask is true, or with an additive mask; None attends to all keys.

    Keys and values are not repeated for the heads that share them: on CUDA our kernel reads them once
    (heads/modules/tree_attention.py), elsewhere the query heads of a group become queries of one head.
    """
    heads, groups = query.shape[1], key.shape[1]
    if mask is not None and masked_kernel is not None and masked_kernel.takes(query, key, value, mask):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return masked_kernel.tree_attention(query, key, value, mask, scale)
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
        inner, kv_inner = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
        self.q_proj = nn.Linear(input_width, inner, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(input_width, kv_inner, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(inner, spec.width, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(dims.head_dim, spec.eps) if spec.qk_norm else nn.Identity() for _ in range(2)
        )
        if spec.injects:
            self.k_inject, self.v_inject = (nn.Linear(spec.width, kv_inner, bias=False) for _ in range(2))

    def forward(self, x: RowInputs, inputs: LayerInputs) -> NodeStates:
        """Project, rotate, call `attend(query, key, value)` and project back."""
        position, max_position, attend, queries = inputs
        out = self.call_attend(attend, *self.checkpointed(self.project, x, position, max_position, queries))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def call_attend(attend: Attend, *states: Tensor) -> Tensor:
        """Call `attend` outside of the compiled part (`compile_layers`)."""
        return attend(*states)

    def project(
        self, x: RowInputs, position: Sequences, max_position: int, queries: Nodes | None
    ) -> tuple[Tensor, ...]:
        """Return the rotated queries of the needed rows, and all keys and values."""
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
        self, c: RowInputs, position: Sequences, max_position: int, *, inject: bool = False
    ) -> tuple[KeyRows, KeyRows]:
        """Return keys and values of injected states, projected like the input or by separate projections."""
        k_proj, v_proj = (self.k_inject, self.v_inject) if inject else (self.k_proj, self.v_proj)
        return self.rotary(self.k_norm(self.split(k_proj(c))), position, max_position), self.split(v_proj(c))

    def split(self, x: RowInputs) -> HeadRows:
        """Return a projection's output, split into heads."""
        return x.view(*x.shape[:2], -1, self.dims.head_dim).transpose(1, 2)


class SwiGLU(Checkpointed):
    """Gated feed-forward layer (Shazeer, 2020)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def apply_to(self, x: States) -> States:
        """Apply the layer."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama decoder layer; `input_norm=False` drops the norm before attention, as in EAGLE's first layer."""

    def __init__(self, spec: LayerSpec, *, input_norm: bool = True) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, spec.eps) if input_norm else nn.Identity()
        self.self_attn = Attention(spec, spec.width)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.eps)
        self.mlp = SwiGLU(spec.width, spec.dims.intermediate_size)

    def forward(self, x: Rows, inputs: LayerInputs) -> NodeStates:
        """Apply the layer with the caller's attention pattern."""
        x = gather_rows(x, inputs.queries) + self.self_attn(self.input_layernorm(x), inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


def compile_layers(head: nn.Module) -> bool:
    """Compile each decoder layer of a head, and return whether it has any.

    One compiled layer serves all depths. Attention, which differs between them, stays outside of the compiled parts.
    """
    pairs = [(layer, child) for layer in head.modules() for child in layer.children() if isinstance(child, Attention)]
    for layer, attention in pairs:
        layer.compile()
        vars(attention)["call_attend"] = torch.compiler.disable(Attention.call_attend)
    return bool(pairs)


class TargetLayer(nn.Module):
    """A new decoder layer of the target's last layer's class; refuse a class that cannot run outside of its model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        import transformers

        if config is None:
            raise ValueError("plan=true traces no layer of the target's own kind: plan with head.layer=llama")
        transformers.AttentionInterface.register(ATTENTION, _attend)
        trusted = type(config).__module__.startswith("transformers_modules")  # such a class was loaded by trusted code
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trusted)
        stacks = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
        self.layer = next(stack for stack in stacks if len(stack) == config.num_hidden_layers)[-1].to(
            torch.get_default_dtype()
        )
        for module in self.layer.modules():
            settings = getattr(module, "config", None)
            if settings is not None:
                settings._attn_implementation = ATTENTION
        self.width: int = config.hidden_size
        rotary = [m for name, m in model.base_model.named_modules() if name.split(".")[-1] == "rotary_emb"]
        if not rotary:
            raise _unfit("it has no rotary positions")
        with torch.device("cpu"):  # on the CPU even if the head is on meta: position tables cannot be computed on meta
            self._rotary = (type(rotary[0])(model.config),)  # a tuple, so that the tables stay fp32 and are not saved
        if (device := torch.get_default_device()).type != "meta":
            self.layer.to_empty(device=device).apply(model._init_weights)
            self.check()

    def norm(self) -> nn.Module:
        """Return a new norm of the layer's class; refuse a layer without a norm of one weight."""
        for child in self.layer.children():
            if [p.ndim for p in child.parameters()] == [1]:
                return copy.deepcopy(child)
        raise _unfit("it has no norm of one weight")

    def forward(self, x: Rows, inputs: LayerInputs) -> NodeStates:
        """Apply the layer with the caller's attention pattern."""
        position, _, attend, queries = inputs
        embed = self._rotary[0].to(x.device)
        # Qwen3.5 rotates by three axes, which are equal in a text; transformers 5.17 does not expand one position.
        rotary = embed(x, position.expand(3, -1, -1) if hasattr(embed, "mrope_section") else position)

        def attend_from(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            query = gather_rows(query.transpose(1, 2), queries).transpose(1, 2)
            out = attend(query, key, value).transpose(1, 2)
            return scatter_rows(out.flatten(2), queries, x.shape[1]).unflatten(2, out.shape[2:]).transpose(1, 2)

        out = self.layer(x, attention_mask=None, position_ids=position, position_embeddings=rotary, attend=attend_from)
        return gather_rows(out[0] if isinstance(out, tuple) else out, queries)

    @torch.no_grad()
    def check(self) -> None:
        """Run the layer on two rows; refuse one that needs other inputs."""
        x = next(self.layer.parameters()).new_zeros(1, 2, self.width)
        position = torch.arange(2, device=x.device)[None]
        try:
            self(x, LayerInputs(position, 2, partial(grouped_attention, mask=None)))
        except UNFIT as error:
            raise _unfit(one_line(error)) from error


def _unfit(why: str) -> ValueError:
    return ValueError(f"the target's last layer cannot run by itself ({why})")


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Call the caller's `attend` with transformers' signature; `attend` scales the scores itself."""
    if odd := [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]:
        raise ValueError(f"its attention has a {odd[0]}")
    width = query.shape[-1]
    scale = kwargs.get("scaling") or width**-0.5
    out = kwargs["attend"](query * (scale * width**0.5), key, value)
    return out.transpose(1, 2).contiguous(), None
