"""A head that nobody else knows, in one file: a state that each drafted token is mixed into, read by the lm_head."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heads.base import DepthOutput, Embeddings, Features, LevelNodes, LevelOutput, NewRows
from heads.common.typed import Parts
from heads.rows import drafted_token, gather_parents, last_rows


class Newcomer(nn.Module):
    """The head; it keeps nothing of a sequence."""

    @dataclass(frozen=True)
    class Config:
        """Numbers of the head."""

        name: str
        depths: Parts

    feature_layers: tuple[int, ...] = ()
    has_kv_cache = False
    vocab = None

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__()
        self.config, self.max_depth, self._embeddings = config, config.depths, (embeddings,)
        self.mix = nn.Linear(2 * embeddings.hidden_size, embeddings.hidden_size)

    @property
    def embeddings(self) -> Embeddings:
        """The target's embedding and lm_head."""
        return self._embeddings[0]

    def step(self, state: Float[Tensor, "*n D"], token: Int[Tensor, "*n"]) -> Float[Tensor, "*n D"]:
        """Return the state behind a token."""
        return state + self.mix(torch.cat([self.embeddings.embed(token).to(state.dtype), state], -1))

    def compute_logits(self, state: Float[Tensor, "*n D"], depth: int) -> Float[Tensor, "*n V"]:
        """Return the logits of states."""
        del depth
        return self.embeddings.logits(state)

    def unroll(self, features: Features, depths: int, anchors: Int[Tensor, "B n"] | None = None) -> list[DepthOutput]:
        """Draft from all rows."""
        del anchors
        state, drafts = features.last_hidden, []
        for depth in range(1, depths + 1):
            state = self.step(state, drafted_token(features.token, depth, features.path))
            drafts.append(DepthOutput(state))
        return drafts

    def extend(self, state: None, new: NewRows) -> tuple[None, LevelOutput]:
        """Score depth 1 from the last row."""
        del state
        return None, self._level(last_rows(new.features.last_hidden, new.counts), last_rows(new.token, new.counts))

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth."""
        del state
        return self._level(gather_parents(level.hidden, nodes.parent), nodes.token)

    def _level(self, before: Tensor, token: Tensor) -> LevelOutput:
        hidden = self.step(before, token)
        return LevelOutput(self.compute_logits(hidden, 1), hidden)
