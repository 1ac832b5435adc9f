"""Acceptance on the device against the reference rules, whose laws are enumerated, on the same coins and noise."""

import pytest
import torch
from torch import Tensor

from inference.drafters.policy import TreeConfig, sampled_shape
from inference.verification import device
from inference.verification.device import Sampled
from inference.verification.rng import COINS, Coupled, Samples, key_of, keyed, noise_at, uniform
from inference.verification.tree import DraftTree, ancestors, keep
from inference.verification.verify import RULES
from tests import enumeration

CPU = torch.device("cpu")
B, V, START = 64, 6, 9
SHAPES = {
    "chain": TreeConfig("chain", 4, 0, 0, [], []),
    "sampled": TreeConfig("sampled", 0, 0, 0, [], [3, 2, 1]),
    "ragged": enumeration.TREES["ragged"],
    "independent": TreeConfig("independent", 0, 0, 0, [], [3, 2, 1]),
}
FITTING = {
    "chain": ("token", "block", "recursive_replacement", "traversal_replacement"),
    "sampled": ("recursive", "traversal"),
    "ragged": ("recursive", "traversal"),
    "independent": ("recursive_replacement", "traversal_replacement"),
}
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
    shape = sampled_shape(config, 9)
    assert shape is not None
    parents, replacement = shape
    samples = Samples(torch.arange(B) + 1000 * seed)
    token = torch.zeros(B, len(parents), dtype=torch.long)
    inner = sorted({*parents} - {-1})
    for row, node in enumerate(inner):
        below = [child for child, parent in enumerate(parents) if parent == node]
        if replacement:
            token[:, below] = samples.picked(q[:, [row]].expand(-1, len(below), -1))
        else:
            children = samples.distinct(q[:, [row]], len(below))[:, 0]
            token[:, below] = torch.nn.functional.pad(children, (0, len(below) - children.shape[1]), value=-1)
    tree = DraftTree(token, torch.tensor(parents).expand_as(token))
    above = ancestors(tree)
    room = torch.randint(5, (B,), generator=torch.Generator().manual_seed(seed))
    present = device.present(tree, above, above.sum(-1) - 1, room)
    return Sampled(parents, replacement, token, present, q[:, : len(inner)])


def reference(rule: str, draft: Sampled, p: Tensor, seed: int, b: int) -> tuple[list[int], int]:
    """Walk one draft by the reference rule; return the accepted nodes, numbered as in the shape, and the next token."""
    whole = DraftTree(draft.token[b], torch.tensor(draft.parents))
    q = torch.zeros(len(draft.parents), V, dtype=p.dtype)
    q[sorted({*draft.parents} - {-1})] = draft.q[b]
    tree, index = keep(whole, draft.present[b])
    path, token = RULES[rule].walk(tree, p[b][index], q[index], Coupled(seed + b, CPU, range(START + 1)))
    return index[path].tolist(), token


def on_device(rule: str, draft: Sampled, p: Tensor, seed: int) -> list[tuple[list[int], int]]:
    """Return the same of all drafts."""
    key = torch.tensor([key_of(seed + b) for b in range(B)])
    point = uniform(keyed(keyed(key, COINS), START + 1)[:, None], torch.arange(p.shape[1]))
    walk = RULES[rule].on_device
    assert walk is not None
    last, left = walk(draft, p, point)
    tree = DraftTree(draft.token, torch.tensor(draft.parents).expand_as(draft.token))
    count = ancestors(tree).sum(-1).gather(1, last[:, None])[:, 0]
    token = (left / noise_at(key, START + count, V)).argmax(-1)
    path, committed, tokens = device.accepted(tree, ancestors(tree), last, token, int(ancestors(tree).sum(-1).max()) - 1)
    assert committed.equal(count)
    assert tokens.gather(1, count[:, None] - 1)[:, 0].equal(token)
    assert all(draft.token[b, path[b, 1:n]].equal(tokens[b, : n - 1]) for b, n in enumerate(count.tolist()))
    return [(path[b, :n].tolist(), int(token[b])) for b, n in enumerate(count.tolist())]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("shape", "rule"), [(shape, rule) for shape, fitting in FITTING.items() for rule in fitting])
def test_every_rule_takes_the_references_path_and_token(shape: str, rule: str, family: str) -> None:
    parents = (sampled_shape(SHAPES[shape], 9) or ((),))[0]
    lengths = set()
    for seed in range(3):
        p, q = probs(family, len(parents), seed)
        draft = drafted(SHAPES[shape], q, seed)
        found = on_device(rule, draft, p, 100 * seed)
        assert found == [reference(rule, draft, p, 100 * seed, b) for b in range(B)]
        lengths |= {len(path) for path, _ in found}
    assert len(lengths) > 1 or family == "disjoint"


def test_every_rule_that_reads_q_is_compared() -> None:
    reading = {name for name, rule in RULES.items() if rule.on_device is not None}
    assert {name for name, rule in RULES.items() if rule.sampled} == reading
    assert {rule for fitting in FITTING.values() for rule in fitting} == reading
