"""Drafters are swapped while requests are decoded: no request is lost, and no token is another."""

from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.formats.store import save_head
from inference import api
from inference.batch import SwappableDrafter, batch_of
from inference.decode import Generation, RequestParams, autoregress, speculate
from inference.drafters.head import HeadDrafter
from inference.drafters.plain import Baseline
from inference.drafters.policy import TreeConfig, best_schedule
from inference.protocol import Drafter
from inference.target.model import TargetOutput
from inference.target.target import Target
from inference.verification.sample import GREEDY, Sampling
from tests import toys
from tests.inference import model_free

T1 = Sampling(1.0, 0, 1.0)
# Wide enough for most of a toy's 40 tokens, so that much is accepted.
TREES = {
    **toys.TREES,
    "dynamic": TreeConfig("dynamic", 2, 30, 36, [], []),
    "static": TreeConfig("static", 0, 0, 0, [[rank] for rank in range(25)], []),
}


def head(name: str, target: Target, tree: str) -> HeadDrafter:
    return HeadDrafter(toys.drafter(name, target, tree).head, TREES[tree], f"{name} {tree}")


def sources(target: Target) -> list[Drafter]:
    """One of every way of drafting in a batch's step, and of those that go one sequence after another."""
    eagle, pausing = head("eagle", target, "dynamic"), best_schedule([(1, TREES["dynamic"]), (2, None)])
    return [
        eagle,
        head("medusa", target, "static"),
        Baseline(target.device),
        head("eagle3 injected", target, "chain"),
        HeadDrafter(eagle.head, TREES["dynamic"], "pausing", pausing),
        model_free.make("prompt_lookup", target),
        head("block", target, "best_first"),
        model_free.make("suffix", target),
        model_free.make("lookahead", target),
    ]


def requests(count: int, sampling: Sampling) -> tuple[list[list[int]], list[RequestParams]]:
    prompts = [toys.prompt(seed, 1 + 3 * seed % 17) for seed in range(count)]
    return prompts, [
        RequestParams(8 + 7 * (seed % 5), sampling, seed=seed, rule="coupled", stop=("w1",) if seed % 4 == 3 else ())
        for seed in range(count)
    ]


def alone(target: Target, count: int, sampling: Sampling) -> list[tuple[list[int], str]]:
    prompts, settings = requests(count, sampling)
    plain = Baseline(target.device)
    return [answer(speculate(target, plain, *one)) for one in zip(prompts, settings, strict=True)]


def answer(generation: Generation) -> tuple[list[int], str]:
    return generation.tokens, generation.finish_reason


def swapped(target: Target, drafters: list[Drafter], count: int, sampling: Sampling, every: int) -> tuple[Any, int]:
    """Decode requests, with the next drafter in service after every few calls; return them and how many swaps."""
    swappable, others, calls, swaps = SwappableDrafter(drafters[0]), cycle(drafters[1:] + drafters[:1]), 0, 0
    prompts, settings = requests(count, sampling)

    def reported(*_: Any) -> None:
        nonlocal calls, swaps
        calls += 1
        if calls % every == 0:
            swappable.swap(next(others))
            swaps += 1

    return speculate(target, swappable, prompts, settings, reported, batch_size=3), swaps


@pytest.mark.parametrize("sampling", [GREEDY, T1], ids=["T0", "T1"])
def test_swaps_between_steps_change_no_text(sampling: Sampling) -> None:
    target = toys.target()
    generations, swaps = swapped(target, sources(target), 8, sampling, 5)
    assert swaps >= len(sources(target))
    assert [answer(one) for one in generations] == alone(target, 8, sampling)
    assert sum(map(toys.lively, (one.tokens for one in generations))) > 3
    assert {one.finish_reason for one in generations} == {"length", "stop"}
    accepted = [step.accepted for one in generations for step in one.steps]
    assert sum(accepted) > 10, "the drafts were worth nothing, so that wrong ones would not show"


@pytest.mark.slow
def test_a_thousand_swaps_change_no_text() -> None:
    target, settings = toys.target(), RequestParams(150, GREEDY)
    heads = cycle([head("medusa", target, "chain"), head("mlp", target, "chain")])
    swappable, swaps = SwappableDrafter(next(heads)), 0
    batch = batch_of(target, swappable, 1)
    for seed in range(8):
        generation = batch.admit(seed, toys.prompt(seed), settings)
        while batch.running:
            swappable.swap(next(heads))
            batch.step()
            swaps += swappable.last_good is swappable.drafter is batch.drafter
            batch.release()
        assert generation.tokens == autoregress(target, toys.prompt(seed), settings).tokens
    assert swaps >= 1000


@pytest.mark.parametrize("name", [*toys.HEAD_CONFIGS])
def test_a_state_that_is_made_of_the_text_drafts_as_one_that_grew_with_it(name: str) -> None:
    target = toys.target("llama", torch.float64)
    drafter = head(name, target, "chain" if name != "medusa" else "static")
    batch = batch_of(target, drafter, 1)
    batch.admit(0, toys.prompt(0, 9), RequestParams(40, GREEDY))
    for _ in range(10):
        batch.step()
    step, (_, grown) = batch.device_step, batch.device_step.dry_run(batch.running)
    step.draft_batch = drafter.batch(1)
    token = torch.tensor(batch.running[0].token_ids)
    out = target.prefill(token[:-1], target.cache(), step.draft_batch.traits.feature_layers)
    step.draft_batch.start_sequence(0, token.tolist(), out)
    assert torch.equal(step.dry_run(batch.running)[1].tree.token, grown.tree.token)


@pytest.mark.parametrize("name", ["eagle", "suffix"])
def test_in_a_batch_it_goes_on_for_the_texts_that_it_took_in(name: str) -> None:
    """A slot is vacant at the swap, which the last sequence takes; another text's draft would be accepted less."""
    target = toys.target("llama", torch.float64)

    def drafter() -> Drafter:
        return head("eagle", target, "dynamic") if name == "eagle" else model_free.make("suffix", target)

    swappable = SwappableDrafter(Baseline(target.device))
    batch = batch_of(target, swappable, 4)
    several = [
        batch.admit(number, toys.prompt(number, 5), RequestParams(4 if number == 1 else 30, GREEDY))
        for number in range(4)
    ]
    for _ in range(3):
        batch.step()
        batch.release()
    swappable.swap(drafter())
    for _ in range(8):
        batch.step()
    expected = []
    for number in (0, 2, 3):
        one = batch_of(target, swappable := SwappableDrafter(Baseline(target.device)), 1)
        generation = one.admit(0, toys.prompt(number, 5), RequestParams(30, GREEDY))
        for _ in range(3):
            one.step()
        swappable.swap(drafter())
        for _ in range(8):
            one.step()
        expected.append([(step.drafted, step.accepted) for step in generation.steps])
    assert [[(step.drafted, step.accepted) for step in several[number].steps] for number in (0, 2, 3)] == expected
    assert sum(accepted for steps in expected for _, accepted in steps) > (3 if name == "eagle" else 0)


class Failing(Baseline):
    """Fails on texts of so many tokens or more."""

    name = "failing"

    def __init__(self, device: torch.device, length: int, kind: type[Exception] = IndexError) -> None:
        super().__init__(device)
        self.length, self.kind = length, kind

    def start_sequence(self, slot: int, token: list[int], features: TargetOutput) -> None:
        if len(token) > self.length:
            raise self.kind("row 9 of 8\nand more")


@pytest.mark.parametrize(("length", "kind"), [(0, IndexError), (9, OSError)])
def test_a_drafter_that_fails_is_refused_and_no_request_is_lost(
    length: int, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    target = toys.target()
    failing = Failing(target.device, length, kind)
    generations, swaps = swapped(target, [head("eagle", target, "chain"), failing], 4, GREEDY, 8)
    assert [answer(one) for one in generations] == alone(target, 4, GREEDY)
    assert swaps > 2
    lines = {record.getMessage() for record in caplog.records}
    assert lines == {"eagle chain is put back: failing fails (row 9 of 8 and more)"}


def test_a_drafter_that_fails_in_one_of_two_batches_is_out_of_service() -> None:
    target = toys.target()
    former, failing = Baseline(target.device), Failing(target.device, 9)
    swappable = SwappableDrafter(former)
    batch = batch_of(target, swappable, 1)
    batch.admit(0, toys.prompt(0, 9), RequestParams(9, GREEDY))
    swappable.swap(failing)
    swappable.last_good = failing  # in the other batch
    batch.take_new_drafter()
    assert (swappable.drafter, swappable.last_good) == (former, former)


def test_a_rule_for_some_trees_alone_is_refused_before_another_tree_comes() -> None:
    target = toys.target()
    with pytest.raises(ValueError, match="rule=block is not for every tree"):
        speculate(
            target, SwappableDrafter(head("eagle", target, "chain")), [[1, 2]], RequestParams(4, GREEDY, rule="block")
        )


def test_a_tree_beyond_the_context_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt, settings = toys.target(), toys.prompt(0, 5), RequestParams(9, GREEDY)
    swappable, wide = SwappableDrafter(Baseline(target.device)), TreeConfig("dynamic", 2, 13, 182, [], [])
    swappable.swap(HeadDrafter(toys.drafter("medusa", target, "static").head, wide, "wide"))
    assert speculate(target, swappable, prompt, settings).tokens == autoregress(target, prompt, settings).tokens
    assert "plain is put back: wide fails (wide: a tree of" in caplog.text


def test_another_drafter_is_loaded_for_the_same_target(tmp_path: Path) -> None:
    target = toys.target()
    save_head(tmp_path / "head", toys.head("eagle", target), target.spec, asdict(TREES["dynamic"]))
    same, drafter = api.load(str(tmp_path / "head"), "tree.depth=1", target=target)
    assert same is target
    assert (drafter.name, drafter.tree) == (str(tmp_path / "head"), "dynamic-d1k30n36")
    with pytest.raises(ValueError, match=r"model\.dtype is given beside a target: leave one of them out"):
        api.load(None, "model.dtype=float32", target=target)
