"""EAGLE-1/2 (Li et al., arXiv 2401.15077 and 2406.16858): one decoder layer that extrapolates the target's features.

The input of row t is fc(embedding of token t+1, feature t); the layer's output is the predicted feature t+1. The
target's frozen lm_head reads it, and the next depth takes it as its feature. Layer 0 has no input norm and there is no
final norm, as in the authors' checkpoints. EAGLE-2 is the same head with a dynamic tree. Row t has rotary position t
and attends to the last `length` rows (heads/modules/kv_cache.py).
"""

from dataclasses import dataclass

import torch
from torch import nn

from heads.base import CandidateConfig, Embeddings
from heads.common.typed import Parts
from heads.modules.autoregressive import AutoregressiveHead
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec
from heads.modules.vocab import lm_head_of
from heads.shapes import Advanced, Rows, Sequences


class Eagle(AutoregressiveHead):
    """The EAGLE head. It reads `Features.last_hidden`; the embedding stays the target's and frozen."""

    @dataclass(frozen=True)
    class Config(CandidateConfig):
        """Hyperparameters of the head."""

        layers: Parts
        bias: bool

    first_layer = "layers.0"

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        self.num_attention_layers = config.layers
        width, spec = embeddings.hidden_size, LayerSpec.of(config, embeddings)
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList(DecoderLayer(spec, input_norm=i > 0) for i in range(config.layers))
        self.lm_head = lm_head_of(config, embeddings, self.vocab)

    def advance(self, token: Sequences, state: Rows, inputs: list[LayerInputs]) -> Advanced:
        """Return the predicted features, for the next depth and for the lm_head."""
        x = self.fc(torch.cat([self.embeddings.embed(token).to(state.dtype), state], -1))
        for layer, given in zip(self.layers, inputs, strict=True):
            x = layer(x, given)
        return x, x


class Hass(Eagle):
    """HASS (Zhang et al., arXiv 2408.15766): EAGLE's head, trained on its own predicted features.

    Harmonised context alignment trains step j on the predictions of step j - 1: a drafted row attends to true rows up
    to the start of its chain and to the chain's own rows after that, as `unroll` does at several depths. The
    gradient does not run from a step into the one before it. The other half, distilling the target's ten most likely
    tokens, is the loss `top_k`. The trained head is an EAGLE head and decodes as one.
    """

    detach = True
