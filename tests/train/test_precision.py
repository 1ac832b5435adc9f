"""A training step in bf16 autocast, as accelerators and CPUs with bf16 units take it by default."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import HEADS
from tests import toys
from tests.train.test_objective import batch, config, loss_of


def gradient(name: str, autocast: bool) -> tuple[float, Tensor]:
    """Return a head's loss and the gradient of all its parameters."""
    head: Any = toys.head(name, toys.target()).requires_grad_()
    for parameter in head.parameters():  # bf16 errors of a few percent shall stay that
        if parameter.ndim == 2:
            parameter.data *= 0.3
    features, mask = batch(head.feature_layers)
    depths = min(4, head.max_depth)
    of = replace(config(soft_ce=1.0), depths=depths)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, _ = loss_of(head, head.unroll(features, depths), features, mask, of)
    loss.backward()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in head.parameters())
    found = [p.grad.flatten() for p in head.parameters() if p.grad is not None]
    return loss.item(), torch.cat(found)


@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_a_step_in_bf16_is_that_in_fp32_but_for_rounding(name: str) -> None:
    (loss, grad), (quick_loss, quick_grad) = gradient(name, False), gradient(name, True)
    assert quick_loss == pytest.approx(loss, rel=0.05)
    assert torch.cosine_similarity(grad, quick_grad, dim=0) > 0.98
    assert float(quick_grad.norm()) == pytest.approx(float(grad.norm()), rel=0.1)
