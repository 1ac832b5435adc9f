"""Tree policies: a fixed shape filled by rank or by sampling, or a shape that follows the head's confidence.

    chain    one node per depth.
    static   a list of rank paths: (0, 2) is the third child of the root's first child (Medusa, EAGLE-1).
    dynamic  EAGLE-2 (arXiv 2406.16858): expand the most probable nodes of each level, keep the best of all.
    best_first  the most probable nodes of all, within a budget (OPT-Tree, arXiv 2406.17276; see `by_confidence`).
    sampled  a fixed number of children per depth, sampled without replacement; verification reads their probs q.

Nodes of different parents are compared by probabilities, which greedy decoding sharpens (`inverse_temperature_of`).
At temperature 0 a sampled shape is filled by rank. Above it a chain is sampled: one sampled child with p/q verification
is accepted more often than one greedy child. No shape depends on a sampled token: that would change q. With coupled
noise (arXiv 2408.07978) every shape is filled by the rank of the logits plus the noise of their position.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from heads.base import DraftVocabulary, LevelNodes, LevelOutput
from heads.common.typed import Count, OneOf, Within
from heads.common.untrusted import shown
from heads.modules.vocab import scatter_logits
from heads.rows import gather_parents
from heads.shapes import Logits, PerSequence, TokenIds
from inference.protocol import DraftContext, DraftInputs, Proposal, inverse_temperature_of
from inference.target.target import Target, check_size
from inference.verification import tree as trees
from inference.verification.sample import distribution, penalize
from inference.verification.tree import AncestorMask, DraftTree

# The kinds of trees, and the fields that each reads.
KINDS = {
    "chain": ("depth",),
    "static": ("paths",),
    "dynamic": ("depth", "top_k", "nodes"),
    "best_first": ("depth", "nodes"),
    "sampled": ("widths",),
}
LARGEST = 1 << 14  # most nodes of a tree, or children of a node
DEEPEST = 1 << 10  # most levels of a tree
PerChild = Int[Tensor, "B K"]  # nodes of each sequence's level
RankPath = tuple[int, ...]  # the ranks of a node's ancestors among their siblings, and its own
Limited = Annotated[int, Within(0, LARGEST)]
BY_CONFIDENCE = ("dynamic", "best_first")  # the kinds whose shape follows the head's confidence


@dataclass(frozen=True)
class TreeConfig:
    """A tree policy; `KINDS` has the fields that each kind reads."""

    kind: Annotated[str, OneOf(tuple(KINDS))]
    depth: Annotated[int, Within(0, DEEPEST)]
    top_k: Limited
    nodes: Limited
    paths: list[list[Limited]]
    widths: list[Annotated[int, Within(1, LARGEST)]]

    def __post_init__(self) -> None:
        for name in KINDS[self.kind]:
            if not (value := getattr(self, name)):
                raise ValueError(f"tree.{name} is {value}: a {self.kind} tree needs it, at least 1")
        # The file may be anyone's: a huge tree would take all memory.
        levels = max(map(len, (self.widths, *self.paths)))
        if levels > DEEPEST or max(len(self.paths), sum(accumulate(self.widths, mul))) > LARGEST:
            name = "widths" if self.widths else "paths"
            raise ValueError(f"tree.{name} makes more than {LARGEST} nodes, or {DEEPEST} levels: give fewer")
        paths = {(), *map(tuple, self.paths)}
        for path in self.paths:
            if not path or tuple(path[:-1]) not in paths:
                raise ValueError(f"tree.paths holds {shown(path)} without its parent {shown(path[:-1])}: add it")

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
    def tree_depth(self) -> int:
        """The greatest depth of a node."""
        return min(self.depth, self.nodes) if self.kind in BY_CONFIDENCE else max(map(len, self.shape()))

    def shape(self) -> list[RankPath]:
        """Return the rank paths of a fixed shape, by depth and then in order."""
        if self.kind == "static":
            return sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        layers: list[list[RankPath]] = [[()]]
        for width in [1] * self.depth if self.kind == "chain" else self.widths:
            layers.append([(*path, rank) for path in layers[-1] for rank in range(width)])
        return [path for layer in layers[1:] for path in layer]


def most_nodes(tree: TreeConfig) -> int:
    """Return the maximum number of nodes of a policy's tree, the root included."""
    return 1 + (tree.nodes if tree.kind in BY_CONFIDENCE else len(tree.shape()))


def expanded(tree: TreeConfig) -> int:
    """Return how many nodes a head expands at most for a policy's tree; by confidence more than the tree has."""
    if tree.kind in BY_CONFIDENCE:
        return tree.depth * (tree.top_k if tree.kind == "dynamic" else tree.nodes)
    return most_nodes(tree)


@dataclass(frozen=True)
class ScheduleLine:
    """A line of a schedule: `tree` is drafted from `batch_size` running sequences on; None drafts nothing."""

    batch_size: Count
    tree: TreeConfig | None


@dataclass(frozen=True)
class Schedule:
    """The tree by the number of running sequences: the line with the largest size that is reached applies."""

    lines: list[ScheduleLine]

    def __post_init__(self) -> None:
        sizes = [line.batch_size for line in self.lines]
        if sizes[:1] != [1] or sizes != sorted({*sizes}):
            raise ValueError(f"schedule has the batch sizes {shown(sizes)}: give them in ascending order, from 1 on")

    @property
    def trees(self) -> list[TreeConfig]:
        """The trees of its lines."""
        return [line.tree for line in self.lines if line.tree is not None]

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
        """Return the tree for a number of sequences, None where nothing is drafted."""
        return next(line.tree for line in reversed(self.lines) if line.batch_size <= running)


def best_schedule(best: Sequence[tuple[int, TreeConfig | None]]) -> Schedule:
    """Return the schedule of the best trees at some batch sizes: each applies up to the next, the first also below.

    Args:
        best: pairs of batch size and tree, in order of size; None where no tree is faster than the baseline.
    """
    lines: list[ScheduleLine] = []
    for size, tree in best:
        if not lines or lines[-1].tree != tree:
            lines.append(ScheduleLine(size if lines else 1, tree))
    return Schedule(lines)


log = logging.getLogger(__name__)


@runtime_checkable
class Expander(Protocol):
    """The part of `DraftHead` from which a tree grows."""

    max_depth: int
    if TYPE_CHECKING:  # a head has an attribute

        @property
        def vocab(self) -> DraftVocabulary | None:
            """The draft vocabulary; None for the whole one."""

    def expand(self, state: Any, level: LevelOutput, nodes: LevelNodes) -> LevelOutput:
        """Score one more tree level; see `DraftHead.expand`."""


class TreeBuilder:
    """Grows one tree per sequence: the nodes so far, and the level that the head has expanded last.

    All trees have equally many nodes per level. Drafts are ranked and sampled with the target's logit processors, as
    far as these change a rank. Ranks are over the head's draft vocabulary; samples, and ranks under noise, are over
    the whole vocabulary (`full`), as probs and noise are.
    """

    def __init__(
        self, head: Expander, state: Any, level: LevelOutput, roots: DraftInputs, *, full: bool = False
    ) -> None:
        self.head, self.state, self.level, self.roots = head, state, level, roots
        count = len(roots.token)
        device = roots.token.device
        noisy = roots.noise is not None
        self.ids = None if head.vocab is None or full or noisy else head.vocab.ids  # token ids of `logits`
        self.token, self.seen_tokens = [roots.token], roots.seen_tokens  # mask of the tokens before each node
        self.parent = [torch.full((count, 1), -1, device=device)]
        self.nodes = torch.zeros(count, 1, dtype=torch.long, device=device)  # tree indices of the level's nodes
        self.sizes, self.depth = [1], 0  # nodes down to each depth; the level's depth
        self.ancestors: Bool[Tensor, "B N M"] = torch.zeros(count, 1, 0, dtype=torch.bool, device=device)

    def logits(self) -> Logits:
        """Return the level's logits after the repetition penalty."""
        logits = self.level.logits if self.ids is not None else scatter_logits(self.head.vocab, self.level.logits)
        if self.seen_tokens is None:
            return logits
        return penalize(
            logits, self.seen_tokens if self.ids is None else self.seen_tokens[..., self.ids], self.roots.sampling
        )

    def scores(self) -> Logits:
        """Return the scores that rank the level's tokens: logits, or log-probs plus noise if coupled."""
        if self.roots.noise is None:
            return self.logits()
        noise = self.roots.noise[:, self.depth : self.depth + 1]
        return (distribution(self.logits(), self.roots.sampling) / noise).log()

    def tokens(self, index: TokenIds) -> TokenIds:
        """Return the tokens at indices of `logits`."""
        return index if self.ids is None else self.ids[index]

    def append(self, token: PerChild, parent: PerChild) -> PerChild:
        """Append nodes whose parents are indices into the current level; return their tree indices."""
        self.token.append(token)
        self.parent.append(self.nodes.gather(1, parent))
        start = self.sizes[-1]
        self.sizes.append(start + token.shape[1])
        return torch.arange(start, self.sizes[-1], device=token.device).expand_as(token)

    def expand_level(self, token: PerChild, parent: PerChild, nodes: PerChild) -> None:
        """Expand nodes with the head (parents: indices into the current level); they become the current level."""
        itself = torch.eye(token.shape[1], dtype=torch.bool, device=token.device).expand(len(token), -1, -1)
        self.ancestors = torch.cat([gather_parents(self.ancestors, parent), itself], -1)
        self.depth += 1
        self.level = self.head.expand(self.state, self.level, LevelNodes(token, parent, self.ancestors, self.depth))
        self.nodes = nodes
        if self.seen_tokens is not None:
            self.seen_tokens = gather_parents(self.seen_tokens, parent).scatter(2, token[..., None], True)

    def build(self) -> DraftTree:
        """Return the trees so far, batched "B N"."""
        return DraftTree(torch.cat(self.token, 1), torch.cat(self.parent, 1))


def grow(
    head: Expander, state: Any, level: LevelOutput, config: TreeConfig, context: DraftContext, min_prob: float = 0.0
) -> Proposal:
    """Grow a tree for one sequence on the host, down to the head's `max_depth`.

    With `min_prob` it is a sampled chain, which ends after a token of lower probability (`sample_chains`).
    """
    if head.max_depth < 1:
        return Proposal(trees.root(context.token[-1], level.logits.device))
    if min_prob > 0:
        return sample_chains(head, level, min(config.depth, head.max_depth), [context], min_prob)[0]
    full = scatter_logits(head.vocab, level.logits)
    roots = context.roots(full, min(head.max_depth, config.tree_depth))
    max_draft_depth = torch.tensor([head.max_depth], device=full.device)
    (token, parent), _, q = grow_batch(head, state, level, config, roots, max_draft_depth, allow_host_sync=True)
    tree = DraftTree(token[0], parent[0])
    if q is None:  # a sampled shape is fixed
        tree, _ = trees.keep(tree, tree.token >= 0)
    return Proposal(tree, None if q is None else q[0])


def sample_chains(
    head: Expander,
    level: LevelOutput,
    depth: int,
    contexts: Sequence[DraftContext],
    min_prob: float = 0.0,
    end: frozenset[int] = frozenset(),
) -> list[Proposal]:
    """Sample a chain of at most `depth` tokens after each node of a level, with one call of the head per depth.

    A chain ends after a token of `end`, or one whose probability at temperature 1 is below `min_prob`. It is part
    of the chain, so that the chain is a sample of its q.
    """
    device = level.logits.device
    seen = [context.seen_tokens(level.logits) for context in contexts]
    penalised = torch.cat([mask for mask in seen if mask is not None], 1) if seen[0] is not None else None
    root = torch.zeros(1, 1, dtype=torch.long, device=device)
    growth = TreeBuilder(head, None, level, DraftInputs(root, contexts[0].sampling, penalised))
    growth.ancestors = growth.ancestors.expand(1, len(contexts), 0)
    chains = [([context.token[-1]], list[Tensor]()) for context in contexts]
    running = [*range(len(contexts))]
    while running:
        live = []
        probs = distribution(growth.logits()[0], contexts[0].sampling)
        for node, index in enumerate(running):
            context, (token, q) = contexts[index], chains[index]
            q.append(probs[node : node + 1])
            token.append(context.draws.token(q[-1], len(q)))
            doubted = min_prob > 0 and float(growth.level.logits[0, node].float().softmax(-1)[token[-1]]) < min_prob
            if len(q) < min(depth, context.max_draft_depth) and token[-1] not in end and not doubted:
                live.append(node)
        running = [running[node] for node in live]
        if running:
            parent = torch.tensor([live], device=device)
            growth.expand_level(
                torch.tensor([[chains[index][0][-1] for index in running]], device=device), parent, parent
            )
    return [Proposal(trees.chain(torch.tensor(token)), torch.cat(q)) for token, q in chains]


def grow_batch(
    head: Expander,
    state: Any,
    level: LevelOutput,
    config: TreeConfig,
    roots: DraftInputs,
    max_draft_depth: PerSequence,
    *,
    allow_host_sync: bool,
) -> tuple[DraftTree, AncestorMask, Float[Tensor, "B M V"] | None]:
    """Return the trees "B N" of B sequences, their ancestor masks, and q if children were sampled.

    All sequences have equal sampling parameters. `max_draft_depth` is each sequence's limit; deeper nodes are included
    only if there are too few others. A token of -1 is padding, in a level with fewer candidates. The M rows of q are
    those of the nodes with children. With `allow_host_sync` the host may read scores to expand fewer nodes; otherwise a
    best_first tree expands all nodes.
    """
    if config.kind in BY_CONFIDENCE:
        growth, scores = by_confidence(
            head, state, level, config, roots, head.max_depth, allow_host_sync=allow_host_sync
        )
        if not allow_host_sync or bool((max_draft_depth < len(growth.sizes) - 1).any()):
            depths = [level.new_full(level.shape[1:], depth) for depth, level in enumerate(growth.token)]
            scores = scores.masked_fill(torch.cat(depths) > max_draft_depth[:, None], float("-inf"))
        tree = trees.best_n(growth.build(), scores, config.nodes)
        return tree, trees.ancestors(tree), None
    samples = None if config.kind == "static" else roots.samples
    q = []
    growth = TreeBuilder(head, state, level, roots, full=samples is not None)
    levels, ancestors = _shape(_paths(config, head.max_depth), level.logits.device)
    for shape in levels:
        if samples is None:
            scores = growth.scores()
            children = growth.tokens(scores.topk(min(shape.width, scores.shape[-1])).indices)
        else:
            q.append(distribution(growth.logits(), roots.sampling))
            children = samples.sample_distinct(q[-1], shape.width)
        token = functional.pad(children, (0, shape.width - children.shape[-1]), value=-1)[:, shape.parent, shape.rank]
        parent = shape.parent.expand_as(token)
        nodes = growth.append(token, parent)
        if len(shape.inner):
            growth.expand_level(token[:, shape.inner].clamp_min(0), parent[:, shape.inner], nodes[:, shape.inner])
    return growth.build(), ancestors, torch.cat(q, 1) if q else None


def sampled_shape(config: TreeConfig, max_depth: int) -> tuple[int, ...] | None:
    """Return the parents of a policy's nodes down to a depth; None if the policy never samples."""
    return None if (config.kind == "static" or config.kind in BY_CONFIDENCE) else parents_of(_paths(config, max_depth))


def _paths(config: TreeConfig, max_depth: int) -> tuple[RankPath, ...]:
    return tuple(path for path in config.shape() if len(path) <= max_depth)


def parents_of(paths: Sequence[RankPath]) -> tuple[int, ...]:
    """Return the parents of a fixed shape's nodes: the root's, then those of `paths`."""
    index = {path: node for node, path in enumerate(((), *paths))}
    return (-1, *(index[path[:-1]] for path in paths))


class ShapeLevel(NamedTuple):
    """One level of a fixed shape: most children, parents among the nodes expanded above, ranks, and nodes to expand."""

    width: int
    parent: Int[Tensor, "K"]
    rank: Int[Tensor, "K"]
    inner: Int[Tensor, "k"]


@cache
def _shape(paths: tuple[RankPath, ...], device: torch.device) -> tuple[list[ShapeLevel], Bool[Tensor, "1 N N"]]:
    """Return the levels of a fixed shape, and its ancestor mask with the root's first; both are cached."""
    levels = []
    above: list[RankPath] = [()]
    parents = {path[:-1] for path in paths}
    for depth in range(1, max(map(len, paths)) + 1):
        new = [path for path in paths if len(path) == depth]
        inner = [i for i, path in enumerate(new) if path in parents]
        indices = [above.index(path[:-1]) for path in new], [path[-1] for path in new], inner
        levels.append(ShapeLevel(1 + max(indices[1]), *(torch.tensor(index, device=device) for index in indices)))
        above = [new[i] for i in inner]
    parent = torch.tensor(parents_of(paths), device=device)
    return levels, trees.ancestors(DraftTree(torch.zeros_like(parent), parent))[None]


def by_confidence(
    head: Expander,
    state: Any,
    level: LevelOutput,
    config: TreeConfig,
    roots: DraftInputs,
    depth: int,
    *,
    allow_host_sync: bool = True,
) -> tuple[TreeBuilder, Float[Tensor, "B N"]]:
    """Draft the most probable nodes by the head, a whole level at a time; return the trees and the nodes' scores.

    A dynamic tree expands the `top_k` most probable nodes of each level. Best-first search expands the most probable
    node not yet expanded until the budget is spent, which yields the `nodes` most probable nodes of the whole tree. A
    child never outscores its parent, so only the nodes among the best `nodes` - 1 so far can have children in the final
    tree. Expanding exactly those, in one call a level, gives the same tree, and ends when none is left. In a batch,
    all sequences expand as many nodes as the one with the most: the surplus nodes are never among the best.
    """
    growth = TreeBuilder(head, state, level, roots)
    depth = min(depth, config.tree_depth)
    score = torch.zeros(growth.nodes.shape, device=growth.nodes.device)  # cumulative log-probs of the level's nodes
    scores, best = [score], score[:, :0]  # scores of all nodes; the best nodes - 1 of them
    is_dynamic = config.kind == "dynamic"
    for step in range(depth):
        log_probs = (growth.scores().float() * inverse_temperature_of(roots.sampling)).log_softmax(-1)
        width = min(config.top_k if is_dynamic else config.nodes, log_probs.shape[-1])
        top = log_probs.topk(width)
        reached = (score[..., None] + top.values).flatten(1)
        token = growth.tokens(top.indices).flatten(1)
        index = torch.arange(reached.shape[1], device=token.device).expand_as(token)
        if not is_dynamic:
            reached, index = reached.topk(min(config.nodes, reached.shape[1]))
            token = token.gather(1, index)
        parent = index // width
        nodes = growth.append(token, parent)
        scores.append(reached)
        if step + 1 == depth:
            break
        if is_dynamic:
            score, chosen = reached.topk(min(config.top_k, reached.shape[1]))
        else:  # scores descend in a level, so the nodes to expand come first
            best = torch.cat([best, reached], 1)
            best = best.topk(min(config.nodes - 1, best.shape[1])).values
            count = reached.shape[1] if best.shape[1] else 0
            if allow_host_sync and count:
                count = int((reached >= best[:, -1:]).sum(1).max())
            chosen = torch.arange(count, device=token.device).expand(len(token), -1)
            score = reached[:, :count]
        if not chosen.shape[1]:
            break
        growth.expand_level(*(rows.gather(1, chosen) for rows in (token, parent, nodes)))
    return growth, torch.cat(scores, 1)


def check_tree(target: Target, tree: TreeConfig, name: str) -> None:
    """Refuse a policy whose largest tree does not fit into the target's context, before one is grown."""
    check_size(target, most_nodes(tree), f"{name}: tree {tree.label}")


def verifiable(target: Target, tree: TreeConfig) -> TreeConfig:
    """Return a policy, or with a warning a chain of equal depth if the target verifies only chains."""
    if tree.kind == "chain" or target.takes_trees:
        return tree
    chain = TreeConfig("chain", tree.tree_depth, 0, 0, [], [])
    log.warning(
        "%s: %s, so no tree (%s) is verified: %s in its place",
        target.name,
        target.incompatibility,
        tree.label,
        chain.label,
    )
    return chain
