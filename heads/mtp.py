"""Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2), one module reused for every depth.

The input of row t is eh_proj(enorm(embedding of token t+1), hnorm(state t)), the embedding first as in all published
weights. One decoder layer and the module's own final norm compute state t+1, which the target's lm_head and the next
depth read. At depth 1, state t is the target's, after its final norm. Row t has rotary position t and attends to the
last `length` rows (heads/modules/kv_cache.py). `feature_layers` (not DeepSeek's) adds EAGLE-3's fused states of these
layers to the target's state.

With `layer=target` the decoder layer and the norms are of the target's own class, so the module can be written back
into the target's checkpoint; `raw_state` then reads the target's states before its final norm, as MiMo does.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import nn

from heads.base import CandidateConfig, Embeddings, Features
from heads.common.typed import OneOf
from heads.modules.autoregressive import AutoregressiveHead
from heads.modules.fusion import Fusion, chosen_layers
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec, RMSNorm, TargetLayer
from heads.modules.vocab import lm_head_of
from heads.shapes import Advanced, Rows, Sequences

LLAMA, TARGET = "llama", "target"  # kinds of decoder layer


class Mtp(AutoregressiveHead):
    """The MTP module; it reads `last_hidden` or `hidden` of the features; embedding and lm_head are the target's."""

    @dataclass(frozen=True)
    class Config(CandidateConfig):
        """Hyperparameters of the module."""

        layer: Annotated[str, OneOf((LLAMA, TARGET))]
        raw_state: bool
        qk_norm: bool
        feature_layers: list[int] | None

    first_layer = "block"

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        spec = LayerSpec.of(config, embeddings)
        width, eps = spec.width, spec.eps
        layers = config.feature_layers
        self.feature_layers = () if layers is None else chosen_layers(layers, len(layers), embeddings.num_layers)
        if config.raw_state and layers:
            raise ValueError("head.raw_state=true reads only the target's last layer: give head.feature_layers=null")
        if config.raw_state:
            self.feature_layers = (embeddings.num_layers - 1,)
        self.fusion = Fusion(width, len(self.feature_layers), eps, normed=True) if layers else None
        if self.fusion is not None:
            nn.init.zeros_(self.fusion.fc.weight)  # training starts as without fused states
        like_targets = TargetLayer(embeddings.config) if config.layer == TARGET else None
        norm = partial(RMSNorm, width, eps) if like_targets is None else like_targets.norm
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = DecoderLayer(spec) if like_targets is None else like_targets
        self.norm = norm()
        self.lm_head = lm_head_of(config, embeddings, self.vocab)

    def check(self) -> None:
        """Refuse a target's layer that needs other inputs than our layers."""
        if isinstance(self.block, TargetLayer):
            self.block.check()

    def initial_states(self, features: Features) -> Rows:
        """Return the target's states: after or before its final norm, plus other layers' fused states if configured."""
        if self.config.raw_state:
            return features.hidden[:, :, 0]
        return features.last_hidden if self.fusion is None else features.last_hidden + self.fusion(features.hidden)

    def advance(self, token: Sequences, state: Rows, inputs: list[LayerInputs]) -> Advanced:
        """Return the normed states, for the next depth and for the lm_head."""
        embedding = self.embeddings.embed(token).to(state.dtype)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))
        x = self.norm(self.block(x, inputs[0]))
        return x, x
