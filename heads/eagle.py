"""EAGLE-1/2 (Li et al., arXiv 2401.15077 and 2406.16858): one decoder layer that extrapolates the target's features.

Row t enters as fc(embedding of token t+1, feature t); the layer's output is the predicted feature t+1, which goes to
the target's frozen lm_head as it is, and back into the head one depth later. Layer 0 has no input norm and there is no
final norm, as in the authors' checkpoints. EAGLE-2 is the same head under a dynamic tree. Row t has the rotary position
t, in texts of any length, and looks at the last `length` rows alone (heads/modules/kv_cache.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads.base import Draft, Embeddings, Features, Level, layer_shape
from heads.common.ranges import Amount, Count, Parts, Positive, Width
from heads.modules import autoregressive
from heads.modules.attention import KeyValue
from heads.modules.kv_cache import KVCache
from heads.modules.layers import Attend, Block
from heads.modules.rope import Rope
from heads.modules.vocab import DraftLmHead, draft_vocabulary


class Eagle(nn.Module):
    """The EAGLE head. It reads `Features.last`; the embedding stays the target's and frozen."""

    @dataclass(frozen=True)
    class Config:
        """Numbers of the head; null takes the target's own, as `length` looks at all rows."""

        name: str
        layers: Parts
        length: Count | None
        num_heads: Width | None
        num_kv_heads: Width | None
        head_dim: Width | None
        intermediate_size: Width | None
        rope_theta: Positive
        rope_scaling: dict[str, Any] | None
        bias: bool
        norm_eps: Amount
        lm_head: str
        draft_vocab: Count | None

    feature_layers: tuple[int, ...] = ()
    max_depth, keeps_rows = 64, True
    injected = False
    detach = False  # whether a gradient stops where a predicted feature enters the head again

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__()
        self.config, self.attentions = config, config.layers
        self._embeddings = (embeddings,)  # in a tuple, so that they are no submodule and never trained or saved
        width, shape = embeddings.hidden_size, layer_shape(config, embeddings)
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList(
            Block(width, shape, rope=Rope.of(config), eps=config.norm_eps, input_norm=i > 0)
            for i in range(config.layers)
        )
        self.vocab = draft_vocabulary(config.draft_vocab, embeddings.vocab_size)
        self.lm_head = DraftLmHead(embeddings, config.lm_head, self.vocab)

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self._embeddings[0]

    def begin(self, features: Features) -> Float[Tensor, "B T D"]:
        """Return the target's own features."""
        return features.last

    def inject(self, _start: Tensor, _position: Tensor, _last: int) -> tuple[KeyValue, ...]:
        """Return nothing: the rows of depth 1 are the context."""
        return ()

    def advance(
        self,
        token: Int[Tensor, "B T"],
        state: Float[Tensor, "B T D"],
        position: Int[Tensor, "B T"],
        last: int,
        attend: list[Attend],
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
        """Return the predicted features, once to be fed back and once for the lm_head."""
        x = self.fc(torch.cat([self.embeddings.embed(token).to(state.dtype), state], -1))
        for layer, pattern in zip(self.layers, attend, strict=True):
            x = layer(x, position, last, pattern)
        return x, x

    def score(self, state: Float[Tensor, "*n D"], depth: int) -> Float[Tensor, "*n W"]:
        """Return the logits of predicted features."""
        del depth
        return self.lm_head(state)

    def unroll(self, features: Features, depths: int, anchors: Int[Tensor, "B n"] | None = None) -> list[Draft]:
        """Draft from all rows; depths beyond the first feed the head's own features back."""
        del anchors
        return autoregressive.unroll(self, features, depths, predicts=True, detach=self.detach)

    def extend(
        self,
        state: KVCache | None,
        features: Features,
        token: Int[Tensor, "B T"],
        count: Int[Tensor, "B"] | None = None,
    ) -> tuple[KVCache, Level]:
        """Commit verified rows with their true features and score under the root."""
        return autoregressive.extend(self, state, features, token, count)

    def expand(
        self,
        state: KVCache,
        level: Level,
        token: Int[Tensor, "B N"],
        parent: Int[Tensor, "B N"],
        mask: Bool[Tensor, "B N M"],
        depth: int,
    ) -> Level:
        """Score the next tree level: every node enters with its parent's predicted feature."""
        return autoregressive.expand(self, state, level, token, parent, mask, depth)
