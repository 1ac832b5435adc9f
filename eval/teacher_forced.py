"""The teacher-forced tier: a head's acceptance along given text, with any tree, from one target pass.

A text runs through the target once. Acceptance of a static tree follows from the head's ranks of the text's tokens. A
tree shaped by the head's confidence is grown once at every token of the text, without limits; its scores tell the nodes
of smaller depths and budgets. For sampled chains the acceptance probability of each of the text's tokens is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.inputs.workloads import Text
from eval.measures.cost_model import ReplayedStep
from eval.measures.metrics import SpecDecodingStats, counted
from heads.base import DepthOutput, Features, NewRows
from heads.modules.vocab import scatter_logits
from inference.drafters.policy import BY_CONFIDENCE, TreeConfig, candidates
from inference.protocol import DraftInputs
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree

TINY = 1e-30  # the least probability that is divided by
FIXED = 16  # a head with no more depths than these has all of them unrolled: some support nothing else


@dataclass(frozen=True)
class Reach:
    """The accepted tokens of a grown tree under every smaller depth and budget."""

    needed: list[list[int]]  # needed[d][j] is the budget that a tree of depth d needs to accept j + 1 tokens
    size: list[int]  # size[d] is the number of nodes that a tree of depth d drafts before it is cut


NOWHERE = Reach([[]], [0])  # at a token without a tree


@dataclass(frozen=True)
class RankedText:
    """A text with a head's guesses at each token after which a step may begin."""

    text: Text
    rank: list[list[int]]  # the rank of the token at depth d among the head's guesses; negative after the text's end
    grown: dict[str, list[Reach]]  # by `growth` key, one tree a token


@torch.inference_mode()
def rank_text(
    target: Target,
    head: Any,
    text: Text,
    largest: Sequence[TreeConfig],
    depth: int,
    *,
    sampling: Sampling = GREEDY,
    steps_alone: bool = False,
) -> RankedText:
    """Run a text that the target wrote through target and head once, ranking `depth` depths.

    `largest` are the trees to grow at every token, each with the greatest depth and budget of its kind, none for static
    shapes; they grow as under `sampling` without noise. With `steps_alone` one tree is grown, only where its steps
    begin.
    """
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    depth = min(depth, head.max_depth)
    drafts = unrolled(head, features, depth)
    begin = text.start - 1  # the position whose root is the first token of the answer
    logits = (
        scatter_logits(head.vocab, head.compute_logits(draft.state[0, begin:], d)) for d, draft in enumerate(drafts, 1)
    )
    rank = torch.stack([ranks(guess, token[begin:], d) for d, guess in enumerate(logits, 1)], 1)
    grown: dict[str, list[Reach]] = {growth(tree): [] for tree in largest}
    state, done, root = None, 0, text.start
    seen = torch.zeros(1, 1, target.embeddings.vocab_size, dtype=torch.bool, device=target.device)
    while largest and root < len(text.token) - 1:  # the positions before it are committed
        following = token[None, done + 1 : root + 1]
        hidden, last = features.hidden[:, done:root], features.last_hidden[:, done:root]
        rows = Features(following, hidden, last, torch.zeros_like(following))
        state, level = head.extend(state, NewRows(rows, following))
        seen[..., token[done : root + 1]] = True
        roots = DraftInputs(token[None, root : root + 1], sampling, None if sampling.repetition_penalty == 1 else seen)
        done = root
        for tree in largest:
            tokens = text.token[root + 1 : root + 1 + depth]
            tree_and_score = candidates(head, state, level, tree, roots, depth)
            grown[growth(tree)].append(reach(*tree_and_score, tokens, min(depth, tree.depth)))
        root += 1
        if steps_alone:
            accepted = accepted_of(grown[growth(tree)][-1], tree, text.limit - (root - text.start) - 1)[0]
            grown[growth(tree)] += [NOWHERE] * accepted
            root += accepted
    return RankedText(text, rank[: text.generated - 1].tolist(), grown)


def unrolled(head: Any, features: Features, depth: int) -> list[DepthOutput]:
    """Return a head's outputs from all rows down to a depth."""
    return head.unroll(features, head.max_depth if head.max_depth <= FIXED else depth)[:depth]


def growth(tree: TreeConfig) -> str:
    """Return the key that all trees share that are cut from the same larger tree."""
    return f"{tree.kind} {tree.top_k}" if tree.kind == "dynamic" else tree.kind


def ranks(logits: Float[Tensor, "T V"], token: Int[Tensor, "T"], depth: int) -> Int[Tensor, "T"]:
    """Return the rank of token t+1+d in row t's logits at depth d, -1 after the end.

    Of equal logits, which are frequent in bf16, the lower token ranks first, as in a draft.
    """
    count = len(token) - 1 - depth
    rank = torch.full_like(token, -1)
    if count > 0:
        guess, following = logits[:count], token[depth + 1 :, None]
        actual, ids = guess.gather(1, following), torch.arange(guess.shape[1], device=guess.device)
        rank[:count] = ((guess > actual) | ((guess == actual) & (ids < following))).sum(1)
    return rank


def reach(tree: DraftTree, score: Float[Tensor, "N"], following: Sequence[int], depth: int) -> Reach:
    """Return the accepted tokens of a tree under every smaller depth and budget, given the next tokens.

    A budget keeps the best nodes, the earlier of equals, as `inference.verification.tree.best_n` does.
    """
    level, at = [0], 0
    path: list[int] = []
    token, parent = tree.token.tolist(), tree.parent.tolist()
    for node in range(1, len(token)):
        level.append(level[parent[node]] + 1)
        if parent[node] == at and len(path) < len(following) and token[node] == following[len(path)]:
            path.append(node)
            at = node
    depths = torch.tensor(level)
    values = score.cpu()
    index = torch.arange(len(token))
    better = []  # [j][d]: nodes of depth up to d that are kept before the path's j-th
    for node in path:
        first = (values > values[node]) | ((values == values[node]) & (index < node))
        first[0] = False
        better.append(torch.bincount(depths[first], minlength=depth + 1).cumsum(0).tolist())
    needed = [[count[d] + 1 for count in better[:d]] for d in range(depth + 1)]
    return Reach(needed, (torch.bincount(depths, minlength=depth + 1).cumsum(0) - 1).tolist())


def replay(of: RankedText, tree: TreeConfig) -> list[ReplayedStep]:
    """Return the steps of decoding the text with a tree; a recorded tree of its kind and top_k must contain it."""
    text, steps, written = of.text, [], 1
    shape = [] if tree.kind in BY_CONFIDENCE else tree.shape()
    while written < text.generated:
        room = text.limit - written - 1
        if tree.kind in BY_CONFIDENCE:
            accepted, nodes = accepted_of(of.grown[growth(tree)][written - 1], tree, room)
        else:
            fitting = {path for path in shape if len(path) <= room}
            accepted, nodes = along(of.rank[written - 1], fitting), len(fitting)
        accepted = min(accepted, text.generated - written)
        steps.append(ReplayedStep(nodes, accepted))
        written += accepted + 1
    return steps


def accepted_of(grown: Reach, tree: TreeConfig, room: int) -> tuple[int, int]:
    """Return how many tokens a grown tree accepts within its budget and `room`, and how many it drafts."""
    depth = max(0, min(room, tree.depth, len(grown.size) - 1))
    return sum(need <= tree.nodes for need in grown.needed[depth]), min(tree.nodes, grown.size[depth])


def passes_along(of: RankedText, tree: TreeConfig) -> SpecDecodingStats:
    """Return the counts of decoding the text with a tree."""
    steps = replay(of, tree)
    return counted([step.accepted for step in steps], sum(step.nodes for step in steps), of.text.generated - 1)


def along(rank: Sequence[int], shape: set[tuple[int, ...]]) -> int:
    """Return the number of tokens with these ranks that a static shape accepts."""
    count = 0
    while count < len(rank) and tuple(rank[: count + 1]) in shape:
        count += 1
    return count


@dataclass(frozen=True)
class Overlap:
    """The overlap of a head's probs q and the target's p along a text that the target sampled.

    Attributes:
        accept_prob: min(1, q(x) / p(x)) of the text's token x, for each token that a step may begin after, by depth;
            0 after the text's last token, and for a token of foreign text to which the target gives p = 0.
        common: the sum of min(p, q), the acceptance rate of drafts sampled from q; NaN after the text's last token.
    """

    text: Text
    accept_prob: Float[Tensor, "T D"]
    common: Float[Tensor, "T D"]


@torch.inference_mode()
def overlap(target: Target, head: Any, text: Text, sampling: Sampling, depth: int) -> Overlap:
    """Run a text through target and head once; return the overlap of their probs.

    Given that the target emitted x, x was an accepted draft with probability min(1, q(x) / p(x)): a draft is x with
    probability q(x) and accepted with min(1, p(x) / q(x)), so both with min(p(x), q(x)), and x is emitted with p(x)
    (Leviathan et al., arXiv 2211.17192, theorem 3.5, for each token).
    """
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    begin = text.start - 1
    probs = distribution(target.embeddings.logits(features.last_hidden[0, begin:]), sampling)
    ratio = probs.new_zeros(text.generated - 1, depth)
    common = torch.full_like(ratio, float("nan"))
    for d, draft in enumerate(unrolled(head, features, depth), 1):
        count = text.generated - d
        if count < 1:
            break
        q = distribution(
            scatter_logits(head.vocab, head.compute_logits(draft.state[0, begin : begin + count], d)), sampling
        )
        p = probs[d : d + count]
        x = token[begin + d + 1 : begin + d + 1 + count, None]
        qx, px = (dist.gather(1, x)[:, 0] for dist in (q, p))
        ratio[:count, d - 1] = torch.where(px > 0, qx / px.clamp_min(TINY), 0.0).clamp_max(1)
        common[:count, d - 1] = torch.minimum(p, q).sum(1)
    return Overlap(text, ratio, common)


def expected(of: Overlap, depth: int) -> SpecDecodingStats:
    """Return the expected passes of decoding the text with sampled chains, verified token by token.

    The target's tokens do not depend on the drafts, so along its text each draft is accepted with the probability in
    `accept_prob`, and the positions where steps begin form a Markov chain: expectations are summed, without sampling.
    """
    text = of.text
    depth = min(depth, of.accept_prob.shape[1])
    begins = [0.0] * (text.generated + 1)  # the probability that a step begins at each token
    begins[1] = 1.0
    reached = [0.0] * depth
    drafted = 0.0
    for written in range(1, text.generated):
        begin = begins[written]
        deepest = max(0, min(depth, text.limit - written - 1))
        drafted += begin * deepest
        survive = 1.0
        for d in range(deepest + 1):
            accept = float(of.accept_prob[written - 1, d]) if d < deepest else 0.0
            begins[min(written + d + 1, text.generated)] += begin * survive * (1 - accept)
            survive *= accept
            if d < deepest:
                reached[d] += begin * survive
    steps = sum(begins[1 : text.generated], 0.0)
    return SpecDecodingStats(float(text.generated - 1), steps, drafted, math.fsum(reached), reached)
