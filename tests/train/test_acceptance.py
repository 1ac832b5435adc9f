"""What is measured while training: τ is the verifier's."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.measures import metrics
from heads.common.resolvers import ROOT
from heads.modules.layers import Recomputing
from inference.decode import RequestParams, speculate
from inference.drafters.head import HeadDrafter
from inference.target.target import Target
from inference.verification.sample import GREEDY
from tests import toys
from tests.train import jobs
from train.config import RunConfig
from train.loop import AcceptanceEvaluator
from train.objective import loss_weights, trainable
from train.step import Loss

PROMPTS = [toys.prompt(seed) for seed in range(5)]


def run(*overrides: str) -> RunConfig:
    return jobs.configured(["trainer.eval_prompts=3", "trainer.eval_tokens=14", "tree=chain", *overrides])


def judging(target: Target, run: RunConfig) -> AcceptanceEvaluator:
    return AcceptanceEvaluator(target, PROMPTS, run.trainer, run.tree, run.name)


def test_tau_is_the_verifiers_on_prompts_that_the_seed_draws() -> None:
    target, head = toys.target(), toys.head("eagle", toys.target())
    evaluator = judging(target, run("trainer.seed=3"))
    found = evaluator.tau(head, bool)
    made = [
        speculate(target, HeadDrafter(head, run().tree, "eagle"), prompt, RequestParams(14, GREEDY))
        for prompt in evaluator.prompts
    ]
    assert found["tau"] == sum(len(each.tokens) - 1 for each in made) / sum(len(each.steps) for each in made)
    assert found["tau_ci"] == metrics.tau_interval(made, 3)
    assert len(evaluator.prompts) == 3
    others = [replace(run(), trainer=replace(run().trainer, seed=seed)) for seed in range(3)]
    assert [judging(target, each).prompts for each in others] != [evaluator.prompts] * 3


def test_a_prompt_that_comes_again_makes_no_interval_narrower() -> None:
    target = toys.target()
    evaluator = AcceptanceEvaluator(target, PROMPTS[:1] * 3, run().trainer, run().tree, "again")
    assert evaluator.tau(toys.head("mlp", target), bool)["tau_ci"] is None  # of one prompt there is none
    ended = judging(target, run("trainer.eval_tokens=1")).tau(toys.head("mlp", target), bool)
    assert (ended["tau"], ended["tau_ci"]) == (1.0, None)  # no answer has a step


def step(head: Any, compiled: bool = False, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Return the gradient of one step."""
    target = toys.target("llama", torch.float64)
    token = torch.tensor([toys.prompt(1, 20), toys.prompt(2, 20)])
    document = torch.zeros_like(token)
    document[0, 9:] = 1
    features = target.features(token, document, head.feature_layers)
    for module in head.modules():
        if isinstance(module, Recomputing):
            module.recompute = recompute
    head.requires_grad_().zero_grad()
    depths = min(4, head.max_depth)
    config = replace(run().objective, depths=depths, losses={"soft_ce": 1.0})
    loss = Loss(head, config, compiled=compiled, autocast=False)
    weight = loss_weights(document, trainable(document, token * 0 + 1, config.depths), None, config)
    loss(features, weight.row, None, loss.chunks(weight.trained, token.device))[0].backward()
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["eagle3", "mtp", "eagle3 injected", "block of DSpark"])
def test_a_recomputed_step_has_the_same_gradient(name: str) -> None:
    target = toys.target("llama", torch.float64)
    same(step(toys.head(name, target)), step(toys.head(name, target), recompute=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, grad in one.items():
        torch.testing.assert_close(other[key], grad, rtol=1e-8, atol=1e-10)


COMPILED = """
import torch
from tests import toys
from tests.train.test_acceptance import same, step
torch.compile = lambda f, compile=torch.compile: compile(f, backend="eager")
target = toys.target("llama", torch.float64)
names = ["medusa", "eagle3", "eagle", "hass", "hydra", "mlp", "mtp", "block"]
for name in names:
    for recompute in (False, True):
        same(step(toys.head(name, target)), step(toys.head(name, target), compiled=True, recompute=recompute))
frames = torch._dynamo.utils.counters["frames"]
assert frames["ok"] >= len(names), frames
"""


@pytest.mark.slow
def test_a_compiled_step_has_the_same_gradient() -> None:
    """In a process without the checks of shapes, which torch.compile cannot follow."""
    subprocess.run([sys.executable, "-c", COMPILED], cwd=ROOT, check=True)
