"""The optimisers, their schedule, and the EMA of the weights."""

import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.base import NamedTensors, draft_size
from heads.common.typed import Json
from heads.modules.vocab import AccumulatingModule
from inference.target.config import fast_dtype
from train.config import TrainerConfig
from train.distributed.strategy import local_shard

FUSED = ("cuda",)  # devices with a fused update, whose step counter is on the device


def adamw(parameters: list[nn.Parameter], config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay only on matrices (Loshchilov and Hutter, 2019)."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(p.device.type in FUSED for p in parameters)
    return torch.optim.AdamW([group for group in groups if group["params"]], config.lr, config.betas, fused=fused)


class Muon(torch.optim.Muon):
    """torch's Muon, but with matrix products in the device's fast dtype.

    torch 2.13 orthogonalises in bf16 on any device. A CPU without bf16 products takes ten times as long for these as
    for fp32: more than for all else in a training step of SmolLM2.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step with Nesterov momentum and decoupled weight decay; `closure` is not called."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(buffer, momentum).to(fast_dtype(p.device)), group["ns_coefficients"])
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * 0.2 * math.sqrt(max(p.shape)))


def orthogonal(matrix: Float[Tensor, "m n"], coefficients: tuple[float, float, float]) -> Float[Tensor, "m n"]:
    """Return a matrix with the same singular vectors and singular values near 1: five Newton-Schulz iterations."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


class MuonAndAdamW:
    """Muon (Jordan et al., 2024) for hidden matrices, AdamW for all else, as one optimiser.

    Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982), so one learning rate and schedule serve both.
    AdamW takes embeddings and lm_heads.
    """

    def __init__(self, head: Any, trained: list[nn.Parameter], config: TrainerConfig) -> None:
        inner = hidden_matrices(head)
        moved = set(map(id, inner))
        others = [p for p in trained if id(p) not in moved]
        self.optimizers: list[torch.optim.Optimizer] = []
        if inner:
            self.optimizers.append(Muon(inner, config.lr, config.weight_decay, momentum=config.momentum))
        if others:  # empty if only LoRA adapters are trained
            self.optimizers.append(adamw(others, config))
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """Take a step of each optimiser."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradient."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def hidden_matrices(head: Any) -> list[nn.Parameter]:
    """Return the trained hidden matrices: those that are not embeddings or lm_heads.

    Modules are distinguished by class, since a draft vocabulary may be as large as the hidden size; an adapter's matrix
    over the vocabulary counts as an lm_head.
    """
    sizes = {head.embeddings.vocab_size, draft_size(head)}
    over_tokens = tuple(
        f"{name.removesuffix('.base_layer')}."
        for name, module in head.named_modules()
        if isinstance(module, (nn.Embedding, AccumulatingModule))
    )
    return [
        p for name, p in head.named_parameters()
        if p.requires_grad and p.ndim == 2 and not (p.shape[0] in sizes and name.startswith(over_tokens))
    ]  # fmt: skip


def optimizer(head: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer | MuonAndAdamW:
    """Return the optimiser of `trainer.optimizer` for a head's trained parameters."""
    trained = [p for p in head.parameters() if p.requires_grad]
    return MuonAndAdamW(head, trained, config) if config.optimizer == "muon" else adamw(trained, config)


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Return the learning rate of step `step` (from 0): linear warm-up, then a cosine to `min_lr` of the peak.

    With a `cooldown` below 1 the rate is constant before the cosine, which takes that share of the steps at the end, so
    a run can be lengthened from a checkpoint before it (Hägele et al., arXiv 2405.18392). There is no scheduler state.
    """
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    begin = max(warmup, cooldown_begin(config))
    fraction = max(0, step - begin) / max(1, config.steps - begin)
    return config.lr * (config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * fraction)))


def same_rates(config: TrainerConfig, schedule: Json, steps: int) -> bool:
    """Return whether the first steps have the same rates under another `schedule` of steps, warm-up and cooldown."""
    other = replace(config, **schedule)
    return all(learning_rate(step, other) == learning_rate(step, config) for step in range(steps))


def cooldown_begin(config: TrainerConfig) -> int:
    """Return the step at which the cosine begins, regardless of the warm-up."""
    return config.steps - round(config.cooldown * config.steps)


class Ema:
    """An exponential moving average of the trained weights; decay 0 turns it off.

    Each process averages its shard of the weights (train/distributed/strategy.py).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights: NamedTensors = {}
        if decay:
            self.weights = {k: local_shard(v).clone() for k, v in trained_state(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Update the average with the current weights."""
        if self.decay:
            for name, value in trained_state(module).items():
                self.weights[name].lerp_(local_shard(value), 1 - self.decay)


def trained_state(module: nn.Module) -> NamedTensors:
    """Return the trained part of a module's state."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if value.requires_grad}
