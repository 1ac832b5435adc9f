"""A head of three tensors and the least that a head may ask of a target."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heads.base import LayerDims


class TinyEnds:
    """The least that a head may ask of its target."""

    hidden_size = 4
    vocab_size = 11
    num_layers = 9
    layer_dims = LayerDims(2, 1, 2, 8)
    config = None

    def embed(self, token: Int[Tensor, "*n"]) -> Float[Tensor, "*n D"]:
        return torch.zeros(*token.shape, 4)

    def logits(self, hidden: Float[Tensor, "*n D"], ids: Int[Tensor, "W"] | None = None) -> Float[Tensor, "*n W"]:
        return torch.zeros(*hidden.shape[:-1], 11 if ids is None else len(ids))

    def lm_head_weight(self) -> Float[Tensor, "V D"]:
        return torch.zeros(11, 4)


class Stub(nn.Module):
    """A head of three tensors, one of them a buffer."""

    @dataclass(frozen=True)
    class Config:
        name: str
        width: int
        rate: float | None
        layers: list[int]

    def __init__(self, config: Config, embeddings: Any) -> None:
        super().__init__()
        self.config, self._embeddings = config, (embeddings,)
        self.linear = nn.Linear(embeddings.hidden_size, config.width)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def head(seed: int = 0, width: int = 5) -> Stub:
    torch.manual_seed(seed)
    made = Stub(Stub.Config("stub", width, None, [1, 2]), TinyEnds())
    made.count += seed + 7
    return made


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in ours
    )
