"""From logits to the law that is sampled: temperature, top-k, top-p, in the order of transformers' processors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same for target and draft, for drafting, verification and the bonus token alike.

    Raises:
        ValueError: naming the value that is out of range.
    """

    temperature: float
    top_k: int  # 0 keeps all tokens
    top_p: float  # 1 keeps all tokens

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: give 0 for greedy decoding or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give 0 for all tokens or a positive count")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a number above 0, up to 1 for all tokens")


GREEDY = Sampling(0.0, 0, 1.0)


def distribution(logits: Float[Tensor, "*n V"], sampling: Sampling) -> Float[Tensor, "*n V"]:
    """Return the law of the next token, in fp32 (fp64 stays).

    Temperature 0 is the one-hot law of the largest logit, so that greedy decoding needs no code of its own. Top-k keeps
    ties with the k-th logit; top-p keeps the smallest set of most likely tokens that reaches p (Holtzman et al., 2020).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    law = logits.softmax(-1)
    if sampling.top_p < 1:
        likely = law.sort(descending=True, stable=True)
        before = likely.values.cumsum(-1) - likely.values
        law = law.masked_fill((before >= sampling.top_p).scatter(-1, likely.indices, before >= sampling.top_p), 0.0)
        law = law / law.sum(-1, keepdim=True)
    return law
