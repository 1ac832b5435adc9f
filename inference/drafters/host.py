"""Drafters on the host: they draft for one sequence at a time, and a batch pads their trees into one tensor."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from heads.base import Tokens
from heads.shapes import PerSequence
from inference import protocol
from inference.target.model import TargetOutput
from inference.verification import tree as trees
from inference.verification.rules import is_chain
from inference.verification.tree import LOOK_AHEAD, AncestorMask, DraftTree


@runtime_checkable
class DrafterState(Protocol):
    """A drafter's state for one sequence."""

    def propose(self, context: protocol.DraftContext) -> protocol.Proposal:
        """Return a draft after the last token."""

    def update(self, commit: protocol.CommittedTokens) -> None:
        """Update the state with the committed tokens; by default there is nothing to update."""
        return


@runtime_checkable
class HostDrafter(protocol.Drafter, Protocol):
    """A drafter on the host, with a state for each sequence.

    Attributes:
        expects_acceptance: whether its proposals set `expected`.
        reads_logits: whether its states read the target's logits.
        single: whether a batch has one slot, because its pass runs another decoder stack.
    """

    expects_acceptance: bool = False
    reads_logits: bool = False
    single: bool = False

    def start(self, prompt: Tokens) -> DrafterState:
        """Begin a sequence; a drafter with memory may add the previous sequence's text to it."""

    def batch(self, size: int) -> "HostBatch":
        """Return the draft batch for up to `size` sequences; each slot has its own clone of the drafter."""
        return HostBatch([self, *(self.clone() for _ in range(size - 1))])


class HostBatch(protocol.DraftBatch):
    """The states of a batch's sequences, and their proposals in the current step."""

    def __init__(self, drafters: Sequence[HostDrafter]) -> None:
        self.traits = protocol.DraftTraits(False, drafters[0].reads_logits, drafters[0].single)
        self.slots: list[tuple[HostDrafter, DrafterState | None]] = [(drafter, None) for drafter in reversed(drafters)]
        self.proposals: list[protocol.Proposal | None] = []  # one per slot

    def start_sequence(self, slot: int, token: Tokens, features: TargetOutput) -> None:
        """Begin a sequence."""
        drafter = self.slots[slot][0]
        state = drafter.start(token[:-1])
        state.update(protocol.CommittedTokens(token[-1:]))
        self.slots[slot] = drafter, state

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move a sequence's state with its drafter."""
        self.slots[slot], self.slots[from_slot] = self.slots[from_slot], self.slots[slot]

    def begin(self, contexts: protocol.Contexts, longest: int) -> protocol.DraftPlan:
        """Collect the sequences' proposals."""
        states = zip([state for _, state in self.slots], contexts, strict=False)
        return self.planned([state.propose(context) if state and context else None for state, context in states])

    def planned(self, proposals: list[protocol.Proposal | None]) -> protocol.DraftPlan:
        """Return the plan of a step's proposals; for a sequence without one only the root is verified."""
        self.proposals = proposals
        proposed = [proposal for proposal in proposals if proposal is not None]
        parents = [[-1], *(proposal.tree.parent.tolist() for proposal in proposed)]
        self.size, depths = max(map(len, parents)), [0]
        self.look_ahead_size = max(
            (len(proposal.look_ahead.token) for proposal in proposed if proposal.look_ahead), default=0
        )
        for tree in parents:
            depth = [0]
            for parent in tree[1:]:
                depth.append(depth[parent] + 1)
            depths += depth
        shapes = [tuple(tree) for tree, proposal in zip(parents[1:], proposed, strict=True) if proposal.q is not None]
        self.plan = protocol.DraftPlan(
            max(depths),
            self.size + self.look_ahead_size,
            all(map(is_chain, parents)),
            max(shapes, key=len, default=None),  # the longest topology; the others are prefixes of it
            [draft is None or draft.q is not None or len(draft.tree.token) == 1 for draft in proposals],
            proposals[0] if self.traits.single else None,
        )
        return self.plan

    def draft_trees(
        self, roots: protocol.DraftInputs, max_draft_depth: PerSequence, longest: int, *, allow_host_sync: bool
    ) -> protocol.Drafted:
        """Return the proposals, padded to the largest, with look-ahead tokens after the nodes."""
        device, size, count = roots.token.device, self.size, len(self.proposals)
        token = torch.full((count, size), -1)
        parent = torch.zeros(count, size, dtype=torch.long)
        for b, proposal in enumerate(self.proposals):
            if proposal is not None:
                tree = proposal.tree
                token[b, : len(tree.token)], parent[b, : len(tree.token)] = tree.token, tree.parent
        parent[:, 0] = -1
        mask = trees.ancestors(DraftTree(token, parent)).to(device)
        token = torch.cat([roots.token, token[:, 1:].to(device)], 1)
        tree = DraftTree(token, parent.to(device))
        q = None
        if self.plan.sampled is not None:
            given = [None if proposal is None else proposal.q for proposal in self.proposals]
            none = next(probs for probs in given if probs is not None)[:0]
            probs = [none if q is None else q for q in given]
            q = pad_sequence(probs, batch_first=True, padding_value=1.0).to(device)
        if not self.look_ahead_size:
            return protocol.Drafted(tree, mask, q)
        tree, mask = padded(tree, mask, self.plan.max_nodes, LOOK_AHEAD)
        depth = mask.sum(-1) - 1
        for b, proposal in enumerate(self.proposals):
            if proposal is not None and proposal.look_ahead is not None:
                ahead = proposal.look_ahead
                nodes = len(proposal.tree.token)
                after = slice(size, size + len(ahead.token))
                tree.token[b, after], depth[b, after] = ahead.token, ahead.offset
                mask[b, after, :nodes], mask[b, after, after] = (ahead.attn_mask[:, :nodes], ahead.attn_mask[:, nodes:])
        return protocol.Drafted(tree, mask, q, depth)

    def update(self, slot: int, token: Tokens, path: list[int], logits: protocol.PassLogits) -> None:
        """Update a sequence's state with its verified proposal."""
        proposal = self.proposals[slot]
        state = self.slots[slot][1]
        assert state is not None
        verified = None if proposal is None else protocol.Verified(proposal.tree, path)
        if proposal is not None and verified is not None and logits is not None:
            ahead = None if proposal.look_ahead is None else logits[self.size :][: len(proposal.look_ahead.token)]
            verified = verified._replace(logits=logits[: len(proposal.tree.token)], look_ahead=ahead)
        state.update(protocol.CommittedTokens(token, verified))


def padded(tree: DraftTree, mask: AncestorMask, size: int, parent: int) -> tuple[DraftTree, Bool[Tensor, "#B M M"]]:
    """Return trees and their ancestor masks, padded to `size` nodes, of which the new ones have this parent."""
    more = (0, size - tree.token.shape[1])
    itself = torch.eye(size, dtype=torch.bool, device=mask.device)  # attention over no keys gives NaN
    tree = DraftTree(pad(tree.token, more, value=-1), pad(tree.parent, more, value=parent))
    return tree, pad(mask, (*more, *more)) | itself
