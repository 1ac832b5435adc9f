"""The schedule's shape, weight decay on matrices alone, and the running average."""

from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir

from heads.common.resolvers import ROOT, register_resolvers
from train.checkpoints.state import TrainState
from train.config import TrainerConfig, run_config
from train.optim import Average, adamw, learning_rate


@pytest.fixture(scope="module")
def config() -> TrainerConfig:
    register_resolvers()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return replace(run_config(compose("train")).trainer, steps=100, warmup=0.1, lr=1.0, min_lr=0.1)


def test_warm_up_then_cosine(config: TrainerConfig) -> None:
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[99] < 0.11


def test_decay_on_matrices_alone(config: TrainerConfig) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = adamw([*module.parameters()], replace(config, weight_decay=0.5)).param_groups
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.5, 1), (0.0, 3)]


def test_average_follows_the_weights() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(module.weight, 0.0)
    average, off = Average(module, 0.9), Average(module, 0.0)
    torch.nn.init.constant_(module.weight, 1.0)
    average.update(module)
    off.update(module)
    assert TrainState(module, None, average).weights()["weight"].item() == pytest.approx(0.1)
    assert TrainState(module, None, off).weights()["weight"].item() == 1.0
