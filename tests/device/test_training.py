"""Training on the device: its features, and every head's loss and gradient, are those of the CPU but for rounding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import HEADS
from heads.base import Features
from heads.modules import flex
from heads.modules.attention import attend_rows, pattern
from heads.modules.vocab import GradientAccumulator
from inference.target.target import Target
from tests import toys
from tests.heads.test_flex import CASES, STEPS, T
from tests.train.test_objective import CONFIG, batch, config, loss_of
from train.objective import chunked, loss_weights, objective, trainable

pytestmark = pytest.mark.gpu
On = Callable[[str, torch.dtype], Target]


@pytest.mark.parametrize("name", toys.ARCHITECTURES)
def test_features_are_those_of_the_cpu(name: str, target_on: On) -> None:
    token = torch.tensor([toys.prompt(1, 16), toys.prompt(2, 16)])
    document = torch.zeros(2, 16, dtype=torch.long)
    document[0, 9:], document[1, 12:] = 1, -1
    found = []
    for target in (toys.target(name), target_on(name, torch.float32)):
        found.append(target.features(token, document, (0, 2)))
    assert found[1].last_hidden.device == target_on(name, torch.float32).device
    real = document >= 0
    torch.testing.assert_close(found[1].hidden.cpu()[real], found[0].hidden[real], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].last_hidden.cpu()[real], found[0].last_hidden[real], rtol=1e-3, atol=1e-3)


def gradient(name: str, device: torch.device, quick: bool, target: Target) -> tuple[float, Tensor]:
    """Return a head's loss and the gradient of all its parameters, on a device."""
    head: Any = toys.head(name, target).to(device).requires_grad_().train()
    for parameter in head.parameters():  # errors of rounding shall stay that
        if parameter.ndim == 2:
            parameter.data *= 0.3
    made, mask = batch(head.feature_layers)
    features = Features(*(part.to(device) for part in made[:4]))
    depths = min(4, head.max_depth)
    of = replace(config(soft_ce=1.0), depths=depths)
    with torch.autocast(device.type, torch.bfloat16, enabled=quick):
        loss, _ = loss_of(head, head.unroll(features, depths), features, mask.to(device), of)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().cpu() for p in head.parameters() if p.grad is not None])


def test_an_lm_heads_gradient_is_summed_in_fp32(device: torch.device) -> None:
    """Of 50 products in bf16, without a rounding of each; other devices than CUDA round each once."""
    weight = torch.empty(300, 32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        gradient = GradientAccumulator(weight)
    wanted = torch.zeros(300, 32, dtype=torch.float64, device=device)
    for _ in range(50):
        d_logits, hidden = (torch.randn(64, width, device=device).bfloat16() for width in (300, 32))
        gradient.add(d_logits.mT, hidden)
        wanted += d_logits.double().mT @ hidden.double()
    assert gradient.operand.dtype == torch.bfloat16
    assert gradient.total is not None
    near = 1e-3 if device.type == "cuda" else 1.0
    torch.testing.assert_close(gradient.total.double(), wanted, rtol=1e-5, atol=near)


def test_no_loss_waits_for_the_device(device: torch.device, target_on: On) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA alone says where the host waits")
    head: Any = toys.head("eagle3", target_on("llama", torch.float32)).to(device).requires_grad_()
    made, mask = batch(head.feature_layers)
    features = Features(*(part.to(device) for part in made[:4]))
    drafts = head.unroll(features, 2)
    weight = loss_weights(made.document, trainable(made.document, mask, CONFIG.depths), None, CONFIG)
    row = weight.row.to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunks = chunked(weight.trained, 8, features.token.device)
        loss, _ = objective(head, drafts, features, row, CONFIG, chunks)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("quick", "near"), [(False, 1e-3), (True, 0.05)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [*HEADS, *toys.OPTIONS])
def test_a_step_is_that_of_the_cpu(name: str, quick: bool, near: float, device: torch.device, target_on: On) -> None:
    loss, grad = gradient(name, torch.device("cpu"), False, toys.target())
    found, theirs = gradient(name, device, quick, target_on("llama", torch.float32))
    assert found == pytest.approx(loss, rel=near)
    assert torch.cosine_similarity(grad, theirs, dim=0) > (0.98 if quick else 0.9999)
    assert float(theirs.norm()) == pytest.approx(float(grad.norm()), rel=2 * near)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_attention_of_drafted_rows_is_that_of_the_blocks(
    name: str, dtype: torch.dtype, near: float, device: torch.device
) -> None:
    """Forward and gradient against the CPU's blocks in fp64, on the same numbers; on CUDA by the fused kernel."""
    torch.manual_seed(0)
    seen, queries = CASES[name]()
    sizes = [(6, queries), (2, T), (2, T), *[(2, queries)] * (2 * STEPS.get(name, 1))]
    inputs = [torch.randn(2, heads, rows, 64).to(dtype) for heads, rows in sizes]
    upstream, results = torch.randn(2, 6, queries, 64).to(dtype), []
    for on, wide in ((device, dtype), (torch.device("cpu"), torch.float64)):
        here = replace(
            seen, first=seen.first.to(on), last_row=None if seen.last_row is None else seen.last_row.to(on), masks={}
        )
        query, *halves = leaves = [x.to(on, wide).requires_grad_() for x in inputs]
        pairs = list(zip(halves[::2], halves[1::2], strict=True))
        assert flex.runs(query, halves[1]) == (on.type == "cuda")
        out = attend_rows(query, pairs[0], pairs[1:], here)
        results.append([out.detach(), *torch.autograd.grad((out * upstream.to(on, wide)).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        assert (found.cpu() - expected).norm() <= near * expected.norm()


def test_the_attention_of_a_long_row_takes_no_square_of_it(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CUDA device counts its memory")
    query, *halves = (torch.randn(1, heads, 16384, 64, device=device, requires_grad=True) for heads in (8, 2, 2, 2, 2))
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seen = pattern(torch.arange(16384, device=device)[None], None, 1)
    attend_rows(query, (halves[0], halves[1]), [(halves[2], halves[3])], seen).square().sum().backward()
    assert torch.cuda.max_memory_allocated(device) - before < 20 * query.nbytes  # scores of all heads: 256 times it
