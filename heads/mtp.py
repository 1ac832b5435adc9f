"""Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2), one module used again for every depth.

Row t enters as eh_proj(enorm(embedding of token t+1), hnorm(state t)), the embedding first as in all published weights;
one decoder layer and a final norm of the module's own turn it into state t+1, which goes to the target's lm_head, and
back into the module one depth later. State t itself is the target's, after its final norm. Row t has the rotary
position t, in texts of any length, and looks at the last `length` rows alone (heads/modules/kv_cache.py).
`feature_layers`, which is not DeepSeek's, adds EAGLE-3's fused states of these layers to the target's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads.base import Draft, Embeddings, Features, Level, layer_shape
from heads.common.ranges import Amount, Count, Positive, Width
from heads.modules import autoregressive
from heads.modules.attention import KeyValue
from heads.modules.fusion import Fusion, chosen_layers
from heads.modules.kv_cache import KVCache
from heads.modules.layers import Attend, Block, RMSNorm
from heads.modules.rope import Rope
from heads.modules.vocab import DraftLmHead, draft_vocabulary


class Mtp(nn.Module):
    """The MTP module. It reads `last` and by option `hidden` of the features; embedding and lm_head are the target's.

    A checkpoint's own module may replace `block`, the three norms and `eh_proj`; its block takes the arguments of
    `heads.modules.layers.Block`.
    """

    @dataclass(frozen=True)
    class Config:
        """Numbers of the module; null takes the target's own, as `length` looks at all rows."""

        name: str
        length: Count | None
        num_heads: Width | None
        num_kv_heads: Width | None
        head_dim: Width | None
        intermediate_size: Width | None
        rope_theta: Positive
        rope_scaling: dict[str, Any] | None
        norm_eps: Amount
        qk_norm: bool
        feature_layers: list[int] | None
        lm_head: str
        draft_vocab: Count | None

    max_depth, keeps_rows = 64, True
    attentions = 1
    injected = False

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__()
        self.config = config
        self._embeddings = (embeddings,)  # in a tuple, so that they are no submodule and never trained or saved
        width, shape, eps = embeddings.hidden_size, layer_shape(config, embeddings), config.norm_eps
        layers = config.feature_layers
        self.feature_layers = () if layers is None else chosen_layers(layers, len(layers), embeddings.num_layers)
        self.fusion = Fusion(width, len(self.feature_layers), eps, normed=True) if layers else None
        if self.fusion is not None:
            nn.init.zeros_(self.fusion.fc.weight)  # so that it starts as the module of one state
        self.enorm: nn.Module = RMSNorm(width, eps)
        self.hnorm: nn.Module = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block: nn.Module = Block(width, shape, rope=Rope.of(config), eps=eps, qk_norm=config.qk_norm)
        self.norm: nn.Module = RMSNorm(width, eps)
        self.vocab = draft_vocabulary(config.draft_vocab, embeddings.vocab_size)
        self.lm_head = DraftLmHead(embeddings, config.lm_head, self.vocab)

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self._embeddings[0]

    def begin(self, features: Features) -> Float[Tensor, "B T D"]:
        """Return the target's own states, to which those of other layers are added by option."""
        return features.last if self.fusion is None else features.last + self.fusion(features.hidden)

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
        """Return the normed states, once to be fed back and once for the lm_head."""
        embedding = self.embeddings.embed(token).to(state.dtype)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))
        x = self.norm(self.block(x, position, last, attend[0]))
        return x, x

    def score(self, state: Float[Tensor, "*n D"], depth: int) -> Float[Tensor, "*n W"]:
        """Return the logits of normed states."""
        del depth
        return self.lm_head(state)

    def unroll(self, features: Features, depths: int, anchors: Int[Tensor, "B n"] | None = None) -> list[Draft]:
        """Draft from all rows; depths beyond the first feed the module's own states back, undetached."""
        del anchors
        return autoregressive.unroll(self, features, depths, predicts=True)

    def extend(
        self,
        state: KVCache | None,
        features: Features,
        token: Int[Tensor, "B T"],
        count: Int[Tensor, "B"] | None = None,
    ) -> tuple[KVCache, Level]:
        """Commit verified rows with their true states and score under the root."""
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
        """Score the next tree level: every node enters with its parent's state."""
        return autoregressive.expand(self, state, level, token, parent, mask, depth)
