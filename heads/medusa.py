"""Medusa (Cai et al., arXiv 2401.10774): K residual heads, head d predicting depth d from the target's last feature.

Head d is `layers` blocks z + SiLU(Wz + b) with W zero at the start, so that training begins at the target's own
next-token law. Its lm_head is the target's, shared and frozen, or a copy that is trained.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from heads.base import Draft, Ends, Features, Level


class ResidualBlock(nn.Module):
    """z + SiLU(Wz + b), the identity at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, z: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Apply the block."""
        return z + functional.silu(self.linear(z))


class Medusa(nn.Module):
    """The Medusa heads. They read `Features.last` and no token, so every node of one depth has the same children."""

    @dataclass(frozen=True)
    class Config:
        """Numbers of the head; `lm_head` is "shared" or "copied"."""

        name: str
        heads: int
        layers: int
        lm_head: str

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: Config, ends: Ends) -> None:
        super().__init__()
        if config.heads < 1 or config.layers < 1:
            raise ValueError(
                f"head.heads={config.heads}, head.layers={config.layers}: Medusa needs at least one of each"
            )
        if config.lm_head not in ("shared", "copied"):
            raise ValueError(f"head.lm_head is {config.lm_head!r}: choose shared or copied")
        self.config = config
        self.max_depth = config.heads
        self._ends = (ends,)  # in a tuple, so that the target's ends are no submodule and never trained or saved
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(ends.hidden_size) for _ in range(config.layers))) for _ in range(config.heads)
        )
        self.lm_heads = nn.ParameterList(
            nn.Parameter(ends.head_weight().detach().float().clone())
            for _ in range(config.heads if config.lm_head == "copied" else 0)
        )

    @property
    def ends(self) -> Ends:
        """The target's embedding and lm_head."""
        return self._ends[0]

    def score(self, last: Float[Tensor, "*n D"], depth: int) -> Float[Tensor, "*n V"]:
        """Return head `depth`'s logits, counted from 1."""
        z = self.blocks[depth - 1](last)
        if self.config.lm_head == "copied":
            return functional.linear(z, self.lm_heads[depth - 1])
        return self.ends.logits(z)

    def unroll(self, features: Features, depths: int) -> list[Draft]:
        """Score all rows at every depth."""
        if depths != self.max_depth:
            raise ValueError(f"objective.depths is {depths} but the head has {self.max_depth} heads: make them equal")
        return [Draft(self.score(features.last, depth), None) for depth in range(1, depths + 1)]

    def extend(self, state: None, features: Features, token: Int[Tensor, "T"]) -> tuple[None, Level]:
        """Score depth 1 from the last row; Medusa keeps no state."""
        del state, token
        root = features.last[0, -1:]
        return None, Level(self.score(root, 1), root, ())

    def expand(
        self, state: None, level: Level, token: Int[Tensor, "N"], parent: Int[Tensor, "N"], mask: Bool[Tensor, "N M"]
    ) -> Level:
        """Score the next depth from the root's feature: the nodes' own tokens are not read."""
        del state, token
        depth = int(mask[0].sum()) + 1
        hidden = level.hidden[parent]
        logits = self.score(hidden[:1], depth)
        return Level(logits.expand(len(hidden), -1), hidden, ())
