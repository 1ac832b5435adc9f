"""Trials of a head on other layers, tokens and positions than declared, along the target's own answers.

A head drafts best as it was trained. Where it drafts clearly better from the layers beside those that its files name,
from the token before, or at other positions, the files are wrong, or its trainer was. No verifier runs: the target's
answers are decoded once, its features kept, and the head drafts from all rows at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eval.inputs.texts import Text
from eval.offline.teacher_forced import FIXED, ranks, unrolled
from heads.base import Features
from heads.common.rope import Rotary
from heads.modules.layers import Attention
from heads.modules.vocab import scatter_logits
from inference.target.target import Target

DEPTHS = 3  # of the drafts that are compared
FEWEST = 50  # drafts, below which nothing is concluded
CLEAR = 4.0  # standard deviations of the difference (McNemar, 1947), rows of one text being alike
MARGIN = 1.02  # smallest ratio to the hits as declared that counts as better
Hits = Bool[Tensor, "N"]
Move = Callable[[Int[Tensor, "B T"]], Int[Tensor, "B T"]]


class Moved:
    """Rotary embedding that moves the positions of drafted rows: rows of a text begin at 0, drafted ones behind it."""

    def __init__(self, rotary: Rotary, move: Move) -> None:
        self.rotary, self.move = rotary, move

    def __call__(
        self, x: Float[Tensor, "B H T E"], position: Int[Tensor, "B T"], last: int
    ) -> Float[Tensor, "B H T E"]:
        """Rotate; rows of the text themselves as ever."""
        drafted = int(position[0, 0]) > 0
        return self.rotary(x, self.move(position).clamp_min(0) if drafted else position, last + 1)


MOVES: dict[str, Move] = {
    "one further": lambda position: position + 1,
    "one less": lambda position: position - 1,
    "where their own row stands": lambda position: position - position[:, :1],
}


class Compared(NamedTuple):
    """Counts of right drafts as declared and in another way, of how many; whether the difference is clear."""

    declared: int
    other: int
    drafts: int
    better: bool
    worse: bool

    def shares(self) -> str:
        """Return both shares for reading."""
        right, declared = (hits / max(self.drafts, 1) for hits in (self.other, self.declared))
        return f"{right:.0%} of {self.drafts} drafts right, as declared {declared:.0%}"


class Trials:
    """A head with the target's answers and their features."""

    def __init__(self, target: Target, head: Any, texts: Sequence[Text]) -> None:
        self.head, self.last = head, target.spec.num_layers - 1
        declared = head.feature_layers
        near = {i + by for i in declared for by in (-1, 0, 1) if 0 <= i + by <= self.last}
        self.layers_read = sorted(near | {self.last})
        self.texts: list[tuple[Features, int]] = []
        for text in texts:
            token = torch.tensor(text.token, device=target.device)[None]
            self.texts.append((target.features(token, torch.zeros_like(token), tuple(self.layers_read)), text.start))
        self.depth = head.max_depth if head.max_depth <= FIXED else DEPTHS
        self.attentions = [module for module in head.modules() if isinstance(module, Attention)]
        self.declared = self.hits(lambda features: self.of_layers(features, declared))

    def of_layers(self, features: Features, layers: Sequence[int]) -> Features:
        """Return the features of some of the layers that are kept."""
        return features._replace(hidden=features.hidden[:, :, [self.layers_read.index(i) for i in layers]])

    @torch.inference_mode()
    def hits(self, change: Callable[[Features], Features]) -> Hits:
        """Return which drafts equal the text's tokens, over all texts, rows and depths, from changed features."""
        right = []
        for features, start in self.texts:
            drafts = unrolled(self.head, change(features), self.depth)[:DEPTHS]
            token = features.token[0, start - 1 :]
            for depth, draft in enumerate(drafts, 1):
                logits = scatter_logits(self.head.vocab, self.head.score(draft.state[0, start - 1 :], depth))
                rank = ranks(logits, token, depth)
                right.append((rank == 0)[rank >= 0].cpu())
        return torch.cat(right) if right else torch.zeros(0, dtype=torch.bool)

    def compared(self, other: Hits) -> Compared:
        """Compare another way of drafting with the declared one, draft by draft."""
        gained, lost = (int(mask.sum()) for mask in (other & ~self.declared, self.declared & ~other))
        sure = abs(gained - lost) > CLEAR * (gained + lost) ** 0.5
        mine, theirs = int(self.declared.sum()), int(other.sum())
        better = sure and theirs > MARGIN * mine and len(other) >= FEWEST
        return Compared(mine, theirs, len(other), better, sure and mine > theirs)

    def from_layers(self, layers: Sequence[int]) -> Compared:
        """Return the comparison for other layers that are kept."""
        return self.compared(self.hits(partial(self.of_layers, layers=layers)))

    def before_norm(self) -> Compared:
        """Return the comparison for the last state before the final norm, for heads that read that state alone."""
        index = self.layers_read.index(self.last)
        return self.compared(self.hits(lambda f: f._replace(last=f.hidden[:, :, index], hidden=f.hidden[:, :, :0])))

    def token_before(self) -> Compared:
        """Return the comparison for drafting from the row's own token instead of the next one."""

        def unshifted(features: Features) -> Features:
            token = features.token
            moved = features._replace(token=torch.cat([token[:, :1], token[:, :-1]], 1))
            return self.of_layers(moved, self.head.feature_layers)

        return self.compared(self.hits(unshifted))

    def moved(self, move: Move) -> Compared:
        """Return the comparison for drafted rows at other positions."""
        with rotated(self.head, lambda attention: Moved(attention.rotary, move)):
            return self.from_layers(self.head.feature_layers)


@contextmanager
def rotated(head: Any, make: Callable[[Attention], Any]) -> Iterator[None]:
    """Give each attention of a head other rotary positions within the block."""
    before = {module: module.rotary for module in head.modules() if isinstance(module, Attention)}
    try:
        for attention in before:
            attention.rotary = make(attention)
        yield
    finally:
        for attention, rotary in before.items():
            attention.rotary = rotary
