"""The static tree with the highest acceptance: acceptance by depth and rank, and Sequoia's dynamic programme over it.

Pure functions. Trees are counted in drafted nodes, the root left out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.measures.cost_model import rising


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
    """Find the best static tree of every size by Sequoia's dynamic programme (arXiv 2402.12374).

    Sequoia's acceptance depends on the rank alone; here on the depth too, as heads get worse with it. As there, the
    acceptance of a node is assumed to depend on the path to it through its length only.

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
    """Return the nearest acceptance table in which no rank is accepted more often than a better one.

    A few texts may have a token of rank 3 and by chance none of rank 2; a tree built from such counts would draft the
    fourth guess and not the third. The nearest non-increasing table treats the two alike.
    """
    rows = [rising(dict(enumerate(reversed(row)))) for row in table.tolist()]
    return torch.tensor([[row[rank] for rank in reversed(range(len(row)))] for row in rows], dtype=table.dtype)
