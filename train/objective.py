"""What training minimises: a pure function of draft logits, the target's law, labels, mask and depth.

Each loss gives one number per trained row; rows are summed here and divided by the global batch's count in the loop, so
that neither padding nor accumulation nor the number of processes changes the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from heads import rows
from heads.base import Draft, Ends, Features


@dataclass(frozen=True)
class ObjectiveConfig:
    """Losses by name with their weights, the weight decay per depth, how many depths, and the feature noise."""

    losses: dict[str, float]
    depth_decay: float
    depths: int
    noise: float

    def __post_init__(self) -> None:
        """Check names and ranges."""
        for name in self.losses:
            if name not in LOSSES:
                raise ValueError(f"objective.losses.{name}: unknown, choose from {', '.join(LOSSES)}")
        if not any(self.losses.values()):
            raise ValueError("objective.losses: no loss has a weight; give at least one")
        if self.depths < 1:
            raise ValueError(f"objective.depths is {self.depths}: give at least 1")


class Rows(NamedTuple):
    """The R trained rows of one depth: draft logits, target logits, labels, predicted and true features."""

    draft: Float[Tensor, "R V"]
    target: Float[Tensor, "R V"]
    label: Int[Tensor, "R"]
    feature: Float[Tensor, "R D"] | None
    true_feature: Float[Tensor, "R D"]


def ce(x: Rows) -> Float[Tensor, "R"]:
    """Cross-entropy with the text's own next token (Medusa-1)."""
    return functional.cross_entropy(x.draft, x.label, reduction="none")


def soft_ce(x: Rows) -> Float[Tensor, "R"]:
    """Cross-entropy with the target's law, its forward KL up to a constant (EAGLE)."""
    return -(x.target.softmax(-1) * x.draft.log_softmax(-1)).sum(-1)


def smooth_l1(x: Rows) -> Float[Tensor, "R"]:
    """Smooth L1 between predicted and true feature, averaged over the width (EAGLE)."""
    if x.feature is None:
        raise ValueError("objective.losses.smooth_l1: this head predicts no features; leave the loss out")
    return functional.smooth_l1_loss(x.feature, x.true_feature, reduction="none").mean(-1)


LOSSES: dict[str, Callable[[Rows], Tensor]] = {"ce": ce, "soft_ce": soft_ce, "smooth_l1": smooth_l1}


def counts(features: Features, mask: Int[Tensor, "B T"], depths: int) -> Float[Tensor, "depths"]:
    """Number of trained rows at each depth."""
    return torch.stack([rows.valid(features.document, mask, d).sum() for d in range(1, depths + 1)]).float()


def objective(
    drafts: list[Draft],
    features: Features,
    ends: Ends,
    mask: Int[Tensor, "B T"],
    config: ObjectiveConfig,
) -> tuple[Float[Tensor, "depths"], dict[str, Float[Tensor, "depths"]]]:
    """Return the weighted loss summed over rows at each depth, and unweighted sums of each loss and of accuracy.

    Args:
        drafts: what the head unrolled, one entry a depth.
        features: the batch; `last` gives the teacher through the target's lm_head.
        ends: the target's embedding and lm_head.
        mask: 1 where the target would write the token.
        config: weights.
    """
    with torch.no_grad():
        law = ends.logits(features.last).float()
    losses: list[Tensor] = []
    sums: dict[str, list[Tensor]] = {name: [] for name in [*config.losses, "accuracy"]}
    for depth, draft in enumerate(drafts, 1):
        chosen = rows.valid(features.document, mask, depth)
        x = Rows(
            draft.logits[chosen].float(),
            rows.teacher(law, depth)[chosen],
            rows.label(features.token, depth)[chosen],
            None if draft.feature is None else draft.feature[chosen].float(),
            rows.teacher(features.last, depth)[chosen].float(),
        )
        total = x.draft.new_zeros(())
        for name, weight in config.losses.items():
            value = LOSSES[name](x).sum()
            total = total + weight * value
            sums[name].append(value.detach())
        sums["accuracy"].append((x.draft.argmax(-1) == x.target.argmax(-1)).sum().float())
        losses.append(total * config.depth_decay ** (depth - 1))
    return torch.stack(losses), {name: torch.stack(values) for name, values in sums.items()}


def noisy(features: Features, noise: float, seed: int, index: Int[Tensor, "B"]) -> Features:
    """Add EAGLE's uniform feature noise, scaled by the training length it was tuned at over this one.

    The noise of a row depends on the seed and the row's number in the run alone, so that a resumed run and any number
    of processes see the same.
    """
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
