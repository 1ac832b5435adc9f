"""Row weights of a batch, and the random anchors and feature noise of a step.

Random numbers of a row depend on the seed and the row's number in the run alone, so that a resumed run and any number
of processes see the same.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads import rows
from heads.base import Features
from train.losses import ObjectiveConfig


class Weights(NamedTuple):
    """The weights of a batch: which rows are trained at each depth, how much each counts, and the normaliser.

    `amount` is the number of rows or of documents, by `ObjectiveConfig.normalize`; summed over the global batch it
    divides the loss.
    """

    trained: Bool[Tensor, "d B T"]
    row: Float[Tensor, "d B T"]
    amount: Float[Tensor, "d"]


def trainable(document: Int[Tensor, "B T"], mask: Int[Tensor, "B T"], depths: int) -> Bool[Tensor, "d B T"]:
    """Return the rows that can be trained at each depth; `mask` is 1 where the target would write the token."""
    return torch.stack([rows.valid(document, mask, d) for d in range(1, depths + 1)])


def weights(
    document: Int[Tensor, "B T"],
    mask: Int[Tensor, "B T"],
    anchors: Bool[Tensor, "B T"] | None,
    config: ObjectiveConfig,
) -> Weights:
    """Return the weights of a batch's rows, without those of depths.

    Args:
        document: the rows' documents.
        mask: 1 where the target would write the token.
        anchors: the rows that are drafted from, None for all.
        config: how many depths, and the normaliser.
    """
    trained = trainable(document, mask, config.depths)
    if anchors is not None:
        trained = trained & anchors
    if config.normalize == "token":
        return Weights(trained, trained.float(), trained.sum((1, 2)).float())
    number = (document != document.roll(1, 1)).long()
    number[:, 0] = 0
    number = number.cumsum(1).expand_as(trained)  # 0, 1, 2, … along a row, so documents of a row differ
    held = torch.zeros(trained.shape, device=trained.device).scatter_add(2, number, trained.float())
    return Weights(trained, trained / held.gather(2, number).clamp_min(1), (held > 0).sum((1, 2)).float())


def sample_anchors(
    useful: Bool[Tensor, "B T"], count: int | None, seed: int, index: Int[Tensor, "B"]
) -> Bool[Tensor, "B T"] | None:
    """Sample the `count` anchor rows of each packed sequence, useful ones first; None where all rows are anchors."""
    length = useful.shape[1]
    if count is None or count >= length:
        return None
    chosen = torch.zeros(useful.shape, dtype=torch.bool)
    for b, row in enumerate(index.tolist()):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row + 1) % 2**63)
        chance = torch.rand(length, generator=generator) + useful[b].cpu()
        chosen[b, chance.topk(count).indices] = True
    return chosen.to(useful.device)


def noisy(features: Features, noise: float, seed: int, index: Int[Tensor, "B"]) -> Features:
    """Add EAGLE's uniform feature noise, scaled by the length it was tuned at over that of these rows."""
    if noise == 0:
        return features
    length = features.last.shape[1]
    scale = noise * 512 / length
    added = []
    for row in index.tolist():
        generator = torch.Generator().manual_seed((seed * 1_000_003 + row) % 2**63)
        shape = (1 + features.hidden.shape[2], *features.last.shape[1:])
        added.append((torch.rand(shape, generator=generator) - 0.5) * scale)
    jitter = torch.stack(added).to(features.last)
    return features._replace(last=features.last + jitter[:, 0], hidden=features.hidden + jitter[:, 1:].transpose(1, 2))
