"""Token recycling against a literal one: a dict of candidates, a pass of its own for every node."""

from math import prod

import pytest
import torch

from inference.drafters.recycling import top_tokens
from inference.protocol import CommittedTokens, DraftContext, Verified
from inference.target.target import Target
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from inference.verification.tree import DraftTree
from tests import toys
from tests.inference.model_free import Recorder, accepted, decode, logits, make, plain

PATHS = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
TOKENS = 24


def literal(
    target: Target, rows: dict[int, list[int]], prompt: list[int], count: int
) -> tuple[list[list[int]], list[int]]:
    """Decode as the method is written down; return each pass's drafted tokens, level by level, and accepted count."""
    text = [*prompt, int(logits(target, prompt).argmax())]
    drafts, counts = [], []
    while len(text) < len(prompt) + count:
        room = len(prompt) + count - len(text) - 1
        nodes: dict[tuple[int, ...], list[int]] = {(): []}
        for path in map(tuple, PATHS):
            if path[:-1] in nodes and len(path) <= room:
                candidates = rows.get(([text[-1], *nodes[path[:-1]]])[-1])
                if candidates is not None:
                    nodes[path] = [*nodes[path[:-1]], candidates[path[-1]]]
        found = {tuple(tokens): logits(target, text + tokens) for tokens in nodes.values()}
        made: tuple[int, ...] = ()
        while made in found:
            made = (*made, int(found[made].argmax()))
        if len(text) + len(made) < len(prompt) + count:  # the engine does not report a request's last pass
            for tokens, law in found.items():
                rows[[text[-1], *tokens][-1]] = law.topk(3).indices.tolist()
        drafts.append([tokens[-1] for tokens in nodes.values() if tokens])
        counts.append(len(made) - 1)
        text += made
    return drafts, counts


def test_drafts_and_acceptance_equal_the_literal_method_across_requests() -> None:
    target = toys.target("llama", torch.float64)
    source = Recorder(make("recycling", target, candidates=3, paths=PATHS))
    rows: dict[int, list[int]] = {}
    total = 0
    for seed in (0, 1, 0):
        source.proposed.clear()
        drafts, counts = literal(target, rows, toys.prompt(seed), TOKENS)
        made = decode(target, source, toys.prompt(seed), TOKENS)
        assert [proposal.tree.token[1:].tolist() for proposal in source.proposed] == drafts
        assert accepted(made) == counts
        total += sum(counts)
    assert total > 0
    assert source.source.candidates == rows


def test_rejected_nodes_renew_their_rows_and_the_last_of_equals_counts() -> None:
    source = make("recycling", toys.target(), candidates=2, paths=[[0], [1]])
    law = torch.zeros(3, toys.VOCAB)
    law[0, [4, 5]] = torch.tensor([2.0, 1.0])
    law[1, [6, 7]] = torch.tensor([2.0, 1.0])
    law[2, [8, 9]] = torch.tensor([2.0, 1.0])
    tree = DraftTree(torch.tensor([1, 2, 1]), torch.tensor([-1, 0, 1]))
    state = source.start([1])
    state.update(CommittedTokens([4], Verified(tree, [0], law)))
    assert source.candidates == {1: [8, 9], 2: [6, 7]}
    proposal = state.propose(DraftContext([0, 2], GREEDY, RequestRng(0, 0, coupled=False), 9))
    assert proposal.tree.token.tolist() == [2, 6, 7]


def test_memory_keeps_candidates_across_requests_and_can_be_forgotten() -> None:
    prompt = toys.prompt(0, 9)
    for memory in (True, False):
        source = make("recycling", toys.target(), memory=memory)
        first = decode(toys.target(), source, prompt, TOKENS)
        again = decode(toys.target(), source, prompt, TOKENS)
        assert first.tokens == again.tokens == plain(toys.target(), prompt, TOKENS)
        assert (sum(accepted(again)) > sum(accepted(first))) == memory
        source.reset()
        assert accepted(decode(toys.target(), source, prompt, TOKENS)) == accepted(first)


def test_the_published_size_follows_its_rule() -> None:
    """By level the paper's count of nodes, those of the smallest product of ranks first."""
    expected: list[list[int]] = []
    level: list[tuple[int, ...]] = [()]
    for count in (8, 21, 25, 15, 8, 3):
        below = [(*path, rank) for path in level for rank in range(8)]
        level = sorted(sorted(below, key=lambda path: (prod(rank + 1 for rank in path), path))[:count])
        expected += map(list, level)
    assert make("recycling80", toys.target()).config.paths == expected
    assert len(expected) == 80


@pytest.mark.parametrize("name", ["recycling", "lookahead"])
def test_a_target_that_takes_no_tree_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toys.target(), "takes_trees", False)
    with pytest.raises(ValueError, match=f"llama: its attention .* which drafter={name} needs: use drafter=prompt_"):
        make(name, toys.target())


@pytest.mark.parametrize("vocabulary", [50, 2048, 32000, 50257])
@pytest.mark.parametrize("count", [1, 8])
def test_the_likeliest_are_those_of_topk(vocabulary: int, count: int) -> None:
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits[1] = logits[1].sort().values  # all of them at the end, behind the last whole row
    logits[2, 64:] = -torch.inf  # and beside tokens that have no probability
    assert torch.equal(top_tokens(logits, count), logits.topk(count).indices)
