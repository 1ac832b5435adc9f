"""The acceptance rules as pure functions: which drafted path stands, and which token comes after it.

Every rule takes the tree, the target's probs p, where it reads them the probs q that drafts were sampled from, and the
randomness. It returns the accepted nodes from the root on, and the next token, the bonus or correction, which is not
part of the tree. Which drafts a rule is right for stands in `verify.RULES`. The lossy ones stand at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.verification.rng import Rng
from inference.verification.sample import Sampling, distribution, residual, without
from inference.verification.tree import DraftTree, children

Chosen = tuple[list[int], int]

# Medusa's typical acceptance, the published epsilon and delta (arXiv 2401.10774); and a fixed bar, as engines offer it.
EPSILON, DELTA = 0.09, 0.3
THRESHOLD = 0.3
LEAST = 1e-30  # stands in for a probability of 0 under a logarithm


class LazyDistributions:
    """Lazy target distributions: the softmax of a node is computed when a rule visits it; most are never visited."""

    def __init__(self, logits: Float[Tensor, "N V"], sampling: Sampling) -> None:
        self.logits, self.sampling = logits, sampling

    def __getitem__(self, node: int, /) -> Float[Tensor, "V"]:
        """Return the probs after a node."""
        return distribution(self.logits[node], self.sampling)


Distributions = Tensor | LazyDistributions  # the target's probs "V" after each node


def follow(tree: DraftTree, choose: Callable[[int, int], int]) -> Chosen:
    """Walk down the tree while the token that `choose` names after a node, at a depth, was drafted there."""
    below, token = children(tree), tree.token.tolist()
    path = [0]
    while True:
        chosen = choose(path[-1], len(path))
        child = next((c for c in below[path[-1]] if token[c] == chosen), None)
        if child is None:
            return path, chosen
        path.append(child)


def match(tree: DraftTree, p: Distributions, rng: Rng) -> Chosen:
    """Sample and match: sample the target's own token at each node and follow it while it was drafted.

    Right for all drafts that do not depend on what is sampled here. Of drafts chosen without sampling each is accepted
    with its probability under p, as speculative sampling does from point masses. With coupled noise it is right for
    all, and drafter-invariant decoding (arXiv 2408.07978).
    """
    return follow(tree, lambda node, depth: rng.sample(p[node][None], depth)[0])


def recursive(tree: DraftTree, p: Distributions, q: Float[Tensor, "N V"], rng: Rng) -> Chosen:
    """Recursive rejection: try siblings in sampled order, each against the residual of the target's probs.

    Siblings are sampled without replacement (Sequoia, arXiv 2402.12374); on a chain it is speculative sampling (arXiv
    2211.17192, 2302.01318).
    """
    below, token = children(tree), tree.token.tolist()
    path = [0]
    while True:
        target, draft = p[path[-1]], q[path[-1]]
        for child in below[path[-1]]:
            x = token[child]
            if rng.accept(float(target[x] / draft[x])):
                path.append(child)
                break
            target = residual(target, draft)
            draft = without(draft, tree.token[child, None])
        else:
            return path, rng.sample(target[None], len(path))[0]


@dataclass
class Frame:
    """A node on the path that traversal verification looks at: the children it has not rejected, and what is left."""

    node: int
    alpha: float  # probability with which the path up to here is accepted, given what was rejected below it
    waiting: list[int]
    target: Tensor | None = None
    draft: Tensor | None = None


def traversal(tree: DraftTree, p: Distributions, q: Float[Tensor, "N V"], rng: Rng) -> Chosen:
    """Traversal verification (arXiv 2505.12398), from the leaves up: a path stands or falls as a whole.

    A rejected leaf is deleted, its parent keeps the residuals of p and q, and the next leaf is tried. On a chain it is
    block verification (arXiv 2403.10444). The root's alpha is 1, so it is accepted at the latest.
    """
    below, token = children(tree), tree.token.tolist()
    frames = [Frame(0, 1.0, below[0])]
    while True:
        top = frames[-1]
        if not top.waiting and rng.accept(top.alpha):
            probs = p[top.node] if top.target is None else top.target
            return [frame.node for frame in frames], rng.sample(probs[None], len(frames))[0]
        if not top.waiting:
            frames.pop()
            _reject(frames[-1], tree.token[top.node, None])
            continue
        if top.target is None or top.draft is None:
            top.target, top.draft = p[top.node], q[top.node]
        child, top.waiting = top.waiting[0], top.waiting[1:]
        x = token[child]
        alpha = min(1.0, top.alpha * float(top.target[x] / top.draft[x]))
        if alpha > 0:
            frames.append(Frame(child, alpha, below[child]))
        else:  # nothing below it can be accepted either
            _reject(top, tree.token[child, None])


def _reject(frame: Frame, token: Int[Tensor, "1"]) -> None:
    """Take into account that the child with a token, and all below it, was rejected."""
    assert frame.target is not None
    assert frame.draft is not None
    left = (frame.alpha * frame.target - frame.draft).clamp_min(0)
    mass = float(left.sum())
    if mass > 0:
        # The parentheses keep an alpha of 1 at exactly 1, on which the root relies.
        frame.target, frame.alpha = left / mass, mass / (mass + (1 - frame.alpha))
    else:  # in exact arithmetic alpha is below 1 then: what is sure to be accepted rejects no child without a residual
        frame.alpha = 1.0 if frame.alpha >= 1 else 0.0
    frame.draft = without(frame.draft, token)


def typical(tree: DraftTree, p: Distributions, rng: Rng) -> Chosen:
    """LOSSY. Medusa's typical acceptance: what the entropy of the target's distribution makes likely enough stands."""

    def bar(probs: Tensor) -> float:
        entropy = -(probs * probs.clamp_min(LEAST).log()).sum()
        return min(EPSILON, float(DELTA * torch.exp(-entropy)))

    return _lenient(tree, p, rng, bar)


def threshold(tree: DraftTree, p: Distributions, rng: Rng) -> Chosen:
    """LOSSY. A drafted token to which the target gives more than a fixed probability stands."""
    return _lenient(tree, p, rng, lambda _: THRESHOLD)


def _lenient(tree: DraftTree, p: Distributions, rng: Rng, bar: Callable[[Tensor], float]) -> Chosen:
    """Accept the longest path whose tokens are all above the bar of the distribution they follow."""
    below, token = children(tree), tree.token.tolist()
    paths = [[0]]
    for path in paths:  # grows meanwhile: breadth first, so that the last one is the longest
        if below[path[-1]]:
            probs = p[path[-1]]
            high = bar(probs)
            paths += [[*path, child] for child in below[path[-1]] if float(probs[token[child]]) > high]
    longest = max(paths, key=len)
    return longest, rng.sample(p[longest[-1]][None], len(longest))[0]
