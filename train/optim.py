"""AdamW, its schedule, and the running average of the weights."""

import math

import torch
from torch import Tensor, nn

from train.config import TrainerConfig


def adamw(module: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices alone (Loshchilov and Hutter, 2019)."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=(beta1, beta2))


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, then a cosine to `min_lr` of the peak.

    A function of the step alone, so there is no scheduler state to save.
    """
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, config.steps - warmup)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * done)))


class Average:
    """An exponential moving average of the trained weights; decay 0 is off and keeps nothing."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        if decay:
            self.weights = {k: v.detach().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move towards the present weights."""
        if self.decay:
            for name, value in module.state_dict().items():
                self.weights[name].lerp_(value.to(self.weights[name]), 1 - self.decay)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights to evaluate and to keep: the average if there is one."""
        return self.weights if self.decay else {k: v.detach() for k, v in module.state_dict().items()}
