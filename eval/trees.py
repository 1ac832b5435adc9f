"""The trees that the tuner tries, by family, and their acceptance along recorded texts.

The static tree with the highest acceptance is found by Sequoia's dynamic programming over acceptance by depth and rank.
A tree's size is its drafted nodes, without the root.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.config import TunerConfig
from inference.drafters.policy import TreeConfig

OWN = "as it is"  # the family of the head's present tree
CHAIN = "chain"


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
        best, sizes = torch.zeros(nodes + 1, dtype=torch.float64), []
        for rank in range(ranks):
            gain = torch.zeros(nodes + 1, dtype=torch.float64)
            gain[1:] = acceptance[depth, rank].double() * (1 + below[:-1])
            total = torch.where(rest >= 0, best[rest.clamp_min(0)] + gain, float("-inf"))
            subtree = total.argmax(1)
            best = total.gather(1, subtree[:, None])[:, 0]
            sizes.append(subtree.tolist())
        below = best
        chosen.insert(0, sizes)
    return StaticTrees(below.tolist(), chosen)


def acceptance(rank: Int[Tensor, "T D"], ranks: int) -> Float[Tensor, "D K"]:
    """Return the frequency of the first K = `ranks` ranks among the text's tokens, by depth.

    `rank` is that of the token d positions after the root among the head's guesses for it; negative after the last one.
    """
    counts = torch.stack([(rank == k).sum(0) for k in range(ranks)], 1).double()
    return counts / (rank >= 0).sum(0).clamp_min(1)[:, None]


def levelled(table: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
    """Return the nearest acceptance table that does not increase with rank.

    By chance a few texts may have a token of rank 3 and none of rank 2, and a tree would skip rank 2.
    """
    from scipy.optimize import isotonic_regression  # late: half a second that a refusal would wait for

    rows = [isotonic_regression(row, increasing=False).x.tolist() for row in table.numpy()]
    return torch.tensor(rows, dtype=table.dtype)


def largest(grid: TunerConfig, current: TreeConfig, depth: int) -> list[TreeConfig]:
    """Return the trees to grow at every token: the largest of each kind and top_k, which contains the others."""
    nodes = max(current.nodes, *grid.nodes)
    wide = sorted({*grid.top_k, *([current.top_k] if current.kind == "dynamic" else [])})
    dynamic = [TreeConfig("dynamic", depth, top_k, nodes, [], []) for top_k in wide]
    return [*dynamic, TreeConfig("best_first", depth, 0, nodes, [], [])]


def proposed(
    grid: TunerConfig, table: Float[Tensor, "D K"], current: TreeConfig, deepest: int, takes_trees: bool
) -> dict[str, list[TreeConfig]]:
    """Return the trees to try, by family; only chains if the target verifies only chains.

    `table` is the acceptance by depth and rank, `current` the head's present tree, `deepest` the head's depth.
    """
    depths = [depth for depth in grid.depths if depth <= deepest] or [deepest]
    families = {CHAIN: [TreeConfig("chain", depth, 0, 0, [], []) for depth in depths]}
    if takes_trees:
        static = best_static(levelled(table[: max(depths)]), max(grid.nodes))
        shapes = {str(paths): paths for paths in map(static.paths, grid.nodes) if paths}
        families["static"] = [TreeConfig("static", 0, 0, 0, paths, []) for paths in shapes.values()]
        sizes = [(depth, nodes) for depth in depths for nodes in grid.nodes if depth <= nodes]
        families["dynamic"] = [
            TreeConfig("dynamic", depth, top_k, nodes, [], [])
            for depth, nodes in sizes
            for top_k in grid.top_k
            if nodes <= top_k + (depth - 1) * top_k**2
        ]
        families["best_first"] = [TreeConfig("best_first", depth, 0, nodes, [], []) for depth, nodes in sizes]
    if takes_trees or current.kind == CHAIN:
        families[OWN] = [current]
    return {name: trees for name, trees in families.items() if trees}
