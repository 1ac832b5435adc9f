"""Predict speed from measured costs and replayed acceptance, for any number of sequences in a batch.

Pure functions. Costs are in seconds; a tree's size is its drafted nodes, without the root.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np

from inference.drafters.policy import BY_CONFIDENCE, TreeConfig

T = TypeVar("T")
Load = TypeVar("Load", int, float)  # a batch size, or a rate of requests


class ReplayedStep(NamedTuple):
    """One step of a replayed text: the nodes drafted, and the drafted tokens accepted."""

    nodes: int
    accepted: int


class Cell(NamedTuple):
    """Key of a part's price: sequences in the forward pass, nodes or tokens, and whether the path leaves gaps."""

    batch: int
    rows: int = 0
    gaps: bool = False


@dataclass(frozen=True)
class Replayed:
    """The simulated decoding of a text with a tree: its steps and their committed tokens."""

    steps: list[ReplayedStep]
    tokens: int


@dataclass(frozen=True)
class Costs:
    """Measured costs in seconds of a step's parts on a device, for `batch` sequences.

    `settle` is acceptance and cache compaction, by the most nodes drafted for one sequence, with and without gaps.
    """

    batch: int
    plain: float  # an autoregressive step of all sequences together
    verify: Mapping[int, float]  # the target's forward pass over all sequences, by the most nodes drafted for one
    settle: tuple[Mapping[int, float], Mapping[int, float]]
    draft: Mapping[str, float]  # all proposals, by the tree's `draft_key`
    commit: Mapping[int, float]  # the head's forward pass over all committed tokens, by the most of one sequence


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a tree."""

    tau: float  # tokens a step
    nodes: float  # drafted nodes a step
    seconds: dict[str, float]  # the seconds of a step by part, those of forward passes divided among their sequences
    tokens_per_second: float  # of all sequences together
    speedup: float  # over autoregressive decoding, in batches of the same size


def predict(texts: Sequence[Replayed], tree: TreeConfig, costs: Mapping[int, Costs], batch: int) -> Prediction:
    """Predict the speed of decoding the replayed texts with a tree, and the speedup over autoregressive decoding.

    A pass is as wide as its widest proposal, and the last sequences run in smaller batches: both ways of decoding are
    simulated pass by pass, in batches of at most `batch`; `costs` by batch size are interpolated.
    """
    total = step_seconds([text.steps for text in texts], tree, costs, batch)
    tokens, steps = sum(text.tokens for text in texts), sum(len(text.steps) for text in texts)
    assert steps, "nothing was replayed"
    nodes = sum(step.nodes for text in texts for step in text.steps)
    elapsed = sum(total.values())
    # autoregressive decoding of as many tokens a text, without prefills
    counts = Counter(len(active) for active in passes([range(text.tokens) for text in texts], batch))
    plain = sum(count * at(costs, size, lambda one: one.plain) for size, count in counts.items())
    return Prediction(
        tau=tokens / steps,
        nodes=nodes / steps,
        seconds={name: seconds / steps for name, seconds in total.items()},
        tokens_per_second=tokens / elapsed,
        speedup=plain / elapsed,
    )


def step_seconds(
    texts: Sequence[Sequence[ReplayedStep]], tree: TreeConfig, costs: Mapping[int, Costs], batch: int
) -> dict[str, float]:
    """Return the total seconds of all steps by part."""
    branches, key = tree.kind in BY_CONFIDENCE or any(map(any, tree.shape())), draft_key(tree)
    cells: dict[str, Counter[Cell]] = {name: Counter() for name in ("draft", "verify", "settle", "commit")}
    for active in passes([list(zip(text, [*text[1:], None], strict=True)) for text in texts], batch):
        size = len(active)
        nodes = max(step.nodes for step, _ in active)
        cells["draft"][Cell(size)] += 1
        cells["verify"][Cell(size, nodes)] += 1
        cells["settle"][Cell(size, nodes, branches)] += 1
        if any(following is not None for _, following in active):  # after the last step nothing is drafted
            cells["commit"][Cell(size, 1 + max(step.accepted for step, _ in active))] += 1
    prices: dict[str, Callable[[Cell, Costs], float]] = {
        "draft": lambda _, one: one.draft[key],
        "verify": lambda cell, one: between(one.verify, cell.rows),
        "settle": lambda cell, one: between(one.settle[cell.gaps], cell.rows),
        "commit": lambda cell, one: between(one.commit, cell.rows),
    }
    return {
        name: sum(times * at(costs, cell.batch, partial(prices[name], cell)) for cell, times in counts.items())
        for name, counts in cells.items()
    }


def passes(texts: Sequence[Sequence[T]], batch: int) -> Iterator[list[T]]:
    """Yield the items of each pass of a continuous batch, given each text's items.

    A finished text is replaced by the next one, as in `inference.decode`.
    """
    waiting = deque(deque(text) for text in texts if text)
    active: list[deque[T]] = []
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(waiting.popleft())
        yield [text.popleft() for text in active]
        active = [text for text in active if text]


def at(costs: Mapping[int, Costs], batch: int, price: Callable[[Costs], float]) -> float:
    """Return a price at a batch size, interpolated unless that was measured."""
    if batch in costs:
        return price(costs[batch])
    return between({size: price(one) for size, one in costs.items()}, batch)


def stops_paying(gains: Mapping[Load, float]) -> Load | None:
    """Return the smallest load beyond which no speedup is above 1; None if the largest load has one."""
    losing = None
    for size in sorted(gains, reverse=True):
        if gains[size] > 1:
            break
        losing = size
    return losing


def draft_key(tree: TreeConfig) -> str:
    """Return the key of a proposal's cost: the tree, without a dynamic tree's budget."""
    return repr(replace(tree, nodes=1) if tree.kind == "dynamic" else tree)


def drafted(tree: TreeConfig) -> int:
    """Return the most nodes that a tree drafts."""
    return tree.nodes if tree.kind in BY_CONFIDENCE else len(tree.shape())


def cycled(items: Sequence[T], least: int) -> list[T]:
    """Return the items, repeated until there are at least `count`."""
    return list(islice(cycle(items), max(len(items), least)))


def between(values: Mapping[int, float], x: float | int) -> float:
    """Return the value at x: linearly interpolated, constant beyond the given points."""
    points = sorted(values)
    return float(np.interp(x, points, [values[point] for point in points]))


def rising(values: Mapping[int, float]) -> dict[int, float]:
    """Return the least-squares non-decreasing fit of the values (pool adjacent violators).

    More nodes never cost less: a dip is noise, and a search for the cheapest tree would find it.
    """
    pools: list[list[int]] = []
    level: list[float] = []
    for point in sorted(values):
        pools.append([point])
        level.append(values[point])
        while len(level) > 1 and level[-2] > level[-1]:
            pools[-2:] = [pools[-2] + pools[-1]]
            level[-2:] = [fmean(values[pooled] for pooled in pools[-1])]
    return {point: average for pool, average in zip(pools, level, strict=True) for point in pool}
