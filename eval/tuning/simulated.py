"""Every tree that the tuner tries, played along recorded texts: half of them to choose from, half to judge by."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import track
from torch import Tensor

from eval.config import TunerConfig
from eval.inputs.texts import Text
from eval.offline.teacher_forced import record
from eval.tuning.grid import Tried, proposed, tried, unlimited
from eval.tuning.static_tree import acceptance
from inference.drafters.head import HeadDrafter
from inference.target.target import Target

# Drafted nodes whose verification is timed whatever is tried: from one row to a few the cost leaps, and a line from one
# to many would pass below it.
SIZES = (0, 1, 2, 4, 8)

T = TypeVar("T")


class Simulated(NamedTuple):
    """The trees with their steps, of which the head's own is of the family OWN.

    `table` is the acceptance by depth and rank on the texts to choose from; `chosen` and `held` count the texts.
    """

    trees: list[Tried]
    table: Float[Tensor, "D K"]
    chosen: int
    held: int


def simulate(grid: TunerConfig, target: Target, drafter: HeadDrafter, texts: Sequence[Text]) -> Simulated:
    """Play every tree along the texts.

    Args:
        grid: which trees.
        target: the target that wrote the texts, greedily.
        drafter: the head with its own tree.
        texts: their records are made one after the other; whoever watches sees how many are done.
    """
    own, head = drafter.policy, drafter.head
    deepest = min(head.max_depth, max(own.deepest, *grid.depths))
    largest = unlimited(grid, own, deepest)
    chosen, held = halves([record(target, head, text, largest, deepest) for text in _progress(texts)])
    table = acceptance(torch.tensor([row for each in chosen for row in each.rank]), max(grid.top_k))
    trees = tried(proposed(grid, table, own, deepest, target.takes_trees), chosen, held)
    return Simulated(trees, table, len(chosen), len(held))


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return every other item, and the rest; one item is both."""
    return list(items[::2]), list(items[1::2] or items)


def _progress(texts: Sequence[Text]) -> Iterable[Text]:
    console = Console(stderr=True)
    return track(texts, "simulating", console=console, transient=True, disable=not console.is_terminal)
