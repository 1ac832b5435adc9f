"""Multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437, section 2.2), one module used again for every depth.

Row t enters as eh_proj(enorm(embedding of token t+1), hnorm(state t)), the embedding first as in all published weights;
one decoder layer and a final norm of the module's own make state t+1 of it, which goes to the target's lm_head, and
back into the module one depth later. State t itself is the target's, after its final norm. Row t has the rotary
position t, in texts of any length, and looks at the last `length` rows alone (heads/committed.py).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads import rows
from heads.base import Draft, Ends, Features, LayerShape, Level
from heads.committed import Committed, KeyValue, check_length, committing, joined, near
from heads.layers import Attend, Block, RMSNorm, drafted_attention, masked_attention


class Mtp(nn.Module):
    """The module. Its feature is `Features.last`; embedding and lm_head stay the target's and frozen.

    `block`, the three norms and `eh_proj` are what a checkpoint's own module may bring instead; a block of its own
    takes the arguments of `heads.layers.Block`.
    """

    @dataclass(frozen=True)
    class Config:
        """Numbers of the module; null takes the target's own, and as `length`, looks at all rows."""

        name: str
        length: int | None
        num_heads: int | None
        num_kv_heads: int | None
        head_dim: int | None
        intermediate_size: int | None
        rope_theta: float
        norm_eps: float

    feature_layers: tuple[int, ...] = ()
    max_depth = 64

    def __init__(self, config: Config, ends: Ends) -> None:
        super().__init__()
        check_length(config.length)
        self.config = config
        self._ends = (ends,)  # in a tuple, so that the target's ends are no submodule and never trained or saved
        width, own, eps = ends.hidden_size, ends.layer, config.norm_eps
        shape = LayerShape(
            config.num_heads or own.num_heads,
            config.num_kv_heads or own.num_kv_heads,
            config.head_dim or own.head_dim,
            config.intermediate_size or own.intermediate_size,
        )
        self.enorm: nn.Module = RMSNorm(width, eps)
        self.hnorm: nn.Module = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block: nn.Module = Block(width, shape, theta=config.rope_theta, eps=eps, input_norm=True)
        self.norm: nn.Module = RMSNorm(width, eps)

    @property
    def ends(self) -> Ends:
        """The target's embedding and lm_head."""
        return self._ends[0]

    def advance(
        self,
        token: Int[Tensor, "B T"],
        state: Float[Tensor, "B T D"],
        position: Int[Tensor, "B T"],
        last: int,
        attend: Attend,
    ) -> Float[Tensor, "B T D"]:
        """Return the states that follow `state` once `token` is chosen; `last` bounds the positions."""
        embedding = self.ends.embed(token).to(state.dtype)
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))
        return self.norm(self.block(x, position, last, attend))

    def unroll(self, features: Features, depths: int) -> list[Draft]:
        """Score all rows at every depth; depths beyond the first feed the module's own states back, undetached."""
        seen, position = rows.visible(features.document), rows.positions(features.document)
        true: list[KeyValue] = []
        own: list[KeyValue] = []

        state, drafts = features.last, []
        for depth in range(1, depths + 1):
            sees = seen & near(position + depth - 1, position, self.config.length)

            def attend(query: Tensor, key: Tensor, value: Tensor, sees: Tensor = sees) -> Tensor:
                if not true:
                    true.append((key, value))
                    return masked_attention(query, key, value, sees)
                own.append((key, value))
                return drafted_attention(query, true[0], own, sees)

            token = rows.drafted_token(features.token, depth)
            state = self.advance(token, state, position + depth - 1, position.shape[1] + depth, attend)
            drafts.append(Draft(self.ends.logits(state), state))
        return drafts

    def extend(self, state: Committed | None, features: Features, token: Int[Tensor, "T"]) -> tuple[Committed, Level]:
        """Commit verified rows with their true states and score under the root."""
        end = (state.length if state else 0) + len(token)
        position, sees = committing(state, len(token), self.config.length, token.device)
        grown: list[KeyValue] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            grown.append(joined(state.layers[0] if state else None, (key, value)))
            return masked_attention(query, *grown[0], sees[None])

        hidden = self.advance(token[None], features.last, position[None], end, attend)[0, -1:]
        return Committed(end, tuple(grown)).kept(self.config.length), Level(self.ends.logits(hidden), hidden, ())

    def expand(
        self,
        state: Committed,
        level: Level,
        token: Int[Tensor, "N"],
        parent: Int[Tensor, "N"],
        mask: Bool[Tensor, "N M"],
    ) -> Level:
        """Score the next tree level: every node enters with its parent's state."""
        position = state.length - 1 + mask.sum(-1)
        sees = torch.cat([near(position, state.position(), self.config.length), mask], 1)
        drafted: list[Tensor] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            drafted.extend(joined((level.drafted[0], level.drafted[1]) if level.drafted else None, (key, value)))
            return masked_attention(query, *joined(state.layers[0], (drafted[0], drafted[1])), sees[None])

        above = level.hidden[parent][None]
        hidden = self.advance(token[None], above, position[None], state.length + mask.shape[1], attend)[0]
        return Level(self.ends.logits(hidden), hidden, tuple(drafted))
