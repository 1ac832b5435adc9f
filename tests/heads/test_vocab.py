"""The pruned vocabulary's maps, and lm_heads of a head's own."""

from typing import Any

import pytest
import torch

from heads.base import DraftVocabulary
from heads.modules.fusion import chosen_layers
from heads.modules.vocab import DraftLmHead, argmax
from inference.drafters.policy import TreeConfig, grow
from inference.protocol import DraftContext
from inference.verification.rng import RequestRng
from inference.verification.sample import GREEDY
from tests import drafting, toys


def test_the_most_frequent_tokens_are_chosen_and_found_again() -> None:
    vocab = DraftVocabulary(4, 8)
    vocab.choose(torch.tensor([0, 7, 3, 7, 0, 9, 3, 1]))
    assert vocab.ids.tolist() == [1, 2, 3, 5]  # of tokens 2 and 6, equally frequent, the lower
    assert vocab.index_of(torch.tensor([[1, 2], [3, 5], [0, 7]])).tolist() == [[0, 1], [2, 3], [-1, -1]]
    full = vocab.scatter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert full[0, vocab.ids].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert full.isinf().sum() == 4


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_a_pruned_lm_head_starts_as_the_targets_rows(kind: str) -> None:
    embeddings, hidden = toys.target().embeddings, torch.randn(3, 32)
    vocab = DraftVocabulary(9, toys.VOCAB)
    readout = DraftLmHead(embeddings, kind, vocab)
    for seed in (1, 2):  # the target's kept rows follow the choice
        vocab.choose(torch.randint(50, (toys.VOCAB,), generator=torch.Generator().manual_seed(seed)))
        readout.start()
        torch.testing.assert_close(readout(hidden), embeddings.logits(hidden)[:, vocab.ids])


def test_a_low_rank_lm_head_starts_as_near_as_can_be() -> None:
    embeddings, hidden = toys.target().embeddings, torch.randn(5, 32)
    weight = embeddings.lm_head_weight()
    full = DraftLmHead(embeddings, "own", None, rank=32)
    torch.testing.assert_close(full(hidden), embeddings.logits(hidden), rtol=1e-4, atol=1e-4)
    low = DraftLmHead(embeddings, "own", None, rank=7)
    assert sum(p.numel() for p in low.parameters()) == 7 * (32 + toys.VOCAB)
    gap = torch.linalg.matrix_norm(weight - low.weight @ low.down.weight)
    best = torch.linalg.svdvals(weight)[7:].square().sum().sqrt()
    torch.testing.assert_close(gap, best, rtol=1e-3, atol=1e-4)


def test_a_rank_of_the_targets_lm_head_is_refused() -> None:
    with pytest.raises(ValueError, match="null with lm_head=shared"):
        DraftLmHead(toys.target().embeddings, "shared", None, 3)


def test_what_is_not_drafted_is_never_drafted() -> None:
    target = toys.target()
    head: Any = toys.head("hass", target)
    packed = target.features(torch.tensor([toys.prompt(1, 8)]), torch.zeros(1, 8, dtype=torch.long), ())
    state, level = drafting.extend(head, None, packed, torch.tensor(toys.prompt(2, 8)))
    assert level.logits.shape == (1, 1, 30)
    logits = drafting.logits(head, level)
    assert logits.shape == (1, toys.VOCAB)
    assert logits.isfinite().sum() == 30
    context = DraftContext([3], GREEDY, RequestRng(0, 0, coupled=False), 1)
    proposal = grow(head, state, level, TreeConfig("dynamic", 1, 30, 30, [], []), context)
    assert sorted(proposal.tree.token[1:].tolist()) == head.vocab.ids.tolist()
    assert set(logits[0].topk(30).indices.tolist()) == set(head.vocab.ids.tolist())


@pytest.mark.parametrize(
    ("wanted", "count", "layers", "found"),
    [
        (None, 3, 32, (1, 15, 28)), (None, 3, 80, (1, 39, 76)), (None, 5, 36, (1, 9, 17, 25, 33)),
        ([0, 4, 2], 3, 5, (0, 4, 2)), (None, 3, 5, (0, 1, 3)), (None, 3, 3, (0, 1, 2)),
        (None, 5, 4, (0, 1, 2, 3)), (None, 3, 1, (0,)),
    ],
)  # fmt: skip
def test_feature_layers(wanted: list[int] | None, count: int, layers: int, found: tuple[int, ...]) -> None:
    assert chosen_layers(wanted, count, layers) == found


@pytest.mark.parametrize("wanted", [[0, 5], [1, 1], []])
def test_layers_that_do_not_exist_are_refused(wanted: list[int]) -> None:
    with pytest.raises(ValueError, match="different layers from 0 to 4"):
        chosen_layers(wanted, 3, 5)


def test_under_autocast_gradients_are_added_up_in_fp32() -> None:
    """On a CPU, whose products of bf16 are of bf16, these; what a device is asked for is in test_device_step.py."""
    readout = DraftLmHead(toys.target().embeddings, "own", None)
    torch.manual_seed(0)
    states = [torch.randn(3, 32) for _ in range(50)]
    upstream = [torch.randn(3, toys.VOCAB).bfloat16() for _ in states]
    with torch.autocast("cpu", torch.bfloat16), readout.accumulate_gradient() as gradient:
        for state, grad in zip(states, upstream, strict=True):
            logits = readout(state)
            assert logits.dtype == torch.bfloat16
            logits.backward(grad)
    products = [grad.mT @ state.bfloat16() for grad, state in zip(upstream, states, strict=True)]
    wanted = torch.stack(products).double().sum(0)
    assert readout.weight.grad is None
    assert gradient.total.dtype == torch.float32
    torch.testing.assert_close(gradient.total.double(), wanted, rtol=1e-5, atol=1e-5)
    assert (sum(products[1:], products[0]).double() - wanted).norm() > 100 * (gradient.total - wanted).norm()


@pytest.mark.parametrize("size", [5, 128, 640, 8192])
def test_the_argmax_is_the_first_of_equals(size: int) -> None:
    logits = torch.randint(9, (3, 40, size)).float()
    assert torch.equal(argmax(logits), logits.argmax(-1))
    logits[1, 2, size // 2] = float("inf")
    assert argmax(logits)[1, 2] == size // 2
