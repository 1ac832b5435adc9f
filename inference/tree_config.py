"""The configuration of a tree policy: which nodes a draft tree has, and checks that they make a tree.

A schedule says which tree is drafted by how many sequences share a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from heads.common.ranges import Count
from heads.common.untrusted import shown

# The kinds, and what each reads.
KINDS = {
    "chain": ("depth",),
    "static": ("paths",),
    "dynamic": ("depth", "top_k", "nodes"),
    "best_first": ("depth", "nodes"),
    "sampled": ("widths",),
}
LARGEST = 1 << 14  # nodes of a tree, or the children of a node: far more than a target pass is worth
DEEPEST = 1 << 10  # of its nodes
BY_CONFIDENCE = ("dynamic", "best_first")  # the kinds whose shape follows the head's confidence


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
        # Whose file it may be: a number beyond any use would take the memory.
        if (deepest := max(map(len, (self.widths, *self.paths)))) > DEEPEST:
            name = "widths" if deepest == len(self.widths) else "paths"
            raise ValueError(f"tree.{name} is {deepest} deep: at most {DEEPEST}")
        ranks = [rank for path in self.paths for rank in path or [-1]]
        numbers = {"depth": [self.depth], "top_k": [self.top_k], "nodes": [self.nodes], "paths": ranks}
        for name, given in {**numbers, "widths": self.widths}.items():
            least, most = int(name == "widths"), DEEPEST if name == "depth" else LARGEST
            if any(not least <= number <= most for number in given):
                raise ValueError(f"tree.{name} is {shown(given)}: give numbers from {least} to {most}")
        if max(len(self.paths), sum(accumulate(self.widths, lambda a, b: min(a * b, LARGEST + 1)))) > LARGEST:
            raise ValueError(f"tree.{'widths' if self.widths else 'paths'} makes more than {LARGEST} nodes: give fewer")
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
        return min(self.depth, self.nodes) if self.kind in BY_CONFIDENCE else max(map(len, self.shape()))

    def shape(self) -> list[tuple[int, ...]]:
        """Return the rank paths of a fixed shape, by depth and then in order."""
        if self.kind == "static":
            return sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        layers: list[list[tuple[int, ...]]] = [[()]]
        for width in [1] * self.depth if self.kind == "chain" else self.widths:
            layers.append([(*path, rank) for path in layers[-1] for rank in range(width)])
        return [path for layer in layers[1:] for path in layer]


def most_nodes(tree: TreeConfig) -> int:
    """Return the most nodes of a policy's tree, the root included."""
    return 1 + (tree.nodes if tree.kind in BY_CONFIDENCE else len(tree.shape()))


def expanded(tree: TreeConfig) -> int:
    """Return the most nodes that a head expands for a policy's tree; of a confident one more than the tree has."""
    if tree.kind in BY_CONFIDENCE:
        return tree.depth * (tree.top_k if tree.kind == "dynamic" else tree.nodes)
    return most_nodes(tree)


@dataclass(frozen=True)
class Scheduled:
    """A line of a schedule: from `batch_size` running sequences on, `tree` is drafted; None: nothing is."""

    batch_size: Count
    tree: TreeConfig | None


@dataclass(frozen=True)
class Schedule:
    """Which tree is drafted by how many sequences share a pass: the line of the largest size that is reached holds."""

    lines: list[Scheduled]

    def __post_init__(self) -> None:
        sizes = [line.batch_size for line in self.lines]
        if sizes[:1] != [1] or sizes != sorted({*sizes}):
            raise ValueError(f"schedule has the batch sizes {shown(sizes)}: give them in ascending order, from 1 on")

    @property
    def trees(self) -> list[TreeConfig]:
        """Its trees, without the lines that have none."""
        return [line.tree for line in self.lines if line.tree is not None]

    @property
    def pauses(self) -> bool:
        """Whether nothing is drafted at some size."""
        return any(line.tree is None for line in self.lines)

    @property
    def label(self) -> str:
        """A short name for tables: the tree of one sequence, then the others, each with its size."""
        names = [
            ("none" if line.tree is None else line.tree.label)
            + (f" from {line.batch_size}" if line.batch_size > 1 else "")
            for line in self.lines
        ]
        return ", ".join(names)

    def at(self, running: int) -> TreeConfig | None:
        """Return the tree for so many sequences, None where nothing is drafted."""
        return next(line.tree for line in reversed(self.lines) if line.batch_size <= running)


def always(tree: TreeConfig) -> Schedule:
    """Return the schedule of one tree, whatever the number of sequences."""
    return Schedule([Scheduled(1, tree)])


def scheduled(best: Sequence[tuple[int, TreeConfig | None]]) -> Schedule:
    """Return the schedule of the best trees at some batch sizes: a size's tree holds up to the next, the first's below.

    Args:
        best: size and tree, by size; None where no tree pays.
    """
    lines: list[Scheduled] = []
    for size, tree in best:
        if not lines or lines[-1].tree != tree:
            lines.append(Scheduled(size if lines else 1, tree))
    return Schedule(lines)
