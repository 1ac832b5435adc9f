"""Losses against their formulas, and sums that neither padding nor batching changes."""

import pytest
import torch

from heads import rows
from heads.base import Draft, Features
from tests import toys
from train.objective import LOSSES, ObjectiveConfig, Rows, counts, noisy, objective


def batch() -> tuple[Features, torch.Tensor]:
    target = toys.target()
    token = torch.tensor([toys.prompt(1, 16), toys.prompt(2, 16)])
    document = torch.zeros(2, 16, dtype=torch.long)
    document[0, 9:], document[1, 12:] = 1, -1
    mask = (torch.arange(16) > 3).long().expand(2, 16).clone()
    return target.features(token, document), mask


def config(**losses: float) -> ObjectiveConfig:
    return ObjectiveConfig(losses, depth_decay=0.5, depths=2, noise=0.0)


def test_losses_by_their_formulas() -> None:
    torch.manual_seed(0)
    x = Rows(torch.randn(5, 7), torch.randn(5, 7), torch.randint(7, (5,)), torch.randn(5, 3), torch.randn(5, 3))
    p, log_q = x.target.softmax(-1), x.draft.log_softmax(-1)
    for r in range(5):
        assert LOSSES["ce"](x)[r].item() == pytest.approx(-log_q[r, x.label[r]].item(), rel=1e-5)
        assert LOSSES["soft_ce"](x)[r].item() == pytest.approx(-(p[r] * log_q[r]).sum().item(), rel=1e-5)
        gap = (x.feature[r] - x.true_feature[r]).abs()
        expected = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean().item()
        assert LOSSES["smooth_l1"](x)[r].item() == pytest.approx(expected, rel=1e-5)


def test_the_teacher_is_the_target_itself() -> None:
    """A head that copies the target's next features has the entropy as soft_ce, no feature loss, full accuracy."""
    features, mask = batch()
    ends = toys.target().ends
    drafts = [
        Draft(ends.logits(rows.teacher(features.last, depth)), rows.teacher(features.last, depth)) for depth in (1, 2)
    ]
    _, sums = objective(drafts, features, ends, mask, config(smooth_l1=1.0, soft_ce=1.0))
    assert sums["smooth_l1"].abs().max() == 0
    assert sums["accuracy"].tolist() == counts(features, mask, 2).tolist()


def test_micro_batches_sum_to_the_whole() -> None:
    features, mask = batch()
    ends, head = toys.target().ends, toys.head("eagle", toys.target())
    chosen = config(smooth_l1=1.0, soft_ce=0.1)
    whole, _ = objective(head.unroll(features, 2), features, ends, mask, chosen)
    parts = torch.zeros(2)
    for b in range(2):
        piece = Features(*(part[b : b + 1] for part in features))
        parts += objective(head.unroll(piece, 2), piece, ends, mask[b : b + 1], chosen)[0]
    torch.testing.assert_close(parts, whole)


def test_depth_decay_and_unknown_losses() -> None:
    features, mask = batch()
    drafts = toys.head("eagle", toys.target()).unroll(features, 2)
    losses, sums = objective(drafts, features, toys.target().ends, mask, config(soft_ce=2.0))
    torch.testing.assert_close(losses, sums["soft_ce"] * torch.tensor([2.0, 1.0]))
    with pytest.raises(ValueError, match="choose from ce, soft_ce"):
        config(mse=1.0)
    with pytest.raises(ValueError, match="predicts no features"):
        objective([d._replace(feature=None) for d in drafts], features, toys.target().ends, mask, config(smooth_l1=1.0))


def test_noise_depends_on_seed_and_row_alone() -> None:
    features, _ = batch()
    index = torch.tensor([3, 8])
    both = noisy(features, 0.2, 0, index)
    alone = noisy(Features(*(part[1:] for part in features)), 0.2, 0, index[1:])
    assert both.last[1:].equal(alone.last)
    assert not noisy(features, 0.2, 1, index).last.equal(both.last)
    spread = (both.last - features.last).abs().max()
    assert 0.9 * 0.1 * 32 < spread <= 0.1 * 32
