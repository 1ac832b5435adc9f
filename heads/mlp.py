"""The recurrent MLP speculator (Wertheimer et al., arXiv 2404.19124): a state that each drafted token is mixed into.

The first state of row t is the target's last feature. Step d projects the state, adds the embedding of token t+d from
its own table, norms the sum and applies GELU; step d's own lm_head reads the result, which is the next state. State and
embedding are weighted so that the state's variance is constant over the steps. `tied` shares the table, norm and
lm_head among all steps, and the projection among all but the first.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from heads.base import Embeddings, draft_size
from heads.common.typed import Count, Parts, Width
from heads.modules.per_depth import PerDepthHead
from heads.modules.vocab import VocabularyLinear
from heads.shapes import Inputs, Logits, States, TokenIds

EPS = 1e-6


class ShiftedNorm(nn.Module):
    """RMSNorm with a shift, as in the authors' checkpoints."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: States) -> States:
        """Normalise the last dimension."""
        # torch has no fused kernel for two dtypes and warns, so under autocast the input takes the weight's dtype.
        return functional.rms_norm(x.to(self.weight.dtype), x.shape[-1:], self.weight, EPS) + self.bias


class Mlp(PerDepthHead):
    """The MLP speculator; it reads `Features.last_hidden`, and only the sizes of the target's embedding and lm_head."""

    @dataclass(frozen=True)
    class Config:
        """Hyperparameters of the head; `inner` is the state's width, null means the target's."""

        name: str
        heads: Parts
        inner: Width | None
        tied: bool
        scale_input: bool
        draft_vocab: Count | None

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        self.max_depth = config.heads
        width = embeddings.hidden_size
        inner = config.inner or width
        count = 1 if config.tied else config.heads
        self.emb = nn.ModuleList(nn.Embedding(embeddings.vocab_size, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else width, inner, bias=False)
            for i in range(min(config.heads, 2) if config.tied else config.heads)
        )
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(VocabularyLinear(inner, draft_size(self), bias=False) for _ in range(count))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=inner**-0.5)
        weight = 0.5 ** (0.5 / config.heads)
        self.mix = math.sqrt((1 - weight**2) * inner / 2) / weight

    def initial_states(self, last: States) -> States:
        """Return the state that step 1 starts from."""
        if not self.config.scale_input:
            return last
        return functional.rms_norm(last, last.shape[-1:], eps=EPS) / math.sqrt(2)

    def step(self, state: Inputs, token: TokenIds, depth: int) -> tuple[States, States]:
        """Return the states of a depth, counted from 1, for the next depth and for the lm_head."""
        i = 0 if self.config.tied else depth - 1
        mixed = self.proj[min(depth, len(self.proj)) - 1](state) + self.mix * self.emb[i](token).to(state.dtype)
        state = functional.gelu(self.ln[i](mixed))
        return state, state

    def compute_logits(self, state: States, depth: int) -> Logits:
        """Return the logits of a depth's states."""
        return self.head[0 if self.config.tied else depth - 1](state)
