"""Simulate every tree that the tuner tries along recorded texts: half of them choose, the others are held back."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from eval.config import TunerConfig
from eval.inputs.texts import Text
from eval.live.interleaved import progress
from eval.offline.teacher_forced import record
from eval.tuning.grid import Tried, proposed, tried, unlimited
from eval.tuning.static_tree import acceptance
from inference.drafters.head import HeadDrafter
from inference.target.target import Target

# Numbers of drafted nodes whose verification is always timed: from one node to a few the cost leaps, and a line from
# one to many would lie below it.
SIZES = (0, 1, 2, 4, 8)

T = TypeVar("T")


class Simulated(NamedTuple):
    """Trees with their simulated steps; the head's own is of the family OWN.

    `table` is the acceptance by depth and rank on the texts to choose by; `chosen` and `held` count the texts.
    """

    trees: list[Tried]
    table: Float[Tensor, "D K"]
    chosen: int
    held: int


def simulate(grid: TunerConfig, target: Target, drafter: HeadDrafter, texts: Sequence[Text]) -> Simulated:
    """Simulate every tree along the texts.

    Args:
        grid: the trees to try.
        target: the target that wrote the texts, greedily.
        drafter: the head with its own tree.
        texts: recorded one after the other, behind a progress bar.
    """
    current, head = drafter.policy, drafter.head
    deepest = min(head.max_depth, max(current.deepest, *grid.depths))
    largest = unlimited(grid, current, deepest)
    chosen, held = halves([record(target, head, text, largest, deepest) for text in progress(texts, "simulating")])
    table = acceptance(torch.tensor([ranks for text in chosen for ranks in text.rank]), max(grid.top_k))
    trees = tried(proposed(grid, table, current, deepest, target.takes_trees), chosen, held)
    return Simulated(trees, table, len(chosen), len(held))


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return every other item, and the rest; a single item is in both."""
    return list(items[::2]), list(items[1::2] or items)
