"""Sampling probabilities of logits, with transformers' logit processors in their order.

The order is the repetition penalty on the raw logits, temperature, top-k, top-p, min-p.
"""

from dataclasses import dataclass
from math import inf

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.common.typed import Within

Distributions = Float[Tensor, "*n V"]  # over the vocabulary, or their logits
RANGES = {
    "temperature": Within(0, inf), "top_k": Within(0, inf), "top_p": Within(0, 1, above=True), "min_p": Within(0, 1),
    "repetition_penalty": Within(0, inf, above=True),
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters, the same for drafting, verification and the bonus token."""

    temperature: float
    top_k: int  # 0 keeps all tokens
    top_p: float  # 1 keeps all tokens
    min_p: float = 0.0  # 0 keeps all tokens
    repetition_penalty: float = 1.0  # 1 changes nothing; read at temperature 0 too

    def __post_init__(self) -> None:
        for name, within in RANGES.items():
            if remedy := within.remedy(value := getattr(self, name)):
                raise ValueError(f"{name} is {value}: {remedy}")


GREEDY = Sampling(0.0, 0, 1.0)


# Most distributions reach top-p within this many tokens, so that the rest of the vocabulary needs no sorting.
FIRST = 1024


def distribution(logits: Distributions, sampling: Sampling) -> Distributions:
    """Return the probabilities of the next token, in fp32 (fp64 stays).

    Temperature 0 is one-hot at the largest logit. Top-k keeps ties with the k-th logit; top-p keeps the
    smallest set of most likely tokens that reaches p (Holtzman et al., 2020); min-p keeps tokens with at least that
    share of the best token's probability (arXiv 2407.01082). `penalize` applies the repetition penalty.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[..., -1:], float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:  # the most likely tokens that together reach it
        best, index = probs.topk(min(FIRST, probs.shape[-1]))
        # Reading the sum makes the host wait for the device, and cannot be captured in a graph.
        may_sync = probs.device.type == "cpu" and not torch.compiler.is_compiling()
        if not may_sync or best.sum(-1).min() < sampling.top_p:
            best, index = probs.sort(descending=True, stable=True)
        inside = best.cumsum(-1) - best < sampling.top_p
        probs = torch.zeros_like(probs).scatter(-1, index, best * inside)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.min_p > 0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def penalize(logits: Distributions, seen_tokens: Bool[Tensor, "*n V"], sampling: Sampling) -> Distributions:
    """Return the logits with those of `seen_tokens` pulled down, in fp32; fp64 stays (arXiv 1909.05858).

    As in transformers a positive logit is divided by the penalty, a negative one multiplied, once whatever the count.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    penalty = sampling.repetition_penalty
    return torch.where(seen_tokens, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def process_logits(
    logits: Distributions,
    sampling: Sampling,
    seen_tokens: Bool[Tensor, "*n V"] | None,
    forbidden: Bool[Tensor, "*n V"] | None,
) -> Distributions:
    """Return the logits after the repetition penalty on `seen_tokens`, without those of `forbidden` tokens."""
    if seen_tokens is not None:
        logits = penalize(logits, seen_tokens, sampling)
    return logits if forbidden is None else logits.masked_fill(forbidden, -inf)


def top2_gap(logits: Distributions) -> Float[Tensor, "*n"]:
    """Return the difference of the two largest logits, in fp32."""
    best = logits.float().topk(2).values
    return best[..., 0] - best[..., 1]


def residual(target: Distributions, draft: Distributions) -> Distributions:
    """Return the residual of the target's probs after a rejected draft."""
    # Equal distributions never reject in exact arithmetic; after a rounding error nothing is left and p is returned.
    return _normalised((target - draft).clamp_min(0), target)


def without(probs: Distributions, token: Int[Tensor, "*n 1"]) -> Distributions:
    """Return the probs given that a token is not sampled; unchanged where nothing else is possible."""
    return _normalised(probs.scatter(-1, token, 0.0), probs)


def _normalised(left: Distributions, otherwise: Distributions) -> Distributions:
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, otherwise)
