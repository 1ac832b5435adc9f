"""The protocol of a drafter: `Drafter` is the model, `DrafterState` drafts for one sequence; and their records."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import DraftHead, Features
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.target.stack import FirstLayersOutput
from inference.tree_config import TreeConfig
from inference.verification.rng import Rng, Samples
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree, LookAhead, chain

GREEDY_INVERSE_TEMPERATURE = 2.0  # chosen by benchmarks/ranking.py (docs/engine.md)


class Context(NamedTuple):
    """What a proposal may read: the tokens so far, how the target is sampled, the randomness, and the depth left.

    No node or look-ahead token may be deeper than `max_draft_depth`: there the target's context or the answer ends.
    `cache` holds the target's entries before the last token. Only a drafter that drafts with the target itself writes
    to
    it: entries behind the committed ones, which it drops again, or hands on as `Proposal.first_layers`.
    """

    token: list[int]
    sampling: Sampling
    rng: Rng
    max_draft_depth: int
    cache: TargetCache | None = None


class Proposal(NamedTuple):
    """A tree rooted at the last token; the probs q its children were sampled from, if they were; look-ahead tokens.

    Siblings are in the order in which they were sampled, without replacement. `first_layers` is given if all nodes have
    run through the target's first layers; then there are no look-ahead tokens. `expected` is how many drafted tokens
    the drafter expects to be accepted, 0 if it does not know (see `Drafter.expects_acceptance`).
    """

    tree: DraftTree
    q: Float[Tensor, "N V"] | None = None
    look_ahead: LookAhead | None = None
    first_layers: FirstLayersOutput | None = None
    expected: float = 0.0


def sampled_chain(token: Int[Tensor, "N"], q: Sequence[Float[Tensor, "1 V"]]) -> Proposal:
    """Return the proposal of a chain, the root its first token, whose others were sampled from these probs."""
    return Proposal(chain(token), torch.cat([*q, torch.zeros_like(q[-1])]).to(token.device) if q else None)


class Verified(NamedTuple):
    """A verified proposal: tree, accepted path from the root on, the target's logits at nodes and look-ahead tokens."""

    tree: DraftTree
    path: list[int]
    logits: Float[Tensor, "N V"]
    look_ahead: Float[Tensor, "R V"] | None


class Commit(NamedTuple):
    """What a target pass committed.

    `token` holds for each committed position the token that follows it (the last one is the next root), `features` the
    target's outputs there, `verified` what was proposed and what became of it, None after a prefill.
    """

    token: Int[Tensor, "T"]
    features: TargetOutput
    verified: Verified | None


@runtime_checkable
class DrafterState(Protocol):
    """The drafting of one sequence."""

    def propose(self, context: Context) -> Proposal:
        """Draft what may follow the last token."""
        ...

    def update(self, commit: Commit) -> None:
        """Take in committed rows; by default there is nothing to learn from them."""
        return

    def leave(self) -> None:
        """End the sequence; by default nothing is held for it."""
        return


@runtime_checkable
class Roots(Protocol):
    """The roots of B trees, and how the tokens that may follow them are ranked."""

    token: Int[Tensor, "B 1"]  # the roots' tokens
    seen_tokens: Bool[Tensor, "B 1 V"] | None  # which tokens stand in each prefix, where a penalty asks for it
    noisy: bool  # whether tokens are ranked under coupled noise
    sampling: Sampling | None = None  # how all sequences are sampled, if they are alike
    samples: Samples | None = None  # what the children of a fixed shape are sampled by, where they are
    inverse_temperature: float | Float[Tensor, "B 1 1"] = 1.0  # one for all or each sequence's

    def penalized(self, logits: Float[Tensor, "B N W"], seen_tokens: Bool[Tensor, "B N W"]) -> Float[Tensor, "B N W"]:
        """Return logits with those of seen tokens pulled down."""
        ...

    def gumbel_scores(self, logits: Float[Tensor, "B N V"], depth: int) -> Float[Tensor, "B N V"]:
        """Return what a level's tokens are ranked by under the noise of the positions `depth` below the roots."""
        ...


def inverse_temperature_of(sampling: Sampling) -> float:
    """Return what draft logits are multiplied by before nodes of different parents are compared.

    Greedy decoding accepts the target's best token whatever its probability: a draft's best guess is then right more
    often than its own probability says, which is trained to be the target's.
    """
    return GREEDY_INVERSE_TEMPERATURE if sampling.temperature == 0 else 1.0


@runtime_checkable
class DraftBatch(Protocol):
    """Drafting for several sequences in one go, those that have started and not left, by slot.

    A sequence that starts takes the first vacant slot; before a draft the last ones are moved to the others.
    By default nothing is held, and nothing is drafted.

    Attributes:
        feature_layers: the target layers whose outputs `commit` reads.
        deepest: the depth of the deepest node of a tree in the step at hand; 0 where nothing is drafted.
        max_nodes: the most nodes of a tree in any step, the root included.
        chain: whether the step's trees are chains, so that an accepted path is their beginning.
        sampled: the parents of the nodes of the shape whose children are sampled in the step where roots say so, the
            root's -1; None where all trees are filled by rank.
        tree_key: what tells the step's trees from those of other steps.
    """

    feature_layers: tuple[int, ...] = ()
    deepest: int = 0
    max_nodes: int = 1
    chain: bool = True
    sampled: tuple[int, ...] | None = None
    tree_key: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its keys and values, on the target's device, for as many rows as are reserved."""
        return 0

    def begin(self, running: int, longest: int) -> None:
        """Choose the tree of a step of so many sequences, which `draft_trees` and what follows keep to.

        Args:
            running: the first sequences.
            longest: how many rows the longest of them has.
        """
        return

    def propose_all(self, contexts: Sequence[Context]) -> list[Proposal]:
        """Draft for all, each sampled in its own way."""
        ...

    def draft_trees(
        self, roots: Roots, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> tuple[DraftTree, Bool[Tensor, "#B N N"], Float[Tensor, "B M V"] | None]:
        """Return trees "B N" for sequences that are ranked alike, their ancestors, and q if children were sampled.

        The M rows of q are those of the nodes with children.

        Args:
            max_draft_depth: below it no node is drafted if another can be.
            longest: how many rows the longest sequence has, or may have.
            allow_host_sync: whether the host may read from the device meanwhile.
        """
        ...

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, which has so many rows, to a vacant slot."""
        return

    def reserve(self, capacity: int) -> None:
        """Take note of how many rows any sequence may have, before one starts."""
        return

    def tensors(self) -> list[Tensor]:
        """Return the tensors beside the weights that drafting reads or writes in place."""
        return []

    def commit(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Take in the first `count` of T verified rows of each sequence; they are those of the verification pass."""
        return

    def catch_up(self, lengths: Sequence[int]) -> None:
        """Commit what `DrafterState.update` was given, so that the sequences have so many rows."""
        return


@runtime_checkable
class Drafter(Protocol):
    """A drafter: weights, configuration, and what it remembers of earlier sequences.

    Attributes:
        name: what reports and errors call it.
        tree: the shape of its proposals, for reports.
        feature_layers: the target layers whose outputs its commits must hold.
        expects_acceptance: whether its proposals say how many tokens are expected to be accepted.
        can_redraft: whether a state may propose again from where it stands, each time with fresh randomness.
        head: the trained head that drafts alone, whose acceptance teacher forcing can measure.
        policy: by which trees grow from that head.
    """

    name: str
    tree: str
    feature_layers: tuple[int, ...] = ()
    expects_acceptance: bool = False
    can_redraft: bool = False
    head: DraftHead | None = None
    policy: TreeConfig | None = None

    def start(self, prompt: list[int]) -> DrafterState:
        """Begin a sequence; a drafter with a memory may now remember the text of the one before."""
        ...

    def reset(self) -> None:
        """Forget earlier sequences; by default nothing outlives one."""
        return

    def clone(self) -> "Drafter":
        """Return a drafter with the same weights and a memory of its own, for sequences side by side."""
        return self

    def clones(self, size: int) -> tuple[Sequence["Drafter"], DraftBatch | None]:
        """Return drafters for `size` sequences of a batch, and what drafts for all at once, by default nothing."""
        return [self, *(self.clone() for _ in range(size - 1))], None


def vacant(slots: Sequence[object]) -> int:
    """Return the slot that the next sequence takes: the first without one, else one more."""
    return next((slot for slot, sequence in enumerate(slots) if sequence is None), len(slots))
