"""Domino (arXiv 2605.29707): a block's logits corrected by a recurrent state over the tokens drafted before."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from heads.modules.vocab import VocabularyLinear


class Domino(nn.Module):
    """A GRU over a block's tokens whose state, joined to a slot's, adds a term of low rank to the slot's logits.

    Depth 1 keeps the block's logits, as in the authors' published heads: its slot has seen the only token before it.
    """

    def __init__(self, width: int, inner: int, rank: int, size: int) -> None:
        super().__init__()
        self.width, self.inner = width, inner
        self.gru = nn.GRUCell(width, inner, bias=False)
        self.down = nn.Linear(width + inner, rank, bias=False)
        self.up = VocabularyLinear(rank, size, bias=False)

    def advance(self, embedding: Float[Tensor, "*n D"], memory: Float[Tensor, "*n G"] | None) -> Float[Tensor, "*n G"]:
        """Return the GRU's state after one more token; without a `memory` it is the first one."""
        flat = embedding.to(self.gru.weight_ih.dtype).flatten(0, -2)
        new: Tensor = self.gru(flat, None if memory is None else memory.flatten(0, -2))
        return new.unflatten(0, embedding.shape[:-1])

    def forward(
        self, logits: Float[Tensor, "*#n W"], slot: Float[Tensor, "*#n D"], memory: Float[Tensor, "*n G"], depth: int
    ) -> Float[Tensor, "*#n W"]:
        """Return the corrected logits of slots behind these states of the GRU."""
        if depth == 1:
            return logits
        state = torch.cat([slot.expand(*memory.shape[:-1], -1), memory], -1)
        return logits + self.up(functional.silu(self.down(state)))

    def begin(self, slots: Float[Tensor, "B S D"], embedding: Float[Tensor, "B 1 D"]) -> Float[Tensor, "B 1 Y"]:
        """Return the root's node: the states of all slots, and the GRU's after the root token."""
        return torch.cat([slots.flatten(1)[:, None], self.advance(embedding, None).to(slots.dtype)], -1)

    def grow(self, node: Float[Tensor, "B N Y"], embedding: Float[Tensor, "B N D"]) -> Float[Tensor, "B N Y"]:
        """Return nodes made of their parents' and of their tokens."""
        memory = self.advance(embedding, node[..., -self.inner :])
        return torch.cat([node[..., : -self.inner], memory.to(node.dtype)], -1)

    def split(self, node: Float[Tensor, "B N Y"], depth: int) -> tuple[Float[Tensor, "B 1 D"], Float[Tensor, "B N G"]]:
        """Return the state of one slot, which all nodes share, and the GRU's of each node."""
        end = depth * self.width
        return node[:, :1, end - self.width : end], node[..., -self.inner :]
