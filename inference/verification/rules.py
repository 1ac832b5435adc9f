"""The verification rules for a batch of trees: they return the accepted path and the token after it.

The host reads nothing here unless `allow_host_sync`. Shapes depend only on the trees' sizes. The rules of sampled
drafts walk a fixed shape, which the host knows: they visit all nodes, and masks mark the nodes that each sequence
reaches. `RULES` says which drafts each rule supports. At temperature 0 the target's distribution is one-hot and every
lossless rule is the same walk along its best tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.shapes import Nodes, PerSequence
from inference.verification.sample import residual, without
from inference.verification.tree import AncestorMask, DraftTree

# Medusa's typical acceptance, the published epsilon and delta (arXiv 2401.10774); and a fixed threshold, as in engines.
EPSILON, DELTA = 0.09, 0.3
THRESHOLD = 0.3
MIN_PROB = 1e-30  # replaces a probability of 0 under a logarithm

NodeMask = Bool[Tensor, "B N"]
SequenceMask = Bool[Tensor, "B"]
Fractions = Float[Tensor, "B"]
PerNode = Float[Tensor, "B N"]
Probs = Float[Tensor, "B V"]
NodeProbs = Float[Tensor, "B N V"]


class Accepted(NamedTuple):
    """The accepted paths of B trees that are at most P - 1 deep."""

    path: Int[Tensor, "B P"]  # accepted nodes from the root on, padded with the last one
    committed: PerSequence  # number of accepted nodes, the root included, and of committed tokens
    token: Int[Tensor, "B P"]  # committed tokens: the accepted drafts, then the bonus token


class Sampled(NamedTuple):
    """B drafts of one fixed shape whose children were sampled."""

    parents: Sequence[int]  # parent of each node of the shape, -1 for the root; parents come before children
    token: Nodes  # the nodes' tokens
    valid: NodeMask  # mask of the drafted nodes
    q: Float[Tensor, "B M V"]  # the probs that the children of the M nodes with children were sampled from, in order


# The last accepted node of each sequence, and the probs that the next token is sampled from.
LastAccepted = tuple[PerSequence, Probs]


def valid_nodes(tree: DraftTree, ancestor_mask: AncestorMask, depth: Nodes, max_draft_depth: PerSequence) -> NodeMask:
    """Return the mask of drafted nodes: no padding (token -1), no descendants of padding, no nodes too deep."""
    return ~(ancestor_mask & (tree.token < 0)[:, None]).any(-1) & (depth <= max_draft_depth[:, None])


def follow(tree: DraftTree, ancestor_mask: AncestorMask, valid: NodeMask, matches_target: NodeMask) -> PerSequence:
    """Return the deepest node of the longest path of accepted nodes.

    `ancestor_mask` marks each node's ancestors, itself included, `valid` the drafted nodes, `matches_target` the nodes
    that the target accepts after their parent.
    """
    alive = ~(ancestor_mask & ~(matches_target | (tree.parent < 0))[:, None]).any(-1) & valid
    return torch.where(alive, ancestor_mask.sum(-1) - 1, -1).argmax(1)


def follow_on_host(
    tree: DraftTree, best: Int[Tensor, "1 N"], max_draft_depth: Int[Tensor, "1"], tree_depth: int
) -> tuple[Accepted, Int[Tensor, "1 P"], Int[Tensor, "1"]]:
    """Return the path that the target's best tokens accept in one tree, its ranks, and the number of drafted nodes.

    For one tree this walk in Python takes a third of the time of the sixty small tensor operations that it replaces.
    """
    (tokens,), (parents,), (following,) = torch.stack([tree.token, tree.parent, best]).tolist()
    most, depth, child = int(max_draft_depth), [0], dict[tuple[int, int], int]()
    for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:], strict=True), 1):
        # Descendants of padding are padding; look-ahead tokens have no parent in the tree.
        reached = depth[parent] + 1 if token >= 0 and parent >= 0 else most + 1
        depth.append(reached)
        if reached <= most:
            child.setdefault((parent, token), node)
    path = [0]
    while below := child.get((path[-1], following[path[-1]])):
        path.append(below)
    count, last = len(path), path[-1]
    committed = [*(tokens[node] for node in path[1:]), following[last]]
    padding = tree_depth + 1 - count
    path, committed = path + [last] * padding, committed + [tokens[last]] * padding
    drafted = sum(reached <= most for reached in depth) - 1
    order = [parents[:node].count(parents[node]) for node in path]
    rows = torch.tensor([[count, drafted, *path, *committed, *order]], device=best.device)
    accepted_path, token_row, ranks_row = rows[:, 2:].chunk(3, 1)
    return Accepted(accepted_path, rows[:, 0], token_row), ranks_row, rows[:, 1]


def walk(
    tree: DraftTree,
    valid: NodeMask,
    choose: Callable[[PerSequence, int], PerSequence],
    tree_depth: int,
    *,
    allow_host_sync: bool,
) -> tuple[PerSequence, PerSequence]:
    """Walk down each tree while a child has the token that `choose` samples after the node; of equal ones the first.

    So probs are computed only for nodes on the accepted paths, one per depth, to `tree_depth`. With `allow_host_sync`
    the host reads whether all paths have ended. Returns the last nodes, and the tokens after them.
    """
    node = torch.zeros_like(tree.token[:, 0])
    walks, token = torch.ones_like(node, dtype=torch.bool), node
    for depth in range(tree_depth + 1):
        token = torch.where(walks, choose(node, depth), token)
        child = valid & (tree.parent == node[:, None]) & (tree.token == token[:, None]) & walks[:, None]
        walks = child.any(1)
        if allow_host_sync and not bool(walks.any()):
            break
        node = torch.where(walks, child.int().argmax(1), node)
    return node, token


def accepted_paths(
    tree: DraftTree, ancestor_mask: AncestorMask, last: PerSequence, token: PerSequence, tree_depth: int
) -> Accepted:
    """Return the paths to the last accepted nodes, and their tokens followed by `token`."""
    size, last = tree.token.shape[-1], last[:, None]
    on_path = ancestor_mask.expand(len(last), -1, -1).take_along_dim(last[..., None], 1)[:, 0]
    node = torch.arange(size, device=on_path.device)
    path = torch.where(on_path, node, size).sort(1).values[:, : tree_depth + 1]  # parents come before children
    path, count = torch.where(path < size, path, last), on_path.sum(1)
    after = tree.token.gather(1, torch.cat([path[:, 1:], last], 1))
    ends = torch.arange(tree_depth + 1, device=on_path.device) == count[:, None] - 1
    return Accepted(path, count, torch.where(ends, token[:, None], after))


def typical(p: NodeProbs) -> PerNode:
    """LOSSY. Return Medusa's probability threshold after each node, from the entropy of the target's distribution."""
    entropy = -(p * p.clamp_min(MIN_PROB).log()).sum(-1)
    return (DELTA * torch.exp(-entropy)).clamp_max(EPSILON)


def above_threshold(tree: DraftTree, p: NodeProbs, threshold: Callable[[NodeProbs], PerNode]) -> NodeMask:
    """LOSSY. Return the mask of nodes whose token is above the threshold after their parent."""
    parent, row = tree.parent.clamp_min(0), torch.arange(len(p), device=p.device)[:, None]
    return p[row, parent, tree.token.clamp_min(0)] > threshold(p).gather(1, parent)


@dataclass
class AcceptDraws:
    """Uniform numbers "B N": each sequence uses its next one where it tests a node."""

    uniforms: PerNode
    used_uniforms: PerSequence

    def sample(self, probability: Fractions, tested: SequenceMask) -> SequenceMask:
        """Return true with the given probability where a node is tested, else false."""
        uniforms = self.uniforms.gather(1, self.used_uniforms[:, None])[:, 0]
        self.used_uniforms = self.used_uniforms + tested
        return tested & (uniforms < probability)


def recursive(draft: Sampled, p: NodeProbs, uniforms: PerNode, allow_host_sync: bool) -> LastAccepted:
    """Recursive rejection sampling: siblings in sampled order, each against the residual of the target's probs.

    Siblings are sampled without replacement (Sequoia, arXiv 2402.12374); on a chain it is speculative sampling (arXiv
    2211.17192, 2302.01318).

    Args:
        p: the target's probs after each node.
        uniforms: uniform numbers, as many as there are nodes.
        allow_host_sync: whether the host may read, to skip nodes that no sequence reaches.
    """
    draws, rows = AcceptDraws(uniforms, torch.zeros_like(draft.token[:, 0])), _rows(draft.parents)
    last, residual_p, residual_q = torch.zeros_like(draws.used_uniforms), p[:, 0], draft.q[:, 0]
    tokens = draft.token.clamp_min(0)
    for node, parent in enumerate(draft.parents[1:], 1):
        token = tokens[:, node, None]
        tested = (last == parent) & draft.valid[:, node]
        if allow_host_sync and not tested.any():
            continue
        accepted = draws.sample(_ratio(residual_p, residual_q, token), tested)
        rejected, column = (tested & ~accepted)[:, None], accepted[:, None]
        residual_p = torch.where(
            column, p[:, node], torch.where(rejected, residual(residual_p, residual_q), residual_p)
        )
        if parent in draft.parents[node + 1 :]:  # it has later siblings
            residual_q = torch.where(rejected, without(residual_q, token), residual_q)
        if node in rows:
            residual_q = torch.where(column, draft.q[:, rows[node]], residual_q)
        last = last.masked_fill(accepted, node)
    return last, residual_p


@dataclass
class PathNode:
    """A node on the current path of traversal verification, for B sequences."""

    reached: SequenceMask  # mask of sequences that reach it, or would without an earlier accepted path
    alpha: Fractions  # probability that the path up to here is accepted, given the rejections below it
    residual_p: Probs  # residual of p after rejections
    residual_q: Probs | None  # residual of q; None without children

    def reject(self, token: Int[Tensor, "B 1"], rejected: SequenceMask, distinct: bool) -> None:
        """Update the residuals after a child with a token was rejected; `distinct` if it has later siblings."""
        assert self.residual_q is not None
        rest = (self.alpha[:, None] * self.residual_p - self.residual_q).clamp_min(0)
        mass = rest.sum(-1)
        # The parentheses keep an alpha of 1 at exactly 1, as the root needs. If no mass is left, alpha is below 1 in
        # exact arithmetic: a node that is accepted for certain has a residual after a rejection.
        alpha = torch.where(mass > 0, mass / (mass + (1 - self.alpha)), (self.alpha >= 1).to(mass.dtype))
        self.residual_p = torch.where((rejected & (mass > 0))[:, None], rest / mass[:, None], self.residual_p)
        self.alpha = torch.where(rejected, alpha, self.alpha)
        if distinct:
            self.residual_q = torch.where(rejected[:, None], without(self.residual_q, token), self.residual_q)


def traversal(draft: Sampled, p: NodeProbs, uniforms: PerNode, allow_host_sync: bool) -> LastAccepted:
    """Traversal verification (arXiv 2505.12398), from the leaves up: a path is accepted or rejected as a whole.

    A rejected leaf is deleted, its parent keeps the residuals of p and q, and the next leaf is tried. On a chain it is
    block verification (arXiv 2403.10444). The root's alpha is 1, so it is accepted if no other path is. The arguments
    are those of `recursive`.
    """
    draws, rows = AcceptDraws(uniforms, torch.zeros_like(draft.token[:, 0])), _rows(draft.parents)
    last, probs = torch.zeros_like(draws.used_uniforms), p[:, 0]
    tokens, undecided = draft.token.clamp_min(0), draft.valid[:, 0]
    frames: list[PathNode] = []
    for node, entering in _walk(draft.parents):
        token, residual_q = tokens[:, node, None], draft.q[:, rows[node]] if node in rows else None
        if entering and not frames:
            frames.append(PathNode(undecided, torch.ones_like(p[:, 0, 0]), p[:, 0], residual_q))
        elif entering:
            top = frames[-1]
            assert top.residual_q is not None
            alpha = (top.alpha * _ratio(top.residual_p, top.residual_q, token)).clamp_max(1)
            frames.append(PathNode(draft.valid[:, node] & top.reached & (alpha > 0), alpha, p[:, node], residual_q))
        else:
            frame = frames.pop()
            accepted = draws.sample(frame.alpha, frame.reached & undecided)
            if not allow_host_sync or accepted.any():
                probs = torch.where(accepted[:, None], frame.residual_p, probs)
            last, undecided = last.masked_fill(accepted, node), undecided & ~accepted
            if not frames or (allow_host_sync and not undecided.any()):
                break
            rejected = frames[-1].reached & draft.valid[:, node] & undecided  # also if it was not reached
            if not allow_host_sync or rejected.any():
                frames[-1].reject(token, rejected, draft.parents[node] in draft.parents[node + 1 :])
    return last, probs


def _rows(parents: Sequence[int]) -> dict[int, int]:
    """Return the row of q of each node that has children."""
    return {node: row for row, node in enumerate(sorted({*parents} - {-1}))}


def _walk(parents: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the nodes of a depth-first walk, each with true when it is entered and with false when it is left."""
    below: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], 1):
        below[parent].append(node)
    waiting = [(0, False), (0, True)]
    while waiting:
        node, entering = waiting.pop()
        yield node, entering
        if entering:
            waiting += [visit for child in reversed(below[node]) for visit in ((child, False), (child, True))]


def _ratio(target: Probs, draft: Probs, token: Int[Tensor, "B 1"]) -> Fractions:
    return (target.gather(1, token) / draft.gather(1, token))[:, 0]


def ranks(tree: DraftTree) -> Nodes:
    """Return each node's rank among its siblings, as they were drafted."""
    return (tree.parent[:, :, None] == tree.parent[:, None]).tril(-1).sum(-1)


AUTO, GREEDY_WALK, NOTHING = "auto", "greedy", "none"


@dataclass(frozen=True)
class Rule:
    """A verification rule, and the drafts that it supports.

    A rule without functions accepts a token if the target samples the same one: `match`, `point_mass` and `coupled`,
    which differ only in how the draft is made (`DeviceStep.draft`). For a draft that is independent of the sample this
    is rejection sampling with a one-hot q. With coupled noise the text is the same for all drafters (arXiv 2408.07978).
    """

    chain: bool = False  # whether it verifies only chains
    # Verification of drafts that are sampled from known probs q; None if any draft is supported.
    verify: Callable[[Sampled, Tensor, Tensor, bool], LastAccepted] | None = None
    threshold: Callable[[Tensor], Tensor] | None = None  # probability threshold of a lossy rule


RULES = {
    "match": Rule(),
    "point_mass": Rule(),
    "token": Rule(True, recursive),
    "block": Rule(True, traversal),
    "recursive": Rule(False, recursive),
    "traversal": Rule(False, traversal),
    "coupled": Rule(),
    "typical": Rule(threshold=typical),
    "threshold": Rule(threshold=lambda p: p.new_full(p.shape[:-1], THRESHOLD)),  # LOSSY: one threshold for all nodes
}
COUPLED = "coupled"


def is_lossy(rule: str) -> bool:
    """Return whether a rule changes the target's distribution."""
    return rule != AUTO and RULES[rule].threshold is not None


def equals_baseline(rule: str) -> bool:
    """Return whether a rule emits the target's own samples, so that the text is the baseline's.

    The other lossless rules sample again after a rejection: the text is another sample of the same distribution.
    """
    return rule in (GREEDY_WALK, NOTHING) or (rule in RULES and RULES[rule] == Rule())


def label(rule: str) -> str:
    """Return a rule's name in reports."""
    return f"{rule} (lossy)" if is_lossy(rule) else rule


def is_chain(parents: Sequence[int]) -> bool:
    """Return whether a tree with these parents has no siblings."""
    return list(parents) == list(range(-1, len(parents) - 1))


def resolve_rule(rule: str, chain: bool, sampled: bool, greedy: bool) -> str:
    """Return the rule for a draft; auto is the one that accepts most (`benchmarks/rules.py` measures them).

    Raises:
        ValueError: the rule does not support the draft; at temperature 0 only a chain rule on a tree does not.
    """
    if rule == AUTO and not sampled:
        return "point_mass"
    if rule == AUTO:
        return "block" if chain else "traversal"
    entry = RULES[rule]
    if entry.chain and not chain:
        raise ValueError(f"rule={rule} verifies chains, and this draft is a tree: choose rule={AUTO}, or tree=chain")
    if greedy:
        return rule
    if entry.verify is not None and not sampled:
        raise ValueError(
            f"rule={rule} needs drafts sampled from known probs, and these are chosen without sampling: choose "
            f"rule={AUTO}, or a chain or sampled tree"
        )
    return rule
