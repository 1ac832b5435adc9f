"""What a draft can be trained for: pure functions of the target's law p and the draft's law q at one row each.

A head with a pruned vocabulary drafts W of the target's V tokens. Distances between laws compare q with p restricted to
those and renormalised, at rows whose likeliest token is among them (EAGLE-3); what counts acceptance takes p as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from heads.common.ranges import Amount, Count, Fraction, Parts

DEPTH_WEIGHTS = ("decay", "dpace")
NORMALIZERS = ("token", "sequence")


@dataclass(frozen=True)
class ObjectiveConfig:
    """Losses by name with their weights, how depths and rows are weighed, how many depths, and the feature noise.

    Attributes:
        depth_weights: "decay" by `depth_decay` to the power of the depth - 1, or "dpace" by the draft's own
            confidence, with `dpace_alpha`.
        normalize: "token", every trained row of the global batch counts alike, or "sequence": every document does.
        anchors: how many rows of a packed row are drafted from in a step, drawn anew each time; null for all.
        eta, top_k: numbers of the losses lk and top_k.
    """

    losses: dict[str, Amount]
    depth_weights: str
    depth_decay: Amount
    dpace_alpha: Fraction
    depths: Parts
    normalize: str
    anchors: Count | None
    noise: Amount
    eta: Amount
    top_k: Count

    def __post_init__(self) -> None:
        """Check names and ranges."""
        for name in self.losses:
            if name not in LOSSES:
                raise ValueError(f"objective.losses.{name}: unknown, choose from {', '.join(LOSSES)}")
        if not any(self.losses.values()):
            raise ValueError("objective.losses: no loss has a weight; give at least one")
        for key, choices in (("depth_weights", DEPTH_WEIGHTS), ("normalize", NORMALIZERS)):
            if getattr(self, key) not in choices:
                raise ValueError(f"objective.{key} is {getattr(self, key)!r}: choose {' or '.join(choices)}")


@dataclass(frozen=True)
class Law:
    """The target's law at n rows over the W tokens that the head drafts; what several losses or depths read is kept.

    Attributes:
        log_p: its logarithm; of a pruned vocabulary a part of it.
        best: the likeliest token of all, by its place among the W, -1 where it is not among them.
    """

    log_p: Float[Tensor, "n W"]
    best: Int[Tensor, "n"]

    @cached_property
    def p(self) -> Float[Tensor, "n W"]:
        """Return the law itself."""
        return self.log_p.exp()

    @cached_property
    def log_mass(self) -> Float[Tensor, "n 1"]:
        """Return the logarithm of what the W tokens have of the law."""
        return self.log_p.logsumexp(-1, keepdim=True)

    def likeliest(self, k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return the `k` likeliest tokens' probabilities and places, found once."""
        if k not in self._likeliest:
            best = self.log_p.topk(min(k, self.log_p.shape[-1]), -1)
            self._likeliest[k] = best.values.exp(), best.indices
        return self._likeliest[k]

    @cached_property
    def _likeliest(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


@dataclass(frozen=True)
class Rows:
    """R trained rows of one depth.

    Attributes:
        law: the target's law at the rows that are teachers; `place` says which of them teaches each row.
        log_q: the draft's, over the same W tokens.
        label: the text's own token by its place among the W, -1 where it is not among them.
        feature, true_feature: the target's feature as predicted and as it is; the prediction is None if there is none.
        confidence: the logit of the draft's acceptance as predicted, None if it is not.
        whole: whether the head drafts the whole vocabulary.
    """

    law: Law
    place: Int[Tensor, "R"]
    log_q: Float[Tensor, "R W"]
    label: Int[Tensor, "R"]
    feature: Float[Tensor, "R D"] | None
    true_feature: Float[Tensor, "R D"]
    confidence: Float[Tensor, "R"] | None
    whole: bool

    @cached_property
    def known(self) -> Bool[Tensor, "R"]:
        """Return whether the target's likeliest token is among the W."""
        return self.law.best[self.place] >= 0

    @cached_property
    def log_p(self) -> Float[Tensor, "R W"]:
        """Return the logarithm of the target's law."""
        return taken(self.law.log_p, self.place)

    @cached_property
    def p(self) -> Float[Tensor, "R W"]:
        """Return the target's law."""
        return taken(self.law.p, self.place)

    def log_law(self) -> Float[Tensor, "R W"]:
        """Return the target's law renormalised over the drafted tokens."""
        return self.log_p if self.whole else self.log_p - self.law.log_mass[self.place]

    def overlap(self) -> Float[Tensor, "R"]:
        """Return the probability that a drawn draft is accepted: the sum of min(p, q)."""
        return torch.minimum(self.log_p, self.log_q).exp().sum(-1)


def taken(x: Shaped[Tensor, "n W"], place: Int[Tensor, "R"]) -> Shaped[Tensor, "R W"]:
    """Return rows of x by ascending place, x itself where these are all of them: a copy costs as much as a loss."""
    return x if len(place) == len(x) else x.index_select(0, place)


def ce(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Cross-entropy with the text's own next token (Medusa-1); none where the head cannot draft it."""
    found = -x.log_q.gather(1, x.label.clamp_min(0)[:, None])[:, 0]
    return torch.where(x.label >= 0, found, 0)


def soft_ce(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Cross-entropy with the target's law, its forward KL up to a constant (EAGLE)."""
    found = -(x.p * x.log_q).sum(-1) * x.known
    if x.whole:
        return found
    mass = x.law.log_mass[x.place, 0].exp()  # of rows that are not known it may round to 0
    return found / mass.clamp_min(torch.finfo(mass.dtype).tiny)


def kl(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Forward divergence KL(p, q)."""
    law = x.log_law()
    return (law.exp() * (law - x.log_q)).sum(-1) * x.known


def reverse_kl(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Reverse divergence KL(q, p)."""
    return (x.log_q.exp() * (x.log_q - x.log_law())).sum(-1) * x.known


def jsd(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Jensen-Shannon divergence: of both from their middle, on average."""
    law = x.log_law()
    middle = torch.logaddexp(law, x.log_q) - torch.log(torch.tensor(2.0, dtype=law.dtype))
    return (law.exp() * (law - middle) + x.log_q.exp() * (x.log_q - middle)).sum(-1) / 2 * x.known


def tv(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Total variation of p and q: the probability that a drawn draft is refused."""
    return 1 - x.overlap()


def nla(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Negative log of the acceptance (arXiv 2602.23881)."""
    return -x.overlap().clamp_min(torch.finfo(x.log_q.dtype).tiny).log()


def lk(x: Rows, config: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Forward KL while little is accepted, total variation as more is: by exp(-eta · acceptance) (arXiv 2602.23881)."""
    share = torch.exp(-config.eta * x.overlap().detach())
    return share * kl(x, config) + (1 - share) * tv(x, config)


def top_k(x: Rows, config: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Cross-entropy with the target's `top_k` likeliest tokens alone (HASS)."""
    share, token = (taken(each, x.place) for each in x.law.likeliest(config.top_k))
    return -(share * x.log_q.gather(-1, token)).sum(-1)


def smooth_l1(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Smooth L1 between predicted and true feature, averaged over the width (EAGLE)."""
    if x.feature is None:
        raise ValueError("objective.losses.smooth_l1: this head predicts no features; leave the loss out")
    return functional.smooth_l1_loss(x.feature, x.true_feature, reduction="none").mean(-1)


def confidence(x: Rows, _: ObjectiveConfig) -> Float[Tensor, "R"]:
    """Cross-entropy of the predicted acceptance with the real one (DSpark, arXiv 2607.05147)."""
    if x.confidence is None:
        raise ValueError("objective.losses.confidence: this head predicts no acceptance; give head.confidence=true")
    return functional.binary_cross_entropy_with_logits(x.confidence, x.overlap().detach(), reduction="none")


LOSSES: dict[str, Callable[[Rows, ObjectiveConfig], Tensor]] = {
    "ce": ce, "soft_ce": soft_ce, "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "nla": nla, "lk": lk,
    "top_k": top_k, "smooth_l1": smooth_l1, "confidence": confidence,
}  # fmt: skip
