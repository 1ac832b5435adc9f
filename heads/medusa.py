"""Medusa (Cai et al., arXiv 2401.10774): K residual heads; head d predicts depth d from the target's last feature.

Head d is `layers` blocks z + SiLU(Wz + b) with W zero at the start, so that training begins at the target's next-token
distribution. Its lm_head is the target's, shared and frozen, or one of its own that starts as a copy and is trained.
"""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from heads.base import Embeddings, LevelNodes, LevelOutput
from heads.common.typed import Count, LmHead, Parts
from heads.modules.per_depth import PerDepthHead
from heads.modules.vocab import DraftLmHead
from heads.shapes import States, TokenIds


class ResidualBlock(nn.Module):
    """z + SiLU(Wz + b), the identity at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, z: States) -> States:
        """Apply the block."""
        return z + functional.silu(self.linear(z))


class Medusa(PerDepthHead):
    """The Medusa heads; they read `Features.last_hidden` and no token, so the nodes of a depth share their children."""

    @dataclass(frozen=True)
    class Config:
        """Hyperparameters; with `lm_head_rank`, the head's own lm_head is a product of two matrices."""

        name: str
        heads: Parts
        layers: Parts
        lm_head: LmHead
        lm_head_rank: Count | None
        draft_vocab: Count | None

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        self.max_depth = config.heads
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(embeddings.hidden_size) for _ in range(config.layers)))
            for _ in range(config.heads)
        )
        self.lm_heads = nn.ModuleList(
            DraftLmHead(embeddings, config.lm_head, self.vocab, config.lm_head_rank) for _ in range(config.heads)
        )

    def step(self, state: States, token: TokenIds, depth: int) -> tuple[States, States]:
        """Return the target's last features, which every depth reads, and the depth's own states."""
        return state, self.blocks[depth - 1](state)

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth once for all nodes, whose tokens are not read."""
        shared = self.level(level.hidden[:, :1], nodes.token[:, :1], nodes.depth + 1)
        return shared._replace(logits=shared.logits.expand(-1, nodes.token.shape[1], -1))
