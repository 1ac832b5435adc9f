"""EAGLE-4 (eagle-hq/EAGLE-4, October 2026): EAGLE-3.1 with a sliding window and a low-rank candidate head.

The window is the head's `length`. The candidate head chooses `candidates` tokens by scores of rank `candidate_rank`;
the lm_head scores these exactly and no others, so a draft does not pay for the whole vocabulary.

It is trained in two stages, as NeMo Automodel documents them (components/speculative/eagle/eagle4.md): EAGLE-3's over
the whole vocabulary, then, with everything else frozen, the two factors. These start from the truncated singular value
decomposition of the lm_head and learn by the forward divergence from the head's own distribution at every depth
(`losses.candidates`). The second stage starts from any EAGLE-3 or EAGLE-4 head: experiment=eagle4_candidates.

Unsupported: layers with a mixture of experts, and the authors' append-only cache of the keys and values of
drafted rows; our cache holds those of verified rows, as in EAGLE-3. Their code is for inference only and was not run.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from heads.base import DraftVocabulary, Embeddings
from heads.common.typed import Count, Width
from heads.eagle3 import Eagle3
from heads.modules.vocab import DraftLmHead, VocabularyLinear, factorise
from heads.shapes import Logits, States


class CandidateLmHead(DraftLmHead):
    """An own lm_head that scores `count` candidates in decoding, and the whole vocabulary in training."""

    def __init__(self, embeddings: Embeddings, vocab: DraftVocabulary | None, count: int, rank: int) -> None:
        super().__init__(embeddings, "own", vocab)
        size, width = self.weight.shape
        self.count = min(count, size)
        self.candidate_down = nn.Linear(width, min(rank, width), bias=False)
        self.candidate_up = VocabularyLinear(min(rank, width), size, bias=False)

    def factorise(self) -> None:
        """Initialise the factors from the lm_head."""
        factorise(self.weight, self.candidate_up.weight, self.candidate_down.weight)

    def scores(self, hidden: States) -> Logits:
        """Return the low-rank scores, by which candidates are chosen."""
        return self.candidate_up(self.candidate_down(hidden))

    def forward(self, hidden: States) -> Logits:
        """Return the logits; in decoding, tokens outside the candidates have minus infinity."""
        if self.training:
            return super().forward(hidden)
        chosen = self.scores(hidden).topk(self.count, -1).indices
        logits = (self.weight[chosen] @ hidden[..., None])[..., 0]
        return logits.new_full((*hidden.shape[:-1], len(self.weight)), float("-inf")).scatter(-1, chosen, logits)


class Eagle4(Eagle3):
    """The EAGLE-4 head; with `candidates` only the candidate head is trained."""

    @dataclass(frozen=True)
    class Config(Eagle3.Config):
        """Hyperparameters of the head; `candidates` null means the first stage, without a candidate head."""

        candidates: Count | None
        candidate_rank: Width

        def __post_init__(self) -> None:
            """Refuse candidates with the target's own lm_head."""
            super().__post_init__()
            if self.candidates is not None and self.lm_head != "own":
                raise ValueError("head.candidates are those of the head's own lm_head: give head.lm_head=own")

    def __init__(self, config: Config, embeddings: Embeddings) -> None:
        super().__init__(config, embeddings)
        if config.candidates is None:
            return
        head = CandidateLmHead(embeddings, self.vocab, config.candidates, config.candidate_rank)
        self.lm_head: Any = head
        self.requires_grad_(False)
        for factor in (head.candidate_down, head.candidate_up):
            factor.requires_grad_(True)
