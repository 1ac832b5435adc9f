"""The oracle of the engine: rules and a loop over one sequence on the host, one node after another.

What drafts is the product's; how a draft is verified is written here once more, for one sequence and without tensors of
a batch. The engine must give the same tokens, coin by coin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from heads.base import Features
from inference.decode import Generation, RequestParams
from inference.drafters.head import HeadBatch
from inference.protocol import DraftBatch, DraftContext, Drafter, DraftInputs, DraftPlan
from inference.request import Step
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification import tree as trees
from inference.verification.rng import ACCEPT_KEY, RequestRng, exponential_noise, hash_key, seed_key, uniform
from inference.verification.rules import (
    COUPLED,
    DELTA,
    EPSILON,
    GREEDY_WALK,
    MIN_PROB,
    NOTHING,
    THRESHOLD,
    is_chain,
    is_lossy,
    label,
    resolve_rule,
)
from inference.verification.sample import Sampling, distribution, penalize, residual, without
from inference.verification.tree import DraftTree, LookAhead, children

Found = tuple[list[int], int]  # the accepted nodes from the root on, and the next token


class Rng(Protocol):
    """The random choices of verification; `depth` counts from the root to the sampled tokens."""

    def sample(self, probs: Tensor, depth: int = 1) -> Sequence[int]: ...

    def accept(self, probability: float) -> bool: ...


class Coins:
    """The engine's numbers, for one sequence: the noise of a position, and the coins of a root by number."""

    def __init__(self, seed: int, start: int) -> None:
        self.key, self.start, self.tossed = seed_key(seed), start, 0

    def sample(self, probs: Tensor, depth: int = 1) -> list[int]:
        where = torch.tensor([[self.key], [self.start + depth - 1]], device=probs.device)
        return (probs / exponential_noise(where[0], where[1], probs.shape[-1])).argmax(-1).tolist()

    def accept(self, probability: float) -> bool:
        self.tossed += 1
        return bool(uniform(hash_key(hash_key(self.key, ACCEPT_KEY), self.start), self.tossed - 1) < probability)


def follow(tree: DraftTree, choose: Callable[[int, int], int]) -> Found:
    """Walk down the tree while the token that `choose` names after a node, at a depth, was drafted there."""
    below, token = children(tree), tree.token.tolist()
    path = [0]
    while True:
        chosen = choose(path[-1], len(path))
        child = next((c for c in below[path[-1]] if token[c] == chosen), None)
        if child is None:
            return path, chosen
        path.append(child)


def match(tree: DraftTree, p: Tensor, _: Any, rng: Rng) -> Found:
    """Sample the target's own token at each node and follow it while it was drafted."""
    return follow(tree, lambda node, depth: rng.sample(p[node][None], depth)[0])


def recursive(tree: DraftTree, p: Tensor, q: Tensor, rng: Rng) -> Found:
    """Try siblings in sampled order, each against the residual of the target's probs."""
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
class PathNode:
    """A node on the path that traversal verification looks at: the children it has not rejected, and what is left."""

    node: int
    alpha: float  # probability with which the path up to here is accepted, given what was rejected below it
    waiting: list[int]
    target: Tensor | None = None
    draft: Tensor | None = None


def traversal(tree: DraftTree, p: Tensor, q: Tensor, rng: Rng) -> Found:
    """From the leaves up: a path is accepted or rejected as a whole."""
    below, token = children(tree), tree.token.tolist()
    frames = [PathNode(0, 1.0, below[0])]
    while True:
        top = frames[-1]
        if not top.waiting and rng.accept(top.alpha):
            probs = p[top.node] if top.target is None else top.target
            return [frame.node for frame in frames], rng.sample(probs[None], len(frames))[0]
        if not top.waiting:
            frames.pop()
            reject(frames[-1], tree.token[top.node, None])
            continue
        if top.target is None or top.draft is None:
            top.target, top.draft = p[top.node], q[top.node]
        child, top.waiting = top.waiting[0], top.waiting[1:]
        x = token[child]
        alpha = min(1.0, top.alpha * float(top.target[x] / top.draft[x]))
        if alpha > 0:
            frames.append(PathNode(child, alpha, below[child]))
        else:  # nothing below it can be accepted either
            reject(top, tree.token[child, None])


def reject(frame: PathNode, token: Tensor) -> None:
    """Take into account that the child with a token, and all below it, was rejected."""
    left = (frame.alpha * frame.target - frame.draft).clamp_min(0)
    mass = float(left.sum())
    if mass > 0:
        # The parentheses keep an alpha of 1 at exactly 1, on which the root relies.
        frame.target, frame.alpha = left / mass, mass / (mass + (1 - frame.alpha))
    else:  # in exact arithmetic alpha is below 1 then: what is sure to be accepted rejects no child without a residual
        frame.alpha = 1.0 if frame.alpha >= 1 else 0.0
    frame.draft = without(frame.draft, token)


def typical(tree: DraftTree, p: Tensor, _: Any, rng: Rng) -> Found:
    """Accept what the entropy of the target's distribution makes likely enough."""

    def bar(probs: Tensor) -> float:
        entropy = -(probs * probs.clamp_min(MIN_PROB).log()).sum()
        return min(EPSILON, float(DELTA * torch.exp(-entropy)))

    return above_threshold(tree, p, rng, bar)


def threshold(tree: DraftTree, p: Tensor, _: Any, rng: Rng) -> Found:
    """Accept a token to which the target gives more than a fixed probability."""
    return above_threshold(tree, p, rng, lambda _: THRESHOLD)


def above_threshold(tree: DraftTree, p: Tensor, rng: Rng, bar: Callable[[Tensor], float]) -> Found:
    """Accept the longest path whose tokens are all above the bar of the distribution they follow."""
    below, token = children(tree), tree.token.tolist()
    paths = [[0]]
    for path in paths:  # grows meanwhile: breadth first, so that the last one is the longest
        if below[path[-1]]:
            high = bar(p[path[-1]])
            paths += [[*path, child] for child in below[path[-1]] if float(p[path[-1]][token[child]]) > high]
    longest = max(paths, key=len)
    return longest, rng.sample(p[longest[-1]][None], len(longest))[0]


WALKS: dict[str, Callable[[DraftTree, Tensor, Any, Rng], Found]] = {
    "match": match, "point_mass": match, "coupled": match, "token": recursive, "recursive": recursive,
    "block": traversal, "traversal": traversal, "typical": typical, "threshold": threshold,
}  # fmt: skip


class Verdict(NamedTuple):
    """The accepted nodes from the root on, the next token, and the rule's label for reports."""

    path: list[int]
    token: int
    rule: str


def decide(
    tree: DraftTree, logits: Tensor, q: Tensor | None, sampling: Sampling, rng: Rng, rule: str = "auto"
) -> Verdict:
    """Verify a draft, whose q has a row for each node, by the processed logits after its nodes."""
    if len(tree.token) == 1:
        rule, shown = "match", NOTHING
    else:
        rule = resolve_rule(rule, is_chain(tree.parent.tolist()), q is not None, sampling.temperature == 0)
        shown = label(rule)
    if sampling.temperature > 0:
        return Verdict(*WALKS[rule](tree, distribution(logits, sampling), q, rng), shown)
    if is_lossy(rule):  # one-hot probs leave nothing to be above_threshold about: they judge by those at temperature 1
        path, _ = WALKS[rule](tree, distribution(logits, replace(sampling, temperature=1.0)), q, rng)
        return Verdict(path, int(logits[path[-1]].argmax()), shown)
    best = logits.max(-1).indices.tolist()  # of equals the first, as in the engine
    return Verdict(*follow(tree, lambda node, _: best[node]), NOTHING if shown == NOTHING else GREEDY_WALK)


def seen_tokens(tree: DraftTree, before: Tensor) -> Tensor:
    """Return for each node which tokens stand in its prefix: those `before` the tree's and those on its path."""
    node, above = trees.ancestors(tree).nonzero(as_tuple=True)
    result = before.expand(len(tree.token), -1).clone()
    result[node, tree.token[above]] = True
    return result


def ranks(tree: DraftTree, path: list[int]) -> tuple[int, ...]:
    """Return the rank of each node of a path from the root, which has none, among its siblings as they were drafted."""
    parent = tree.parent.tolist()
    return tuple(parent[:node].count(parent[node]) for node in path[1:])


def score(
    target: Target, tree: DraftTree, cache: TargetCache, ahead: LookAhead | None = None, layers: tuple[int, ...] = ()
) -> TargetOutput:
    """Run a tree and look-ahead tokens behind it in one pass; return all logits."""
    prefix, seen = cache.length, trees.ancestors(tree)
    token, position = tree.token, prefix + seen.sum(-1) - 1
    if ahead is not None:
        token, position = torch.cat([token, ahead.token]), torch.cat([position, prefix + ahead.offset])
        seen = torch.cat([torch.cat([seen, seen.new_zeros(len(seen), len(ahead.token))], 1), ahead.attn_mask])
    whole = torch.cat([seen.new_ones(len(seen), prefix), seen], 1)
    mask, stack = whole[None] if target.takes_trees else None, None if ahead is None else ahead.stack
    with torch.inference_mode():
        out = target.run(token[None], position[None], mask, cache, layers, stack=stack)
        return out._replace(logits=target.embeddings.logits(out.last_hidden))


def paths(tree: DraftTree) -> list[list[int]]:
    """Return every path from the root to a leaf, as node indices."""
    parent, found = tree.parent.tolist(), []
    for leaf in {*range(len(parent))} - {*parent}:
        path = [leaf]
        while parent[path[0]] >= 0:
            path.insert(0, parent[path[0]])
        found.append(path)
    return sorted(found)


def by_node(tree: DraftTree, q: Tensor | None) -> Tensor | None:
    """Return q with a row for each node, of one that has a row for each node with children."""
    if q is None:
        return None
    rows = q.new_zeros(len(tree.token), q.shape[-1])
    rows[sorted({*tree.parent.tolist()} - {-1})] = q
    return rows


def roots(text: list[int], settings: RequestParams, tree_depth: int, vocab: int) -> DraftInputs:
    """Return the root of a text, as the engine hands it to what drafts."""
    sampling, draws = settings.sampling, RequestRng(seed_key(settings.seed), len(text), settings.rule == COUPLED)
    like = torch.zeros(vocab)
    return DraftContext(text, sampling, draws, 0).roots(like, tree_depth + 1)


@torch.inference_mode()
def reference(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    settings: RequestParams,
    trees_of_steps: Sequence[Any] | None = None,
) -> Generation:
    """Decode one prompt with a head or the baseline, by a loop on the host; or under the trees of its steps."""
    sampling, made, text = settings.sampling, Generation(), list(prompt)
    limit = min(settings.max_new_tokens, target.max_model_len - len(prompt))
    drafts, cache, vocab = drafter.batch(1), target.cache(), target.embeddings.vocab_size

    def processed(logits: Tensor, tree: DraftTree) -> Tensor:
        if sampling.repetition_penalty != 1:
            before = torch.zeros(vocab, dtype=torch.bool)
            before[text] = True
            logits = penalize(logits, seen_tokens(tree, before), sampling)
        lacking = settings.min_new_tokens - len(made.tokens)
        if lacking > 0 and target.eos:
            logits = logits.clone()
            logits[(trees.layout(tree, 0)[0] < lacking).nonzero(), torch.tensor(sorted(target.eos))] = float("-inf")
        return logits

    def emit(tokens: list[int], sources: list[str], scores: Tensor) -> int:
        for count, (token, source, row) in enumerate(zip(tokens, sources, scores, strict=True), 1):
            made.tokens.append(token)
            made.origins.append(source)
            text.append(token)
            if settings.logit_gaps:
                best = row.float().topk(2).values
                made.logit_gaps.append(float(best[0] - best[1]))
            stopped = any(stop in target.tokenizer.decode(made.tokens) for stop in settings.stop)
            ends = {"eos": token in target.eos, "stop": stopped, "length": len(made.tokens) >= limit}
            made.finish_reason = next((name for name, there in ends.items() if there), "")
            if made.finish_reason:
                return count
        return len(tokens)

    token = torch.tensor(prompt)
    out = target.prefill(token, cache, drafts.traits.feature_layers)
    root = trees.root(prompt[-1], target.device)
    scores = processed(out.logits[0], root)
    emit([decide(root, scores, None, sampling, Coins(settings.seed, len(text))).token], ["prefill"], scores)
    drafts.start_sequence(0, text, out)
    while not made.finish_reason:
        prefix, room = len(text) - 1, limit - len(made.tokens) - 1
        tree, q = trees.root(text[-1], target.device), None
        plan = drafts.begin([None], prefix)
        if trees_of_steps is not None:
            plan = grow_by(drafts, trees_of_steps[len(made.steps)])
        if plan.tree_depth:
            tree, q = drafted(drafts, roots(text, settings, plan.tree_depth, vocab), room, prefix)
        verified = score(target, tree, cache, None, drafts.traits.feature_layers)
        scores = processed(verified.logits[0], tree)
        path, bonus, rule = decide(tree, scores, q, sampling, Coins(settings.seed, len(text)), settings.rule)
        cache.keep(prefix, path)
        tokens = [*tree.token[path[1:]].tolist(), bonus]
        taken = emit(tokens, ["draft"] * (len(path) - 1) + ["bonus"], scores[path])
        accepted = min(len(path) - 1, taken)
        taken_ranks = ranks(tree, path[: accepted + 1])
        made.steps.append(Step(len(tree.token) - 1, accepted, taken, 0.0, 0.0, 0.0, rule, taken_ranks))
        if isinstance(drafts, HeadBatch) and not made.finish_reason:
            drafts.set_longest(prefix)
            following = torch.tensor([tokens])
            hidden, last = verified.hidden[:, path], verified.last_hidden[:, path]
            rows = Features(following, hidden, last, torch.zeros_like(following))
            drafts.extend(rows, torch.tensor([len(tokens)]))
    return made


def grow_by(drafts: Any, policy: Any) -> DraftPlan:
    """Let a head draft by another policy."""
    drafts.policy = policy
    return DraftPlan(0 if policy is None else min(policy.tree_depth, drafts.head.max_depth))


def drafted(drafts: DraftBatch, root: DraftInputs, room: int, prefix: int) -> tuple[DraftTree, Tensor | None]:
    """Return the draft of one sequence without padding and what is deeper than its room, its q by nodes."""
    made = drafts.draft_trees(root, torch.tensor([room]), prefix, allow_host_sync=True)
    tree = DraftTree(made.tree.token[0], made.tree.parent[0])
    q = by_node(tree, None if made.q is None else made.q[0])
    alone, index = trees.keep(tree, (tree.token >= 0) & (trees.layout(tree, 0)[0] <= room))
    return alone, None if q is None or len(index) == 1 else q[index]
