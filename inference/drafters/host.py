"""Drafters that work on the host, a sequence at a time: a batch of their trees is padded into one tensor."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from inference.protocol import (
    CommittedTokens,
    Context,
    DraftBatch,
    Drafted,
    Drafter,
    DraftInputs,
    DraftPlan,
    DraftTraits,
    Proposal,
    Verified,
)
from inference.target.model import TargetOutput
from inference.verification import tree as trees
from inference.verification.tree import LOOK_AHEAD, DraftTree


@runtime_checkable
class DrafterState(Protocol):
    """The drafting of one sequence."""

    def propose(self, context: Context) -> Proposal:
        """Draft what may follow the last token."""
        ...

    def update(self, commit: CommittedTokens) -> None:
        """Take in what was committed; by default there is nothing to learn from it."""
        return


@runtime_checkable
class HostDrafter(Drafter, Protocol):
    """A source with a state for each sequence.

    Attributes:
        expects_acceptance: whether its proposals say how many tokens are expected to be accepted.
        reads_logits: whether its states read the target's logits.
        single: whether it drafts for one sequence at a time: its pass runs through other layers.
    """

    expects_acceptance: bool = False
    reads_logits: bool = False
    single: bool = False

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence; a source with a memory may now remember the text of the one before."""
        ...

    def batch(self, size: int) -> "HostBatch":
        """Return what drafts for up to `size` sequences, each by a clone of its size: none learns from the others."""
        return HostBatch([self, *(self.clone() for _ in range(size - 1))])


class HostBatch(DraftBatch):
    """The states of a batch's sequences, and what they propose in the step at hand."""

    def __init__(self, sources: Sequence[HostDrafter]) -> None:
        self.free = list(sources)
        self.traits = DraftTraits(False, sources[0].reads_logits, sources[0].single)
        self.slots: list[tuple[HostDrafter, DrafterState] | None] = [None] * len(sources)
        self.proposals: list[Proposal | None] = []  # by slot

    def start_sequence(self, slot: int, token: list[int], features: TargetOutput) -> None:
        """Begin a sequence, by the source of the one that has left its slot if there was one."""
        pair = self.slots[slot]
        source = self.free.pop() if pair is None else pair[0]
        state = source.start(token[:-1])
        state.update(CommittedTokens(token[-1:]))
        self.slots[slot] = source, state

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move a sequence's state."""
        left, self.slots[slot], self.slots[from_slot] = self.slots[slot], self.slots[from_slot], None
        if left is not None:
            self.free.append(left[0])

    def begin(self, contexts: Sequence[Context | None], longest: int) -> DraftPlan:
        """Let the sequences propose."""
        pairs = zip(self.slots, contexts, strict=False)
        return self.planned(
            [None if context is None or pair is None else pair[1].propose(context) for pair, context in pairs]
        )

    def planned(self, proposals: list[Proposal | None]) -> DraftPlan:
        """Return the plan of a step's proposals; where there is none, the root is verified."""
        self.proposals = proposals
        proposed = [proposal for proposal in proposals if proposal is not None]
        parents = [[-1], *(proposal.tree.parent.tolist() for proposal in proposed)]
        self.size = max(map(len, parents))
        self.look_ahead_size = max(
            (len(one.look_ahead.token) for one in proposed if one.look_ahead is not None), default=0
        )
        chain = all(one == [*range(-1, len(one) - 1)] for one in parents)
        shapes = [tuple(one) for one, proposal in zip(parents[1:], proposed, strict=True) if proposal.q is not None]
        self.plan = DraftPlan(
            self.size - 1 if chain else max(map(_deepest, parents)),
            self.size + self.look_ahead_size,
            chain,
            max(shapes, key=len, default=None),  # the others are its beginnings
            [one is None or one.q is not None or len(one.tree.token) == 1 for one in proposals],
            proposals[0] if self.traits.single else None,
        )
        return self.plan

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return the proposals, padded to the largest, with look-ahead tokens behind the nodes."""
        device, shown = roots.token.device, [proposal and proposal.tree for proposal in self.proposals]
        root = DraftTree(torch.zeros(1, dtype=torch.long), torch.full((1,), -1))
        token = pad_sequence([(tree or root).token.cpu() for tree in shown], batch_first=True, padding_value=-1).to(
            device
        )
        token = torch.cat([roots.token, token[:, 1:]], 1)
        if self.plan.chain:
            tree = DraftTree(token, torch.arange(-1, self.size - 1, device=device).expand_as(token))
            mask = token.new_ones(1, self.size, self.size, dtype=torch.bool).tril()
        else:
            parent = pad_sequence([(tree or root).parent.cpu() for tree in shown], batch_first=True).to(device)
            tree = DraftTree(token, parent)
            mask = trees.ancestors(tree)
        q = self.probs(device) if any(one is not None and one.q is not None for one in self.proposals) else None
        return self.with_look_ahead(tree, mask, q) if self.look_ahead_size else Drafted(tree, mask, q)

    def probs(self, device: torch.device) -> Float[Tensor, "B M V"]:
        """Return the probs that children were sampled from, those of absent nodes 1."""
        assert self.plan.sampled is not None
        given = [None if proposal is None else proposal.q for proposal in self.proposals]
        none = next(q for q in given if q is not None)[:0]
        size, rows = len({*self.plan.sampled} - {-1}), [none if q is None else q for q in given]
        return torch.stack([pad(q, (0, 0, 0, size - len(q)), value=1.0) for q in rows]).to(device)

    def with_look_ahead(self, tree: DraftTree, mask: Tensor, q: Float[Tensor, "B M V"] | None) -> Drafted:
        """Return trees with the look-ahead tokens of each behind its nodes."""
        count, more = len(self.proposals), (0, self.look_ahead_size)
        tree = DraftTree(pad(tree.token, more, value=-1), pad(tree.parent, more, value=LOOK_AHEAD))
        mask = pad(mask, (*more, *more)).repeat(count // len(mask), 1, 1)
        mask |= torch.eye(self.plan.max_nodes, dtype=torch.bool, device=mask.device)  # what sees nothing would be NaN
        depth = mask.sum(-1) - 1
        for b, proposal in enumerate(self.proposals):
            if proposal is not None and proposal.look_ahead is not None:
                ahead, size = proposal.look_ahead, len(proposal.tree.token)
                rows = slice(self.size, self.size + len(ahead.token))
                tree.token[b, rows], depth[b, rows] = ahead.token, ahead.offset
                mask[b, rows, :size], mask[b, rows, rows] = ahead.attn_mask[:, :size], ahead.attn_mask[:, size:]
        return Drafted(tree, mask, q, depth)

    def learn(self, slot: int, token: list[int], path: list[int], logits: Float[Tensor, "M V"] | None) -> None:
        """Tell a sequence's state what became of its proposal."""
        proposal, pair = self.proposals[slot], self.slots[slot]
        assert pair is not None
        verified = None if proposal is None else Verified(proposal.tree, path)
        if proposal is not None and verified is not None and logits is not None:
            ahead = None if proposal.look_ahead is None else logits[self.size :][: len(proposal.look_ahead.token)]
            verified = verified._replace(logits=logits[: len(proposal.tree.token)], look_ahead=ahead)
        pair[1].update(CommittedTokens(token, verified))


def _deepest(parents: list[int]) -> int:
    """Return the depth of a tree's deepest node."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return max(depth)
