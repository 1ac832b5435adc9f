"""A model-free draft where it promises more accepted tokens than the head has been giving, else the head's tree.

The rule of SuffixDecoding's hybrid (arXiv 2411.04975): a repetition found in the text is longer and cheaper than what
any head drafts, and rarer. Both sides are counted in expected accepted tokens: the model-free drafter states its own
for each draft, corrected by what its drafts have turned out to be worth, and the head's is what the target accepted of
its drafts lately, so that where the text decides, the head need not draft at all.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from heads.common.ranges import Amount, Within
from inference.protocol import Commit, Context, Drafter, DrafterState, Proposal
from inference.verification.tree import agreed, root


@dataclass
class Record:
    """What both drafters have been worth, in running means of tokens."""

    accepted: float  # of the head's drafts
    lookup_expected: float = 1.0  # what the lookup expected to be accepted of its drafts
    lookup_accepted: float = 1.0  # what was, or would have been


class Hybrid(Drafter):
    """Chooses between two drafters before each pass; both see everything that is committed."""

    @dataclass(frozen=True)
    class Config:
        """How both records are kept: the head's first value, and the weight of the newest draft; the lookup."""

        expected: Amount
        weight: Annotated[float, Within(0, 1, above=True)]
        lookup: dict[str, Any]

    def __init__(self, config: Config, main: Drafter, lookup: Drafter, name: str) -> None:
        self.config, self.main, self.lookup, self.name = config, main, lookup, name
        self.tree = f"{lookup.tree} or {main.tree}"
        self.feature_layers = main.feature_layers
        self.record = Record(config.expected)

    def start(self, prompt: list[int]) -> "HybridState":
        """Begin a sequence with both drafters; what the head is worth is learned over all of them."""
        return HybridState(self, prompt)

    def reset(self) -> None:
        """Forget both drafters' memories and records."""
        self.main.reset()
        self.lookup.reset()
        self.record = Record(self.config.expected)

    def clone(self) -> "Hybrid":
        """Return a drafter with clones of both and a copy of their records."""
        other = Hybrid(self.config, self.main.clone(), self.lookup.clone(), self.name)
        other.record = replace(self.record)
        return other


class HybridState(DrafterState):
    """One sequence: both drafters' states, the lookup's last proposal, and whether it was taken."""

    def __init__(self, drafter: Hybrid, prompt: list[int]) -> None:
        self.drafter = drafter
        self.main, self.lookup = drafter.main.start(prompt), drafter.lookup.start(prompt)
        self.looked_up = Proposal(root(prompt[-1] if prompt else 0, torch.device("cpu")))
        self.took_lookup = False

    def update(self, commit: Commit) -> None:
        """Let both drafters learn, the head's record if it drafted, and the lookup's in any case.

        What the lookup would have had accepted shows in the text; behind a short commit it is seen in part only.
        """
        record, weight = self.drafter.record, self.drafter.config.weight
        if commit.verified is not None:
            if not self.took_lookup:
                record.accepted += weight * (len(commit.verified.path) - 1 - record.accepted)
            if self.looked_up.expected > 0:
                accepted = agreed(self.looked_up.tree, commit.token.tolist())
                record.lookup_expected += weight * (self.looked_up.expected - record.lookup_expected)
                record.lookup_accepted += weight * (accepted - record.lookup_accepted)
        self.main.update(commit)
        self.lookup.update(commit)

    def propose(self, context: Context) -> Proposal:
        """Take the model-free draft if it promises more."""
        record = self.drafter.record
        self.looked_up = self.lookup.propose(context)
        worth = self.looked_up.expected * record.lookup_accepted / record.lookup_expected
        self.took_lookup = worth > record.accepted
        return self.looked_up if self.took_lookup else self.main.propose(context)
