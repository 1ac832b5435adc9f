"""Training losses: pure functions of the target's distribution p and the draft's q, one value per row.

A head with a draft vocabulary drafts W of the target's V tokens. Divergences compare q with p renormalised over the W
tokens, at rows whose most likely token is one of them (EAGLE-3); acceptance losses read p itself.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from heads.common.typed import Amount, Count, Fraction, NewTokens, Number, OneOf, Parts, Positive

PerRow = Float[Tensor, "R"]
RowIndex = Int[Tensor, "R"]
PerToken = Float[Tensor, "R W"]


@dataclass(frozen=True)
class OnPolicyConfig:
    """Training on the head's own drafts (train/rollouts.py): conf/objective/default.yaml explains the keys."""

    prompts: Number
    every: Count
    tokens: NewTokens
    temperature: Amount
    nodes: Annotated[str, OneOf(("text", "accepted", "rejected", "all"))]
    weight: Positive
    losses: dict[str, Amount] | None


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective; conf/objective/default.yaml explains the keys."""

    losses: dict[str, Amount]
    depth_weights: Annotated[str, OneOf(("decay", "dpace"))]
    depth_decay: Amount
    dpace_alpha: Fraction
    depths: Parts
    normalize: Annotated[str, OneOf(("token", "sequence"))]
    anchors: Count | None
    noise: Amount
    eta: Amount
    top_k: Count
    base_loss_share: tuple[Fraction, Fraction] | None
    on_policy: OnPolicyConfig

    def __post_init__(self) -> None:
        rollouts = {f"on_policy.losses.{name}": name for name in self.on_policy.losses or ()}
        for key, name in ({f"losses.{name}": name for name in self.losses} | rollouts).items():
            if name not in LOSSES:
                raise ValueError(f"objective.{key}: unknown, choose from {', '.join(LOSSES)}")
        if not any(self.losses.values()):
            raise ValueError("objective.losses: no loss has a weight; give at least one")

    def base_loss_share_at(self, progress: float) -> float:
        """Return the share of the uncorrected logits' loss after the fraction `progress` of the steps."""
        first, last = self.base_loss_share or (0.0, 0.0)
        return first + (last - first) * progress


@dataclass
class TeacherProbs:
    """The target's distribution at n rows over the draft vocabulary of W tokens, with cached derived values."""

    log_p: Float[Tensor, "n W"]  # log-probs; with a draft vocabulary they do not sum to 1
    best: Int[Tensor, "n"]  # argmax over the whole vocabulary as an index into the W tokens, -1 outside them

    @cached_property
    def p(self) -> Float[Tensor, "n W"]:
        """Return the probabilities."""
        return self.log_p.exp()

    @cached_property
    def log_mass(self) -> Float[Tensor, "n 1"]:
        """Return the log of the W tokens' total probability."""
        return self.log_p.logsumexp(-1, keepdim=True)

    def top_k(self, k: int) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Return probabilities and indices of the `k` most likely tokens, computed once."""
        if k not in self._top_k:
            best = self.log_p.topk(min(k, self.log_p.shape[-1]), -1)
            self._top_k[k] = best.values.exp(), best.indices
        return self._top_k[k]

    @cached_property
    def _top_k(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}


@dataclass(frozen=True)
class LossInputs:
    """The losses' inputs: R trained rows of one depth; None for a feature or acceptance that is not predicted."""

    teacher: TeacherProbs  # the target's distribution at n rows
    teacher_index: RowIndex  # each row's teacher among them
    log_q: PerToken  # the draft's log-probs over the same W tokens
    label: RowIndex  # the label as an index into the W tokens, -1 if it is not one of them
    feature: Float[Tensor, "R D"] | None  # the head's predicted feature
    true_feature: Float[Tensor, "R D"] | None  # the target's feature
    confidence: PerRow | None  # the predicted logit of the draft's acceptance
    full_vocab: bool  # whether the head drafts the whole vocabulary
    scores: PerToken | None = None  # scores by which candidates are chosen
    candidates: int = 0  # number of candidates

    @cached_property
    def best(self) -> RowIndex:
        """Return the target's most likely token, -1 outside the draft vocabulary."""
        return self.teacher.best[self.teacher_index]

    @cached_property
    def covered(self) -> Bool[Tensor, "R"]:
        """Return whether the target's most likely token is in the draft vocabulary."""
        return self.best >= 0

    @cached_property
    def log_p(self) -> PerToken:
        """Return the target's log-probs."""
        return take_rows(self.teacher.log_p, self.teacher_index)

    @cached_property
    def p(self) -> PerToken:
        """Return the target's probabilities."""
        return take_rows(self.teacher.p, self.teacher_index)

    def renormalised_log_p(self) -> PerToken:
        """Return the target's log-probs renormalised over the drafted tokens."""
        return self.log_p if self.full_vocab else self.log_p - self.teacher.log_mass[self.teacher_index]

    def overlap(self) -> PerRow:
        """Return the probability that a sampled draft is accepted: the sum of min(p, q)."""
        return torch.minimum(self.log_p, self.log_q).exp().sum(-1)


def take_rows(x: Shaped[Tensor, "n W"], index: RowIndex) -> Shaped[Tensor, "R W"]:
    """Return rows of x by ascending index, or x itself for all rows: a copy costs as much as a loss."""
    return x if len(index) == len(x) else x.index_select(0, index)


def ce(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Cross-entropy with the label, the data's next token (Medusa-1); 0 outside the draft vocabulary."""
    return torch.where(x.label >= 0, -x.log_q.gather(1, x.label.clamp_min(0)[:, None])[:, 0], 0)


def soft_ce(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Cross-entropy with the target's distribution, its forward KL up to a constant (EAGLE)."""
    loss = -(x.p * x.log_q).sum(-1) * x.covered
    if x.full_vocab:
        return loss
    mass = x.teacher.log_mass[x.teacher_index, 0].exp()  # may round to 0 at rows that are not covered
    return loss / mass.clamp_min(torch.finfo(mass.dtype).tiny)


def kl(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Forward divergence KL(p, q)."""
    log_p = x.renormalised_log_p()
    return (log_p.exp() * (log_p - x.log_q)).sum(-1) * x.covered


def reverse_kl(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Reverse divergence KL(q, p)."""
    return (x.log_q.exp() * (x.log_q - x.renormalised_log_p())).sum(-1) * x.covered


def jsd(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Jensen-Shannon divergence: the mean of KL(p, m) and KL(q, m) with m = (p + q) / 2."""
    log_p = x.renormalised_log_p()
    middle = torch.logaddexp(log_p, x.log_q) - math.log(2)
    return (log_p.exp() * (log_p - middle) + x.log_q.exp() * (x.log_q - middle)).sum(-1) / 2 * x.covered


def tv(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Total variation of p and q: the probability that a sampled draft is rejected."""
    return 1 - x.overlap()


def nla(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Negative log of the acceptance (arXiv 2602.23881)."""
    return -x.overlap().clamp_min(torch.finfo(x.log_q.dtype).tiny).log()


def lk(x: LossInputs, config: ObjectiveConfig) -> PerRow:
    """Forward KL blended into total variation as acceptance grows, by exp(-eta · acceptance) (arXiv 2602.23881)."""
    weight = torch.exp(-config.eta * x.overlap().detach())
    return weight * kl(x, config) + (1 - weight) * tv(x, config)


def top_k(x: LossInputs, config: ObjectiveConfig) -> PerRow:
    """Cross-entropy with the target's `top_k` most likely tokens (HASS)."""
    p, token = (take_rows(values, x.teacher_index) for values in x.teacher.top_k(config.top_k))
    return -(p * x.log_q.gather(-1, token)).sum(-1)


def smooth_l1(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Smooth L1 between predicted and true feature, averaged over the width (EAGLE)."""
    if x.feature is None or x.true_feature is None:
        raise ValueError("objective.losses.smooth_l1: this head predicts no features; leave the loss out")
    return functional.smooth_l1_loss(x.feature, x.true_feature, reduction="none").mean(-1)


def confidence(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Cross-entropy of the predicted acceptance with the real one (DSpark, arXiv 2607.05147)."""
    if x.confidence is None:
        raise ValueError("objective.losses.confidence: this head predicts no acceptance; give head.confidence=true")
    return functional.binary_cross_entropy_with_logits(x.confidence, x.overlap().detach(), reduction="none")


def candidates(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """Forward KL from the head's own distribution to that of the scores that choose its candidates (EAGLE-4)."""
    log_q = x.log_q.detach()
    return (log_q.exp() * (log_q - _scores(x).log_softmax(-1))).sum(-1)


def missed(x: LossInputs, _: ObjectiveConfig) -> PerRow:
    """1 if the head's most likely token is not a candidate (one minus the recall); log it with weight 0."""
    scores = _scores(x).detach()
    return ((scores > scores.gather(-1, x.log_q.detach().argmax(-1, keepdim=True))).sum(-1) >= x.candidates).float()


def _scores(x: LossInputs) -> PerToken:
    if x.scores is None:
        raise ValueError("objective.losses: this head has no candidates; give experiment=candidates")
    return x.scores


LOSSES = {
    "ce": ce, "soft_ce": soft_ce, "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv, "nla": nla, "lk": lk,
    "top_k": top_k, "smooth_l1": smooth_l1, "confidence": confidence, "candidates": candidates, "missed": missed,
}  # fmt: skip
# Losses of outputs other than logits; `base_loss_share` skips them.
NOT_OF_LOGITS = {"smooth_l1", "confidence", "candidates", "missed"}
READ_P = {"ce", "soft_ce", "smooth_l1"}  # losses that do not read the target's log-probs, which may then be overwritten
