"""A model-free draft if its expected acceptance is higher than the head's recent acceptance, else the head's tree.

The rule of SuffixDecoding's hybrid (arXiv 2411.04975): a draft from repeated text is longer and cheaper than a head's,
and rarer. The two are compared by expected accepted tokens. The model-free drafter states this number for each draft;
it is corrected by the acceptance of its past drafts. The head's number is the mean acceptance of its recent drafts. If
all sequences use the model-free draft, the head does not draft.
"""

from dataclasses import dataclass, replace

import torch

from heads.base import Tokens
from heads.common.typed import Amount, Json, Share
from heads.shapes import PerSequence
from inference.drafters.host import HostBatch, HostDrafter, padded
from inference.protocol import Contexts, Drafted, Drafter, DraftInputs, DraftPlan, PassLogits, Proposal
from inference.target.model import TargetOutput
from inference.verification.tree import DraftTree, agreed


@dataclass
class Record:
    """Running means of the tokens that were accepted of both drafters' drafts."""

    accepted: float  # tokens accepted of the head's drafts
    lookup_expected: float = 1.0  # tokens that the lookup expected to be accepted
    lookup_accepted: float = 1.0  # tokens that were, or would have been


class Hybrid(Drafter):
    """Chooses between two drafters before each pass; both are updated with all committed tokens."""

    @dataclass(frozen=True)
    class Config:
        """The head's initial acceptance, the weight of the newest draft in the means, and the lookup's options."""

        expected: Amount
        weight: Share
        lookup: Json

    def __init__(self, config: Config, head_drafter: Drafter, lookup: HostDrafter, name: str) -> None:
        self.config, self.head_drafter, self.lookup, self.name = config, head_drafter, lookup, name
        self.tree = f"{lookup.tree} or {head_drafter.tree}"
        self.record = Record(config.expected)

    def reset(self) -> None:
        """Forget both drafters' memories and records."""
        self.head_drafter.reset()
        self.lookup.reset()
        self.record = Record(self.config.expected)

    def clone(self) -> "Hybrid":
        """Return a drafter with clones of both and a copy of their records."""
        other = Hybrid(self.config, self.head_drafter.clone(), self.lookup.clone(), self.name)
        other.record = replace(self.record)
        return other

    def batch(self, size: int) -> "HybridBatch":
        """Return the draft batch for up to `size` sequences; each slot has its own lookup and record."""
        return HybridBatch(self, size)


class HybridBatch(HostBatch):
    """The lookups of a batch's sequences, and the draft batch for sequences that do not use theirs."""

    def __init__(self, drafter: Hybrid, size: int) -> None:
        drafters = [drafter, *(drafter.clone() for _ in range(size - 1))]
        super().__init__([clone.lookup for clone in drafters])
        self.drafters = {id(clone.lookup): clone for clone in drafters}
        self.weight, self.head_batch = drafter.config.weight, drafter.head_drafter.batch(size)
        self.traits = self.head_batch.traits._replace(on_device=False)
        self.looked_up: list[Proposal | None] = []

    def start_sequence(self, slot: int, token: Tokens, features: TargetOutput) -> None:
        """Begin a sequence with both drafters."""
        super().start_sequence(slot, token, features)
        self.head_batch.start_sequence(slot, token, features)

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move a sequence."""
        super().move(from_slot, slot, length)
        self.head_batch.move(from_slot, slot, length)

    def needs_prefill(self, running: int) -> bool:
        """Return whether the sequences must be prefilled again for the other drafter."""
        return self.head_batch.needs_prefill(running)

    def record(self, slot: int) -> Record:
        """Return the record of a slot."""
        return self.drafters[id(self.slots[slot][0])].record

    def begin(self, contexts: Contexts, longest: int) -> DraftPlan:
        """Choose the lookups of higher expected acceptance; the other drafter drafts for the rest, if there is one."""
        plan = super().begin(contexts, longest)
        self.looked_up, taken = self.proposals, []
        for slot, proposal in enumerate(self.looked_up):
            taken.append(proposal)
            if proposal is not None:
                record = self.record(slot)
                if proposal.expected * record.lookup_accepted / record.lookup_expected <= record.accepted:
                    taken[slot] = None
        rest = [None if proposal is not None else context for proposal, context in zip(taken, contexts, strict=True)]
        self.both, head_plan = any(context is not None for context in rest), self.head_batch.begin(rest, longest)
        if not self.both:
            return plan
        lookup_plan, has_q = self.planned(taken), head_plan.has_q or [True] * len(taken)
        if all(proposal is None for proposal in taken):
            return head_plan
        return head_plan._replace(
            tree_depth=max(lookup_plan.tree_depth, head_plan.tree_depth),
            max_nodes=max(lookup_plan.max_nodes, head_plan.max_nodes),
            chain=lookup_plan.chain and head_plan.chain,
            has_q=[lookup is None and sampled for lookup, sampled in zip(taken, has_q, strict=True)],
        )

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: PerSequence, longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return the chosen lookups and the other sequences' trees, all padded to the largest."""
        if not self.both:
            return super().draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)
        head_drafts = self.head_batch.draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)
        taken = [proposal is not None for proposal in self.proposals]
        if not any(taken):
            return head_drafts
        lookup_drafts = super().draft_trees(roots, max_draft_depth, longest, allow_host_sync=allow_host_sync)
        size = max(lookup_drafts.tree.token.shape[1], head_drafts.tree.token.shape[1])
        which = torch.tensor(taken, device=max_draft_depth.device)[:, None]
        (lookup_tree, lookup_mask), (head_tree, head_mask) = (
            padded(drafts.tree, drafts.ancestor_mask, size, 0) for drafts in (lookup_drafts, head_drafts)
        )
        tree = DraftTree(*(torch.where(which, *rows) for rows in zip(lookup_tree, head_tree, strict=True)))
        return Drafted(tree, torch.where(which[..., None], lookup_mask, head_mask), head_drafts.q)

    def update(self, slot: int, token: Tokens, path: list[int], logits: PassLogits) -> None:
        """Update both drafters, the lookup's acceptance, and the head's acceptance if the head drafted.

        The acceptance of an unused lookup follows from the committed tokens; a short commit shows only part of it.
        """
        record, looked_up, weight = self.record(slot), self.looked_up[slot], self.weight
        if self.proposals[slot] is None:
            record.accepted += weight * (len(path) - 1 - record.accepted)
        if looked_up is not None and looked_up.expected > 0:
            accepted = agreed(looked_up.tree, token)
            record.lookup_expected += weight * (looked_up.expected - record.lookup_expected)
            record.lookup_accepted += weight * (accepted - record.lookup_accepted)
        super().update(slot, token, path, logits)
        self.head_batch.update(slot, token, path, logits)
