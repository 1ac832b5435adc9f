"""The lm_head of a draft head, its draft vocabulary, and an argmax of logits that is fast on a CPU.

With a vocabulary of 128k the lm_head dominates the cost of a small head. A head that drafts only the W most frequent
tokens (FR-Spec, arXiv 2502.14856; EAGLE-3) cannot draft rare tokens and is cheaper at every step. The W tokens are
sorted by id.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from heads.base import CandidateConfig, DraftVocabulary, Embeddings
from heads.shapes import Logits, States, TokenIds

BLOCK = 128  # tokens of a block; only the best block is searched for the index of the maximum
FEW = 4096  # below this number of tokens a full search is faster
SUMS_WIDE = ("cuda",)  # devices that accumulate 16-bit products into an fp32 sum without rounding


def scatter_logits(vocab: DraftVocabulary | None, logits: Logits) -> Float[Tensor, "*n V"]:
    """Return logits over the target's vocabulary."""
    return logits if vocab is None else vocab.scatter(logits)


def argmax(scores: Logits) -> TokenIds:
    """Return the argmax of each row, the first among ties; on a CPU several times faster than `torch.argmax`.

    On a CPU torch vectorises max but not argmax, so the block that contains the maximum is found first.
    """
    size = scores.shape[-1]
    if scores.device.type != "cpu" or size % BLOCK or size <= FEW:
        return scores.max(-1).indices  # twice as fast as argmax in bf16
    blocks = scores.unflatten(-1, (size // BLOCK, BLOCK))
    best = blocks.amax(-1).argmax(-1)
    block = blocks.take_along_dim(best[..., None, None], -2)[..., 0, :]
    return best * BLOCK + block.argmax(-1)


class GradientAccumulator:
    """The gradient of a weight over the vocabulary, accumulated in the weight's own dtype."""

    def __init__(self, weight: Tensor) -> None:
        kind = weight.device.type
        self.dtype = weight.dtype
        self.operand = weight.detach()  # in the dtype of the matmul, which autocast narrows
        if torch.is_autocast_enabled(kind):
            self.operand = self.operand.to(torch.get_autocast_dtype(kind))
        self.total: Tensor | None = None  # None before the first product

    def add(self, d_logits: Float[Tensor, "W n"], hidden: Float[Tensor, "n D"]) -> None:
        """Add a product in place; devices outside SUMS_WIDE round it once."""
        beta = 0 if self.total is None else 1
        if self.total is None:
            self.total = d_logits.new_empty(len(d_logits), hidden.shape[1], dtype=self.dtype)
        if d_logits.dtype == self.dtype:  # an `out` argument keeps autocast from changing the dtype
            torch.addmm(self.total, d_logits, hidden, beta=beta, out=self.total)
        elif d_logits.device.type in SUMS_WIDE:
            torch.addmm(self.total, d_logits, hidden, beta=beta, out_dtype=self.dtype, out=self.total)
        else:
            product = d_logits @ hidden
            self.total = self.total.add_(product) if beta else self.total.copy_(product)


class AccumulatingModule(nn.Module):
    """A module with a weight over the vocabulary, whose gradient can be accumulated in place."""

    weight: Any  # a parameter, or None
    gradient: GradientAccumulator | None = None  # set within `accumulate_gradient`

    def product(self, hidden: States, bias: Float[Tensor, "W"] | None = None) -> Logits:
        """Return the logits."""
        if self.gradient is None or not torch.is_grad_enabled():
            return functional.linear(hidden, self.weight, bias)
        apply: Any = _AccumulatingProduct.apply
        logits = apply(hidden.to(self.gradient.operand.dtype), self.weight, self.gradient)
        return logits if bias is None else logits + bias

    @contextmanager
    def accumulate_gradient(self) -> Iterator[GradientAccumulator]:
        """Accumulate the weight's gradient in the yielded sum; autograd gets none.

        Autograd would allocate a gradient as large as the weight for every product before adding it, rounded under
        autocast. A frozen weight has no gradient either way.
        """
        gradient = GradientAccumulator(self.weight)
        if self.weight.requires_grad:
            self.gradient = gradient
        try:
            yield gradient
        finally:
            self.gradient = None


class _AccumulatingProduct(torch.autograd.Function):
    """A product with a weight whose gradient is accumulated in `gradient`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, gradient: GradientAccumulator) -> Tensor:
        """Return hidden x weight.T; `weight` is an input so that autograd calls `backward`."""
        del weight
        ctx.save_for_backward(hidden)
        ctx.gradient = gradient
        return hidden @ gradient.operand.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of `hidden`."""
        (hidden,) = ctx.saved_tensors
        ctx.gradient.add(grads[0].flatten(0, -2).mT, hidden.flatten(0, -2))
        return grads[0] @ ctx.gradient.operand if ctx.needs_input_grad[0] else None, None, None


class VocabularyLinear(AccumulatingModule, nn.Linear):
    """A linear layer over the vocabulary, whose gradient can be accumulated in place."""

    def forward(self, hidden: States) -> Logits:
        """Return the logits."""
        return self.product(hidden, self.bias)


class DraftLmHead(AccumulatingModule):
    """The lm_head of a draft head: from final-normed states to logits over the draft vocabulary.

    It is the target's, shared and frozen, or the head's own, which starts as a copy of the target's and is trained: a
    full matrix, or a product of two matrices of rank `rank`, which starts at the best approximation.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        kind: str,
        vocab: DraftVocabulary | None,
        rank: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if rank is not None and kind == "shared":
            raise ValueError(f"head.lm_head_rank is {rank}: give null with lm_head=shared, or lm_head=own")
        self._embeddings, self._vocab = (embeddings,), (vocab,)  # in tuples, so that neither becomes a submodule
        width, size = embeddings.hidden_size, embeddings.vocab_size if vocab is None else len(vocab.ids)
        inner = width if rank is None else min(rank, width)
        self.down = None if rank is None else nn.Linear(width, inner, bias=False)
        trained = kind == "own"
        self.weight = nn.Parameter(torch.empty(size, inner)) if trained else None
        self.bias = nn.Parameter(torch.zeros(size)) if trained and bias else None
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Initialise from the rows of the target's lm_head for the vocabulary's tokens."""
        if self.weight is None or self.weight.is_meta:  # a meta tensor has no values to start from
            return
        if self.down is None:
            self.weight.copy_(self.rows())
        else:
            factorise(self.rows(), self.weight, self.down.weight)

    def rows(self) -> Float[Tensor, "W D"]:
        """Return the rows of the target's lm_head for the vocabulary's tokens, in fp32."""
        weight, vocab = self._embeddings[0].lm_head_weight().detach(), self._vocab[0]
        return (weight if vocab is None else weight[vocab.ids.to(weight.device)]).float()

    def forward(self, hidden: States) -> Logits:
        """Return the logits."""
        if self.weight is None:
            vocab = self._vocab[0]
            return self._embeddings[0].logits(hidden, None if vocab is None else vocab.ids)
        return self.product(hidden if self.down is None else self.down(hidden), self.bias)


class CandidateLmHead(DraftLmHead):
    """An lm_head that scores `count` candidates in decoding, and the whole vocabulary in training (EAGLE-4).

    Candidates are the tokens with the highest scores of rank `rank`; the lm_head, the target's or the head's own,
    scores these exactly and no others. It is trained in a second stage, as NeMo Automodel documents it
    (components/speculative/eagle/eagle4.md): with everything else frozen (`freeze_around_candidates`) the two factors
    start as the truncated singular value decomposition of the lm_head and learn by `losses.candidates`.
    """

    def __init__(self, embeddings: Embeddings, kind: str, vocab: DraftVocabulary | None, count: int, rank: int) -> None:
        super().__init__(embeddings, kind, vocab)
        width, size = embeddings.hidden_size, embeddings.vocab_size if vocab is None else len(vocab.ids)
        self.count, rank = min(count, size), min(rank, width)
        self.candidate_down = nn.Linear(width, rank, bias=False)
        self.candidate_up = VocabularyLinear(rank, size, bias=False)

    def factorise(self) -> None:
        """Initialise the factors from the lm_head."""
        weight = self.rows() if self.weight is None else self.weight
        factorise(weight, self.candidate_up.weight, self.candidate_down.weight)

    def scores(self, hidden: States) -> Logits:
        """Return the low-rank scores, by which candidates are chosen."""
        return self.candidate_up(self.candidate_down(hidden))

    def forward(self, hidden: States) -> Logits:
        """Return the logits; in decoding, tokens outside the candidates have minus infinity."""
        if self.training:
            return super().forward(hidden)
        scores, vocab = self.scores(hidden), self._vocab[0]
        chosen = scores.topk(self.count, -1).indices
        if self.weight is None:
            logits = self._embeddings[0].logits(hidden, chosen if vocab is None else vocab.ids[chosen])
        else:
            logits = (self.weight[chosen] @ hidden[..., None])[..., 0]
        return torch.full_like(scores, float("-inf"), dtype=logits.dtype).scatter(-1, chosen, logits)


def lm_head_of(config: CandidateConfig, embeddings: Embeddings, vocab: DraftVocabulary | None) -> DraftLmHead:
    """Return the one lm_head of a head."""
    if config.candidates is None:
        return DraftLmHead(embeddings, config.lm_head, vocab)
    return CandidateLmHead(embeddings, config.lm_head, vocab, config.candidates, config.candidate_rank)


def freeze_around_candidates(head: nn.Module) -> None:
    """Freeze a head but for the factors that choose its candidates, if it has any."""
    lm_head = getattr(head, "lm_head", None)
    if isinstance(lm_head, CandidateLmHead):
        head.requires_grad_(False)
        lm_head.candidate_down.requires_grad_(True)
        lm_head.candidate_up.requires_grad_(True)


@torch.no_grad()
def factorise(weight: Tensor, up: Tensor, down: Tensor) -> None:
    """Write the best approximation of a weight by two factors, `up @ down`, of the rank that these have."""
    main = torch.linalg.eigh(weight.T @ weight).eigenvectors[:, -len(down) :]
    up.copy_(weight @ main)
    down.copy_(main.T)


def choose_draft_vocab(head: nn.Module, counts: Int[Tensor, "V"]) -> None:
    """Choose the tokens of a head's draft vocabulary by their frequency in the training data."""
    vocab = getattr(head, "vocab", None)
    if vocab is not None:
        vocab.choose(counts)
        for module in head.modules():
            if isinstance(module, DraftLmHead):
                module.start()
