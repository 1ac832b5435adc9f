"""Hydra (Ankner et al., arXiv 2402.05109): Medusa's heads, each reading the tokens that were drafted before it.

Head d reads a summary of row t and the embeddings of tokens t+1 … t+d, so a node's children depend on its path. The
first block maps these to the target's width, the others are Medusa's residual blocks. The summary is the target's last
feature; Hydra++ (`prefix`) computes it by a decoder layer over all rows' features. `tied` shares one module among a
head's later blocks, as the authors' checkpoints do.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from heads.base import DepthOutput, Embeddings, Features, HeadModule, LayerConfig, LevelNodes, LevelOutput, NewRows
from heads.common.ranges import Count, Parts
from heads.medusa import ResidualBlock
from heads.modules.autoregressive import Recurrent
from heads.modules.kv_cache import KVCache
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec, RMSNorm
from heads.modules.vocab import DraftLmHead
from heads.rows import drafted_token, gather_parents, gather_rows, last_rows, scatter_rows
from heads.shapes import Advanced, Anchors, Inputs, Rows, States, TokenIds


class EntryBlock(nn.Module):
    """Rx + SiLU(Wx + b): a residual block whose input is wider than its output."""

    def __init__(self, input_width: int, width: int) -> None:
        super().__init__()
        self.res_connection = nn.Linear(input_width, width)
        self.linear = nn.Linear(input_width, width)

    def forward(self, x: Inputs) -> States:
        """Apply the block."""
        return self.res_connection(x) + functional.silu(self.linear(x))


class Branch(nn.Module):
    """One head: an entry block and residual blocks, `count` in all."""

    def __init__(self, input_width: int, width: int, count: int, *, tied: bool) -> None:
        super().__init__()
        self.entry = EntryBlock(input_width, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(min(count - 1, 1) if tied else count - 1))
        self.repeat = count - 1 if tied else 1
        with torch.no_grad():  # starts near the summary itself, as Medusa does
            self.entry.res_connection.weight[:, :width] = torch.eye(width)

    def forward(self, x: Inputs) -> States:
        """Apply the blocks."""
        z = self.entry(x)
        for block in self.blocks:
            for _ in range(self.repeat):
                z = block(z)
        return z


class Prefix(Recurrent):
    """A decoder layer over the features of all rows so far, and a norm."""

    def __init__(self, config: Any, embeddings: Embeddings) -> None:
        super().__init__()
        self.config = config
        self.layer = DecoderLayer(LayerSpec.of(config, embeddings))
        self.norm = RMSNorm(embeddings.hidden_size, config.norm_eps)

    def advance(self, token: Tensor, state: Rows, inputs: list[LayerInputs]) -> Advanced:
        """Return the summaries."""
        summary = self.norm(self.layer(state, inputs[0]))
        return summary, summary


class Hydra(HeadModule):
    """The Hydra heads; the embedding stays the target's and frozen."""

    @dataclass(frozen=True)
    class Config(LayerConfig):
        """Hyperparameters of the head."""

        heads: Parts
        layers: Parts
        tied: bool
        prefix: bool
        lm_head_bias: bool
        lm_head_rank: Count | None

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        self.max_depth, self.has_kv_cache = config.heads, config.prefix
        width = embeddings.hidden_size
        self.prefix = Prefix(config, embeddings) if config.prefix else None
        self.branches = nn.ModuleList(
            Branch((d + 1) * width, width, config.layers, tied=config.tied) for d in range(1, config.heads + 1)
        )
        self.lm_heads = nn.ModuleList(
            DraftLmHead(embeddings, config.lm_head, self.vocab, config.lm_head_rank, config.lm_head_bias)
            for _ in range(config.heads)
        )

    def append_token(self, before: Inputs, token: TokenIds) -> Float[Tensor, "*n Y"]:
        """Return a head's input with one more token."""
        return torch.cat([before, self.embeddings.embed(token).to(before.dtype)], -1)

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft from all rows, or from `anchors`, at every depth."""
        self.check_depths(depths)
        x = features.last_hidden
        if self.prefix is not None:
            x = self.prefix.unroll(features, 1, anchors)[0].state
        x, drafts = gather_rows(x, anchors), []
        for depth, branch in enumerate(self.branches, 1):
            token = drafted_token(features.token, depth, features.path)
            x = self.append_token(x, gather_rows(token, anchors))
            drafts.append(DepthOutput(scatter_rows(branch(x), anchors, token.shape[1])))
        return drafts

    def extend(self, state: KVCache | None, new: NewRows) -> tuple[KVCache | None, LevelOutput]:
        """Append verified rows and score depth 1 from the last one."""
        summary, token = new.features.last_hidden, new.token
        if self.prefix is not None:
            state, position = KVCache.opened(state, self.config.length, token)
            summary, _ = self.prefix.append_verified(state, summary, new, position)
        return state, self._level(self.append_token(last_rows(summary, new.counts), last_rows(token, new.counts)), 1)

    def expand(self, state: KVCache | None, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score the next depth from the parents' head inputs and the nodes' tokens."""
        return self._level(self.append_token(gather_parents(level.hidden, nodes.parent), nodes.token), nodes.depth + 1)

    def _level(self, x: Float[Tensor, "B N X"], depth: int) -> LevelOutput:
        return LevelOutput(self.compute_logits(self.branches[depth - 1](x), depth), x)
