"""The configuration of a tree policy: which nodes a draft tree has, and checks that they make a tree."""

import math
from dataclasses import dataclass

from heads.common.untrusted import shown
from inference.verification import tree as trees

# The kinds, and what each reads.
KINDS = {
    "chain": ("depth",),
    "static": ("paths",),
    "dynamic": ("depth", "top_k", "nodes"),
    "best_first": ("depth", "nodes"),
    "sampled": ("widths",),
    "independent": ("widths",),
}
CONFIDENT = ("dynamic", "best_first")  # the kinds whose shape follows the head's confidence


@dataclass(frozen=True)
class TreeConfig:
    """A tree policy; of the other fields it reads those that `KINDS` names."""

    kind: str
    depth: int
    top_k: int
    nodes: int
    paths: list[list[int]]
    widths: list[int]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"tree.kind is {self.kind!r}: choose one of {', '.join(KINDS)}")
        for name in KINDS[self.kind]:
            value = getattr(self, name)
            if not value or (isinstance(value, int) and value < 1):
                raise ValueError(f"tree.{name} is {value}: a {self.kind} tree needs it, at least 1")
        trees.check_shapes(self.paths, self.widths)
        trees.check_numbers({"depth": [self.depth], "top_k": [self.top_k], "nodes": [self.nodes]}, 0)
        trees.check_numbers({"widths": self.widths}, 1)
        paths = {tuple(path) for path in self.paths}
        for path in paths:
            if path[:-1] and path[:-1] not in paths:
                held, parent = shown(list(path)), shown(list(path[:-1]))
                raise ValueError(f"tree.paths holds {held} without its parent {parent}: add it")

    @property
    def label(self) -> str:
        """A short name for tables."""
        sizes = {
            "chain": f"{self.depth}",
            "static": f"{len(self.paths)}",
            "dynamic": f"d{self.depth}k{self.top_k}n{self.nodes}",
            "best_first": f"d{self.depth}n{self.nodes}",
        }
        return f"{self.kind}-{sizes.get(self.kind, 'x'.join(map(str, self.widths)))}"

    @property
    def deepest(self) -> int:
        """The greatest depth of a node."""
        return min(self.depth, self.nodes) if self.kind in CONFIDENT else max(map(len, self.shape()))

    def shape(self) -> list[tuple[int, ...]]:
        """Return the rank paths of a fixed shape, by depth and then in order."""
        if self.kind == "static":
            return sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        layers: list[list[tuple[int, ...]]] = [[()]]
        for width in _widths(self):
            layers.append([(*path, rank) for path in layers[-1] for rank in range(width)])
        return [path for layer in layers[1:] for path in layer]


def _widths(tree: TreeConfig) -> list[int]:
    return [1] * tree.depth if tree.kind == "chain" else tree.widths


def most_nodes(tree: TreeConfig) -> int:
    """Return the most nodes of a policy's tree, the root included."""
    if tree.kind in CONFIDENT:
        return 1 + tree.nodes
    if tree.kind == "static":
        return 1 + len(tree.paths)
    widths = _widths(tree)
    return sum(math.prod(widths[:depth]) for depth in range(len(widths) + 1))


def expanded(tree: TreeConfig) -> int:
    """Return the most nodes that a head expands for a policy's tree; of a confident one more than the tree has."""
    if tree.kind in CONFIDENT:
        return tree.depth * (tree.top_k if tree.kind == "dynamic" else tree.nodes)
    return most_nodes(tree)
