"""The trees that the tuner tries, by family, and their simulation along recorded texts.

Half of the texts choose a tree, the others are held out. The static tree with the highest acceptance is found by
Sequoia's dynamic programming over acceptance by depth and rank. A tree's size is its drafted nodes, without the root.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.config import TunerConfig
from eval.inputs.workloads import Text
from eval.measures.cost_model import Costs, Prediction, Replayed, cycled, draft_key, drafted, predict, rising
from eval.teacher_forced import RankedText, rank_text, replay
from heads.common.progress import progress
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.target.target import Target


@dataclass(frozen=True)
class StaticTrees:
    """The best static trees of every size.

    chosen[d][r][m] is the size of the subtree under the child of rank r, of a node at depth d, when m nodes are left
    for the children of ranks 0 … r.
    """

    value: list[float]  # value[n] is the expected number of accepted tokens of the best tree of at most n nodes
    chosen: list[list[list[int]]]

    def paths(self, nodes: int) -> list[list[int]]:
        """Return the best tree of at most this many nodes as rank paths, by depth."""
        return sorted(self._below(0, nodes, []), key=lambda path: (len(path), path))

    def _below(self, depth: int, nodes: int, path: list[int]) -> list[list[int]]:
        paths_below: list[list[int]] = []
        if depth == len(self.chosen):
            return paths_below
        for rank in reversed(range(len(self.chosen[depth]))):
            size = self.chosen[depth][rank][nodes]
            if size:
                child = [*path, rank]
                paths_below += [child, *self._below(depth + 1, size - 1, child)]
            nodes -= size
        return paths_below


def best_static(acceptance: Float[Tensor, "D K"], nodes: int) -> StaticTrees:
    """Find the best static tree of every size by Sequoia's dynamic programming (arXiv 2402.12374).

    Sequoia's acceptance depends on the rank; here on the depth too, since heads get worse with it. As in Sequoia, a
    node's acceptance depends on the path to it only by its length.

    Args:
        acceptance: the probability that the target's token has rank k among the children of a node at depth d - 1,
            given that the node is accepted.
        nodes: the greatest size.
    """
    depths, ranks = acceptance.shape
    size = torch.arange(nodes + 1)
    rest = size[:, None] - size  # [m, y]: the nodes left of m when a subtree takes y
    below = torch.zeros(nodes + 1, dtype=torch.float64)  # the best value of m nodes under a node one level down
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


def acceptance(rank: Int[Tensor, "T D"], ranks: int) -> Float[Tensor, "D K"]:
    """Return the frequency of the first K = `ranks` ranks among the text's tokens, by depth.

    `rank` is that of the token d positions after the root among the head's guesses for it; negative after the last one.
    """
    table = torch.zeros(rank.shape[1], ranks, dtype=torch.float64)
    for depth, column in enumerate(rank.unbind(1)):
        valid = column[column >= 0]
        counts = torch.bincount(valid.clamp_max(ranks), minlength=ranks + 1)[:ranks]
        table[depth] = counts / max(len(valid), 1)
    return table


def levelled(table: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
    """Return the nearest acceptance table that does not increase with rank.

    By chance a few texts may have a token of rank 3 and none of rank 2, and a tree would skip rank 2.
    """
    rows = [rising(dict(enumerate(reversed(row)))) for row in table.tolist()]
    return torch.tensor([[row[rank] for rank in reversed(range(len(row)))] for row in rows], dtype=table.dtype)


OWN = "as it is"  # the family of the head's present tree
CHAIN, TREE = "chain", "tree"  # the two kinds compared at larger batch sizes

# A tree is not tried at a batch size if at the one before its speedup was below this even with free drafts: in a
# larger batch a node costs more, for the device has less to spare.
HOPELESS = 0.8

FINALISTS = 3  # trees of each family that are priced again
AGAIN = 8  # factor of the samples for that

# Numbers of drafted nodes whose verification is always timed: from one node to a few the cost leaps, and a line from
# one to many would lie below it.
SIZES = (0, 1, 2, 4, 8)

T = TypeVar("T")
Families = dict[str, list[TreeConfig]]


@dataclass(frozen=True)
class Tried:
    """A tree with its replays along the texts to choose by, and along the held-out texts."""

    family: str
    tree: TreeConfig
    chosen: list[Replayed]
    held: list[Replayed]

    @property
    def kind(self) -> str:
        """Chain or tree."""
        return CHAIN if self.tree.kind == CHAIN else TREE

    def promised(self, costs: Mapping[int, Costs], batch: int) -> Prediction:
        """Return the prediction at a batch size on the texts to choose by."""
        return predict(cycled(self.chosen, batch), self.tree, costs, batch)

    def predicted(self, costs: Mapping[int, Costs], batch: int) -> Prediction:
        """Return the prediction at a batch size on the held-out texts."""
        return predict(cycled(self.held, batch), self.tree, costs, batch)


def unlimited(grid: TunerConfig, current: TreeConfig, depth: int) -> list[TreeConfig]:
    """Return the trees to grow at every token: the largest of each kind and top_k, which contains the others."""
    nodes = max(current.nodes, *grid.nodes)
    wide = sorted({*grid.top_k, *([current.top_k] if current.kind == "dynamic" else [])})
    dynamic = [TreeConfig("dynamic", depth, top_k, nodes, [], []) for top_k in wide]
    return [*dynamic, TreeConfig("best_first", depth, 0, nodes, [], [])]


def proposed(
    grid: TunerConfig, table: Float[Tensor, "D K"], current: TreeConfig, deepest: int, takes_trees: bool
) -> Families:
    """Return the trees to price, by family; only chains if the target verifies only chains.

    `table` is the acceptance by depth and rank, `current` the head's present tree, `deepest` the head's depth.
    """
    depths = [depth for depth in grid.depths if depth <= deepest] or [deepest]
    families = {CHAIN: [TreeConfig("chain", depth, 0, 0, [], []) for depth in depths]}
    if takes_trees:
        static = best_static(levelled(table[: max(depths)]), max(grid.nodes))
        shapes = {str(paths): paths for paths in map(static.paths, grid.nodes) if paths}
        families["static"] = [TreeConfig("static", 0, 0, 0, paths, []) for paths in shapes.values()]
        families["dynamic"] = [
            TreeConfig("dynamic", depth, top_k, nodes, [], [])
            for depth in depths
            for top_k in grid.top_k
            for nodes in grid.nodes
            if depth <= nodes <= top_k + (depth - 1) * top_k**2
        ]
        families["best_first"] = [
            TreeConfig("best_first", depth, 0, nodes, [], [])
            for depth in depths
            for nodes in grid.nodes
            if depth <= nodes
        ]
    if takes_trees or current.kind == CHAIN:
        families[OWN] = [current]
    return {name: trees for name, trees in families.items() if trees}


def distinct(trees: Sequence[Tried]) -> list[TreeConfig]:
    """Return one of the trees that cost the same to draft, for each cost."""
    return list({draft_key(one.tree): one.tree for one in trees}.values())


def worth_timing(trees: Sequence[Tried], costs: Mapping[int, Costs]) -> list[Tried]:
    """Return the trees worth trying at a larger batch size than those measured; at least one chain and one tree."""
    if not costs:
        return list(trees)

    def bound(one: Tried) -> float:  # the speedup with free drafts
        prediction = one.promised(costs, max(costs))
        return prediction.speedup * sum(prediction.seconds.values()) / prediction.seconds["verify"]

    bounds = [bound(one) for one in trees]
    best = {one.kind: value for value, one in sorted(zip(bounds, trees, strict=True), key=lambda pair: pair[0])}
    return [one for value, one in zip(bounds, trees, strict=True) if value >= min(HOPELESS, best[one.kind])]


def sizes_for(trees: Sequence[Tried], sizes: Sequence[int]) -> list[int]:
    """Return the sizes of verification passes to time, so that every tree's size is interpolated."""
    largest = max(drafted(one.tree) for one in trees)
    return sorted({largest, *(size for size in sizes if size <= largest)})


def simulate(
    grid: TunerConfig, target: Target, drafter: HeadDrafter, texts: Sequence[Text]
) -> tuple[list[Tried], Float[Tensor, "D K"]]:
    """Simulate every tree along the texts that the target wrote greedily; the head's own is of the family OWN.

    It also returns the acceptance by depth and rank on the texts to choose by.
    """
    current, head = drafter.policy, drafter.head
    deepest = min(head.max_depth, max(current.deepest, *grid.depths))
    largest = unlimited(grid, current, deepest)
    chosen, held = halves([rank_text(target, head, text, largest, deepest) for text in progress(texts, "simulating")])
    table = acceptance(torch.tensor([ranks for text in chosen for ranks in text.rank]), max(grid.top_k))

    def replays(records: Sequence[RankedText], tree: TreeConfig) -> list[Replayed]:
        return [Replayed(replay(record, tree), record.text.generated - 1) for record in records]

    families = proposed(grid, table, current, deepest, target.takes_trees)
    pairs = [(family, tree) for family, trees in families.items() for tree in trees]
    return [Tried(family, tree, replays(chosen, tree), replays(held, tree)) for family, tree in pairs], table


def halves(items: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return every other item, and the others; a single item is in both."""
    return list(items[::2]), list(items[1::2] or items)
