"""A head along given text: how many tokens each step would have accepted under any tree, from one target pass.

A text runs through the target once, teacher-forced. Of a tree of fixed shape the head's ranks of the text's tokens say
everything. One whose shape follows the head's confidence is grown once at every token of the text, without limits; what
a smaller depth or budget would have left of it follows from its scores. Of chains that are drawn, what counts is how
likely each of the text's tokens would have been accepted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eval.inputs.texts import Text
from eval.measures.cost_model import Step
from eval.measures.metrics import Passes
from heads.base import Draft, Features
from heads.modules.vocab import scatter_logits
from inference.drafters.head import HeadState
from inference.drafters.policy import CONFIDENT, TreeConfig, candidates
from inference.protocol import Commit, Context
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification.rng import TINY, Generator
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree

FIXED = 16  # a head with no more depths than these has all of them unrolled: some can do nothing else


@dataclass(frozen=True)
class Reach:
    """How far a grown tree follows the text, cut to any depth and budget.

    Attributes:
        needed: needed[d][j] is the budget that a tree of depth d needs to accept j + 1 tokens.
        size: size[d] is how many nodes a tree of depth d drafts before it is cut.
    """

    needed: list[list[int]]
    size: list[int]


@dataclass(frozen=True)
class Record:
    """A text with what a head made of it, an entry for each of its tokens that a step may begin after.

    Attributes:
        rank: of the token d places on, among the head's guesses for it; negative where the text ends before.
        grown: by `growth`, one tree a token.
    """

    text: Text
    rank: list[list[int]]
    grown: dict[str, list[Reach]]


@torch.inference_mode()
def record(target: Target, head: Any, text: Text, largest: Sequence[TreeConfig], depth: int) -> Record:
    """Run a text through target and head once.

    Args:
        target: the target that wrote it.
        head: the draft head.
        text: prompt and answer.
        largest: the trees to grow at every token, each with the greatest depth and budget of its kind; none, where
            only fixed shapes are asked for.
        depth: how many depths to rank.
    """
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    depth = min(depth, head.max_depth)
    drafts = unrolled(head, features, depth)
    begin = text.start - 1  # the row whose root is the first token of the answer
    logits = (scatter_logits(head.vocab, head.score(draft.state[0, begin:], d)) for d, draft in enumerate(drafts, 1))
    rank = torch.stack([ranks(each, token[begin:], d) for d, each in enumerate(logits, 1)], 1)
    grown: dict[str, list[Reach]] = {growth(tree): [] for tree in largest}
    drafting = HeadState(head, largest[0]) if largest else None
    done = 0
    for made in range(1, text.made) if drafting else ():
        row = text.start + made - 1  # the rows before it are committed, its token is the root
        assert drafting is not None
        drafting.update(Commit(token[done + 1 : row + 1], _rows(features, done, row), None))
        done = row
        context = Context(text.token[: row + 1], GREEDY, Generator(0, target.device), depth)
        for tree in largest:
            assert drafting.level is not None
            tokens = text.token[row + 1 : row + 1 + depth]
            tree_and_score = candidates(head, drafting.state, drafting.level, tree, context)
            grown[growth(tree)].append(reach(*tree_and_score, tokens, min(depth, tree.depth)))
    return Record(text, rank[: text.made - 1].tolist(), grown)


def unrolled(head: Any, features: Features, depth: int) -> list[Draft]:
    """Return what a head drafts from all rows down to a depth."""
    return head.unroll(features, head.max_depth if head.max_depth <= FIXED else depth)[:depth]


def growth(tree: TreeConfig) -> str:
    """Return what the trees have in common that are cut from the same larger one."""
    return f"{tree.kind} {tree.top_k}" if tree.kind == "dynamic" else tree.kind


def _rows(features: Any, first: int, end: int) -> TargetOutput:
    return TargetOutput(features.hidden[:, first:end], features.last[:, first:end], None)


def ranks(logits: Float[Tensor, "T V"], token: Int[Tensor, "T"], depth: int) -> Int[Tensor, "T"]:
    """Return the rank of token t+1+d in row t's guess at depth d, -1 where there is no such token."""
    known = len(token) - 1 - depth
    rank = torch.full_like(token, -1)
    if known > 0:
        wanted = logits[:known].gather(1, token[depth + 1 :, None])
        rank[:known] = (logits[:known] > wanted).sum(1)
    return rank


def reach(tree: DraftTree, score: Float[Tensor, "N"], following: Sequence[int], depth: int) -> Reach:
    """Return how far a tree follows the tokens to come under every smaller depth and budget.

    A budget keeps the best nodes, of equal ones the earlier, as `inference.verification.tree.best_n` does.
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
    place = torch.arange(len(token))
    better = []  # [j][d]: nodes of depth up to d that are kept before the path's j-th
    for node in path:
        first = (values > values[node]) | ((values == values[node]) & (place < node))
        first[0] = False
        better.append(torch.bincount(depths[first], minlength=depth + 1).cumsum(0).tolist())
    needed = [[count[d] + 1 for count in better[:d]] for d in range(depth + 1)]
    return Reach(needed, (torch.bincount(depths, minlength=depth + 1).cumsum(0) - 1).tolist())


def replay(of: Record, tree: TreeConfig) -> list[Step]:
    """Return the steps that decoding the text with a tree takes.

    The tree's kind and top_k must have been recorded, with no smaller a depth and budget.
    """
    text, steps, made = of.text, [], 1
    shape = [] if tree.kind in CONFIDENT else tree.shape()
    while made < text.made:
        room = text.limit - made - 1
        if tree.kind in CONFIDENT:
            grown = of.grown[growth(tree)][made - 1]
            depth = max(0, min(room, tree.depth, len(grown.size) - 1))
            accepted = sum(need <= tree.nodes for need in grown.needed[depth])
            nodes = min(tree.nodes, grown.size[depth])
        else:
            fitting = {path for path in shape if len(path) <= room}
            accepted, nodes = along(of.rank[made - 1], fitting), len(fitting)
        accepted = min(accepted, text.made - made)
        steps.append(Step(text.start + made - 1, nodes, accepted))
        made += accepted + 1
    return steps


def along(rank: Sequence[int], shape: set[tuple[int, ...]]) -> int:
    """Return how many tokens of these ranks a fixed shape follows."""
    count = 0
    while count < len(rank) and tuple(rank[: count + 1]) in shape:
        count += 1
    return count


@dataclass(frozen=True)
class Overlap:
    """How far a head's laws q and the target's p agree along a text that the target drew.

    Attributes:
        text: the text.
        share: min(1, q(x) / p(x)) of the text's token x, for each token that a step may begin after and each depth; 0
            where the text has ended, or has a token of another's that the target never draws.
        common: the sum of min(p, q), with NaN where the text has ended: what is accepted of any draft drawn from q.
    """

    text: Text
    share: Float[Tensor, "T D"]
    common: Float[Tensor, "T D"]


@torch.inference_mode()
def overlap(target: Target, head: Any, text: Text, sampling: Sampling, depth: int) -> Overlap:
    """Run a text through target and head once, and compare their laws.

    That x was accepted has probability min(1, q(x) / p(x)) once x is known to be the target's choice: a draft is x with
    probability q(x), accepted with min(1, p(x) / q(x)), so both with min(p(x), q(x)), of x's own p(x) (Leviathan et
    al., arXiv 2211.17192, theorem 3.5, for each token).
    """
    token = torch.tensor(text.token, device=target.device)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    begin = text.start - 1
    law = distribution(target.embeddings.logits(features.last[0, begin:]), sampling)
    places = text.made - 1
    share = law.new_zeros(places, depth)
    common = torch.full_like(share, float("nan"))
    for d, draft in enumerate(unrolled(head, features, depth), 1):
        known = places - d + 1
        if known < 1:
            break
        q = distribution(scatter_logits(head.vocab, head.score(draft.state[0, begin : begin + known], d)), sampling)
        p = law[d : d + known]
        wanted = token[begin + d + 1 : begin + d + 1 + known, None]
        mine, theirs = (law.gather(1, wanted)[:, 0] for law in (q, p))
        share[:known, d - 1] = torch.where(theirs > 0, mine / theirs.clamp_min(TINY), 0.0).clamp_max(1)
        common[:known, d - 1] = torch.minimum(p, q).sum(1)
    return Overlap(text, share, common)


def expected(of: Overlap, depth: int) -> Passes:
    """Return the passes that decoding the text with drawn chains is expected to take, verified token by token.

    Which tokens the target chooses does not depend on the drafts, so along its text each draft is accepted with the
    probability that `share` has, and where steps begin is a chain of such choices: summed up, and not drawn.
    """
    text = of.text
    depth = min(depth, of.share.shape[1])
    begins = [0.0] * (text.made + 1)  # the probability that a step begins when so many tokens are there
    begins[1] = 1.0
    reached = [0.0] * depth
    drafted = 0.0
    for made in range(1, text.made):
        here = begins[made]
        deepest = max(0, min(depth, text.limit - made - 1))
        drafted += here * deepest
        survive = 1.0
        for d in range(deepest + 1):
            more = float(of.share[made - 1, d]) if d < deepest else 0.0
            begins[min(made + d + 1, text.made)] += here * survive * (1 - more)
            survive *= more
            if d < deepest:
                reached[d] += here * survive
    return Passes(float(text.made - 1), sum(begins[1 : text.made], 0.0), drafted, math.fsum(reached), reached)
