"""The replay takes the steps that decoding takes, for every head and kind of tree."""

import functools
from typing import Any

import pytest
import torch

from eval.inputs.workloads import Text, of_answer, write
from eval.teacher_forced import RankedText, rank_text, ranks, reach, replay
from eval.tuning.grid import acceptance
from heads import HEADS
from heads.base import Features
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import CONFIDENT, TreeConfig
from inference.verification.sample import GREEDY, Sampling
from inference.verification.tree import DraftTree, best_n
from tests import drafting, toys

SETTINGS = Settings(36, GREEDY)
# Heads of one family are replayed alike, and each takes long.
SOME = [pytest.param(h, marks=[] if h in ("eagle", "medusa", "hydra", "block") else pytest.mark.slow) for h in HEADS]
# HASS drafts as EAGLE does; only its training differs.
KINDS = [pytest.param(head, marks=pytest.mark.slow if head == "hass" else []) for head in HEADS]
DEPTH = 4
LARGEST = [TreeConfig("dynamic", DEPTH, k, 12, [], []) for k in (2, 3)] + [
    TreeConfig("best_first", DEPTH, 0, 16, [], [])
]
TRIED = [
    toys.TREES["chain"], toys.TREES["static"], toys.TREES["dynamic"], toys.TREES["sampled"],
    TreeConfig("dynamic", 2, 2, 3, [], []), TreeConfig("dynamic", 3, 3, 5, [], []),
    TreeConfig("best_first", 4, 0, 16, [], []), TreeConfig("best_first", 3, 0, 6, [], []),
    TreeConfig("best_first", 2, 7, 1, [], []),
]  # fmt: skip


@functools.cache
def texts() -> tuple[Text, ...]:
    return tuple(write(toys.target(), [toys.prompt(seed) for seed in range(3)], SETTINGS))


@functools.cache
def records(name: str) -> tuple[RankedText, ...]:
    target = toys.target()
    return tuple(rank_text(target, toys.head(name, target), text, LARGEST, DEPTH) for text in texts())


@pytest.mark.parametrize("tree", TRIED, ids=lambda tree: tree.label)
@pytest.mark.parametrize("head", SOME)
def test_a_replay_takes_the_steps_of_decoding(head: str, tree: TreeConfig) -> None:
    target, accepted = toys.target(), 0
    source = HeadDrafter(toys.head(head, target), tree, head)
    for seed, of in enumerate(records(head)):
        made = speculate(target, source, toys.prompt(seed), SETTINGS)
        assert toys.lively(made.tokens)
        steps = replay(of, tree)
        assert [(step.nodes, step.accepted) for step in steps] == [(step.drafted, step.accepted) for step in made.steps]
        assert sum(step.accepted + 1 for step in steps) == len(made.tokens) - 1
        accepted += sum(step.accepted for step in steps)
    assert accepted > 0 or tree.nodes == 1, "no draft was accepted: nothing was tested"


SAMPLED = [tree for tree in TRIED if tree.kind in CONFIDENT and tree.nodes > 1]


@pytest.mark.parametrize(
    "tree",
    [pytest.param(tree, marks=pytest.mark.slow if tree.nodes > 6 else (), id=tree.label) for tree in SAMPLED],
)
def test_a_sampled_text_is_replayed_under_the_trees_that_it_was_sampled_with(tree: TreeConfig) -> None:
    """They compare nodes by other probabilities than greedy decoding's."""
    target, sampling = toys.target(), Sampling(1.0, 0, 1.0)
    head, accepted, differ = toys.head("eagle", target), 0, False
    for seed in range(3):
        how = Settings(36, sampling, seed=seed, rule="point_mass")
        made = speculate(target, HeadDrafter(head, tree, "eagle"), toys.prompt(seed), how)
        text = of_answer(target, toys.prompt(seed), made.tokens, how)
        mine, greedy = (rank_text(target, head, text, LARGEST, DEPTH, sampling=each) for each in (sampling, GREEDY))
        steps = [step.accepted for step in replay(mine, tree)]
        assert steps == [step.accepted for step in made.steps]
        accepted, differ = accepted + sum(steps), differ or mine.grown != greedy.grown
    assert accepted > 0
    assert differ, "the trees of greedy decoding would have done: nothing was tested"


def test_a_text_that_ends_early_is_replayed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    target, text = toys.target(), texts()[0]
    monkeypatch.setattr(target, "eos", frozenset({text.token[text.start + 20]}))
    (short,) = write(target, [toys.prompt(0)], SETTINGS)
    assert 2 < short.generated < 36
    for name in ("eagle", "block"):
        head = toys.head(name, target)
        of = rank_text(target, head, short, LARGEST, DEPTH)
        for tree in TRIED:
            made = speculate(target, HeadDrafter(head, tree, name), toys.prompt(0), SETTINGS)
            assert made.finish == "eos"
            assert [step.accepted for step in replay(of, tree)] == [step.accepted for step in made.steps]


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


@pytest.mark.parametrize("head", KINDS)
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


def test_answers_of_one_token_leave_nothing_to_replay() -> None:
    assert write(toys.target(), [toys.prompt(0)], Settings(1, GREEDY)) == []


def test_of_equal_scores_the_earlier_node_is_kept_as_a_tree_is_cut() -> None:
    tree = DraftTree(torch.tensor([0, 5, 6, 7]), torch.tensor([-1, 0, 0, 2]))
    score = torch.tensor([0.0, -1.0, -1.0, -1.0])
    assert [reach(tree, score, text, 2).needed[2] for text in ([5], [6], [6, 7])] == [[1], [2], [2, 3]]
    for text, needed in ((5, 1), (6, 2), (7, 3)):
        kept = [text in best_n(tree, score, budget)[0].token.tolist() for budget in (1, 2, 3)]
        assert kept == [budget >= needed for budget in (1, 2, 3)]
