"""The device step on the device: nothing of it waits for the host, in static shapes or out of a graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from heads.modules.vocab import choose_draft_vocab
from inference.batch import Batch, batch_of
from inference.decode import RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.request import PhaseTimer
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.inference.step_graph import decoded

pytestmark = pytest.mark.gpu
On = Callable[[str, torch.dtype], Target]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 0, 0.9)], ids=["T0", "T0.9"])
@pytest.mark.parametrize("tree", ["chain", "static", "dynamic", "best_first", "sampled"])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "block"])
def test_nothing_of_a_step_waits(name: str, tree: str, sampling: Sampling, target_on: On, device: torch.device) -> None:
    target = target_on("llama", torch.float32)
    head: Any = toys.head(name, target).to(device)
    requests = [(toys.prompt(slot, 5 + slot), RequestParams(40, sampling)) for slot in range(2)]
    batch = batch_of(target, HeadDrafter(head, toys.TREES[tree], name), 2, requests)
    step: Any = batch.device_step
    step.fixed_shapes, step.graphs = True, None
    for slot, request in enumerate(requests):
        batch.admit(slot, *request)
    batch.step()  # tables are made
    kv_length = step.kv_length(max(request.cache.length for request in batch.running))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            _, result, *_ = step.run_stages(step.slots, kv_length, requests[0][1], PhaseTimer(device))
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert (result[:, 0] >= 1).all(), "every sequence commits a token"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 0, 0.9)], ids=["T0", "T0.9"])
@pytest.mark.parametrize(
    ("name", "tree"), [("eagle3", "dynamic"), ("medusa", "static"), ("block", "chain"), ("mtp", "sampled")]
)
def test_replayed_graphs_write_the_tokens_of_a_step_that_is_not_captured(
    name: str, tree: str, sampling: Sampling, target_on: On, device: torch.device
) -> None:
    """Sequences of different lengths come and go, and the replays wait for nothing."""
    target = target_on("llama", torch.float32)
    head: Any = toys.head(name, target).to(device)
    requests = [
        (toys.prompt(seed, 5 + 9 * seed), RequestParams(30 + 5 * seed, sampling, seed=seed)) for seed in range(5)
    ]
    texts = {}
    for captures in (False, True):
        batch = batch_of(target, HeadDrafter(head, toys.TREES[tree], name), 2, requests)
        step: Any = batch.device_step
        step.fixed_shapes = True
        if not captures:
            step.graphs = None
        texts[captures] = [answer.tokens for answer in decoded(batch, requests)]
        if captures and device.type == "cuda":
            assert len(step.graphs.captured) >= 5, "each stage is captured"
    assert texts[True] == texts[False]


@pytest.mark.parametrize("size", [1, 3])
def test_heads_and_the_baseline_take_turns_with_the_graphs_of_their_first_request(
    size: int, target_on: On, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is captured again, and each head's graphs read its own rows of the lm_head, which both share."""
    target, made = target_on("llama", torch.float32), list[Batch]()
    heads: list[Any] = [copy.deepcopy(toys.head("hass", toys.target())).to(device) for _ in range(2)]
    for seed, head in enumerate(heads):
        head._embeddings = (target.embeddings,)
        choose_draft_vocab(head, torch.randint(100, (toys.VOCAB,), generator=torch.Generator().manual_seed(seed)))
    sources = [HeadDrafter(head, toys.TREES["dynamic"], "hass") for head in heads]
    prompts, settings = [toys.prompt(seed, 9) for seed in range(size)], RequestParams(30, GREEDY)
    expected = [autoregress(target, prompt, settings).tokens for prompt in prompts]
    original = Batch.__init__

    def noted(self: Batch, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(Batch, "__init__", noted)
    accepted: list[list[int]] = []
    for source in sources * 3:
        answers = speculate(target, source, prompts, settings, batch_size=size)
        assert [answer.tokens for answer in answers] == expected
        accepted.append([step.accepted for answer in answers for step in answer.steps])
    assert accepted[:2] == accepted[2:4] == accepted[4:], "no drafts of another head's rows"
    assert device.type != "cuda" or len(made) == 2
    target.idle.clear()
