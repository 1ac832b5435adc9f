"""What does not fit is refused in one line, by the library and before anything large is computed."""

import time
from dataclasses import asdict
from typing import Any

import pytest

from eval.config import eval_config
from inference.decode import Settings, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Plain
from inference.drafters.policy import TreeConfig, check_tree, expanded, most_nodes
from inference.drafters.registry import make
from inference.verification.sample import GREEDY
from tests import toys

FOUR = Settings(4, GREEDY)


def refused(words: str, prompts: Any, settings: Any, drafter: Any = None, **options: Any) -> None:
    target = toys.target()
    with pytest.raises(ValueError, match=words) as error:
        speculate(target, drafter or Plain(target.device), prompts, settings, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("prompts", "settings", "words"),
    [
        ([], FOUR, "the prompt is empty: give at least one token; of several prompts, at least one prompt"),
        ([], [], "there are no prompts: give at least one"),
        ([], [FOUR], "there are no prompts"),
        ([[]], FOUR, "the prompt is empty"),
        ([[1, 2], [3]], [FOUR], "there are 1 settings for 2 prompts: give one for all, or one each"),
        ([[1, 2]], [FOUR, FOUR], "there are 2 settings for 1 prompts"),
        ([1, 2], [FOUR], "settings is a list, but the prompt is one"),
        ([[1], [1] * 160], FOUR, "the prompt has 160 tokens but llama reads at most 160: shorten it"),
        ([1] * 160, FOUR, "the prompt has 160 tokens"),
        ([1, 40], FOUR, "the prompt holds token 40 but those of llama go from 0 to 39"),
        ([[1], [2, -1]], FOUR, "the prompt holds token -1"),
    ],
)
def test_prompts_and_settings(prompts: Any, settings: Any, words: str) -> None:
    refused(words, prompts, settings)


@pytest.mark.parametrize("prompts", [[1, 2], [[1, 2], [3]]])
def test_batch_sizes(prompts: Any) -> None:
    refused("batch_size is 0: give 1 or more", prompts, FOUR, batch_size=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_new_tokens": 5}, "min_new_tokens is 5: give 0 to max_new_tokens, which is 4"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: give 1 or more"),
    ],
)
def test_lengths(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**{"max_new_tokens": 4, "sampling": GREEDY, **values})


def test_lengths_of_an_evaluation() -> None:
    with pytest.raises(ValueError, match="min_new_tokens is 9: give 0 to max_new_tokens, which is 8"):
        eval_config(run=None, drafter={"plain": {}}, max_new_tokens=8, min_new_tokens=9)
    with pytest.raises(ValueError, match="tune=true lets answers end by themselves"):
        eval_config(run="a", tune=True, min_new_tokens=9)


def test_a_tree_that_the_context_cannot_hold_is_refused_in_a_batch_too() -> None:
    own: Any = toys.head("eagle", toys.target())
    paths = [[i] for i in range(13)] + [[i, j] for i in range(13) for j in range(13)]
    wide = HeadDrafter(own, TreeConfig("static", 0, 0, 0, paths, []), "eagle")
    refused("eagle: a tree of 183 nodes is larger than the context of llama, 160 tokens", [1, 2], FOUR, wide)
    refused("a tree of 183 nodes", [[1, 2], [3]], FOUR, wide, batch_size=2)


@pytest.mark.parametrize("name", toys.TREES)
def test_no_tree_is_larger_than_its_policy_says(name: str) -> None:
    target, drafted = toys.target(), 0
    own: Any = toys.head("eagle", target)
    for step in speculate(target, HeadDrafter(own, toys.TREES[name], "e"), toys.prompt(0), Settings(24, GREEDY)).steps:
        assert step.drafted < most_nodes(toys.TREES[name])
        drafted = max(drafted, step.drafted)
    assert drafted == most_nodes(toys.TREES[name]) - 1


def test_a_policys_trees_are_counted_without_growing_one() -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="a tree of 16257 nodes is larger"):
        check_tree(toys.target(), TreeConfig("sampled", 0, 0, 0, [], [127, 127]), "head")
    check_tree(toys.target(), TreeConfig("chain", 159, 0, 0, [], []), "head")  # of 160 nodes, as many as it reads
    kinds = ("dynamic", "best_first", "sampled")
    assert [expanded(TreeConfig(kind, 3, 2, 7, [], [3, 2])) for kind in kinds] == [6, 21, 10]
    with pytest.raises(ValueError, match="more than 16384 nodes"):
        TreeConfig("sampled", 0, 0, 0, [], [1000, 1000, 1000])
    options = {
        **{"model": "nowhere", "match": "same", "dtype": None, "device": None, "trust_remote_code": False},
        **{"schedule": "constant", "confidence": 0.0, "tree": asdict(TreeConfig("chain", 160, 0, 0, [], []))},
    }
    with pytest.raises(ValueError, match=r"drafter\.assistant: tree chain-160: a tree of 161 nodes"):
        make("assistant", options, toys.target())
    assert time.perf_counter() - begun < 5
