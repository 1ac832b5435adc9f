"""Acceptance on the device against the reference rules, which are enumerated elsewhere, on the same coins and noise."""

import pytest
import torch
from torch import Tensor

from inference.drafters.policy import TreeConfig, sampled_shape
from inference.verification import rules
from inference.verification.rng import ACCEPT_KEY, RequestRng, Samples, exponential_noise, hash_key, seed_key, uniform
from inference.verification.rules import RULES, Sampled
from inference.verification.tree import DraftTree, ancestors, keep
from tests import enumeration
from tests.oracle import WALKS, Coins

CPU = torch.device("cpu")
B, V, START = 32, 6, 9
SHAPES = {
    "chain": TreeConfig("chain", 4, 0, 0, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [3, 2, 1]),
    "ragged": enumeration.TREES["ragged"],
}
FITTING = {"chain": ("token", "block"), "sampled": ("recursive", "traversal"), "ragged": ("recursive", "traversal")}
FAMILIES = ("mild", "close", "equal", "zeros", "disjoint", "one")


def probs(family: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return p and q "B N V", in fp64."""
    generator = torch.Generator().manual_seed(seed)
    p, q, holes = torch.randn(3, B, size, V, generator=generator, dtype=torch.float64)
    if family in ("close", "equal"):
        q = p + (0.4 * q if family == "close" else 0)
    if family in ("zeros", "disjoint"):
        first = torch.arange(V) < V // 2
        p = p.masked_fill((holes > 0.3) & ~first if family == "zeros" else ~first, float("-inf"))
        q = q.masked_fill((holes < -0.3) & first if family == "zeros" else first, float("-inf"))
    if family == "one":  # all probability on one token, often the same
        p, q = 1e3 * p, 1e3 * torch.where(holes > 0, p, q)
    return p.softmax(-1), q.softmax(-1)


def drafted(config: TreeConfig, q: Tensor, seed: int) -> Sampled:
    """Sample B drafts of a shape, and leave out what is deeper than their room."""
    parents = sampled_shape(config, 9)
    assert parents is not None
    samples = Samples(torch.arange(B) + 1000 * seed)
    token = torch.zeros(B, len(parents), dtype=torch.long)
    inner = sorted({*parents} - {-1})
    for row, node in enumerate(inner):
        below = [child for child, parent in enumerate(parents) if parent == node]
        children = samples.sample_distinct(q[:, [row]], len(below))[:, 0]
        token[:, below] = torch.nn.functional.pad(children, (0, len(below) - children.shape[1]), value=-1)
    tree = DraftTree(token, torch.tensor(parents).expand_as(token))
    ancestor_mask = ancestors(tree)
    room = torch.randint(5, (B,), generator=torch.Generator().manual_seed(seed))
    valid = rules.valid_nodes(tree, ancestor_mask, ancestor_mask.sum(-1) - 1, room)
    return Sampled(parents, token, valid, q[:, : len(inner)])


def reference(rule: str, draft: Sampled, p: Tensor, seed: int, b: int) -> tuple[list[int], int]:
    """Walk one draft by the reference rule; return the accepted nodes, numbered as in the shape, and the next token."""
    whole = DraftTree(draft.token[b], torch.tensor(draft.parents))
    q = torch.zeros(len(draft.parents), V, dtype=p.dtype)
    q[sorted({*draft.parents} - {-1})] = draft.q[b]
    tree, index = keep(whole, draft.valid[b])
    path, token = WALKS[rule](tree, p[b][index], q[index], Coins(seed + b, START + 1))
    return index[path].tolist(), token


def on_device(rule: str, draft: Sampled, p: Tensor, seed: int, allow_host_sync: bool) -> list[tuple[list[int], int]]:
    """Return the same of all drafts."""
    key = torch.tensor([seed_key(seed + b) for b in range(B)])
    uniforms = uniform(hash_key(hash_key(key, ACCEPT_KEY), START + 1)[:, None], torch.arange(p.shape[1]))
    walk = RULES[rule].verify
    last, left = walk(draft, p, uniforms, allow_host_sync)
    tree = DraftTree(draft.token, torch.tensor(draft.parents).expand_as(draft.token))
    count = ancestors(tree).sum(-1).gather(1, last[:, None])[:, 0]
    token = (left / exponential_noise(key, START + count, V)).argmax(-1)
    tree_depth = int(ancestors(tree).sum(-1).max()) - 1
    path, committed, tokens = rules.accepted_paths(tree, ancestors(tree), last, token, tree_depth)
    assert committed.equal(count)
    assert tokens.gather(1, count[:, None] - 1)[:, 0].equal(token)
    assert all(draft.token[b, path[b, 1:n]].equal(tokens[b, : n - 1]) for b, n in enumerate(count.tolist()))
    return [(path[b, :n].tolist(), int(token[b])) for b, n in enumerate(count.tolist())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "rule"), [(shape, rule) for shape, fitting in FITTING.items() for rule in fitting])
def test_every_rule_takes_the_references_path_and_token(shape: str, rule: str, family: str) -> None:
    parents = sampled_shape(SHAPES[shape], 9) or ()
    lengths = set()
    for seed in range(2):
        p, q = probs(family, len(parents), seed)
        draft = drafted(SHAPES[shape], q, seed)
        expected = [reference(rule, draft, p, 100 * seed, b) for b in range(B)]
        found = on_device(rule, draft, p, 100 * seed, allow_host_sync=False)
        assert found == on_device(rule, draft, p, 100 * seed, allow_host_sync=True) == expected
        lengths |= {len(path) for path, _ in found}
    assert len(lengths) > 1 or family == "disjoint"


def test_every_rule_that_reads_q_is_compared() -> None:
    reading = {name for name, rule in RULES.items() if rule.verify is not None}
    assert {rule for fitting in FITTING.values() for rule in fitting} == reading


def statistic(counts: Tensor) -> float:
    """Return chi-square."""
    found, expected = counts
    return float(((found - expected) ** 2 / expected).sum())


def test_what_is_drafted_says_nothing_of_other_drafts_coins_or_noise() -> None:
    """Tokens of every pair of numbers that one text reads, over many seeds, against the product of their probs."""
    probs, count = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), 600
    rows: list[list[int]] = []
    for seed in range(count):
        row: list[int] = []
        for start in (7, 8):
            drafts, verified = RequestRng(seed_key(seed), start, coupled=False).samples(CPU), Coins(seed, start)
            two = probs.expand(1, 2 if start == 7 else 1, -1)
            row += [*drafts.sample_distinct(two, 2)[0, :, 0].tolist(), *drafts.sample(two)[0].tolist()]
            row += verified.sample(probs)
            row += [2 * verified.accept(0.5) + verified.accept(0.5)] if start == 7 else []
        rows.append(row)
    columns = torch.tensor(rows).T
    dists = [probs[0]] * 5 + [torch.full((4,), 0.25)] + [probs[0]] * 3
    for i, one in enumerate(columns):
        for j, other in enumerate(columns[:i]):
            found, expected = torch.bincount(4 * one + other, minlength=16), count * dists[i][:, None] * dists[j]
            assert statistic(torch.stack([found, expected.flatten()])) < 45, (i, j)


class Strict(Coins):
    """Rejects whatever is not certain, and notes what the next token is sampled from."""

    def accept(self, probability: float) -> bool:
        return probability >= 1

    def sample(self, probs: Tensor, depth: int = 1) -> list[int]:
        self.left = probs[0]
        return super().sample(probs, depth)


def test_an_alpha_of_one_stays_one() -> None:
    """As in the reference: mass / (mass + 1 - 1) is not 1 for every mass, and a rejected root would leave p."""
    p, q = torch.rand(2, 200, 4, 3, generator=torch.Generator().manual_seed(0)).add(1e-3).unbind()
    p, q = p / p.sum(-1, keepdim=True), (q / q.sum(-1, keepdim=True))[:, :1]
    token, parents = torch.tensor([0, 0, 1, 2]).expand(200, -1), (-1, 0, 0, 0)
    draft = Sampled(parents, token, torch.ones_like(token, dtype=torch.bool), q)
    last, left = rules.traversal(draft, p, torch.full((200, 4), 1 - 2.0**-53, dtype=torch.float64), False)
    for b in range(200):
        rng = Strict(0, 1)
        path, _ = WALKS["traversal"](DraftTree(token[b], torch.tensor(parents)), p[b], q[b].expand(4, -1), rng)
        assert path[-1] == last[b]
        torch.testing.assert_close(left[b], rng.left)


def test_one_tree_is_followed_on_the_host_as_many_are_on_the_device() -> None:
    """Random trees of few tokens, so that paths are long, with absent nodes and every room."""
    generator = torch.Generator().manual_seed(3)
    lengths = set()
    for case in range(200):
        size = 2 + case % 12
        parent = [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, size))]
        token = [parent[:node].count(above) for node, above in enumerate(parent)]  # siblings are different tokens
        absent = torch.rand(size, generator=generator) < (0.2 if case % 3 == 0 else 0)
        tree = DraftTree(torch.tensor([token]).masked_fill(absent, -1), torch.tensor([parent]))
        tree.token[:, 0] = 1
        ancestor_mask = ancestors(tree)
        depth, room = ancestor_mask.sum(-1) - 1, torch.tensor([case % 5])
        best, tree_depth = torch.randint(4, (1, size), generator=generator), int(depth.max())
        valid = rules.valid_nodes(tree, ancestor_mask, depth, room)
        last = rules.follow(tree, ancestor_mask, valid, tree.token == best.gather(1, tree.parent.clamp_min(0)))
        accepted = rules.accepted_paths(tree, ancestor_mask, last, best[0, last], tree_depth)
        ranks = rules.ranks(tree).gather(1, accepted.path)
        one, its_ranks, count = rules.follow_on_host(tree, best, room, tree_depth)
        assert torch.equal(one.path, accepted.path)
        assert torch.equal(its_ranks, ranks)
        assert torch.equal(one.committed, accepted.committed)
        committed = int(one.committed)
        assert torch.equal(one.token[:, :committed], accepted.token[:, :committed])
        assert int(count) == int(valid.sum()) - 1
        lengths.add(committed)
    assert lengths >= {1, 2, 3, 4}


def test_what_pads_a_path_is_a_token() -> None:
    """The head reads it, though nothing counts it: a node's number may be beyond a small vocabulary."""
    parent = torch.tensor([[-1] + [0] * 12 + [1]])
    tree = DraftTree(torch.tensor([[0, *(node % V for node in range(12)), 3]]), parent)
    found = rules.accepted_paths(tree, ancestors(tree), torch.tensor([12]), torch.tensor([5]), 2)
    assert found.committed.tolist() == [2]
    assert found.token.tolist() == [[11 % V, 5, 11 % V]]
