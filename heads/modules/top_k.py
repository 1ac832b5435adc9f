"""The target's distribution truncated to its top-k tokens: smaller to store than a hidden state of a wide target."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.base import DraftVocabulary

BLOCK = 128  # tokens that are searched for the index of the maximum
FEW = 4096  # tokens that are faster searched at once


def argmax(scores: Float[Tensor, "*n V"]) -> Int[Tensor, "*n"]:
    """Return the argmax of each row, of equals the first, on a CPU several times faster than `torch.argmax`.

    There torch finds a maximum by vectors and its index number by number. So a row's best block is found first.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % BLOCK or size <= FEW:
        return scores.max(-1).indices  # twice as fast as argmax in bf16
    blocks = scores.unflatten(-1, (size // BLOCK, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    block = blocks.take_along_dim(best[..., None, None], -2)[..., 0, :]
    return best * BLOCK + block.argmax(-1)


class TopLogProbs(NamedTuple):
    """The top-k tokens of each row and their log-probs; the other tokens share the remaining mass evenly."""

    ids: Int[Tensor, "*n K"]
    log_p: Float[Tensor, "*n K"]


def top_log_probs(logits: Float[Tensor, "*n V"], k: int) -> TopLogProbs:
    """Return the top-k tokens of each row with their log-probs, the most likely first."""
    best = logits.float().log_softmax(-1).topk(k, -1)
    return TopLogProbs(best.indices, best.values)


def full_log_probs(top: TopLogProbs, vocab_size: int) -> Float[Tensor, "*n V"]:
    """Return the log-probs of all tokens: those in `top`, and for the others an even share of the remaining mass.

    They are normalised at the end, since rounding may leave the top ones with slightly more or less than 1.
    """
    rest = _rest(top, vocab_size - top.ids.shape[-1])
    log_p = rest.expand(*rest.shape[:-1], vocab_size).scatter(-1, top.ids, top.log_p)
    return log_p.log_softmax(-1)


def log_probs(top: TopLogProbs, vocab_size: int, vocab: DraftVocabulary | None) -> Float[Tensor, "*n W"]:
    """Return what `full_log_probs` gives the tokens of a draft vocabulary, without those of all; None: of all."""
    if vocab is None:
        return full_log_probs(top, vocab_size)
    others, size = vocab_size - top.ids.shape[-1], len(vocab.ids)
    rest, index = _rest(top, others), vocab.index_of(top.ids)
    log_p = rest.expand(*rest.shape[:-1], size + 1).scatter(-1, torch.where(index < 0, size, index), top.log_p)
    both = torch.cat([top.log_p, rest + math.log(others)], -1) if others else top.log_p
    return log_p[..., :size] - both.logsumexp(-1, keepdim=True)


def most_likely(top: TopLogProbs) -> Int[Tensor, "*n"]:
    """Return the most likely token of each row, of equals the first."""
    tied = top.log_p == top.log_p.amax(-1, keepdim=True)
    return torch.where(tied, top.ids, torch.iinfo(top.ids.dtype).max).amin(-1)


def _rest(top: TopLogProbs, others: int) -> Float[Tensor, "*n 1"]:
    """Return the log-prob of one of the `others`: an even share of the mass that the top ones leave."""
    rest = (1 - top.log_p.exp().sum(-1, keepdim=True)).clamp_min(torch.finfo(top.log_p.dtype).tiny) / max(1, others)
    return rest.log()
