"""How a tree grows from a head: a fixed shape filled by rank, the same shape filled by sampling, or by confidence.

    chain    one node a depth.
    static   a list of rank paths: (0, 2) is the third child of the root's first child (Medusa, EAGLE-1).
    dynamic  EAGLE-2 (arXiv 2406.16858): expand the most probable nodes of each level, keep the best of all.
    sampled  a fixed number of children a depth, drawn without replacement; their laws q are kept for verification.

At temperature 0 a sampled shape is filled by rank. Above it a chain is sampled: one drawn child with p/q verification
is accepted more often than one greedy child. No shape depends on a sampled token: that would change q.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Level
from inference import tree as trees
from inference.sample import Sampling, distribution
from inference.tree import DraftTree
from inference.verify import Rng

KINDS = ("chain", "static", "dynamic", "sampled")


@dataclass(frozen=True)
class TreeConfig:
    """A tree policy: chain (depth), static (paths), dynamic (depth, top_k, nodes) or sampled (widths)."""

    kind: str
    depth: int
    top_k: int
    nodes: int
    paths: list[list[int]]
    widths: list[int]

    def __post_init__(self) -> None:
        """Check that the numbers the kind reads are there."""
        if self.kind not in KINDS:
            raise ValueError(f"tree.kind is {self.kind!r}: choose one of {', '.join(KINDS)}")
        needed = {
            "chain": ("depth",),
            "static": ("paths",),
            "dynamic": ("depth", "top_k", "nodes"),
            "sampled": ("widths",),
        }
        for name in needed[self.kind]:
            value = getattr(self, name)
            if not value or (isinstance(value, int) and value < 1):
                raise ValueError(f"tree.{name} is {value}: a {self.kind} tree needs it, at least 1")
        known = {tuple(path) for path in self.paths}
        for path in known:
            if path[:-1] and path[:-1] not in known:
                raise ValueError(f"tree.paths holds {list(path)} without its parent {list(path[:-1])}: add it")

    @property
    def label(self) -> str:
        """A short name for tables."""
        sizes = {
            "chain": f"{self.depth}",
            "static": f"{len(self.paths)}",
            "dynamic": f"d{self.depth}k{self.top_k}n{self.nodes}",
            "sampled": "x".join(map(str, self.widths)),
        }
        return f"{self.kind}-{sizes[self.kind]}"

    @property
    def deepest(self) -> int:
        """The greatest depth of a node."""
        return self.depth if self.kind == "dynamic" else max(map(len, self.shape()))

    def shape(self) -> list[tuple[int, ...]]:
        """Return the rank paths of a fixed shape, by depth and then in order."""
        if self.kind == "static":
            return sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        widths = [1] * self.depth if self.kind == "chain" else self.widths
        layers: list[list[tuple[int, ...]]] = [[()]]
        for width in widths:
            layers.append([(*path, rank) for path in layers[-1] for rank in range(width)])
        return [path for layer in layers[1:] for path in layer]


@runtime_checkable
class Expander(Protocol):
    """What a tree grows from: the part of `DraftHead` that drafts."""

    max_depth: int

    def expand(
        self, state: Any, level: Level, token: Int[Tensor, "N"], parent: Int[Tensor, "N"], mask: Bool[Tensor, "N M"]
    ) -> Level:
        """Score one more tree level; see `DraftHead.expand`."""
        ...


class Growth:
    """The tree that is being grown: its nodes so far, and which of them the head has expanded."""

    def __init__(self, head: Expander, state: Any, level: Level, root: int) -> None:
        self.head, self.state, self.level = head, state, level
        device = level.logits.device
        self.token = [torch.tensor([root], device=device)]
        self.parent = [torch.tensor([-1], device=device)]
        self.nodes = torch.zeros(1, dtype=torch.long, device=device)  # tree indices of the level's nodes
        self.size = 1
        self.lineage: Bool[Tensor, "N M"] = torch.zeros(1, 0, dtype=torch.bool, device=device)

    def add(self, token: Int[Tensor, "K"], parent: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Append nodes whose parents are indices into the current level; return their tree indices."""
        self.token.append(token)
        self.parent.append(self.nodes[parent])
        start, self.size = self.size, self.size + len(token)
        return torch.arange(start, self.size, device=token.device)

    def descend(self, token: Int[Tensor, "K"], parent: Int[Tensor, "K"], nodes: Int[Tensor, "K"]) -> None:
        """Let the head expand these nodes (parents: indices into the current level); they become the level."""
        own = torch.eye(len(token), dtype=torch.bool, device=token.device)
        self.lineage = torch.cat([self.lineage[parent], own], 1)
        self.level = self.head.expand(self.state, self.level, token, parent, self.lineage)
        self.nodes = nodes

    def tree(self) -> DraftTree:
        """Return the tree as grown so far."""
        return DraftTree(torch.cat(self.token), torch.cat(self.parent))


def grow(
    head: Expander, state: Any, level: Level, root: int, config: TreeConfig, sampling: Sampling, rng: Rng, room: int
) -> tuple[DraftTree, Float[Tensor, "N V"] | None]:
    """Grow a tree from the root's level.

    Args:
        head: the draft head or another expander, with its committed `state` and the root's `level`.
        root: the root's token.
        config: the policy.
        sampling: how the target will be sampled; sampled trees draw from the draft's law under the same filters.
        rng: randomness of sampled trees.
        room: the greatest depth that can still be committed.

    Returns:
        The tree, and q where its children were sampled.
    """
    depth = min(room, head.max_depth)
    growth = Growth(head, state, level, root)
    if depth < 1:
        return growth.tree(), None
    if config.kind == "dynamic":
        return _dynamic(growth, config, min(depth, config.depth)), None
    paths = [path for path in config.shape() if len(path) <= depth]
    sampled = config.kind != "static" and sampling.temperature > 0
    laws = _fixed(growth, paths, rng if sampled else None, sampling)
    q = None
    if sampled:
        q = torch.zeros(growth.size, level.logits.shape[-1], dtype=laws[0][1].dtype, device=level.logits.device)
        for nodes, law in laws:
            q[nodes] = law
    tree = growth.tree()
    if bool(
        (tree.token < 0).any()
    ):  # a filtered law or a small vocabulary had fewer tokens than the shape has children
        tree, index = trees.keep(tree, tree.token >= 0)
        q = None if q is None else q[index]
    return tree, q


def _fixed(
    growth: Growth, paths: list[tuple[int, ...]], rng: Rng | None, sampling: Sampling
) -> list[tuple[Tensor, Float[Tensor, "K V"]]]:
    """Fill a fixed shape level by level, by rank or by drawing; return the levels' nodes and the laws drawn from."""
    laws = []
    device = growth.nodes.device
    inner = {path[:-1] for path in paths}
    level: list[tuple[int, ...]] = [()]
    for depth in range(1, max(map(len, paths)) + 1):
        new = [path for path in paths if len(path) == depth]
        width = 1 + max(path[-1] for path in new)
        if rng is None:
            ranked = growth.level.logits.topk(width).indices
        else:
            law = distribution(growth.level.logits, sampling)
            laws.append((growth.nodes, law))
            ranked = rng.distinct(law, width)
        place = {path: i for i, path in enumerate(level)}
        parent = torch.tensor([place[path[:-1]] for path in new], device=device)
        rank = torch.tensor([path[-1] for path in new], device=device)
        exhausted = rank >= ranked.shape[-1]  # a vocabulary smaller than the width
        token = torch.where(exhausted, -1, ranked[parent, rank.clamp_max(ranked.shape[-1] - 1)])
        nodes = growth.add(token, parent)
        chosen = [i for i, path in enumerate(new) if path in inner]
        if chosen:
            pick = torch.tensor(chosen, device=device)
            growth.descend(token[pick].clamp_min(0), parent[pick], nodes[pick])
            level = [new[i] for i in chosen]
    return laws


def _dynamic(growth: Growth, config: TreeConfig, depth: int) -> DraftTree:
    """Expand the top_k most probable nodes of each level and keep the `nodes` most probable of all drafted ones."""
    score = growth.level.logits.new_zeros(1, dtype=torch.float32)  # cumulative log-probability of the level's nodes
    scores = [score]
    width = min(config.top_k, growth.level.logits.shape[-1])
    for step in range(depth):
        best = growth.level.logits.float().log_softmax(-1).topk(width)
        reached = (score[:, None] + best.values).flatten()
        token = best.indices.flatten()
        parent = torch.arange(len(score), device=token.device).repeat_interleave(width)
        nodes = growth.add(token, parent)
        scores.append(reached)
        if step + 1 < depth:
            pick = reached.topk(min(width, len(reached))).indices
            growth.descend(token[pick], parent[pick], nodes[pick])
            score = reached[pick]
    return trees.best_n(growth.tree(), torch.cat(scores), config.nodes)[0]
