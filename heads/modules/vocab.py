"""The pruned draft vocabulary and its two maps, and the lm_head of a draft head.

With a vocabulary of 128k the lm_head is most of a small head's work. A head that drafts the W most frequent tokens
alone (FR-Spec, arXiv 2502.14856; EAGLE-3) loses the rare ones to the target and is cheaper at every step. The maps go
between a token's id in the target's vocabulary and its index among the W, which are sorted by id.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from heads.base import DraftVocabulary, Embeddings


def draft_vocabulary(size: int | None, full_size: int) -> DraftVocabulary | None:
    """Return the draft vocabulary of a head's configuration, None where it is the target's whole one."""
    return None if size is None or size >= full_size else DraftVocabulary(size, full_size)


def scatter_logits(vocab: DraftVocabulary | None, logits: Float[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
    """Return logits over the target's vocabulary."""
    return logits if vocab is None else vocab.scatter(logits)


class DraftLmHead(nn.Module):
    """The lm_head of a draft head: from final-normed states to logits over the draft vocabulary.

    It is the target's, shared and frozen, or one of the head's own that starts as a copy of the target's and is
    trained: whole, or as the product of two matrices of rank `rank`, which starts at the best approximation.
    """

    KINDS = ("shared", "own")

    def __init__(
        self,
        embeddings: Embeddings,
        kind: str,
        vocab: DraftVocabulary | None,
        rank: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if kind not in self.KINDS:
            raise ValueError(f"head.lm_head is {kind!r}: choose {' or '.join(self.KINDS)}")
        if rank is not None and kind == "shared":
            raise ValueError(f"head.lm_head_rank is {rank}: give null with lm_head=shared, or lm_head=own")
        self._embeddings, self._vocab = (embeddings,), (vocab,)  # in tuples, so that neither becomes a submodule
        width, size = embeddings.hidden_size, embeddings.vocab_size if vocab is None else len(vocab.ids)
        inner = width if rank is None else min(rank, width)
        self.down = None if rank is None else nn.Linear(width, inner, bias=False)
        trained = kind == "own"
        self.weight = nn.Parameter(torch.empty(size, inner)) if trained else None
        self.sums: list[Tensor] | None = None  # while `adding`: the sum of the weight's gradients, once there is one
        self.bias = nn.Parameter(torch.zeros(size)) if trained and bias else None
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Initialise from the target's lm_head, for the tokens that the vocabulary holds now."""
        if self.weight is None or self.weight.is_meta:  # a meta tensor has no values to start from
            return
        weight, vocab = self._embeddings[0].head_weight().detach(), self._vocab[0]
        weight = (weight if vocab is None else weight[vocab.ids.to(weight.device)]).float()
        if self.down is None:
            self.weight.copy_(weight)
        else:
            main = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -len(self.down.weight) :]
            self.weight.copy_(weight @ main)
            self.down.weight.copy_(main.T)

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n W"]:
        """Return the logits."""
        if self.weight is None:
            vocab = self._vocab[0]
            return self._embeddings[0].logits(hidden, None if vocab is None else vocab.ids)
        hidden = hidden if self.down is None else self.down(hidden)
        if self.sums is None or not torch.is_grad_enabled():
            return functional.linear(hidden, self.weight, self.bias)
        apply: Any = _Adding.apply
        product: Tensor = apply(hidden, self.weight, self.sums)
        return product if self.bias is None else product + self.bias

    @contextmanager
    def adding(self) -> Iterator[list[Tensor]]:
        """Accumulate the weight's gradients in one tensor, which the yielded list receives, and give autograd none.

        Autograd allocates each as large as the weight before it adds. It keeps doing so where the weight is not trained
        or autocast multiplies in another dtype: then the list stays empty.
        """
        weight, sums = self.weight, list[Tensor]()
        if weight is not None and weight.requires_grad and not torch.is_autocast_enabled(weight.device.type):
            self.sums = sums
        try:
            yield sums
        finally:
            self.sums = None


class _Adding(torch.autograd.Function):
    """A product with a weight, whose gradient is accumulated in `sums`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, sums: list[Tensor]) -> Tensor:
        """Return hidden x weight, transposed."""
        ctx.save_for_backward(hidden, weight)
        ctx.sums = sums
        return hidden @ weight.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of `hidden`."""
        hidden, weight = ctx.saved_tensors
        d_logits, inputs = grads[0].flatten(0, -2).mT, hidden.flatten(0, -2)
        if ctx.sums:
            torch.addmm(ctx.sums[0], d_logits, inputs, out=ctx.sums[0])  # which counters of operations know, not addmm_
        else:
            ctx.sums.append(d_logits @ inputs)
        return grads[0] @ weight if ctx.needs_input_grad[0] else None, None, None


def prune(head: nn.Module, counts: Int[Tensor, "V"]) -> None:
    """Choose the tokens of a head's pruned vocabulary by how often each occurs in the training text."""
    vocab = getattr(head, "vocab", None)
    if vocab is not None:
        vocab.choose(counts)
        for module in head.modules():
            if isinstance(module, DraftLmHead):
                module.start()
