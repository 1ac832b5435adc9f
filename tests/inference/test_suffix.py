"""Suffix decoding: counts against a brute-force counter, drafts against a literal reading of the method."""

import random
from collections import Counter
from typing import Any

import pytest

from inference.drafters.suffix import Locus, Node, Suffix, SuffixTree
from inference.protocol import DraftContext
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from tests import toys
from tests.inference.model_free import make

DRAWS = RequestRng(0, 0, coupled=False)


def counts(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    """Count every substring by looking at all of them."""
    return Counter(
        tuple(text[begin:end])
        for text in texts
        for begin in range(len(text))
        for end in range(begin + 1, min(begin + depth, len(text)) + 1)
    )


def edges(tree: SuffixTree) -> list[Node]:
    found, open_ = [], [tree.root]
    while open_:
        below = list(open_.pop().children.values())
        found += below
        open_ += below
    return found


def count_in(tree: SuffixTree, substring: list[int]) -> int:
    """Return how often a tree has counted a substring."""
    locus: Locus | None = Locus(tree.root, 0)
    for token in substring:
        locus = None if locus is None else locus.follow(token)
    return 0 if locus is None else locus.node.count


@pytest.mark.parametrize("vocabulary", [1, 2, 5])
def test_counts_equal_brute_force_while_texts_grow(vocabulary: int) -> None:
    for seed in range(25):
        chance = random.Random(seed)
        depth = chance.choice([2, 3, 4, 6])
        tree, texts = SuffixTree(depth), []
        for _ in range(12):
            if not texts or chance.random() < 0.4:
                tree.start()
                texts.append([])
            source = chance.choice(texts)
            copied = source[chance.randint(0, len(source)) :] if chance.random() < 0.4 else []
            new = copied + chance.choices(range(vocabulary), k=chance.randint(0, 6))
            tree.extend(new)
            texts[-1] += new
            expected = counts(texts, depth)
            for substring, count in expected.items():
                assert count_in(tree, list(substring)) == count
            absent = [tuple(chance.choices(range(vocabulary + 1), k=chance.randint(1, depth))) for _ in range(10)]
            assert all(count_in(tree, list(substring)) == expected[substring] for substring in absent)
            assert len(edges(tree)) == tree.nodes


def literal(source: Suffix, texts: list[list[int]], text: list[int], room: int) -> tuple[list[int], float]:
    """Return the path that the method's description gives, from counts of all substrings, and its score."""
    config = source.config
    table = counts(texts, config.depth)
    last: dict[tuple[int, ...], tuple[int, int]] = {}  # the latest occurrence, between equals
    for number, known in enumerate(texts):
        for begin in range(len(known)):
            for end in range(begin + 1, min(begin + config.depth, len(known)) + 1):
                last[tuple(known[begin:end])] = (number, begin)
    best: tuple[list[int], float] = ([], 0.0)
    for length in range(min(len(text), config.depth - 1), 0, -1):
        suffix = tuple(text[-length:])
        if not table[suffix]:
            continue
        budget = min(config.tokens, int(config.factor * length + config.offset), config.depth - length, room)
        path, probability, score = [], 1.0, 0.0
        while len(path) < budget:
            here = (*suffix, *path)
            known = [token for token in range(toys.VOCAB) if table[(*here, token)]]
            if not known:
                break
            token = max(known, key=lambda token: (table[(*here, token)], last[(*here, token)]))
            probability *= table[(*here, token)] / table[here]
            if probability < config.min_probability:
                break
            path.append(token)
            score += probability
        if score > best[1] + 1e-9:
            best = (path, score)
    return best


@pytest.mark.parametrize(
    "values", [{}, {"factor": 1.5, "offset": 0.5}, {"min_probability": 0.6, "offset": 2.0}, {"depth": 3, "tokens": 1}]
)
def test_drafts_equal_the_method_read_literally(values: dict[str, Any]) -> None:
    from_past = 0
    for seed in range(12):
        chance = random.Random(seed)
        source = make("suffix", toys.target(), **{"depth": 6, **values})
        past: list[list[int]] = []
        for _ in range(3):
            text = chance.choices(range(4), k=chance.randint(1, 8))
            state = source.start(list(text))
            begin = len(text)
            for _ in range(8):
                text += chance.choices(range(4), k=chance.randint(1, 3))
                max_draft_depth = chance.choice([0, 1, 99])
                proposal = state.propose(DraftContext(text, GREEDY, DRAWS, max_draft_depth))
                own, other = (
                    literal(source, [text], text, max_draft_depth),
                    literal(source, past, text, max_draft_depth),
                )
                path, score = own if own[1] >= other[1] - 1e-9 else other
                assert proposal.tree.token[1:].tolist() == path
                assert proposal.expected == pytest.approx(score)
                from_past += own[1] < other[1] - 1e-9
            past.append(text[begin:])
    assert from_past > 0


def test_forgetting_within_a_request_leaves_the_request_its_own_text() -> None:
    source = make("suffix", toys.target())
    state = source.start([1, 2, 3])
    state.propose(DraftContext([1, 2, 3, 4, 5], GREEDY, DRAWS, 99))
    source.reset()
    state.propose(DraftContext([1, 2, 3, 4, 5, 6, 7], GREEDY, DRAWS, 99))
    assert source.start([9]).suffixes.texts == [[9]]
    assert source.past.texts == [[6, 7]]


def test_a_clone_drafts_as_the_original_after_a_long_run_of_one_token() -> None:
    source = make("suffix", toys.target(), depth=300)
    source.start([0]).propose(DraftContext([0] + [7] * 600, GREEDY, DRAWS, 99))
    clone = source.clone()
    drafts = [one.start([5, 7, 7]).propose(DraftContext([5, 7, 7, 7], GREEDY, DRAWS, 99)) for one in (source, clone)]
    assert len(drafts[0].tree.token) > 1
    assert drafts[0].tree.token.tolist() == drafts[1].tree.token.tolist()


def test_the_past_is_bounded_and_forgets_the_oldest() -> None:
    source = make("suffix", toys.target(), memory_nodes=200)
    for request in range(12):
        source.start([0]).propose(DraftContext([0, *range(request, 3 * request + 10)], GREEDY, DRAWS, 99))
    source.start([0])
    assert 0 < source.past.nodes <= 200
    assert len(source.past.texts) > 1
    assert source.past.texts[-1] == list(range(11, 43))
    assert count_in(source.past, [0]) == 0
