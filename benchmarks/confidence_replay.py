"""Replay of decoding under policies that draft and verify by a head's probabilities, at given prices: pure functions.

Used by benchmarks/confidence.py, which says what the policies are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KINDS = ("fixed", "order", "nodes", "padded", "stop", "hindsight", "oracle")
WIDEST = 60  # nodes of a tree
BUDGETS = (*range(1, 17), 20, 24, 32, 48, WIDEST)  # without gaps where a pass begins to cost more
# What is accepted now is easy or hard to draft later, so a token is worth more or less than its share of the time.
AIMS = (0.25, 0.5, 1.0, 2.0)  # of the rate, by which seconds are compared with tokens
SHARES = (0.5, 1.0, 2.0, 4.0)  # of a level's price
ROUNDS = 4  # texts that pass through every slot of a batch, at least


class Nodes(NamedTuple):
    """All nodes that trees of one top_k draft, the root left out, level by level, after each of T tokens."""

    score: Array  # (T, N): the path's log-probability
    right: Array  # (T, N): whether the target accepts the path
    parent: Array  # (T, N): index, -1 of the root
    depth: Array  # (N,)


class Ranked(NamedTuple):
    """The nodes down to each depth d, at index d - 1, in the order in which they are verified."""

    p: Array  # (T, D, W): probabilities, falling
    accepted: Array  # (T, D, W + 1): tokens that the first n accept
    alive: Array  # (T, D): tokens expected of the level's top_k best nodes, below which the next level is drafted


class Prices(NamedTuple):
    """Seconds of a step's parts for a full batch."""

    batch: int
    verify: Mapping[bool, Array]  # by whether trees branch, then by nodes of a sequence; 0 is the baseline's step
    draft: Mapping[int, Array]  # by top_k, then by depth
    commit: Array  # by the most tokens that a sequence commits


class Choice(NamedTuple):
    """One step: tokens accepted of each sequence, nodes verified of one on average, the depth drafted to."""

    accepted: Array
    nodes: float
    depth: int


class Outcome(NamedTuple):
    """Replayed texts: seconds of each (its share of the passes), and the means of all steps."""

    tokens: Array
    seconds: Array
    tau: float
    nodes: float
    depth: float

    @property
    def rate(self) -> float:
        """Tokens a second of the whole batch."""
        return float(self.tokens.sum() / self.seconds.sum())


def isotonic(score: Array, right: Array) -> Callable[[Array], Array]:
    """Fit the non-decreasing function of a score nearest to what was right, by pooling adjacent violators."""
    steps, group = np.unique(np.round(20 * score), return_inverse=True)  # scores within a twentieth are one
    share, weight, start = list[float](), list[float](), list[float]()
    sums, counts = np.bincount(group, right), np.bincount(group)
    for first, y, w in zip(steps / 20, sums / counts, counts, strict=True):
        share, weight, start = [*share, y], [*weight, w], [*start, first]
        while len(share) > 1 and share[-2] >= share[-1]:
            share[-2:] = [float(np.average(share[-2:], weights=weight[-2:]))]
            weight[-2:] = [sum(weight[-2:])]
            start.pop()
    values = np.array(share)
    return lambda new: values[np.maximum(np.searchsorted(start, np.round(20 * new) / 20, side="right") - 1, 0)]


def calibrated(nodes: Nodes, rows: Array) -> Array:
    """Return the probability "T N" of every node, as the nodes of some rows say; below a node none has more."""
    p = np.ones_like(nodes.score, dtype=float)
    for depth in np.unique(nodes.depth):
        level = nodes.depth == depth
        above = np.ones(1) if depth == 1 else np.take_along_axis(p, nodes.parent[:, level], 1)
        fitted = isotonic(nodes.score[rows][:, level].ravel(), nodes.right[rows][:, level].ravel())
        p[:, level] = np.minimum(fitted(nodes.score[:, level]), above)
    return p


def ranked(nodes: Nodes, p: Array, top_k: int) -> Ranked:
    """Rank the nodes by probability; of equal ones the earlier comes first, which is never the child."""
    best, accepted, alive = [], [], []
    for depth in np.unique(nodes.depth):
        level, inside = p[:, nodes.depth == depth], nodes.depth <= depth
        order = np.argsort(-p[:, inside], 1, kind="stable")[:, :WIDEST]
        gap = ((0, 0), (0, WIDEST - order.shape[1]))
        best.append(np.pad(np.take_along_axis(p[:, inside], order, 1), gap))
        right = np.pad(np.take_along_axis(nodes.right[:, inside], order, 1), gap)
        accepted.append(np.pad(right.cumsum(1), ((0, 0), (1, 0))))
        alive.append(np.sort(level, 1)[:, -top_k:].sum(1))
    return Ranked(*(np.stack(arrays, 1) for arrays in (best, accepted, alive)))


@dataclass(frozen=True)
class Policy:
    """What is drafted and verified in a step; of several depths and node counts, what is worth most beyond its price.

    Attributes:
        ranks: the nodes of its top_k.
        depths: to choose among.
        budget: the nodes of every tree; None: as many as are worth it.
        padded: whether all sequences have equally many.
        share: drafting ends where this share of a level's price is more than the level above is worth; None: where all
            levels' probabilities, seen beforehand, say.
        rate: tokens a second, by which seconds and tokens are compared.
    """

    ranks: Ranked
    prices: Prices
    top_k: int
    depths: Sequence[int]
    budget: int | None = None
    padded: bool = False
    share: float | None = None
    rate: float = 0.0

    @property
    def label(self) -> str:
        """A short name."""
        depth = f"d{self.depths[0]}" if len(self.depths) == 1 else ""
        share = "" if self.share is None else f" at {self.share}"
        return f"{depth}k{self.top_k}{'' if self.budget is None else f'n{self.budget}'}{share}"

    @property
    def verify(self) -> Array:
        """Seconds of a pass by nodes of a sequence."""
        return self.prices.verify[self.top_k > 1]

    def choose(self, rows: Array) -> Choice:
        """Choose for a batch whose sequences stand at some rows."""
        depths = self.depths
        if self.budget is not None:
            return Choice(self.ranks.accepted[rows, depths[0] - 1, self.budget], self.budget, depths[0])
        if self.share is not None:
            depths = [next((depth for depth in depths[:-1] if self.stops(rows, depth)), depths[-1])]
        chosen = [self.worth(rows, depth) for depth in depths]
        _, nodes, depth = max(chosen, key=lambda one: one[0])
        return Choice(self.ranks.accepted[rows, depth - 1, nodes], float(nodes.mean()), depth)

    def stops(self, rows: Array, depth: int) -> bool:
        """Whether drafting ends at a depth."""
        assert self.share is not None
        low, high = self.prices.draft[self.top_k][depth : depth + 2]
        return bool(self.ranks.alive[rows, depth - 1].sum() < self.share * self.rate * (high - low))

    def worth(self, rows: Array, depth: int) -> tuple[float, Array, int]:
        """Return the gain in tokens over the price, each sequence's nodes, and the depth."""
        verify, draft = self.verify, self.rate * float(self.prices.draft[self.top_k][depth])
        p = self.ranks.p[rows, depth - 1, : len(verify) - 1]
        if self.padded:
            gain = np.append(0, p.sum(0).cumsum()) - self.rate * verify
            return float(gain.max()) - draft, np.full(len(rows), gain.argmax()), depth
        order = np.argsort(-p, axis=None, kind="stable")
        price = np.interp(np.arange(p.size + 1) / len(rows), range(len(verify)), verify)
        gain = np.append(0, p.ravel()[order].cumsum()) - self.rate * price
        nodes = np.bincount(order[: gain.argmax()] // p.shape[1], minlength=len(rows))
        return float(gain.max()) - draft, nodes, depth

    def seconds(self, choice: Choice) -> float:
        """Return the seconds of a step; ragged trees cost what equal ones of as many nodes on average would."""
        verify, committed = self.verify, 1 + int(choice.accepted.max())
        draft = self.prices.draft[self.top_k][choice.depth]
        return float(np.interp(choice.nodes, range(len(verify)), verify) + draft + self.prices.commit[committed])


def play(policy: Policy, lengths: Sequence[int], texts: Array) -> Outcome:
    """Replay some of all texts in full batches, each equally often; where one ends the next takes its slot."""
    batch, shuffle = policy.prices.batch, np.random.default_rng(0)
    rounds = -(-ROUNDS * batch // len(texts)) if batch > 1 else 1
    order = [int(text) for _ in range(rounds) for text in shuffle.permutation(texts)]
    begin, total, left = np.cumsum([0, *lengths]), np.zeros(4), len(order)
    waiting = chain(enumerate(order), cycle([(left, order[0])]))  # those that only fill the last batches
    seconds, free = np.zeros(left + 1), np.arange(batch)
    number, row, end = np.zeros((3, batch), dtype=int)
    while left:
        for slot in free:
            number[slot], text = next(waiting)
            row[slot], end[slot] = begin[text], begin[text + 1]
        choice = policy.choose(row)
        np.add.at(seconds, number, policy.seconds(choice) / batch)
        total += [1, choice.accepted.mean(), choice.nodes, choice.depth]
        row += choice.accepted + 1
        free = np.flatnonzero(row >= end)
        left -= int((number[free] < len(order)).sum())
    spent = np.bincount(order, seconds[:-1], len(lengths))[texts] / rounds
    return Outcome(np.array(lengths)[texts], spent, *(np.array([0, 1, 0, 0]) + total / total[0])[1:])


def policies(kind: str, ranks: Mapping[int, Ranked], prices: Prices, rate: float) -> Iterator[Policy]:
    """Yield a kind's policies; `rate` is about how many tokens a second there are."""
    for top_k, nodes in ranks.items():
        depths = range(1, nodes.p.shape[1] + 1)
        base = Policy(nodes, prices, top_k, depths)
        aimed = [replace(base, rate=aim * rate) for aim in AIMS]
        if kind in ("fixed", "order"):
            for depth in depths:
                most = min(len(base.verify) - 1, depth if top_k == 1 else top_k + (depth - 1) * top_k**2)
                sizes = [depth] if top_k == 1 else [n for n in BUDGETS if depth <= n <= most]
                yield from (replace(base, depths=[depth], budget=n) for n in sizes)
        elif kind in ("nodes", "padded"):
            yield from (replace(one, depths=[d], padded=kind == "padded") for one in aimed for d in depths)
        elif kind == "stop":
            yield from (replace(one, share=share) for one in aimed for share in SHARES)
        else:
            yield from aimed


def chosen(
    kind: str, ranks: Mapping[int, Ranked], prices: Prices, lengths: Sequence[int], texts: Array, rate: float
) -> Policy:
    """Return a kind's policy that is fastest along some texts."""
    return max(policies(kind, ranks, prices, rate), key=lambda policy: play(policy, lengths, texts).rate)
