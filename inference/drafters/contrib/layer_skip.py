"""Draft & Verify (Zhang et al., arXiv 2309.08168) and SWIFT (arXiv 2410.06916): the target drafts without some layers.

The skipped attention and MLP sub-layers come from a search on the user's prompts (skip_search.py). The
drafted rows see the committed ones in the target's own cache; their keys and values are dropped before verification
writes its own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from inference.drafters.contrib.skip_search import load_skips
from inference.protocol import Commit, Context, Proposal
from inference.target.target import Target
from inference.verification.sample import distribution
from inference.verification.tree import DraftTree, root


class LayerSkip:
    """Drafts a chain, at temperatures above 0 drawn from the thinned target's law."""

    @dataclass(frozen=True)
    class Config:
        """The file that the search wrote, and what differs from its depth and stop; None differs in nothing."""

        skips: str | None
        depth: int | None
        stop: float | None

        def __post_init__(self) -> None:
            """Check the ranges."""
            if not self.skips:
                raise ValueError("drafter.layer_skip.skips is missing: give the file that eval/search_skips.py writes")
            if self.depth is not None and self.depth < 1:
                raise ValueError(f"drafter.layer_skip.depth is {self.depth}: give at least 1")
            if self.stop is not None and not 0 <= self.stop < 1:
                raise ValueError(
                    f"drafter.layer_skip.stop is {self.stop}: give 0 for no stop, or a probability below 1"
                )

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, name: str) -> None:
        file = load_skips(Path(config.skips or "").expanduser(), target)
        self.parts, self.name, self.skips = target.parts, name, file.skips
        self.depth = file.depth if config.depth is None else config.depth
        self.stop = file.stop if config.stop is None else config.stop
        self.tree = f"chain-{self.depth}"

    def reset(self, prompt: list[int]) -> None:
        """Nothing to begin: what is known of the sequence stands in the target's cache."""

    def forget(self) -> None:
        """Nothing outlives a sequence."""

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    @torch.inference_mode()
    def propose(self, context: Context) -> Proposal:
        """Draft a chain; it ends after a token that is less probable than `stop`, never instead of it."""
        cache = context.cache
        assert cache is not None
        prefix, device = cache.length, self.parts.target.device
        chain = root(context.token[-1], device).token
        laws: list[torch.Tensor] = []
        while len(laws) < min(self.depth, context.room):
            position = torch.tensor([prefix + len(laws)], device=device)
            seen = torch.ones(1, prefix + len(laws) + 1, dtype=torch.bool, device=device)
            logits = self.parts.skim(self.skips, chain[-1:], position, seen, cache)
            laws.append(distribution(logits, context.sampling))
            drawn = context.rng.distinct(laws[-1], 1, len(laws))[0]
            chain = torch.cat([chain, drawn])
            if float(logits.float().softmax(-1)[0, drawn]) < self.stop:
                break
        cache.keep(prefix, [])
        tree = DraftTree(chain, torch.arange(-1, len(laws), device=device))
        return Proposal(tree, torch.cat([*laws, torch.zeros_like(laws[-1])]) if laws else None)
