"""Which tree pays: Sequoia's dynamic programme, and the speed that measured costs and acceptance predict.

Pure functions: nothing here decodes or reads a clock. Costs are in seconds; trees are counted in drafted nodes, the
root left out.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.policy import CONFIDENT, TreeConfig


@dataclass(frozen=True)
class StaticTrees:
    """The best static trees of every size.

    Attributes:
        value: value[n] is the expected number of accepted tokens of the best tree of at most n nodes.
        chosen: chosen[d][r][m] is the size of the subtree under the child of rank r, of a node at depth d, when m
            nodes are left for the children of ranks 0 … r.
    """

    value: list[float]
    chosen: list[list[list[int]]]

    def paths(self, nodes: int) -> list[list[int]]:
        """Return the tree of at most this many nodes as rank paths, by depth."""
        return sorted(self._below(0, nodes, []), key=lambda path: (len(path), path))

    def _below(self, depth: int, nodes: int, path: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        if depth == len(self.chosen):
            return found
        for rank in reversed(range(len(self.chosen[depth]))):
            size = self.chosen[depth][rank][nodes]
            if size:
                child = [*path, rank]
                found += [child, *self._below(depth + 1, size - 1, child)]
            nodes -= size
        return found


def best_static(acceptance: Float[Tensor, "D K"], nodes: int) -> StaticTrees:
    """Find the static tree of every size that accepts most, by Sequoia's dynamic programme (arXiv 2402.12374).

    Sequoia's acceptance depends on the rank alone; here on the depth too, which heads lose with. As there, whether a
    node is accepted is taken to depend on the path to it through its length only.

    Args:
        acceptance: the probability that the target's token has rank k among the children of a node at depth d - 1,
            given that the node is right.
        nodes: the greatest size.
    """
    depths, ranks = acceptance.shape
    size = torch.arange(nodes + 1)
    rest = size[:, None] - size  # [m, y]: what m nodes leave when a subtree takes y
    below = torch.zeros(nodes + 1, dtype=torch.float64)  # the best of m nodes under a node one level down
    chosen: list[list[list[int]]] = []
    for depth in reversed(range(depths)):
        best, picks = torch.zeros(nodes + 1, dtype=torch.float64), []
        for rank in range(ranks):
            gain = torch.zeros(nodes + 1, dtype=torch.float64)
            gain[1:] = acceptance[depth, rank].double() * (1 + below[:-1])
            total = torch.where(rest >= 0, best[rest.clamp_min(0)] + gain, float("-inf"))
            pick = total.argmax(1)
            best = total.gather(1, pick[:, None])[:, 0]
            picks.append(pick.tolist())
        below = best
        chosen.insert(0, picks)
    return StaticTrees(below.tolist(), chosen)


@dataclass(frozen=True)
class Step:
    """One step of a replayed text: the tokens before its root, the nodes drafted, the drafted tokens accepted."""

    prefix: int
    nodes: int
    accepted: int


@dataclass(frozen=True)
class Costs:
    """What the parts of a step cost on a device at one batch size, measured.

    Attributes:
        plain: seconds of a step of plain decoding.
        verify: of the target's pass, by drafted nodes.
        settle: of the choice of the path and of closing the cache's gaps, by drafted nodes: where the path is a prefix
            of the nodes, and where it leaves gaps.
        draft: of a proposal, by the tree's `draft_key`.
        commit: of the head's pass over the committed rows, by their number.
    """

    batch: int
    plain: float
    verify: Mapping[int, float]
    settle: tuple[Mapping[int, float], Mapping[int, float]]
    draft: Mapping[str, float]
    commit: Mapping[int, float]


@dataclass(frozen=True)
class Prediction:
    """What a tree is expected to be worth: tokens a pass, seconds of a step by part, speedup over plain decoding."""

    tau: float
    nodes: float
    seconds: dict[str, float]
    speedup: float


def predict(steps: Sequence[Step], tokens: int, tree: TreeConfig, costs: Costs) -> Prediction:
    """Return what decoding the replayed texts with a tree costs, against plain decoding of the same tokens.

    Args:
        steps: of the replay of all texts.
        tokens: how many they commit together.
        tree: the policy, one that `costs.draft` knows.
        costs: of the parts.
    """
    assert steps, "nothing was replayed"
    branches = tree.kind in CONFIDENT or any(map(any, tree.shape()))
    settled = [between(costs.settle[branches and step.accepted > 1], step.nodes) for step in steps]
    seconds = {
        "draft": costs.draft[draft_key(tree)],
        "verify": mean([between(costs.verify, step.nodes) for step in steps]),
        "settle": mean(settled),
        "commit": mean([between(costs.commit, step.accepted + 1) for step in steps]),
    }
    tau = tokens / len(steps)
    nodes = mean([float(step.nodes) for step in steps])
    return Prediction(tau, nodes, seconds, tau * costs.plain / sum(seconds.values()))


def draft_key(tree: TreeConfig) -> str:
    """Return what a proposal's cost depends on: all of the tree, but for what a dynamic one is cut to in the end."""
    return repr(replace(tree, nodes=1) if tree.kind == "dynamic" else tree)


def between(known: Mapping[int, float], at: float | int) -> float:
    """Return the value at a point: linear between the known ones, the outermost beyond them."""
    points = sorted(known)
    if at <= points[0]:
        return known[points[0]]
    if at >= points[-1]:
        return known[points[-1]]
    index = bisect_right(points, at)
    low, high = points[index - 1], points[index]
    share = (at - low) / (high - low)
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


def acceptance(rank: Int[Tensor, "T D"], ranks: int) -> Float[Tensor, "D K"]:
    """Return how often the text's token had each of the first K ranks, by depth.

    Args:
        rank: of the token d places after each row's root, among the draft's guesses for it; negative where the text
            ends before.
        ranks: how many ranks to tell apart.
    """
    table = torch.zeros(rank.shape[1], ranks, dtype=torch.float64)
    for depth, column in enumerate(rank.unbind(1)):
        known = column[column >= 0]
        counts = torch.bincount(known.clamp_max(ranks), minlength=ranks + 1)[:ranks]
        table[depth] = counts / max(len(known), 1)
    return table
