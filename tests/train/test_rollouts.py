"""Rollouts: heads unroll drafts as text, nodes teach what the target says there, and a resumed run drafts the same."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from data.batches import Batches, Packed
from data.features.source import MicroBatch
from heads import HEADS
from inference.drafters.policy import TreeConfig
from tests import toys
from tests.train import strategy_job
from tests.train.test_objective import all_at_once
from train import rollouts
from train.losses import OnPolicyConfig
from train.rollouts import Rollouts, rollout_rows
from train.step import Loss, Stepper

TREE = TreeConfig("dynamic", 3, 2, 6, [], [])
CONFIG = OnPolicyConfig(2, 1, 12, 0.0, "all", 0.5, None)
DEPTHS = 4


def rollout(name: str, nodes: str, micro_rows: int = 2) -> tuple[Any, Any, list[MicroBatch], int]:
    """Return a target, a head, and its rollout on two texts: a chat's with two answers, and plain text."""
    target = toys.target("llama", torch.float64)
    head: Any = toys.head(name, target).double()
    token = torch.tensor([toys.prompt(seed, 10) for seed in (1, 2)])
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1, 1, 1], [1] * 10])
    batches = Batches(Packed(token, torch.zeros_like(token), mask), 2, micro_rows, 0, 0, 1)
    rollouts = Rollouts(target, lambda _: head, TREE, replace(CONFIG, nodes=nodes), DEPTHS, batches)
    return target, head, *rollouts(3, batches(3), {})


def trained(micro: MicroBatch) -> list[tuple[int, int, int, list[int]]]:
    """Return batch row, depth, row and path of everything that is trained."""
    batch = micro.batch
    assert batch.trained is not None
    assert batch.path is not None
    return [(b, d, t, batch.path[b, t, : d + 1].tolist()) for d, b, t in batch.trained.nonzero().tolist()]


def test_a_prompt_over_the_context_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is that of any answer of a text, of no padding."""
    target: Any = toys.target("llama", torch.float64)
    token, document = torch.arange(12)[None], torch.tensor([[0] * 10 + [-1] * 2])
    mask = torch.tensor([[0] * 5 + [1] + [0] * 2 + [1, 1, 0, 1]])
    batches = Batches(Packed(token, document, mask), 1, 1, 0, 0, 1)
    rollouts = Rollouts(target, lambda _: None, TREE, CONFIG, DEPTHS, batches)
    monkeypatch.setattr(target, "max_model_len", 6)
    found = {tuple(prompt) for seed in range(9) for prompt in rollouts.prompts(batches(0), random.Random(seed))}
    assert found == {(1, 2, 3, 4), (4, 5, 6, 7)}


@pytest.mark.parametrize("nodes", ["text", "accepted", "rejected", "all"])
def test_a_node_teaches_what_the_target_says_behind_its_tokens(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[int], list[Any]]] = []
    monkeypatch.setattr(rollouts, "rollout_rows", lambda *given: made.append(given[:2]) or rollout_rows(*given))
    target, _, [micro], read = rollout("eagle3", nodes)
    features, seen = micro.read(), set()
    for b, _, t, path in trained(micro):
        token = micro.batch.token[b, [*range(t + 1), *path]][None]
        own = target.features(token, token * 0, ()).last_hidden[0, -1]
        torch.testing.assert_close(features.last_hidden[b, path[-1]], own)
        assert micro.batch.document[b, t] == 0
        seen.add((b * 2 // len(features.token), *token[0].tolist()))
    rejected = [path for b, _, _, path in trained(micro) if micro.batch.document[b, path[-1]] < 0]
    assert bool(rejected) == (nodes in ("rejected", "all"))
    assert nodes != "all" or len(trained(micro)) == len(seen), "each node once"
    drafts = [one for _, passes in made for one in passes if one.tree is not None]
    verified = sum(len(one.tree.token) for one in drafts)
    assert read == verified + sum(len(prompt) + 1 for prompt, _ in made), "an answer's last pass drafts nothing"
    sizes = [(len(prompt) - 1, len(prompt) - 1 + sum(len(one.token) for one in passes[1:])) for prompt, passes in made]
    written = sum(first <= t + d <= last for first, last in sizes for t in range(last) for d in range(1, DEPTHS + 1))
    counts = {"text": written, "accepted": sum(len(one.path) for one in drafts), "all": verified}
    assert len(trained(micro)) == counts.get(nodes, len(trained(micro)))


@pytest.mark.parametrize("name", sorted(HEADS))
def test_a_head_unrolls_a_draft_as_it_unrolls_text(name: str) -> None:
    """And the loss takes these rows, in chunks as by plain autograd."""
    target, head, [micro], _ = rollout(name, "all")
    given = micro.read()
    drafts = head.unroll(given, DEPTHS)
    nodes, final = trained(micro), len(given.token) - 1
    for b, d, t, path in nodes[::15] + [node for node in nodes if node[0] == final]:
        token = micro.batch.token[b, [*range(t + 1), *path]][None]
        text = target.features(token, token * 0, head.feature_layers)
        torch.testing.assert_close(drafts[d].state[b, t], head.unroll(text, DEPTHS)[d].state[0, t])
    of = replace(
        strategy_job.run_of("eagle", "ddp").objective, losses={"ce": 1.0}, depths=DEPTHS, anchors=8,
        on_policy=replace(CONFIG, losses={"soft_ce": 1.0}),
    )  # fmt: skip
    head.requires_grad_(requires_grad=True)
    loss = Loss(head, of, compiled=False, autocast=False)
    anchors, weight = loss.sample_rows(micro.batch, torch.arange(len(micro.batch.token)))
    value, sums = loss(given, weight.row, anchors, loss.chunks(weight.trained, weight.row.device, given.path))
    whole, _ = all_at_once(head, head.unroll(given, DEPTHS, anchors), given, weight.row, loss.rollout_config)
    torch.testing.assert_close(value, whole)
    assert list(sums) == ["ce", "soft_ce", "accuracy"]
    torch.testing.assert_close(weight.row, 0.5 * weight.trained.float())
    torch.testing.assert_close(weight.normalizer, weight.row.sum((1, 2)))


def test_every_process_step_and_run_draws_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same ones again: of the seeds that its answers are decoded with."""
    target, seen, config = toys.target(), list[tuple[int, ...]](), replace(CONFIG, temperature=0.5, tokens=9)

    def decoded(_: Any, __: Any, prompts: list[list[int]], settings: list[Any], **___: Any) -> list[Any]:
        seen.append(tuple(each.seed for each in settings))
        assert [(each.sampling.temperature, each.max_new_tokens) for each in settings] == [(0.5, 9)] * 2
        return [SimpleNamespace(target_passes=[], steps=[]) for _ in prompts]

    monkeypatch.setattr("train.rollouts.speculate", decoded)
    monkeypatch.setattr("train.rollouts.rollout_rows", lambda *_: [])
    monkeypatch.setattr("train.rollouts._micro_batch", lambda *_: None)
    token = torch.tensor([toys.prompt(seed, 10) for seed in range(4)])
    packed = Packed(token, torch.zeros_like(token), torch.ones_like(token))
    for seed, rank, step in ((0, 0, 3), (1, 0, 3), (0, 1, 3), (0, 0, 4), (0, 0, 3)):
        batches = Batches(packed, 2, 2, seed, rank, 2)
        Rollouts(target, lambda _: toys.head("eagle", target), TREE, config, DEPTHS, batches)(step, batches(step), {})
    assert len(set(seen[:4])) == 4
    assert seen[4] == seen[0]


def stepper(**changed: Any) -> Stepper:
    """Return the step of a run with a rollout in every second step; `changed` of its objective."""
    run = strategy_job.run_of("eagle", "ddp")
    run = replace(run, objective=replace(run.objective, **changed))
    step = strategy_job.stepper(run, "eagle", Accelerator(cpu=True))
    target = toys.target()

    def decoding(weights: dict[str, Tensor]) -> Any:
        head = toys.head("eagle", target)
        head.load_state_dict(weights)
        return head

    config = replace(CONFIG, every=2)
    step.rollouts = Rollouts(target, decoding, TREE, config, run.objective.depths, step.source.batches)
    return step


def test_a_drafted_row_counts_for_its_weight_in_loss_and_normaliser() -> None:
    """A whole step: with A, B the sums over n rows of text and m drafted ones, (A + w B) / (n + w m).

    And of text the sum over depths of decay times factor times the mean over that depth's own rows.
    """
    plain = stepper(depths=3, depth_decay=0.5)
    plain.rollouts = None
    deep = plain(5, halted=lambda: False).record or {}
    assert plain.loss.progress == 0.25  # of 20 steps, by which the share of uncorrected logits goes
    plain.trainer = replace(plain.trainer, log_every=2)  # a record is then of two steps, its rates of one
    assert plain(6, halted=lambda: False).record is None
    both = plain(7, halted=lambda: False).record or {}
    rates = [both[name] * both["step_seconds"] for name in ("tokens_per_second", "rows_per_second")]
    assert rates == pytest.approx([plain.source.batches.step_tokens, deep["rows"]])
    by_loss = {name: sum(0.5**d * mean for d, mean in enumerate(deep[name])) for name in ("soft_ce", "smooth_l1")}
    assert deep["loss"] == pytest.approx(by_loss["soft_ce"] + 0.1 * by_loss["smooth_l1"], rel=1e-5)
    found, rows = [], []
    for weight in (None, 1.0, 0.5, 0.25):
        step = stepper(depths=1, on_policy=replace(CONFIG, weight=weight or 1.0))
        step.rollouts = None if weight is None else step.rollouts
        record = step(0, halted=lambda: False).record or {}
        found.append(record["loss"])
        rows.append(record["rows"])
    n, m = rows[0], rows[1] - rows[0]
    assert m > 4
    text, drafted = n * found[0], (n + m) * found[1] - n * found[0]
    assert drafted / m != pytest.approx(text / n, rel=0.02)
    assert found[2:] == pytest.approx([(text + w * drafted) / (n + w * m) for w in (0.5, 0.25)], rel=1e-5)


def test_a_resumed_run_drafts_the_same() -> None:
    one, two = stepper(), stepper()
    strategy_job.losses(one, 0, 3)
    for name, value in strategy_job.snapshot(one).items():
        two.state.write(name, value)
    first, second = (step(4, halted=lambda: False).record or {} for step in (one, two))
    assert first["rollout_tokens"] == second["rollout_tokens"] == two.progress["rollout_tokens"] > 0
    assert first["loss"] == second["loss"]
    assert first["grad_norm"] == second["grad_norm"]
    assert first["seconds"]["rollout"] > 0
