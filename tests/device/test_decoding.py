"""Decoding on the device: the baseline's text by every head, tree and source, one by one and in batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.measures.losslessness import Gate, gate
from heads import HEADS
from inference.decode import Generation, RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.protocol import Drafter
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.inference import model_free

pytestmark = pytest.mark.gpu
On = Callable[[str, torch.dtype], Target]
DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = [toys.prompt(seed) for seed in range(3)]
SETTINGS = RequestParams(36, GREEDY, logit_gaps=True)


def drafter(name: str, tree: str, target: Target) -> HeadDrafter:
    head: Any = toys.head(name, target).to(target.device)
    return HeadDrafter(head, toys.TREES[tree], name)


def judged(target: Target, source: Drafter, dtype: torch.dtype) -> tuple[Gate, list[Generation]]:
    """Decode with a source and compare with the baseline, near ties apart."""
    plain = [speculate(target, Baseline(target.device), prompt, SETTINGS) for prompt in PROMPTS]
    made = [speculate(target, source, prompt, SETTINGS) for prompt in PROMPTS]
    return gate(plain, made, ["0", "1", "2"], dtype), made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", toys.TREES)
@pytest.mark.parametrize("head", HEADS)
def test_every_head_by_every_tree_writes_plain_text(head: str, tree: str, dtype: torch.dtype, target_on: On) -> None:
    target = target_on("llama", dtype)
    found, made = judged(target, drafter(head, tree, target), dtype)
    assert found.passed, found.first
    assert all(toys.lively(each.tokens) for each in made)
    if dtype == torch.float32:
        assert found.identical == len(PROMPTS)
        assert sum(step.accepted for each in made for step in each.steps) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_every_target_takes_trees(name: str, dtype: torch.dtype, target_on: On) -> None:
    target = target_on(name, dtype)
    assert target.takes_trees
    assert judged(target, drafter("eagle", "dynamic", target), dtype)[0].passed


@pytest.mark.parametrize("name", model_free.NAMES)
def test_sources_without_a_model_write_plain_text(name: str, target_on: On) -> None:
    target = target_on("llama", torch.float32)
    assert judged(target, model_free.make(name, target), torch.float32)[0].identical == len(PROMPTS)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(("head", "tree"), [("eagle3", "dynamic"), ("medusa", "static"), ("eagle", "chain")])
def test_a_batch_is_what_each_is_alone(head: str, tree: str, sampling: Sampling, target_on: On) -> None:
    target = target_on("llama", torch.float32)
    settings = [RequestParams(20 + i, sampling, seed=i) for i in range(len(PROMPTS))]
    alone = [
        speculate(target, drafter(head, tree, target), prompt, each)
        for prompt, each in zip(PROMPTS, settings, strict=True)
    ]
    together = speculate(target, drafter(head, tree, target), PROMPTS, settings)
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [[step.accepted for step in each.steps] for each in together] == [
        [step.accepted for step in each.steps] for each in alone
    ]
