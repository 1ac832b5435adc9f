"""Hydra (Ankner et al., arXiv 2402.05109): Medusa's heads, each reading the tokens that were drafted before it.

Head d reads a summary of row t and the embeddings of tokens t+1 … t+d, so a node's children depend on its path. The
first block maps these to the target's width, the others are Medusa's residual blocks. The summary is the target's last
feature; Hydra++ (`prefix`) computes it by a decoder layer over all rows' features. `tied` shares one module among a
head's later blocks, as the authors' checkpoints do.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heads.base import DepthOutput, Embeddings, Features, LayerConfig, LevelOutput, NewRows
from heads.common.typed import Count, Parts
from heads.medusa import ResidualBlock
from heads.modules.autoregressive import Autoregressive
from heads.modules.kv_cache import KVCache
from heads.modules.layers import DecoderLayer, LayerInputs, LayerSpec, RMSNorm
from heads.modules.per_depth import PerDepthHead
from heads.modules.vocab import DraftLmHead
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


class Prefix(Autoregressive):
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


class Hydra(PerDepthHead):
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

    def step(self, state: Inputs, token: TokenIds, depth: int) -> tuple[Tensor, States]:
        """Return the depth's inputs, which are those of the depth before and one more token, and its states."""
        x = torch.cat([state, self.embeddings.embed(token).to(state.dtype)], -1)
        return x, self.branches[depth - 1](x)

    def unroll(self, features: Features, depths: int, anchors: Anchors = None) -> list[DepthOutput]:
        """Draft from all rows, or from `anchors`, at every depth."""
        if self.prefix is not None:
            features = features._replace(last_hidden=self.prefix.unroll(features, 1, anchors)[0].state)
        return super().unroll(features, depths, anchors)

    def extend(self, state: KVCache | None, new: NewRows) -> tuple[KVCache | None, LevelOutput]:
        """Append verified rows and score depth 1 from the last one."""
        if self.prefix is not None:
            state, position = KVCache.opened(state, self.config.length, new.token)
            summary, _ = self.prefix.append_verified(state, new.features.last_hidden, new, position)
            new = new._replace(features=new.features._replace(last_hidden=summary))
        return super().extend(state, new)
