"""Mirror speculative decoding (arXiv 2510.13161): an assistant on another device drafts while the target verifies.

The assistant drafts after the most probable outcomes of the verification, level by level with one pass for all of them;
if the actual outcome is among them, the next draft is ready. Drafts depend only on the text and the seed, so a prepared
draft equals the one that would be drafted later: preparing changes only the time of a step.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heads.base import Tokens
from heads.common.typed import Number
from inference.drafters.assistant import ROOT, Assistant, AssistantState
from inference.drafters.host import HostDrafter
from inference.protocol import CommittedTokens, DraftContext, Proposal
from inference.target.target import Target

WORKERS = ThreadPoolExecutor()
Outcome = tuple[int, ...]  # the tokens that a verification commits: accepted drafts, then the bonus token


class Mirror(HostDrafter):
    """An assistant's chains, with the next one prepared during verification."""

    @dataclass(frozen=True)
    class Config:
        """The number of outcomes to draft after, and the assistant, which drafts chains."""

        outcomes: Number
        assistant: Assistant.Config

    def __init__(self, config: Config, target: Target, name: str) -> None:
        self.config, self.name, self.assistant = config, name, Assistant(config.assistant, target, name)
        self.tree = self.assistant.tree
        if config.assistant.tree.kind != "chain":
            raise ValueError("drafter.mirror.assistant drafts chains: set tree.kind=chain, or use drafter=assistant")
        self.assistant.model.check_masks("which chains in one pass need: use drafter=assistant")

    def start(self, prompt: Tokens) -> "MirrorState":
        """Begin a sequence."""
        return MirrorState(self, prompt)


class MirrorState(AssistantState):
    """One sequence: the assistant's state, and the chains that a worker prepares with it."""

    def __init__(self, drafter: Mirror, prompt: Tokens) -> None:
        super().__init__(drafter.assistant, prompt)
        self.most, self.tried, self.accepted, self.drafted = drafter.config.outcomes, 4, 3, 0
        self.work: Future[dict[Outcome, Proposal]] | None = None
        self.ready: Proposal | None = None

    def update(self, commit: CommittedTokens) -> None:
        """Use the chain prepared for this outcome, or prefill the assistant."""
        self.accepted += len(commit.token) - 1
        self.tried += self.drafted
        self.ready = self.work.result().get(tuple(commit.token)) if self.work else None
        self.work = None
        if self.ready is None:
            super().update(commit)
        else:
            self.text += self.vocabulary.translate(commit.token)

    def propose(self, context: DraftContext) -> Proposal:
        """Return the prepared chain, or draft one; then prepare the next in the background."""
        proposal = self.ready or super().propose(context)
        chain = proposal.tree.token[1:].tolist()
        self.drafted = len(chain)
        if chain and self.most:
            self.work = WORKERS.submit(self.ahead, chain, context._replace(token=[*context.token]))
        return proposal

    @torch.inference_mode()
    def ahead(self, chain: Tokens, context: DraftContext) -> dict[Outcome, Proposal]:
        """Draft after the most probable outcomes of verifying a chain."""
        read = self.read(self.text), self.branch(torch.tensor(chain), [ROOT, *range(len(chain) - 1)])
        free = min(context.max_draft_depth, self.model.max_model_len - len(self.text))
        outcomes = [
            tokens for tokens in self.outcomes(chain, self.answer(torch.cat(read)).logits[0]) if len(tokens) < free
        ]
        if not outcomes:
            return {}
        level = self.answer(
            self.branch(torch.tensor([tokens[-1] for tokens in outcomes]), [len(tokens) - 2 for tokens in outcomes])
        )
        contexts = []
        for tokens in outcomes:
            token = [*context.token, *tokens]
            contexts.append(DraftContext(token, context.sampling, context.draws.at(len(token)), free - len(tokens)))
        return dict(zip(outcomes, self.chains(level, contexts), strict=True))

    def outcomes(self, chain: Tokens, logits: Float[Tensor, "N V"]) -> list[Outcome]:
        """Return the most probable outcomes, by the recent acceptance rate and the assistant's probs of the next token.

        After a rejection the next token is another one than the rejected.
        """
        rate = self.accepted / self.tried
        probs = logits.float().softmax(-1)
        probs[range(len(chain)), chain] = 0
        probs[:-1] *= (1 - rate) / probs[:-1].sum(-1, keepdim=True).clamp_min(1e-9)
        probs *= rate ** torch.arange(len(probs), device=probs.device)[:, None]
        best = probs.flatten().topk(min(self.most, probs.numel())).indices
        size = probs.shape[1]
        return [(*chain[: index // size], index % size) for index in best.tolist()]
