"""A model-free draft where it promises more accepted tokens than the head has been giving, else the head's tree.

The rule of SuffixDecoding's hybrid (arXiv 2411.04975): a repetition found in the text is longer and cheaper than what
any head drafts, and rarer. Both sides are counted in expected accepted tokens: the model-free source states its own for
each draft, corrected by what its drafts have turned out to be worth, and the head's is what the target accepted of its
drafts lately, so that where the text decides, the head need not draft at all.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from inference.protocol import Commit, Context, Drafter, Proposal
from inference.verification.tree import agreed, root


@runtime_checkable
class Scored(Drafter, Protocol):
    """A draft source that knows how many of its last proposal's tokens it expects to be accepted."""

    score: float


class Hybrid:
    """Chooses between two sources before each pass; both see everything that is committed."""

    @dataclass(frozen=True)
    class Config:
        """How both records are kept: the head's first value, and the weight of the newest draft; the lookup."""

        expected: float
        weight: float
        lookup: dict[str, Any]

        def __post_init__(self) -> None:
            """Check the ranges."""
            if not 0 < self.weight <= 1:
                raise ValueError(f"drafter.hybrid.weight is {self.weight}: give a number above 0, up to 1")
            if self.expected < 0:
                raise ValueError(f"drafter.hybrid.expected is {self.expected}: give 0 or more tokens")

    def __init__(self, config: Config, head: Drafter, lookup: Scored, name: str) -> None:
        self.config, self.head, self.lookup, self.name = config, head, lookup, name
        self.tree = f"{lookup.tree} or {head.tree}"
        self.feature_layers = head.feature_layers
        self.chosen: Drafter = head
        self.found = Proposal(root(0, torch.device("cpu")))
        self._begin()

    def _begin(self) -> None:
        """Begin both records. Of the lookup: what it promised and what came true, in running means."""
        self.expected = self.config.expected
        self.promised = self.kept = 1.0

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence; what the head is worth is learned over all of them."""
        self.head.reset(prompt)
        self.lookup.reset(prompt)
        self.chosen = self.head

    def forget(self) -> None:
        """Forget both sources' memories and the head's record."""
        self.head.forget()
        self.lookup.forget()
        self._begin()

    def observe(self, commit: Commit) -> None:
        """Let both sources learn, the head's record if it drafted, and the lookup's in any case.

        What the lookup would have had accepted shows in the text; behind a short commit it is seen in part only.
        """
        weight = self.config.weight
        if commit.verified is not None:
            if self.chosen is self.head:
                self.expected += weight * (len(commit.verified.path) - 1 - self.expected)
            if self.lookup.score > 0:
                self.promised += weight * (self.lookup.score - self.promised)
                self.kept += weight * (agreed(self.found.tree, commit.token.tolist()) - self.kept)
        self.head.observe(commit)
        self.lookup.observe(commit)

    def propose(self, context: Context) -> Proposal:
        """Take the model-free draft if it promises more."""
        self.found = self.lookup.propose(context)
        if self.lookup.score * self.kept / self.promised > self.expected:
            self.chosen = self.lookup
            return self.found
        self.chosen = self.head
        return self.head.propose(context)
