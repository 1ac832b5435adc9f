"""EAGLE-3 (Li et al., arXiv 2503.01840): fused features of several layers; it predicts tokens, not features.

The wide first layer reads (norm of the embedding of token t+1, norm of the state before). The state is fc(features of
the chosen layers at t) at depth 1 and the layer's own output at later depths, in training too: `unroll` is the
training-time test. The head's own lm_head reads the normed output, over a draft vocabulary if it has one.

EAGLE-3.1 (arXiv 2605.09992) norms each layer's features before they are fused (`feature_norm`) and feeds the normed
output back (`norm_output`), which keeps deep drafts and long texts from drifting. Further options: one norm of all
features before fc (`joint_norm`, speculators' default), Qwen3's norms of queries and keys (`qk_norm`), more layers, and
`kv_injection`, as in DFlash (arXiv 2602.06036): every layer's keys and values of the context are projections of the
fused features, not of the layer's own input.
"""

from dataclasses import dataclass

import torch
from torch import nn

from heads.base import CandidateConfig, Embeddings, Features
from heads.common.typed import Parts
from heads.modules.attention import KeyValue
from heads.modules.autoregressive import AutoregressiveHead
from heads.modules.fusion import EAGLE3_LAYERS, Fusion, chosen_layers
from heads.modules.layers import Attention, DecoderLayer, LayerInputs, LayerSpec, RMSNorm, SwiGLU
from heads.modules.vocab import lm_head_of
from heads.rows import gather_rows
from heads.shapes import Advanced, NodeStates, Rows, Sequences, States, TokenIds


class WideDecoderLayer(nn.Module):
    """The first layer of EAGLE-3: a decoder layer whose attention reads an embedding and the state.

    The residual is the state, or with `norm_before_residual` the normed state: trainers differ here.
    """

    def __init__(self, spec: LayerSpec, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(spec.width, spec.eps)
        self.hidden_norm = RMSNorm(spec.width, spec.eps)
        self.self_attn = Attention(spec, 2 * spec.width)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.eps)
        self.mlp = SwiGLU(spec.width, spec.dims.intermediate_size)

    def forward(self, embedding: Rows, state: Rows, inputs: LayerInputs) -> NodeStates:
        """Apply the layer with the caller's attention pattern."""
        normed = self.hidden_norm(state)
        both = torch.cat([self.input_layernorm(embedding), normed], -1)
        x = gather_rows(normed if self.norm_before_residual else state, inputs.queries) + self.self_attn(both, inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class FusedConfig(CandidateConfig):
    """Hyperparameters of a head on fused features; `feature_layers` null takes three layers."""

    layers: Parts
    feature_layers: list[int] | None
    feature_norm: bool
    joint_norm: bool
    norm_before_residual: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        """Refuse two norms before fc: no engine runs them."""
        if self.feature_norm and self.joint_norm:
            raise ValueError("head.feature_norm and head.joint_norm are both true: give one norm before fc")


class Eagle3(AutoregressiveHead):
    """The EAGLE-3 head; the embedding stays the target's and frozen."""

    @dataclass(frozen=True)
    class Config(FusedConfig):
        """Hyperparameters of the head."""

        norm_output: bool
        kv_injection: bool

    predicts_feature, first_layer = False, "first"

    def __init__(self, config: FusedConfig, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        spec = LayerSpec.of(config, embeddings)
        self.num_attention_layers, self.injected = config.layers, spec.injects
        self.feeds_normed: bool = getattr(config, "norm_output", False)  # the next depth reads the normed state
        width, eps = spec.width, spec.eps
        self.feature_layers = chosen_layers(config.feature_layers, EAGLE3_LAYERS, embeddings.num_layers)
        self.fusion = Fusion(width, len(self.feature_layers), eps, normed=config.feature_norm, joint=config.joint_norm)
        self.first = WideDecoderLayer(spec, norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleList(DecoderLayer(spec) for _ in range(config.layers - 1))
        self.inject_norm = RMSNorm(width, eps) if spec.injects else None
        self.norm = RMSNorm(width, eps)
        self.lm_head = lm_head_of(config, embeddings, self.vocab)

    def embed(self, token: TokenIds) -> States:
        """Return the embeddings of tokens."""
        return self.embeddings.embed(token)

    def initial_states(self, features: Features) -> Rows:
        """Return the fused features."""
        return self.fusion(features.hidden)

    def inject(self, start: Rows, position: Sequences, max_position: int) -> tuple[KeyValue, ...]:
        """Return every layer's keys and values from the fused features, empty without `kv_injection`."""
        if self.inject_norm is None:
            return ()
        fused = self.inject_norm(start)
        layers = [self.first, *self.layers]
        return tuple(layer.self_attn.key_value(fused, position, max_position, inject=True) for layer in layers)

    def advance(self, token: Sequences, state: Rows, inputs: list[LayerInputs]) -> Advanced:
        """Return the states for the next depth, and the normed states for the lm_head."""
        x = self.first(self.embed(token).to(state.dtype), state, inputs[0])
        for layer, given in zip(self.layers, inputs[1:], strict=True):
            x = layer(x, given)
        pre_logits = self.norm(x)
        return (pre_logits if self.feeds_normed else x), pre_logits
