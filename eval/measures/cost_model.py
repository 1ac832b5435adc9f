"""The speed that measured costs and replayed acceptance predict, for any number of sequences in a batch.

Pure functions: nothing here decodes or reads a clock. Costs are in seconds; trees are counted in drafted nodes, the
root left out.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from inference.drafters.policy import CONFIDENT, TreeConfig

T = TypeVar("T")


class Step(NamedTuple):
    """One step of a replayed text: the tokens before its root, the nodes drafted, the drafted tokens accepted."""

    prefix: int
    nodes: int
    accepted: int


class Cell(NamedTuple):
    """What a part's price depends on: sequences in the pass, nodes or rows, and whether the path leaves gaps."""

    batch: int
    rows: int
    gaps: bool


@dataclass(frozen=True)
class Replayed:
    """One text as a tree would decode it: its steps, and the tokens that they commit."""

    steps: list[Step]
    tokens: int


@dataclass(frozen=True)
class Costs:
    """What the parts of a step cost on a device with `batch` sequences side by side, measured.

    Attributes:
        plain: seconds of a step of plain decoding, of all sequences together.
        verify: of the target's pass over all sequences, by the most nodes drafted for one.
        settle: of one sequence's choice of the path and of closing its cache's gaps, by its drafted nodes: where the
            path is a prefix of the nodes, and where it leaves gaps.
        draft: of one sequence's proposal, by the tree's `draft_key`.
        commit: of the head's pass over one sequence's committed rows, by their number.
    """

    batch: int
    plain: float
    verify: Mapping[int, float]
    settle: tuple[Mapping[int, float], Mapping[int, float]]
    draft: Mapping[str, float]
    commit: Mapping[int, float]


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to be worth.

    Attributes:
        tau: tokens a step.
        nodes: drafted a step.
        seconds: of a step by part, a sequence's share of the passes that it is in.
        tokens_per_second: of all sequences together.
        speedup: that over plain decoding's, in batches of the same size.
    """

    tau: float
    nodes: float
    seconds: dict[str, float]
    tokens_per_second: float
    speedup: float


def predict(texts: Sequence[Replayed], tree: TreeConfig, costs: Mapping[int, Costs], batch: int) -> Prediction:
    """Return what decoding the replayed texts with a tree costs, against plain decoding of the same tokens.

    A pass is as wide as its widest proposal, and the last sequences run in emptier batches: both ways of decoding are
    played through pass by pass.

    Args:
        texts: in the order in which they are decoded.
        tree: the policy, one that every `draft` knows.
        costs: by batch size; those of a size between are interpolated.
        batch: sequences in a pass, at most.
    """
    total = step_seconds([each.steps for each in texts], tree, costs, batch)
    tokens, steps = sum(each.tokens for each in texts), sum(len(each.steps) for each in texts)
    assert steps, "nothing was replayed"
    nodes = sum(step.nodes for each in texts for step in each.steps)
    spent = sum(total.values())
    return Prediction(
        tau=tokens / steps,
        nodes=nodes / steps,
        seconds={part: seconds / steps for part, seconds in total.items()},
        tokens_per_second=tokens / spent,
        speedup=plain_seconds([each.tokens for each in texts], costs, batch) / spent,
    )


def plain_seconds(tokens: Sequence[int], costs: Mapping[int, Costs], batch: int) -> float:
    """Return how long plain decoding of so many tokens a text takes, prefills aside."""
    full = Counter(len(row) for row in passes([range(count) for count in tokens], batch))
    return sum(count * at(costs, size, lambda one: one.plain) for size, count in full.items())


def step_seconds(
    texts: Sequence[Sequence[Step]], tree: TreeConfig, costs: Mapping[int, Costs], batch: int
) -> dict[str, float]:
    """Return the seconds of all steps together by part."""
    branches, key = tree.kind in CONFIDENT or any(map(any, tree.shape())), draft_key(tree)
    cells: dict[str, Counter[tuple[int, int, bool]]] = {
        part: Counter() for part in ("draft", "verify", "settle", "commit")
    }
    for row in passes([list(zip(text, [*text[1:], None], strict=True)) for text in texts], batch):
        size = len(row)
        cells["draft"][size, 0, False] += size
        cells["verify"][size, max(step.nodes for step, _ in row), False] += 1
        for step, following in row:
            cells["settle"][size, step.nodes, branches and step.accepted > 1] += 1
            if following is not None:  # what a sequence's last step commits, no draft needs
                cells["commit"][size, step.accepted + 1, False] += 1
    prices: dict[str, Callable[[Cell, Costs], float]] = {
        "draft": lambda _, one: one.draft[key],
        "verify": lambda cell, one: between(one.verify, cell.rows),
        "settle": lambda cell, one: between(one.settle[cell.gaps], cell.rows),
        "commit": lambda cell, one: between(one.commit, cell.rows),
    }
    return {
        part: sum(times * at(costs, cell[0], partial(prices[part], Cell(*cell))) for cell, times in counted.items())
        for part, counted in cells.items()
    }


def passes(texts: Sequence[Sequence[T]], batch: int) -> Iterator[list[T]]:
    """Yield what a continuous batch does in each pass, from what each text does by itself.

    A text that ends leaves, and the next one takes its place, as in `inference.decode`.
    """
    waiting = deque(deque(text) for text in texts if text)
    active: list[deque[T]] = []
    while waiting or active:
        while waiting and len(active) < batch:
            active.append(waiting.popleft())
        yield [each.popleft() for each in active]
        active = [each for each in active if each]


def at(costs: Mapping[int, Costs], batch: int, price: Callable[[Costs], float]) -> float:
    """Return a price at a batch size, between those that were measured if need be."""
    if batch in costs:
        return price(costs[batch])
    return between({size: price(one) for size, one in costs.items()}, batch)


def at_context(costs: Mapping[int, Costs], here: Mapping[int, float], there: Mapping[int, float]) -> dict[int, Costs]:
    """Return the costs at another context, from a lone sequence's verification pass in this context and in that one.

    Attention reads each sequence's own rows, so what a context adds to the pass, it adds once for each of them.
    """

    def moved(one: Costs) -> Costs:
        added = {size: one.batch * (between(there, size) - between(here, size)) for size in {0, *one.verify}}
        verify = {size: seconds + added[size] for size, seconds in one.verify.items()}
        return replace(one, plain=one.plain + added[0], verify=verify)

    return {size: moved(one) for size, one in costs.items()}


def stops_paying(gains: Mapping[int, float]) -> int | None:
    """Return the smallest batch size from which on no larger one has a speedup above 1; None if the largest has one."""
    losing = None
    for size in sorted(gains, reverse=True):
        if gains[size] > 1:
            break
        losing = size
    return losing


def draft_key(tree: TreeConfig) -> str:
    """Return what a proposal's cost depends on: all of the tree, but for what a dynamic one is cut to in the end."""
    return repr(replace(tree, nodes=1) if tree.kind == "dynamic" else tree)


def drafted(tree: TreeConfig) -> int:
    """Return the most nodes that a tree drafts."""
    return tree.nodes if tree.kind in CONFIDENT else len(tree.shape())


def cycled(items: Sequence[T], least: int) -> list[T]:
    """Return the items, from the first on again until there are at least so many."""
    count = max(len(items), least)
    return list(islice((item for _ in range(count) for item in items), count))


def between(known: Mapping[int, float], where: float | int) -> float:
    """Return the value at a point: linear between the known ones, the outermost beyond them."""
    points = sorted(known)
    if where <= points[0]:
        return known[points[0]]
    if where >= points[-1]:
        return known[points[-1]]
    index = bisect_right(points, where)
    low, high = points[index - 1], points[index]
    share = (where - low) / (high - low)
    return known[low] + share * (known[high] - known[low])


def rising(known: Mapping[int, float]) -> dict[int, float]:
    """Return the non-decreasing values nearest to the known ones in squares, by pooling adjacent violators.

    More rows never cost less: a dip is noise, and whoever looks for the cheapest tree would find the noise.
    """
    pools: list[list[int]] = []
    value: list[float] = []
    for point in sorted(known):
        pools.append([point])
        value.append(known[point])
        while len(value) > 1 and value[-2] > value[-1]:
            pools[-2:] = [pools[-2] + pools[-1]]
            value[-2:] = [mean([known[one] for one in pools[-1]])]
    return {point: level for pool, level in zip(pools, value, strict=True) for point in pool}


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)
