"""Draft & Verify (Zhang et al., arXiv 2309.08168) and SWIFT (arXiv 2410.06916): the target drafts without some layers.

The skipped attention and MLP sub-layers come from a search on the user's prompts (skip_search.py). The
drafted rows see the committed ones in the target's own cache; their keys and values are dropped before verification
writes its own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from heads.common.ranges import Count, Decay
from inference.drafters.contrib.skip_search import load_skips
from inference.protocol import Context, Drafter, DrafterState, Proposal
from inference.target.target import Target
from inference.verification.sample import distribution
from inference.verification.tree import DraftTree, root


class LayerSkip(Drafter, DrafterState):
    """Drafts a chain, above temperature 0 sampled from the thinned target's probs; its state is the target's cache."""

    @dataclass(frozen=True)
    class Config:
        """The file that the search wrote, and what differs from its depth and stop; None differs in nothing."""

        skips: str | None
        depth: Count | None
        stop: Decay | None

        def __post_init__(self) -> None:
            if not self.skips:
                raise ValueError("drafter.layer_skip.skips is missing: give the file that eval/search_skips.py writes")

    def __init__(self, config: Config, target: Target, name: str) -> None:
        file = load_skips(Path(config.skips or "").expanduser(), target)
        self.parts, self.name, self.skips = target.parts, name, file.skips
        self.depth = file.depth if config.depth is None else config.depth
        self.stop = file.stop if config.stop is None else config.stop
        self.tree = f"chain-{self.depth}"

    def start(self, prompt: list[int]) -> "LayerSkip":
        """Return the state of any sequence: none of its own."""
        return self

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Draft a chain; it ends after a token that is less probable than `stop`, never instead of it."""
        cache = context.cache
        assert cache is not None
        prefix, device = cache.length, self.parts.target.device
        chain = root(context.token[-1], device).token
        q: list[torch.Tensor] = []
        while len(q) < min(self.depth, context.room):
            position = torch.tensor([prefix + len(q)], device=device)
            seen = torch.ones(1, prefix + len(q) + 1, dtype=torch.bool, device=device)
            logits = self.parts.skim(self.skips, chain[-1:], position, seen, cache)
            q.append(distribution(logits, context.sampling))
            token = context.rng.distinct(q[-1], 1, len(q))[0]
            chain = torch.cat([chain, token])
            if float(logits.float().softmax(-1)[0, token]) < self.stop:
                break
        cache.keep(prefix, [])
        tree = DraftTree(chain, torch.arange(-1, len(q), device=device))
        return Proposal(tree, torch.cat([*q, torch.zeros_like(q[-1])]) if q else None)
