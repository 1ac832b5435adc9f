"""Medusa (Cai et al., arXiv 2401.10774): K residual heads; head d predicts depth d from the target's last feature.

Head d is `layers` blocks z + SiLU(Wz + b) with W zero at the start, so that training begins at the target's next-token
distribution. Its lm_head is the target's, shared and frozen, or one of its own that starts as a copy and is trained.
"""

from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from heads.base import DepthOutput, Embeddings, Features, HeadModule, LevelNodes, LevelOutput, NewRows
from heads.common.ranges import Count, LmHead, Parts
from heads.modules.vocab import DraftLmHead
from heads.rows import gather_rows, last_rows, scatter_rows
from heads.shapes import Anchors, States


class ResidualBlock(nn.Module):
    """z + SiLU(Wz + b), the identity at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, z: States) -> States:
        """Apply the block."""
        return z + functional.silu(self.linear(z))


class Medusa(HeadModule):
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

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft from all rows, or from `anchors`, at every depth."""
        self.check_depths(depths)
        last = gather_rows(features.last_hidden, anchors)
        return [DepthOutput(scatter_rows(block(last), anchors, features.last_hidden.shape[1])) for block in self.blocks]

    def extend(self, state: None, new: NewRows) -> tuple[None, LevelOutput]:
        """Score depth 1 from the last row; Medusa keeps no state."""
        root = last_rows(new.features.last_hidden, new.counts)
        return None, LevelOutput(self.compute_logits(self.blocks[0](root), 1), root)

    def expand(self, state: None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth from the root's feature; the nodes' tokens are not read."""
        root = level.hidden[:, :1]
        logits = self.compute_logits(self.blocks[nodes.depth](root), nodes.depth + 1)
        return LevelOutput(logits.expand(-1, nodes.token.shape[1], -1), root)
