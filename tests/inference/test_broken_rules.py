"""The enumeration catches rules that are known to be broken; and block verification as its paper words it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference.verification import rules
from inference.verification.rng import Rng
from inference.verification.rules import Frame
from inference.verification.sample import Sampling, distribution
from inference.verification.tree import DraftTree
from inference.verification.verify import RULES
from tests.enumeration import PROMPT, SAMPLINGS, TREES, VOCAB, Rule, Tables, distance, drafts, one_pass, texts, verify

T1 = SAMPLINGS["T1"]
Found = tuple[list[int], int]


def error(tables: Tables, tree: str, sampling: Sampling, rule: str | Rule) -> float:
    law = one_pass(drafts(tables, TREES[tree], sampling), sampling, rule).law
    return distance(tables.continued(law, sampling), tables.target_law(sampling))


def block(tree: DraftTree, p: Tensor, q: Tensor, rng: Rng, stop: bool) -> Found:
    """Block verification (arXiv 2403.10444), literally: every length has a coin, the longest accepted one stands."""
    length = len(tree.token) - 1
    alpha, tau, left = 1.0, 0, p[0]
    for i in range(length + 1):
        if i > 0:
            x = tree.token[i]
            alpha = min(1.0, alpha * float(p[i - 1, x] / q[i - 1, x]))
        residual = (alpha * p[i] - q[i]).clamp_min(0)
        mass = float(residual.sum())
        bar = alpha if i == length else mass / (mass + (1 - alpha)) if mass else float(i == 0)
        if rng.accept(bar):
            tau, left = i, p[i] if i == length or not mass else residual / mass
        elif stop and i > 0:
            break
    return list(range(tau + 1)), rng.sample(left[None])[0]


@pytest.mark.parametrize("family", ["mild", "peaky", "close", "zeros"])
def test_block_verification_is_its_papers(family: str) -> None:
    tables = Tables(0, family)
    found = drafts(tables, TREES["chain"], T1)
    literal = one_pass(found, T1, lambda tree, p, q, rng: block(tree, p, q, rng, stop=False))
    ours = one_pass(found, T1, "block")
    assert distance(ours.law, literal.law) < 1e-10  # of whole texts, their lengths included


def typical_acceptance(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    return rules.typical(tree, p, rng)


def one_sample_per_path(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Resample the target for every root-leaf path and keep the longest match (Medusa's and REST's nucleus mode)."""
    best: Found = ([0], rng.sample(p[:1])[0])
    for leaf in range(1, len(tree.parent)):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = int(tree.parent[node])
        path = path[::-1]
        matched = [0]
        for node in path[1:]:
            if rng.sample(p[matched[-1]][None])[0] != int(tree.token[node]):
                break
            matched.append(node)
        if len(matched) > len(best[0]):
            best = (matched, rng.sample(p[matched[-1]][None])[0])
    return best


def pruned_by_own_value(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Drop sampled nodes that the draft itself finds unlikely: the law they were drawn from is no longer q."""
    assert q is not None
    likely = [0] + [i for i in range(1, len(tree.parent)) if q[tree.parent[i], tree.token[i]] > 0.3]
    kept = [i for i in likely if i == 0 or int(tree.parent[i]) in likely]
    number = {old: new for new, old in enumerate(kept)}
    parent = torch.tensor([-1 if i == 0 else number[int(tree.parent[i])] for i in kept])
    smaller = DraftTree(tree.token[kept], parent)
    path, bonus = verify(smaller, p[kept], q[kept], rng, "recursive")
    return [kept[node] for node in path], bonus


def wrong_replacement(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Test siblings drawn without replacement as if they had been drawn with it."""
    return RULES["recursive_replacement"].walk(tree, p, q, rng)


def stopping_block(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Stop at the first rejected length, as token-level verification does."""
    assert q is not None
    return block(tree, p, q, rng, stop=True)


def stale_residual(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Traversal that tries the next sibling against the law from before the rejection."""

    def reject(frame: Frame, x: int, replacement: bool) -> None:
        assert frame.draft is not None
        left = frame.draft.clone()
        left[x] = 0
        frame.draft = left / left.sum() if left.sum() > 0 else left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_reject", reject)
        return RULES["traversal"].walk(tree, p, q, rng)


def stale_alpha(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
    """Traversal that keeps a node's probability when what hangs below it was rejected."""
    reject = rules._reject

    def stale(frame: Frame, x: int, replacement: bool) -> None:
        alpha = frame.alpha
        reject(frame, x, replacement)
        frame.alpha = alpha

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_reject", stale)
        return RULES["traversal"].walk(tree, p, q, rng)


BROKEN: dict[str, tuple[str, Rule]] = {
    "typical acceptance": ("static", typical_acceptance),
    "fixed threshold": ("static", lambda tree, p, _, rng: rules.threshold(tree, p, rng)),
    "one sample per path": ("static", one_sample_per_path),
    "sampled nodes pruned by their own value": ("chain", pruned_by_own_value),
    "residual with replacement on drafts without": ("sampled", wrong_replacement),
    "block verification that stops at a rejection": ("chain", stopping_block),
    "traversal with a stale residual": ("sampled", stale_residual),
    "traversal with a stale alpha": ("sampled", stale_alpha),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_caught(name: str) -> None:
    tree, rule = BROKEN[name]
    assert max(error(Tables(seed, "mild"), tree, T1, rule) for seed in range(2)) > 0.004


def test_greedy_draft_with_softmax_ratio_is_caught() -> None:
    tables = Tables(0, "mild")

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        # The commonest published defect: children are the top of q, but are tested as if they were drawn from q.
        laws = torch.stack([distribution(tables.logits(text)[1], T1) for text in texts(tree)])
        return verify(tree, p, laws, rng, "recursive")

    assert error(tables, "static", T1, rule) > 0.01


def test_a_bonus_without_the_processors_is_caught() -> None:
    tables, sampling = Tables(0, "mild"), SAMPLINGS["top-k"]

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        path, bonus = verify(tree, p, q, rng)
        if len(path) == 3:
            bonus = rng.sample(tables.logits(texts(tree)[path[-1]])[0].softmax(-1)[None])[0]
        return path, bonus

    assert error(tables, "chain", sampling, rule) > 0.01


def test_a_penalty_for_the_roots_prefix_at_every_node_is_caught() -> None:
    tables, sampling = Tables(0, "mild"), replace(T1, repetition_penalty=3.0)
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[PROMPT] = True

    def rule(tree: DraftTree, p: Tensor, q: Tensor | None, rng: Rng) -> Found:
        raw = torch.stack([tables.logits(text)[0] for text in texts(tree)])
        scaled = torch.where(raw < 0, raw * 3.0, raw / 3.0)
        return verify(tree, distribution(torch.where(seen, scaled, raw), T1), q, rng)

    assert error(tables, "chain", sampling, "auto") < 1e-10
    assert error(tables, "chain", sampling, rule) > 0.01
