"""EAGLE-1/2 (Li et al., arXiv 2401.15077 and 2406.16858): one decoder layer that extrapolates the target's features.

Row t enters as fc(embedding of token t+1, feature t); the layer's output is the predicted feature t+1, which goes to
the target's frozen lm_head as it is, and back into the head one depth later. Layer 0 has no input norm and there is no
final norm, as in the authors' checkpoints. EAGLE-2 is the same head under a dynamic tree. Row t has the rotary position
t, in texts of any length, and looks at the last `length` rows alone (heads/committed.py).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heads import rows
from heads.base import Draft, Ends, Features, LayerShape, Level
from heads.committed import Committed, KeyValue, check_length, committing, joined, near
from heads.layers import Block, drafted_attention, masked_attention


class Eagle(nn.Module):
    """The EAGLE head. Its feature is `Features.last`; embedding and lm_head stay the target's and frozen."""

    @dataclass(frozen=True)
    class Config:
        """Numbers of the head; null takes the target's own, and as `length`, looks at all rows."""

        name: str
        layers: int
        length: int | None
        num_heads: int | None
        num_kv_heads: int | None
        head_dim: int | None
        intermediate_size: int | None
        rope_theta: float
        bias: bool
        norm_eps: float

    feature_layers: tuple[int, ...] = ()
    max_depth = 64

    def __init__(self, config: Config, ends: Ends) -> None:
        super().__init__()
        if config.layers < 1:
            raise ValueError(f"head.layers is {config.layers}: an EAGLE head has at least one layer")
        check_length(config.length)
        self.config = config
        self._ends = (ends,)  # in a tuple, so that the target's ends are no submodule and never trained or saved
        width, own = ends.hidden_size, ends.layer
        shape = LayerShape(
            config.num_heads or own.num_heads,
            config.num_kv_heads or own.num_kv_heads,
            config.head_dim or own.head_dim,
            config.intermediate_size or own.intermediate_size,
        )
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList(
            Block(width, shape, theta=config.rope_theta, eps=config.norm_eps, input_norm=i > 0)
            for i in range(config.layers)
        )

    @property
    def ends(self) -> Ends:
        """The target's embedding and lm_head."""
        return self._ends[0]

    def enter(self, token: Int[Tensor, "B T"], feature: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Fuse a chosen token with the feature before it."""
        return self.fc(torch.cat([self.ends.embed(token).to(feature.dtype), feature], -1))

    def unroll(self, features: Features, depths: int) -> list[Draft]:
        """Score all rows at every depth; depths beyond the first feed the head's own features back, undetached."""
        seen, position = rows.visible(features.document), rows.positions(features.document)
        true: list[KeyValue] = []
        own: list[list[KeyValue]] = [[] for _ in self.layers]
        feature, drafts = features.last, []
        for depth in range(1, depths + 1):
            sees = seen & near(position + depth - 1, position, self.config.length)
            x = self.enter(rows.drafted_token(features.token, depth), feature)
            for i, layer in enumerate(self.layers):

                def attend(
                    query: Tensor, key: Tensor, value: Tensor, i: int = i, depth: int = depth, sees: Tensor = sees
                ) -> Tensor:
                    if depth == 1:
                        true.append((key, value))
                        return masked_attention(query, key, value, sees)
                    own[i].append((key, value))
                    return drafted_attention(query, true[i], own[i], sees)

                x = layer(x, position + depth - 1, position.shape[1] + depth, attend)
            feature = x
            drafts.append(Draft(self.ends.logits(feature), feature))
        return drafts

    def extend(self, state: Committed | None, features: Features, token: Int[Tensor, "T"]) -> tuple[Committed, Level]:
        """Commit verified rows with their true features and score under the root."""
        end = (state.length if state else 0) + len(token)
        position, sees = committing(state, len(token), self.config.length, token.device)
        grown: list[KeyValue] = []
        x = self.enter(token[None], features.last)
        for i, layer in enumerate(self.layers):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                grown.append(joined(state.layers[i] if state else None, (key, value)))
                return masked_attention(query, *grown[i], sees[None])

            x = layer(x, position[None], end, attend)
        hidden = x[0, -1:]
        return Committed(end, tuple(grown)).kept(self.config.length), Level(self.ends.logits(hidden), hidden, ())

    def expand(
        self,
        state: Committed,
        level: Level,
        token: Int[Tensor, "N"],
        parent: Int[Tensor, "N"],
        mask: Bool[Tensor, "N M"],
    ) -> Level:
        """Score the next tree level: every node enters with its parent's predicted feature."""
        position = state.length - 1 + mask.sum(-1)
        sees = torch.cat([near(position, state.position(), self.config.length), mask], 1)
        drafted: list[Tensor] = []
        x = self.enter(token[None], level.hidden[parent][None])
        for i, layer in enumerate(self.layers):

            def attend(query: Tensor, key: Tensor, value: Tensor, i: int = i) -> Tensor:
                before = (level.drafted[2 * i], level.drafted[2 * i + 1]) if level.drafted else None
                pair = joined(before, (key, value))
                drafted.extend(pair)
                return masked_attention(query, *joined(state.layers[i], pair), sees[None])

            x = layer(x, position[None], state.length + mask.shape[1], attend)
        return Level(self.ends.logits(x[0]), x[0], tuple(drafted))
