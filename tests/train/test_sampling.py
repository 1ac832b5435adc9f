"""What a step samples follows from the seed, the step and a row's number, and from nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batches import Batches, Packed
from heads.base import Features
from tests import toys
from tests.train import strategy_job
from train.objective import noisy, row_keys, sample_anchors, trainable, trained_rows
from train.step import Loss

ROWS, LENGTH, WIDTH = 8, 16, 6


def states(rows: int = 2, layers: int = 2, dtype: torch.dtype = torch.float32) -> Features:
    token = torch.zeros(rows, LENGTH, dtype=torch.long)
    hidden, last = torch.zeros(rows, LENGTH, layers, WIDTH, dtype=dtype), torch.zeros(rows, LENGTH, WIDTH, dtype=dtype)
    return Features(token, hidden, last, token)


def test_no_two_rows_of_a_run_sample_the_same() -> None:
    """Not even a row and its neighbour in the next step, whose numbers would meet if they only added up."""
    keys = [row_keys(seed, step, torch.arange(40)) for seed in range(3) for step in range(30)]
    assert len(torch.cat(keys).unique()) == 3 * 30 * 40


def test_anchors_follow_from_the_row_and_come_first_where_they_are_useful() -> None:
    document = torch.tensor([[0] * 9 + [1] * 7, [0] * 12 + [-1] * 4])
    mask = torch.ones_like(document)
    has_loss, keys = trainable(document, mask, 2).any(0), row_keys(0, 7, torch.tensor([3, 8]))
    chosen, more = sample_anchors(has_loss, 5, keys), sample_anchors(has_loss, 14, keys)
    assert chosen is not None
    assert more is not None
    assert chosen.diff().gt(0).all(), "in order, none twice"
    assert has_loss.gather(1, chosen).all()
    for b in range(2):
        assert {*chosen[b].tolist()} < {*more[b].tolist()}
        assert {*has_loss[b].nonzero()[:, 0].tolist()} < {*more[b].tolist()}
    again = sample_anchors(has_loss[1:], 5, keys[1:])
    assert again is not None
    assert again.equal(chosen[1:])
    assert sample_anchors(has_loss, LENGTH, keys) is None


def test_the_rows_that_are_trained_are_drafted_from_and_few_others() -> None:
    has_loss = torch.zeros(2, 64, dtype=torch.bool)
    has_loss[0, 10:19], has_loss[1, 50:54] = True, True
    kept = trained_rows(has_loss)
    assert kept is not None
    assert kept.shape == (2, 12), "as many as the sequence with most, to a sixteenth of the length"
    assert kept.diff().gt(0).all()
    for b in range(2):
        assert {*has_loss[b].nonzero()[:, 0].tolist()} < {*kept[b].tolist()}
    assert trained_rows(torch.ones(2, 64, dtype=torch.bool)) is None
    assert trained_rows(torch.zeros(2, 64, dtype=torch.bool)) is None


def test_nothing_but_anchors_is_trained() -> None:
    head: Any = toys.head("block", toys.target())
    config = replace(strategy_job.run_of("eagle", "ddp").objective, depths=4, anchors=5)
    token = torch.zeros(2, LENGTH, dtype=torch.long)
    batch = Batches(Packed(token, token, torch.ones_like(token)), 2, 2, 0, 0, 1)(0)[0]
    anchors, weight = Loss(head, config, compiled=False, autocast=False).sample_rows(batch, row_keys(0, 0, batch.index))
    assert anchors is not None
    trained = weight.trained.any(0)
    assert trained.any()
    assert all({*trained[b].nonzero()[:, 0].tolist()} <= {*anchors[b].tolist()} for b in range(2))
    assert weight.trained.sum() < trainable(batch.document, batch.loss_mask, config.depths).sum()


def test_noise_is_uniform_and_scaled_by_the_length() -> None:
    changed = noisy(states(200), 0.2, row_keys(0, 0, torch.arange(200)))
    scale = 0.2 * 512 / LENGTH
    for part in (changed.last_hidden, changed.hidden):
        level = part / scale + 0.5
        assert level.min() >= 0
        assert level.max() <= 1
        for power, mean in ((1, 1 / 2), (2, 1 / 3)):
            spread = (1 / (2 * power + 1) - mean**2) ** 0.5
            assert abs(level.pow(power).double().mean() - mean) < 5 * spread / part.numel() ** 0.5
    together = torch.cat([changed.last_hidden[:, :, None], changed.hidden], 2)
    assert len(together.unique()) > 0.99 * together.numel(), "no vector has another one's noise"
    for shift in (1, 2):
        for dim in range(4):
            moved = together.roll(shift, dim).flatten()
            assert abs(torch.corrcoef(torch.stack([together.flatten(), moved]))[0, 1]) < 5 / together.numel() ** 0.5


def by_row(world: int, micro: int, step: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the anchors and the noise of a step's rows, by their number in the data."""
    token = torch.zeros(24, LENGTH, dtype=torch.long)
    sampled: dict[int, tuple[Tensor, Tensor]] = {}
    for rank in range(world):
        for batch in Batches(Packed(token, token, token), ROWS, micro, 3, rank, world)(step):
            keys = row_keys(3, step, batch.index)
            anchors = sample_anchors(torch.ones_like(batch.token, dtype=torch.bool), 4, keys)
            assert anchors is not None
            noise = noisy(states(len(batch.index)), 0.2, keys).last_hidden
            sampled |= {row: (anchors[i], noise[i]) for i, row in enumerate(batch.index.tolist()) if row >= 0}
    return sampled


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 3), (2, 2), (3, 2)])
def test_any_cut_into_processes_and_micro_batches_samples_the_same(world: int, micro: int) -> None:
    whole, cut, later = by_row(1, ROWS, 2), by_row(world, micro, 2), by_row(1, ROWS, 5)
    assert whole.keys() == cut.keys()
    assert all(a.equal(b) for row in whole for a, b in zip(whole[row], cut[row], strict=True))
    shared = whole.keys() & later.keys()
    assert shared, "the same rows come again"
    assert not any(a.equal(b) for row in shared for a, b in zip(whole[row], later[row], strict=True))


def test_anchors_change_no_draft() -> None:
    head: Any = toys.head("block", toys.target("llama", torch.float64))
    token = torch.tensor([toys.prompt(i, LENGTH) for i in range(2)])
    features = toys.target("llama", torch.float64).features(token, torch.zeros_like(token), head.feature_layers)
    chosen = sample_anchors(features.document >= 0, 5, row_keys(0, 0, torch.tensor([1, 2])))
    assert chosen is not None
    is_anchor = torch.zeros(token.shape, dtype=torch.bool).scatter_(1, chosen, True)
    for some, every in zip(head.unroll(features, 4, chosen), head.unroll(features, 4), strict=True):
        torch.testing.assert_close(some.state[is_anchor], every.state[is_anchor])
        assert not some.state[~is_anchor].any()
