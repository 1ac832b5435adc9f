"""How a tree grows from a head: a fixed shape filled by rank, the same shape filled by sampling, or by confidence.

    chain    one node a depth.
    static   a list of rank paths: (0, 2) is the third child of the root's first child (Medusa, EAGLE-1).
    dynamic  EAGLE-2 (arXiv 2406.16858): expand the most probable nodes of each level, keep the best of all.
    best_first  the most probable nodes of all, within a budget (OPT-Tree, arXiv 2406.17276; see `_best_first`).
    sampled  a fixed number of children a depth, sampled without replacement; their probs q go on to verification.
    independent  the same with replacement, so that siblings may repeat (SpecInfer, arXiv 2305.09781).

At temperature 0 a sampled shape is filled by rank. Above it a chain is sampled: one sampled child with p/q verification
is accepted more often than one greedy child. No shape depends on a sampled token: that would change q. With coupled
noise (arXiv 2408.07978) every shape is filled by rank, of the logits with the noise of their position added.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Level
from inference.limits import check_size
from inference.protocol import Context, Proposal
from inference.target.target import Target
from inference.tree_config import CONFIDENT, TreeConfig, most_nodes
from inference.verification import tree as trees
from inference.verification.rng import Coupled, Rng
from inference.verification.sample import distribution, penalize
from inference.verification.tree import DraftTree

__all__ = [
    "CONFIDENT", "Expander", "Growth", "TreeConfig", "candidates", "check_masks", "check_tree", "grow", "most_nodes",
]  # fmt: skip


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
    """The tree that is being grown: its nodes so far, and which of them the head has expanded.

    Drafts are ranked and sampled under the processors that the target is sampled with, as far as a rank notices them.
    """

    def __init__(self, head: Expander, state: Any, level: Level, context: Context) -> None:
        self.head, self.state, self.level, self.context = head, state, level, context
        logits = level.logits
        self.token = [torch.tensor(context.token[-1:], device=logits.device)]
        self.parent = [torch.tensor([-1], device=logits.device)]
        self.nodes = torch.zeros(1, dtype=torch.long, device=logits.device)  # tree indices of the level's nodes
        self.size, self.depth = 1, 0
        self.ancestors: Bool[Tensor, "N M"] = torch.zeros(1, 0, dtype=torch.bool, device=logits.device)
        self.seen: Tensor | None = None  # which tokens stand in the prefix of the level's nodes, for a penalty
        if context.sampling.repetition_penalty != 1:
            self.seen = torch.zeros_like(logits, dtype=torch.bool)
            self.seen[:, context.token] = True

    def logits(self) -> Float[Tensor, "N V"]:
        """Return the level's logits, penalised."""
        logits = self.level.logits
        return logits if self.seen is None else penalize(logits, self.seen, self.context.sampling)

    def scores(self) -> Float[Tensor, "N V"]:
        """Return what the level's tokens are ranked by: their logits, or the probs with their noise if coupled."""
        sampling, rng = self.context.sampling, self.context.rng
        if sampling.temperature == 0 or not isinstance(rng, Coupled):
            return self.logits()
        return rng.race(distribution(self.logits(), sampling), self.depth + 1).log()

    def add(self, token: Int[Tensor, "K"], parent: Int[Tensor, "K"]) -> Int[Tensor, "K"]:
        """Append nodes whose parents are indices into the current level; return their tree indices."""
        self.token.append(token)
        self.parent.append(self.nodes[parent])
        start, self.size = self.size, self.size + len(token)
        return torch.arange(start, self.size, device=token.device)

    def descend(self, token: Int[Tensor, "K"], parent: Int[Tensor, "K"], nodes: Int[Tensor, "K"]) -> None:
        """Let the head expand these nodes (parents: indices into the current level); they become the level."""
        itself = torch.eye(len(token), dtype=torch.bool, device=token.device)
        self.ancestors = torch.cat([self.ancestors[parent], itself], 1)
        self.level = self.head.expand(self.state, self.level, token, parent, self.ancestors)
        self.nodes = nodes
        self.depth += 1
        if self.seen is not None:
            self.seen = self.seen[parent].scatter(1, token[:, None], True)

    def tree(self) -> DraftTree:
        """Return the tree as grown so far."""
        return DraftTree(torch.cat(self.token), torch.cat(self.parent))


def grow(head: Expander, state: Any, level: Level, config: TreeConfig, context: Context) -> Proposal:
    """Grow a tree from the root's level.

    Args:
        head: the draft head or another expander, with its committed `state` and the root's `level`.
        config: the policy.
        context: the tokens so far, the root the last one; sampling, randomness, and the depth that is left.

    Returns:
        The tree, and q where its children were sampled.
    """
    depth = min(context.room, head.max_depth)
    growth = Growth(head, state, level, context)
    if depth < 1:
        return Proposal(growth.tree())
    if config.kind in CONFIDENT:
        return Proposal(trees.best_n(*_confident(growth, config, min(depth, config.depth)), config.nodes)[0])
    paths = [path for path in config.shape() if len(path) <= depth]
    sampled = config.kind != "static" and context.sampling.temperature > 0 and not isinstance(context.rng, Coupled)
    replacement = config.kind == "independent"
    levels = _fixed(growth, paths, sampled, replacement)
    q = None
    if sampled:
        q = torch.zeros(growth.size, level.logits.shape[-1], dtype=levels[0][1].dtype, device=level.logits.device)
        for nodes, probs in levels:
            q[nodes] = probs
    tree = growth.tree()
    # Filtered probs or a small vocabulary may have fewer tokens than the shape has children.
    if bool((tree.token < 0).any()):
        tree, index = trees.keep(tree, tree.token >= 0)
        q = None if q is None else q[index]
    return Proposal(tree, q, replacement=replacement)


def _fixed(
    growth: Growth, paths: list[tuple[int, ...]], sampled: bool, replacement: bool
) -> list[tuple[Tensor, Float[Tensor, "K V"]]]:
    """Fill a fixed shape level by level, by rank or by sampling; return the sampled levels' nodes and probs."""
    levels = []
    device = growth.nodes.device
    inner = {path[:-1] for path in paths}
    level: list[tuple[int, ...]] = [()]
    for depth in range(1, max(map(len, paths)) + 1):
        new = [path for path in paths if len(path) == depth]
        width = 1 + max(path[-1] for path in new)
        if sampled:
            probs = distribution(growth.logits(), growth.context.sampling)
            levels.append((growth.nodes, probs))
            ranked = _sampled(probs, width, depth, replacement, growth.context.rng)
        else:
            ranked = growth.scores().topk(min(width, growth.level.logits.shape[-1])).indices
        position = {path: i for i, path in enumerate(level)}
        parent = torch.tensor([position[path[:-1]] for path in new], device=device)
        rank = torch.tensor([path[-1] for path in new], device=device)
        exhausted = rank >= ranked.shape[-1]  # a vocabulary smaller than the width
        token = torch.where(exhausted, -1, ranked[parent, rank.clamp_max(ranked.shape[-1] - 1)])
        nodes = growth.add(token, parent)
        chosen = [i for i, path in enumerate(new) if path in inner]
        if chosen:
            pick = torch.tensor(chosen, device=device)
            growth.descend(token[pick].clamp_min(0), parent[pick], nodes[pick])
            level = [new[i] for i in chosen]
    return levels


def _sampled(probs: Float[Tensor, "K V"], width: int, depth: int, replacement: bool, rng: Rng) -> Int[Tensor, "K C"]:
    """Sample each node's children, in order."""
    if not replacement:
        return rng.distinct(probs, width, depth)
    tokens = rng.sample(probs.repeat_interleave(width, 0), depth)
    return torch.tensor(tokens, device=probs.device).view(-1, width)


def candidates(
    head: Expander, state: Any, level: Level, config: TreeConfig, context: Context
) -> tuple[DraftTree, Float[Tensor, "N"]]:
    """Return all that a dynamic or best_first tree drafts before it is cut to its budget, with the scores it is cut by.

    The scores are the nodes' cumulative log-probabilities, 0 at the root.
    """
    depth = min(context.room, head.max_depth, config.depth)
    return _confident(Growth(head, state, level, context), config, depth)


def _confident(growth: Growth, config: TreeConfig, depth: int) -> tuple[DraftTree, Float[Tensor, "N"]]:
    scores = (_dynamic if config.kind == "dynamic" else _best_first)(growth, config, depth)
    return growth.tree(), torch.cat(scores)


def _dynamic(growth: Growth, config: TreeConfig, depth: int) -> list[Float[Tensor, "K"]]:
    """Expand the top_k most probable nodes of each level; return the levels' scores."""
    score = growth.level.logits.new_zeros(1, dtype=torch.float32)  # cumulative log-probability of the level's nodes
    scores = [score]
    width = min(config.top_k, growth.level.logits.shape[-1])
    for step in range(depth):
        best = growth.scores().float().log_softmax(-1).topk(width)
        reached = (score[:, None] + best.values).flatten()
        token = best.indices.flatten()
        parent = torch.arange(len(score), device=token.device).repeat_interleave(width)
        nodes = growth.add(token, parent)
        scores.append(reached)
        if step + 1 < depth:
            pick = reached.topk(min(width, len(reached))).indices
            growth.descend(token[pick], parent[pick], nodes[pick])
            score = reached[pick]
    return scores


def _best_first(growth: Growth, config: TreeConfig, depth: int) -> list[Float[Tensor, "K"]]:
    """Draft the nodes that best-first search would, a whole level at a time; return the levels' scores.

    Best-first search expands the most probable node not yet expanded until the budget is spent, which yields the
    `nodes` most probable nodes of the whole tree. No child is more probable than its parent, so a node's children
    can be among them only if fewer than `nodes` - 1 of the nodes known so far are better than it. To expand exactly
    those of each level finds the same tree in one call a level, and ends by itself where no node is left to expand.
    """
    score = growth.level.logits.new_zeros(1, dtype=torch.float32)
    scores = [score]
    best = score[:0]  # the nodes - 1 best scores so far
    width = min(config.nodes, growth.level.logits.shape[-1])
    for step in range(depth):
        top = growth.scores().float().log_softmax(-1).topk(width)
        reached = (score[:, None] + top.values).flatten()
        reached, pick = reached.topk(min(config.nodes, len(reached)))
        token, parent = top.indices.flatten()[pick], pick // width
        nodes = growth.add(token, parent)
        scores.append(reached)
        so_far = torch.cat([best, reached])
        best = so_far.topk(min(config.nodes - 1, len(so_far))).values
        count = int((reached >= best[-1]).sum()) if len(best) else 0  # reached falls, so they come first
        if count == 0 or step + 1 == depth:
            break
        growth.descend(token[:count], parent[:count], nodes[:count])
        score = reached[:count]
    return scores


def check_tree(target: Target, tree: TreeConfig, name: str) -> None:
    """Check that the largest tree of a policy fits into the target's context, before one is grown.

    Raises:
        ValueError: it does not.
    """
    check_size(target, most_nodes(tree), f"{name}: tree {tree.label}")


def check_masks(target: Target, tree: TreeConfig) -> None:
    """Check that the target verifies what a policy drafts, before anything is decoded.

    Raises:
        ValueError: it verifies chains alone, and the policy drafts trees.
    """
    if tree.kind != "chain" and not target.takes_trees:
        raise ValueError(f"{target.name}: {target.objection}, so no tree ({tree.label}) is verified: give tree=chain")
