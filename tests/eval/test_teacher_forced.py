"""The replay takes the steps that decoding takes, for every head and kind of tree, greedy and sampled; and its rows."""

import functools
import itertools
from typing import Any

import pytest
import torch

from eval.inputs.workloads import Text, of_answer, write
from eval.measures.metrics import SpecDecodingStats
from eval.measures.results import TEACHER_FORCED, MeasuredRequest, Measurement, ResultRow, result
from eval.teacher_forced import (
    Overlap,
    RankedText,
    acceptance,
    expected,
    overlap,
    rank_text,
    ranks,
    replay,
    tree_acceptance,
)
from heads import HEADS
from heads.base import Features
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import TreeConfig
from inference.verification.sample import GREEDY, Sampling, distribution
from inference.verification.tree import DraftTree, best_n
from tests import drafting, toys

SETTINGS = RequestParams(24, GREEDY)
DEPTH = 4
LARGEST = [TreeConfig("dynamic", DEPTH, k, 12, [], []) for k in (2, 3)] + [
    TreeConfig("best_first", DEPTH, 0, 16, [], [])
]
HASS = "hass"  # drafts as EAGLE does; only its training differs
TRIED = [
    toys.TREES["chain"], toys.TREES["static"], toys.TREES["dynamic"], toys.TREES["sampled"],
    TreeConfig("dynamic", 3, 3, 5, [], []), TreeConfig("best_first", 3, 0, 6, [], []),
    TreeConfig("best_first", 2, 7, 1, [], []),
]  # fmt: skip
# How a head drafts and how a tree is cut do not depend on each other: every tree with EAGLE, every head with one.
PAIRS = [("eagle", tree) for tree in TRIED] + [(head, TRIED[2]) for head in HEADS if head not in ("eagle", HASS)]


@functools.cache
def texts() -> tuple[Text, ...]:
    return tuple(write(toys.target(), [toys.prompt(seed) for seed in range(2)], SETTINGS))


@functools.cache
def records(name: str) -> tuple[RankedText, ...]:
    target, largest = toys.target(), LARGEST if name == "eagle" else LARGEST[1:2]
    return tuple(rank_text(target, toys.head(name, target), text, largest, DEPTH) for text in texts())


@pytest.mark.parametrize(("head", "tree"), PAIRS)
def test_a_replay_takes_the_steps_of_decoding(head: str, tree: TreeConfig) -> None:
    target, accepted = toys.target(), 0
    source = HeadDrafter(toys.head(head, target), tree, head)
    for seed, of in enumerate(records(head)):
        made = speculate(target, source, toys.prompt(seed), SETTINGS)
        assert toys.lively(made.tokens)
        steps = replay(of, tree)
        assert steps == [(step.drafted, step.accepted) for step in made.steps]
        assert sum(count + 1 for _, count in steps) == len(made.tokens) - 1
        accepted += sum(count for _, count in steps)
    assert accepted > 0 or tree.nodes == 1, "no draft was accepted: nothing was tested"


@pytest.mark.parametrize("tree", [TRIED[2], TRIED[5]], ids=lambda tree: tree.label)
def test_a_sampled_text_is_replayed_under_the_trees_that_it_was_sampled_with(tree: TreeConfig) -> None:
    """They compare nodes by other probabilities than greedy decoding's."""
    target, sampling = toys.target(), Sampling(1.0, 0, 1.0)
    head, accepted, differ = toys.head("eagle", target), 0, False
    for seed in range(3):
        params = RequestParams(24, sampling, seed=seed, rule="point_mass")
        made = speculate(target, HeadDrafter(head, tree, "eagle"), toys.prompt(seed), params)
        text = of_answer(target, toys.prompt(seed), made.tokens, params)
        mine, greedy = (rank_text(target, head, text, LARGEST[1:], DEPTH, sampling=each) for each in (sampling, GREEDY))
        steps = [count for _, count in replay(mine, tree)]
        assert steps == [step.accepted for step in made.steps]
        accepted, differ = accepted + sum(steps), differ or mine.grown != greedy.grown
    assert accepted > 0
    assert differ, "the trees of greedy decoding would have done: nothing was tested"


def test_a_text_that_ends_early_is_replayed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    target, text = toys.target(), texts()[0]
    monkeypatch.setattr(target, "eos", frozenset({text.token[text.start + 12]}))
    (short,) = write(target, [toys.prompt(0)], SETTINGS)
    assert 2 < short.generated < 24
    for name in ("eagle", "block"):
        head = toys.head(name, target)
        of = rank_text(target, head, short, LARGEST[1:], DEPTH)
        for tree in (TRIED[0], TRIED[1], TRIED[2], TRIED[5]):
            made = speculate(target, HeadDrafter(head, tree, name), toys.prompt(0), SETTINGS)
            assert made.finish_reason == "eos"
            assert [count for _, count in replay(of, tree)] == [step.accepted for step in made.steps]


@torch.inference_mode()
def naive(head: Any, text: Text) -> torch.Tensor:
    """Return the acceptance by depth and rank, each row by itself: the head reads the true rows, then the true path."""
    target = toys.target()
    token = torch.tensor(text.token)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    hits, seen = torch.zeros(DEPTH, 5, dtype=torch.float64), torch.zeros(DEPTH, 1, dtype=torch.float64)
    for root in range(text.start, len(token) - 1):
        rows = Features(*(part[:, :root] for part in features[:4]))
        state, level = drafting.extend(head, None, rows, token[1 : root + 1])
        for depth in range(min(DEPTH, len(token) - 1 - root)):
            wanted = token[root + 1 + depth]
            rank = drafting.logits(head, level)[0].argsort(descending=True).tolist().index(int(wanted))
            seen[depth] += 1
            if rank < 5:
                hits[depth, rank] += 1
            if depth + 1 < DEPTH:
                path = torch.ones(1, depth + 1, dtype=torch.bool)
                level = drafting.expand(head, state, level, wanted[None], torch.tensor([0]), path)
    return hits / seen


@pytest.mark.parametrize("head", [head for head in HEADS if head != HASS])
def test_acceptance_by_depth_and_rank_is_that_of_every_row_by_itself(head: str) -> None:
    of = records(head)[0]
    found = acceptance(torch.tensor(of.rank), 5)
    torch.testing.assert_close(found, naive(toys.head(head, toys.target()), of.text))
    assert found[0].sum() > 0


def test_ranks_end_where_the_text_does() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 4)
    token = torch.tensor([0, 1, 2, 0])
    assert ranks(logits, token, 1).tolist() == [2, 0, -1, -1]
    assert ranks(logits, token, 3).tolist() == [-1] * 4


def test_of_equal_logits_one_token_alone_has_the_first_rank() -> None:
    """In bf16 many are equal, and a draft takes one of them."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]] * 5)
    token = torch.tensor([0, 0, 1, 2, 4])
    assert ranks(logits, token, 1).tolist() == [0, 1, 2, -1, -1]


def test_of_equal_scores_the_earlier_node_is_kept_as_a_tree_is_cut() -> None:
    tree = DraftTree(torch.tensor([0, 5, 6, 7]), torch.tensor([-1, 0, 0, 2]))
    score = torch.tensor([0.0, -1.0, -1.0, -1.0])
    assert [tree_acceptance(tree, score, text, 2).needed[2] for text in ([5], [6], [6, 7])] == [[1], [2], [2, 3]]
    for text, needed in ((5, 1), (6, 2), (7, 3)):
        kept = [text in best_n(tree, score, budget).token.tolist() for budget in (1, 2, 3)]
        assert kept == [budget >= needed for budget in (1, 2, 3)]


def test_what_passes_are_expected_is_the_sum_over_all_verdicts() -> None:
    text = Text(list(range(9)), 2, 6)  # 7 tokens written, but only 6 allowed: the last draft is cut
    share = torch.tensor([[0.9, 0.5], [0.2, 0.4], [0.7, 0.3], [0.6, 1.0], [1.0, 0.8], [0.5, 0.0]])
    found = expected(Overlap(text, share, share), 2)

    def walk(made: int) -> tuple[float, float, float]:
        """Return the expected passes, accepted and drafted tokens from here on, verdict by verdict."""
        if made >= text.generated:
            return 0.0, 0.0, 0.0
        depth = max(0, min(2, text.limit - made - 1))
        passes, accepted, drafted = 1.0, 0.0, float(depth)
        for verdict in itertools.product([True, False], repeat=depth):
            chance, count = 1.0, 0
            for d, right in enumerate(verdict):
                p = float(share[made - 1, d])
                chance *= p if right else 1 - p
                count += right and all(verdict[:d])
            more = walk(min(made + count + 1, text.generated))
            passes += chance * more[0]
            accepted += chance * (count + more[1])
            drafted += chance * more[2]
        return passes, accepted, drafted

    passes, accepted, drafted = walk(1)
    assert found.steps == pytest.approx(passes)
    assert found.accepted == pytest.approx(accepted)
    assert found.drafted == pytest.approx(drafted)
    assert found.tokens == 6


def test_shares_are_of_the_laws_of_every_row_by_itself() -> None:
    target, sampling = toys.target(), Sampling(0.8, 12, 0.95)
    head = toys.head("eagle", target)
    (text,) = write(target, [toys.prompt(3)], RequestParams(12, sampling, seed=5))
    found = overlap(target, head, text, sampling, 3)
    token = torch.tensor(text.token)
    features = target.features(token[None], torch.zeros_like(token)[None], head.feature_layers)
    seen = 0
    with torch.inference_mode():
        for made in range(1, text.generated):
            root = text.start + made - 1  # the token a step begins after
            rows = Features(*(part[:, :root] for part in features[:4]))
            state, level = drafting.extend(head, None, rows, token[1 : root + 1])
            for depth in range(3):
                place = root + 1 + depth
                if place >= len(token):
                    assert found.accept_prob[made - 1, depth] == 0
                    assert found.common[made - 1, depth].isnan()
                    continue
                p = distribution(target.embeddings.logits(features.last_hidden[0, place - 1]), sampling)
                q = distribution(drafting.logits(head, level)[0], sampling)
                ratio = (q[token[place]] / p[token[place]]).clamp_max(1)
                torch.testing.assert_close(found.accept_prob[made - 1, depth], ratio, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(
                    found.common[made - 1, depth], torch.minimum(p, q).sum(), atol=1e-5, rtol=1e-4
                )
                torch.testing.assert_close((p * (q / p.clamp_min(1e-30)).clamp_max(1)).sum(), torch.minimum(p, q).sum())
                seen += 1
                if depth < 2:
                    path = torch.ones(1, depth + 1, dtype=torch.bool)
                    level = drafting.expand(head, state, level, token[place][None], torch.tensor([0]), path)
    assert seen > 20


SESSION = Measurement("tiny", 1.0, 1, 0, 0, conversations=[0, 1], tier=TEACHER_FORCED)


def rows(each: list[SpecDecodingStats]) -> list[ResultRow]:
    texts, info = [MeasuredRequest(passes) for passes in each], ("eagle", "token", "chain-4")
    return [result(*info, subset, subset.of(texts)) for subset in SESSION.parts(len(texts))]


def test_answers_of_one_token_have_no_passes_and_no_tau() -> None:
    share = torch.zeros(0, 4)
    none = expected(Overlap(Text([1, 2, 3], 2, 8), share, share), 4)
    (row,) = rows([none, none])
    assert (row.steps, row.tokens, row.tau, row.tau_ci, row.accepted_by_depth) == (0, 0, None, None, [])
    one = SpecDecodingStats(6.0, 3.0, 6.0, 3.0, [2.0, 1.0])
    (row,) = rows([none, one])
    assert (row.tau, row.tau_request_mean, row.accepted_by_depth) == (2.0, 2.0, [2 / 3, 1 / 3])
