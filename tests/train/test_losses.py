"""Losses against their formulas, over the whole vocabulary and over a pruned one."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from omegaconf import OmegaConf

from heads.common.typed import typed
from tests.train.test_objective import CONFIG
from train.losses import LOSSES, LossInputs, ObjectiveConfig, TeacherProbs


def rows(width: int) -> LossInputs:
    """Five rows of seven tokens, of which the head drafts `width`; row 4's own token is not among them."""
    torch.manual_seed(0)
    log_p = torch.randn(5, 7).log_softmax(-1)
    label = torch.tensor([1, 0, 2, 3, -1 if width < 7 else 6])
    best = log_p.argmax(-1)
    teacher = TeacherProbs(log_p[:, :width], torch.where(best < width, best, -1))
    return LossInputs(
        teacher, torch.arange(5), torch.randn(5, width).log_softmax(-1), label, torch.randn(5, 3), torch.randn(5, 3),
        torch.randn(5), width == 7, torch.randn(5, width), 2,
    )  # fmt: skip


@pytest.mark.parametrize("width", [7, 4])
def test_losses_by_their_formulas(width: int) -> None:
    x = rows(width)
    assert x.covered.all() == (width == 7)
    for r in range(5):
        p, q = x.log_p[r].exp().tolist(), x.log_q[r].exp().tolist()
        law = [each / sum(p) for each in p]
        overlap = sum(map(min, zip(p, q, strict=True)))
        known = float(x.covered[r])
        forward = known * sum(a * math.log(a / b) for a, b in zip(law, q, strict=True))
        middle = [(a + b) / 2 for a, b in zip(law, q, strict=True)]
        share = math.exp(-3 * overlap)
        best = sorted(range(width), key=lambda i: -p[i])[:4]
        gap = [abs(a - b) for a, b in zip(x.feature[r].tolist(), x.true_feature[r].tolist(), strict=True)]
        low = x.scores[r].softmax(-1).tolist()
        rank = sum(score > low[q.index(max(q))] for score in low)
        sure = 1 / (1 + math.exp(-float(x.confidence[r])))
        expected = {
            "ce": -math.log(q[int(x.label[r])]) if x.label[r] >= 0 else 0.0,
            "soft_ce": known * -sum(a * math.log(b) for a, b in zip(law, q, strict=True)),
            "kl": forward,
            "reverse_kl": known * sum(b * math.log(b / a) for a, b in zip(law, q, strict=True)),
            "jsd": known
            * sum(a * math.log(a / m) + b * math.log(b / m) for a, b, m in zip(law, q, middle, strict=True))
            / 2,
            "tv": 1 - overlap,
            "nla": -math.log(overlap),
            "lk": share * forward + (1 - share) * (1 - overlap),
            "top_k": -sum(p[i] * math.log(q[i]) for i in best),
            "smooth_l1": sum(0.5 * g * g if g < 1 else g - 0.5 for g in gap) / 3,
            "confidence": -overlap * math.log(sure) - (1 - overlap) * math.log(1 - sure),
            "candidates": sum(a * math.log(a / b) for a, b in zip(q, low, strict=True)),
            "missed": float(rank >= 2),
        }
        assert expected.keys() == LOSSES.keys()
        for name, value in expected.items():
            assert LOSSES[name](x, CONFIG)[r].item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", LOSSES)
def test_a_law_that_has_nothing_for_the_drafted_tokens_leaves_the_loss_finite(name: str) -> None:
    x = rows(4)
    log_q = x.log_q.clone().requires_grad_()
    far = replace(x, teacher=TeacherProbs(torch.full((5, 4), -200.0), torch.full((5,), -1)), log_q=log_q)
    value = LOSSES[name](far, CONFIG).sum()
    assert value.isfinite()
    if value.requires_grad:
        (grad,) = torch.autograd.grad(value, log_q)
        assert grad.isfinite().all()


def test_each_k_has_its_own_most_likely_tokens_and_none_more_than_there_are() -> None:
    teacher = rows(4).teacher
    assert [teacher.top_k(k)[1].shape[1] for k in (2, 3, 9, 2)] == [2, 3, 4, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"losses": {"mse": 1.0}}, "losses.mse: unknown, choose from ce, soft_ce"),
        ({"losses": {"ce": 0.0}}, "no loss has a weight"),
        ({"base_loss_share": [1.0]}, r"base_loss_share is \[1\.0\], expected a list of 2"),
        ({"depths": 0}, "objective.depths is 0"),
        ({"depth_weights": "linear"}, "choose decay, dpace"),
    ],
)
def test_bad_numbers_are_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        typed(ObjectiveConfig, OmegaConf.create({"objective": {**asdict(CONFIG), **change}}).objective)


@pytest.mark.parametrize("name", ["lk", "confidence"])
def test_the_acceptance_that_weighs_or_is_predicted_is_taken_as_it_is(name: str) -> None:
    """A gradient through it would make the draft easier to weigh or to predict, and not better."""
    x = replace(rows(7), log_q=rows(7).log_q.requires_grad_(), confidence=torch.randn(5, requires_grad=True))
    share = (-CONFIG.eta * x.overlap().detach()).exp()
    mixed = share * LOSSES["kl"](x, CONFIG) + (1 - share) * LOSSES["tv"](x, CONFIG)
    value = LOSSES[name](x, CONFIG)
    if name == "lk":
        wanted, found = (torch.autograd.grad(each.sum(), x.log_q)[0] for each in (mixed, value))
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.autograd.grad(value.sum(), [x.log_q, x.confidence], allow_unused=True)[0] is None
