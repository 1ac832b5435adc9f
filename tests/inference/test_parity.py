"""Tests 1, 2 and 4 of the design: same tokens, same logits, same acceptance, for every head and policy."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import HEADS
from heads.base import Features
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters import head as drafters
from inference.drafters.head import HeadBatch
from inference.drafters.policy import TreeConfig, grow_batch
from inference.protocol import DraftInputs
from inference.target.attention import Ragged, RowGroup
from inference.verification import tree as trees
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree, LookAhead
from tests import drafting, toys
from tests.oracle import paths, score

TOKENS = 22
# Each head drafts in one tree, and one of them in every tree.
CASES = [
    pytest.param(head, tree, marks=[] if head == "eagle" or i % len(toys.TREES) == j else pytest.mark.slow)
    for i, head in enumerate(HEADS)
    for j, tree in enumerate(toys.TREES)
]
EXACT = {"gemma2": 1e-5}  # its attention takes the softmax in fp32 whatever the model's dtype


@functools.cache
def decode(head: str, tree: str, seed: int) -> Generation:
    target = toys.target()
    return speculate(target, toys.drafter(head, target, tree), toys.prompt(seed), RequestParams(TOKENS, GREEDY))


@functools.cache
def text(seed: int) -> tuple[list[int], int]:
    """Return a prompt with the target's greedy continuation, and the prompt's length."""
    prompt = toys.prompt(seed)
    return prompt + autoregress(toys.target(), prompt, RequestParams(TOKENS, GREEDY)).tokens, len(prompt)


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_tree_pass_equals_sequential_passes(name: str) -> None:
    target, near = toys.target(name, torch.float64), EXACT.get(name, 1e-9)
    assert target.takes_trees
    tree = DraftTree(torch.tensor(toys.prompt(9, 10)), torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 6, 8]))
    prompt = torch.tensor(toys.prompt(3, 12))
    for path in paths(tree):
        cache = target.cache()
        target.prefill(prompt, cache, layers=(0, 2))
        together = target.score(tree, cache, layers=(0, 2))
        sequence = torch.cat([prompt, tree.token[path]])
        alone = target.features(sequence[None], torch.zeros_like(sequence)[None], (0, 2))
        logits = target.embeddings.logits(alone.last_hidden[0, len(prompt) :])
        assert together.logits is not None
        torch.testing.assert_close(together.logits[0, path], logits, rtol=near, atol=near)
        torch.testing.assert_close(together.hidden[0, path], alone.hidden[0, len(prompt) :], rtol=near, atol=near)
        cache.keep(len(prompt), path)
        following = target.prefill(tree.token[:3], cache, layers=(0, 2))
        fresh = target.prefill(torch.cat([sequence, tree.token[:3]]), target.cache(), layers=(0, 2))
        torch.testing.assert_close(following.logits, fresh.logits, rtol=near, atol=near)
        torch.testing.assert_close(following.last_hidden, fresh.last_hidden[:, -3:], rtol=near, atol=near)


@pytest.mark.parametrize("name", [*toys.ARCHITECTURES, *toys.EXPERTS])
@torch.inference_mode()
def test_a_pass_without_padding_equals_the_padded_one(name: str) -> None:
    target, sizes = toys.target(name, torch.float64), [5, 1, 9, 2]
    if not target.takes_ragged:
        assert name == "gemma2"  # in transformers 5.24, not in 5.17
        return
    parent, size = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5, 6]).expand(4, -1), max(sizes)
    tree = DraftTree(torch.stack([torch.tensor(toys.prompt(b, size)) for b in range(4)]), parent)
    cache, lengths = target.batch_cache(5), [12, 3, 8, 15]
    for b, length in enumerate(lengths):
        target.prefill(torch.tensor(toys.prompt(b, length)), cache.allocate())
    start, mask = torch.tensor(lengths), trees.ancestors(tree)
    depth = mask.sum(-1) - 1
    rows, seen, key_position = cache.storage.tree_pass(start, mask, depth, max(lengths) + size)
    inputs = tree.token, start[:, None] + depth, seen, rows, (0, 2), key_position
    padded = target.run(*inputs)
    assert Ragged.of([33, 1, 1, 2], lengths).groups == [(0, 4, 0, 2, 17), (0, 1, 2, 33, 45)]
    far = Ragged.of([1] * 6, [300, 290, 3000, 310, 100, 110]).groups
    assert far == [(0, 2, 0, 1, 301), (2, 3, 0, 1, 3001), (3, 6, 0, 1, 311)]
    assert Ragged.of([1] * 6, [300, 290, 300, 310, 280, 290]).groups == [(0, 6, 0, 1, 311)]
    for width, runs in ((1, [(0, 4, 16)]), (2, [(0, 1, 14), (1, 2, 5), (2, 4, 17)]), (5, [(0, 2, 17), (2, 4, 20)])):
        groups = [RowGroup(first, stop, 0, width, end) for first, stop, end in runs]
        groups += [RowGroup(b, b + 1, width, n, lengths[b] + n) for b, n in enumerate(sizes) if n > width]
        for b, length in enumerate(lengths):
            for buffer in rows.keys:
                buffer[b, :, length:] = 0  # the pass writes them
        out = target.run_ragged(Ragged(groups), *inputs)
        assert out.logits is not None
        for b, n in enumerate(sizes):
            for mine, theirs in zip(out, (*padded[:2], target.embeddings.logits(padded.last_hidden)), strict=True):
                torch.testing.assert_close(mine[b, :n], theirs[b, :n], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_riders_see_what_they_should_and_change_no_node(name: str) -> None:
    target, near = toys.target(name, torch.float64), EXACT.get(name, 1e-9)
    tree = DraftTree(torch.tensor(toys.prompt(9, 4)), torch.tensor([-1, 0, 0, 2]))
    # The first rider follows the root, the second follows the first, the third follows node 3 at depth 2.
    seen = torch.tensor([[1, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 1]]).bool()
    look_ahead = LookAhead(torch.tensor(toys.prompt(4, 3)), torch.tensor([1, 2, 3]), seen)
    prompt = torch.tensor(toys.prompt(3, 12))
    caches = target.cache(), target.cache()
    for cache in caches:
        target.prefill(prompt, cache)
    alone = target.score(tree, caches[0]).logits
    together = score(target, tree, caches[1], look_ahead).logits
    assert alone is not None
    assert together is not None
    torch.testing.assert_close(together[:, :4], alone, rtol=near, atol=near)
    for rider, nodes, before in ((0, [0], []), (1, [0], [0]), (2, [0, 2, 3], [])):
        sequence = torch.cat([prompt, tree.token[nodes], look_ahead.token[[*before, rider]]])
        expected = target.prefill(sequence, target.cache()).logits
        assert expected is not None
        torch.testing.assert_close(together[0, 4 + rider], expected[0, -1], rtol=near, atol=near)


def predicted(head: Any, tree: TreeConfig, seed: int) -> list[int]:
    """Predict the accepted counts from Features alone: the head reads all true rows again before each step."""
    target = toys.target()
    token, length = text(seed)
    document = torch.zeros(1, len(token), dtype=torch.long)
    features = target.features(torch.tensor([token]), document, head.feature_layers)
    counts, root = [], length
    while root < length + TOKENS - 1:
        rows = Features(*(part[:, :root] for part in features[:4]))
        state, level = drafting.extend(head, None, rows, torch.tensor(token[1 : root + 1]))
        max_draft_depth = torch.tensor([length + TOKENS - root - 2])
        roots = DraftInputs(torch.tensor([token[root : root + 1]]), GREEDY)
        (below, parent), *_ = grow_batch(head, state, level, tree, roots, max_draft_depth, allow_host_sync=True)
        grown = DraftTree(below[0], parent[0])
        drafted, _ = trees.keep(grown, (below[0] >= 0) & (trees.layout(grown, 0)[0] <= max_draft_depth))
        counts.append(trees.agreed(drafted, token[root + 1 :]))
        root += counts[-1] + 1
    return counts


@pytest.mark.parametrize(("head", "tree"), CASES)
def test_speculation_writes_the_targets_text_with_the_acceptance_predicted_offline(head: str, tree: str) -> None:
    total = 0
    for seed in range(12):
        if seed > 1 and total:
            break
        (token, length), made = text(seed), decode(head, tree, seed)
        assert toys.lively(token[length:])
        assert made.tokens == token[length:]
        online = [step.accepted for step in made.steps]
        assert predicted(toys.head(head, toys.target()), toys.TREES[tree], seed) == online
        total += sum(online)
    assert total > 0, "no draft was accepted: nothing was tested"


def test_chain_acceptance_follows_from_unroll() -> None:
    """The training-time unrolling, on true tokens, predicts a chain's accepted counts."""
    head: Any = toys.head("eagle", toys.target())
    for seed in range(2):
        token, length = text(seed)
        document = torch.zeros(1, len(token), dtype=torch.long)
        features = toys.target().features(torch.tensor([token]), document, head.feature_layers)
        guesses = [head.compute_logits(draft.state[0], 1).argmax(-1).tolist() for draft in head.unroll(features, 4)]
        counts, row = [], length - 1
        while row < len(token) - 2:
            accepted = 0
            while accepted < min(4, len(token) - row - 3) and guesses[accepted][row] == token[row + 2 + accepted]:
                accepted += 1
            counts.append(accepted)
            row += accepted + 1
        assert counts == [step.accepted for step in decode("eagle", "chain", seed).steps]


class StaleFeatures(HeadBatch):
    """Commits the first row's feature for every row of a path (vLLM#14649's kind)."""

    def extend(self, features: Features, count: Tensor) -> None:
        super().extend(
            features._replace(last_hidden=features.last_hidden[:, :1].expand_as(features.last_hidden)), count
        )


class WrongToken(HeadBatch):
    """Reads token t instead of t+1."""

    def extend(self, features: Features, count: Tensor) -> None:
        super().extend(features._replace(token=features.token.roll(1, 1)), count)


@pytest.mark.parametrize("broken", [StaleFeatures, WrongToken])
def test_broken_drafters_stay_lossless_and_are_caught_offline(
    broken: type[HeadBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters, "HeadBatch", broken)
    differs = []
    for seed in range(2):
        made, (token, length) = decode.__wrapped__("eagle", "static", seed), text(seed)
        assert made.tokens == token[length:]
        online = [step.accepted for step in made.steps]
        differs.append(online != predicted(toys.head("eagle", toys.target()), toys.TREES["static"], seed))
    assert any(differs)
