"""What the costs are measured on: trees of the wanted size and acceptance, in the engine, every part of it."""

from typing import Any

import pytest
import torch

from eval import costs as costing
from eval.costs import at_context, measure, planted, typical, verification
from eval.replay import write
from inference import tree as trees
from inference.decode import Settings
from inference.drafters.head import HeadDrafter
from inference.policy import TreeConfig
from inference.sample import GREEDY
from inference.tuner import Costs, draft_key
from tests import toys

SETTINGS = Settings(30, GREEDY)
MEASURED = [toys.TREES["chain"], toys.TREES["dynamic"], TreeConfig("best_first", 3, 0, 6, [], [])]
SIZES = [0, 3, 8]


@pytest.mark.parametrize("tokens", [[], [7], [7, 8, 9]])
@pytest.mark.parametrize("size", [3, 4, 11])
def test_a_planted_tree_holds_the_tokens_and_nothing_else_that_is_right(tokens: list[int], size: int) -> None:
    tree = planted(5, tokens, size, toys.target())
    assert len(tree.token) == size + 1
    assert trees.agreed(tree, [*tokens, 1]) == len(tokens)
    assert int(trees.depth(tree).max()) == max(len(tokens), 1)


def test_a_target_that_takes_chains_alone_gets_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target()
    monkeypatch.setattr(target, "takes_trees", False)
    tree = planted(5, [7, 8], 6, target)
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert trees.agreed(tree, [7, 8, 1]) == 2
    chain = toys.TREES["chain"]
    head = HeadDrafter(toys.head("eagle", target), chain, "head")
    texts = write(target, [toys.prompt(0)], SETTINGS)
    assert measure(target, head, texts, [chain], SIZES, 1, SETTINGS).draft[draft_key(chain)] > 0


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_every_part_of_a_step_is_measured(name: str) -> None:
    target = toys.target()
    texts = write(target, [toys.prompt(seed) for seed in range(2)], SETTINGS)
    head = HeadDrafter(toys.head(name, target), toys.TREES["chain"], "head")
    found = measure(target, head, texts, MEASURED, SIZES, 3, SETTINGS)
    assert set(found.draft) == {draft_key(tree) for tree in MEASURED}
    assert set(SIZES) <= set(found.verify)
    assert {1, 2, 3} <= set(found.commit)
    assert set(found.settle[1]) <= set(found.settle[0]) == set(found.verify)
    every = [found.plain, *found.verify.values(), *found.draft.values(), *found.commit.values()]
    assert min([*every, *found.settle[0].values(), *found.settle[1].values()]) > 0


def test_the_played_back_text_is_what_plain_decoding_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    speculate = costing.speculate

    def kept(*args: Any) -> Any:
        made.append(speculate(*args))
        return made[-1]

    monkeypatch.setattr(costing, "speculate", kept)
    target = toys.target()
    texts = write(target, [toys.prompt(0)], SETTINGS)
    head = HeadDrafter(toys.head("eagle", target), toys.TREES["chain"], "head")
    measure(target, head, texts, MEASURED, SIZES, 3, SETTINGS)
    assert all(run.tokens == texts[0].token[texts[0].start :] for run in made)
    steps = [step for run in made for step in run.steps]
    assert max(step.accepted for step in steps) > 1
    assert {step.drafted for step in steps} >= set(SIZES)


def test_verification_by_context_and_size_leaves_out_what_does_not_fit() -> None:
    target = toys.target()
    found = verification(target, SIZES, [16, 64, 155], 2, 0)
    assert list(found) == [16, 64]
    assert all(list(each) and set(each) == set(SIZES) and min(each.values()) > 0 for each in found.values())


def test_another_context_changes_the_passes_alone() -> None:
    own = Costs(1, 10.0, {0: 9.0, 8: 12.0}, ({0: 1.0}, {0: 1.0}), {}, {})
    moved = at_context(own, {0: 19.0, 8: 25.0})
    assert (moved.plain, moved.verify[8], moved.settle) == (20.0, 25.0, own.settle)


def test_a_typical_value_drops_single_outliers_and_keeps_the_mean() -> None:
    assert typical([2.0, 4.0]) == 3.0
    assert typical([1.0] * 9 + [50.0] + [0.0] + [1.0] * 9) == 1.0
    assert typical(torch.arange(20.0).tolist()) == 9.5
