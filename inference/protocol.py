"""Drafters: a `Drafter` is the model, a `DraftBatch` drafts for the sequences of a batch; and what they exchange."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import DraftHead, Features, Layers, Tokens
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.verification.rng import Draws, Samples
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree, LookAhead

AnyDrafter = TypeVar("AnyDrafter")
GREEDY_INVERSE_TEMPERATURE = 2.0  # chosen by benchmarks/ranking.py (docs/engine.md)


def inverse_temperature_of(sampling: Sampling) -> float:
    """Return what draft logits are multiplied by before nodes of different parents are compared.

    Greedy decoding accepts the target's best token whatever its probability: a draft's best guess is then right more
    often than its own probability says, which is trained to be the target's.
    """
    return GREEDY_INVERSE_TEMPERATURE if sampling.temperature == 0 else 1.0


class DraftInputs(NamedTuple):
    """The roots of B trees, and how the tokens that may follow them are ranked or sampled.

    Attributes:
        token: the roots' tokens.
        sampling: of the target, for all alike.
        seen_tokens: which tokens are in each prefix, where a penalty asks for it.
        noise: of the P positions below each root, under which tokens are ranked if they are coupled.
        samples: what the children of a fixed shape are sampled by, where they are.
    """

    token: Int[Tensor, "B 1"]
    sampling: Sampling
    seen_tokens: Bool[Tensor, "B 1 V"] | None = None
    noise: Float[Tensor, "B P V"] | None = None
    samples: Samples | None = None


class Drafted(NamedTuple):
    """What was drafted for B sequences.

    Attributes:
        tree: their trees "B N".
        ancestor_mask: what each node sees of them: its ancestors, and itself.
        q: the probs that children were sampled from, of the M nodes with children; None where none were sampled.
        depth: of each node; None: as many nodes as it sees above it.
        noise: the roots' (see `DraftInputs`).
    """

    tree: DraftTree
    ancestor_mask: Bool[Tensor, "#B N N"]
    q: Float[Tensor, "B M V"] | None = None
    depth: Int[Tensor, "B N"] | None = None
    noise: Float[Tensor, "B P V"] | None = None

    @property
    def node_depth(self) -> Int[Tensor, "B N"]:
        """The depth of each node, once it is known."""
        assert self.depth is not None
        return self.depth

    def first(self, count: int) -> "Drafted":
        """Return what was drafted for the first sequences."""
        ancestor_mask = self.ancestor_mask if len(self.ancestor_mask) == 1 else self.ancestor_mask[:count]
        q, depth, noise = (None if rows is None else rows[:count] for rows in self[2:])
        return Drafted(DraftTree(*(rows[:count] for rows in self.tree)), ancestor_mask, q, depth, noise)


class Context(NamedTuple):
    """What the host drafts a sequence from: its tokens, how the target is sampled, the randomness, and the depth left.

    No node may be deeper than `max_draft_depth`: there the target's context or the answer ends, and deeper look-ahead
    tokens run at its position.
    `cache` holds the target's entries before the last token. Only a drafter that drafts with the target itself writes
    to it: entries behind the committed ones, which it drops again.
    """

    token: Tokens
    sampling: Sampling
    draws: Draws
    max_draft_depth: int
    cache: TargetCache | None = None

    def seen_tokens(self, like: Float[Tensor, "*n V"]) -> Bool[Tensor, "1 1 V"] | None:
        """Return which tokens stand in the text, where a penalty asks for it, for logits `like`."""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(1, 1, like.shape[-1], dtype=torch.bool, device=like.device)
        seen[..., self.token] = True
        return seen

    def roots(self, like: Float[Tensor, "*n V"], deepest: int) -> DraftInputs:
        """Return this sequence's root for a tree of a depth, with what its tokens are ranked by, for logits `like`."""
        token, seen_tokens = torch.tensor([self.token[-1:]], device=like.device), self.seen_tokens(like)
        noise = samples = None
        if self.sampling.temperature > 0 and self.draws.coupled:
            noise = self.draws.noise(range(deepest), like)[None]
        elif self.sampling.temperature > 0:
            samples = self.draws.samples(like.device)
        return DraftInputs(token, self.sampling, seen_tokens, noise, samples)


class Proposal(NamedTuple):
    """A tree rooted at the last token; the probs q that children were sampled from, if they were; look-ahead tokens.

    q has a row for each of the M nodes with children. Siblings are in the order in which they were sampled, without
    replacement. `expected` is how many drafted tokens the drafter expects to be accepted, 0 if it does not know.
    """

    tree: DraftTree
    q: Float[Tensor, "M V"] | None = None
    look_ahead: LookAhead | None = None
    expected: float = 0.0


class Verified(NamedTuple):
    """A verified proposal: tree, accepted path from the root on, the target's logits at nodes and look-ahead tokens.

    There are logits for a drafter that reads them (`HostDrafter.reads_logits`).
    """

    tree: DraftTree
    path: list[int]
    logits: Float[Tensor, "N V"] | None = None
    look_ahead: Float[Tensor, "R V"] | None = None


class CommittedTokens(NamedTuple):
    """The tokens that a target pass committed, and what became of the proposal, None after a prefill."""

    token: Tokens
    verified: Verified | None = None


@runtime_checkable
class DraftRows(Protocol):
    """The verified rows that a batch's drafter learns from, by slot.

    Attributes:
        feature_layers: the target layers whose outputs are rows.
    """

    feature_layers: Layers

    @property
    def nbytes(self) -> int:
        """Bytes of their keys and values, on the target's device, for as many rows as are reserved."""
        ...

    def reserve(self, capacity: int) -> None:
        """Take note of how many rows any sequence may have, before one starts."""
        ...

    def tensors(self) -> list[Tensor]:
        """Return the tensors other than weights that drafting reads or writes in place."""
        ...

    def commit(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Take in the first `count` of T verified rows of each sequence; they are those of the verification pass."""
        ...


class DraftTraits(NamedTuple):
    """What holds for all steps of a batch.

    Attributes:
        on_device: whether drafts are a function of tensors, which can be captured or compiled.
        reads_logits: whether `learn` reads the target's logits.
        single: whether it drafts for one sequence at a time: a batch then has one slot.
        max_nodes: the most nodes of a tree, the root included; of a drafter on the host each step says it.
        rows: the rows that it learns from; None: it learns nothing from features.
    """

    on_device: bool = True
    reads_logits: bool = False
    single: bool = False
    max_nodes: int = 1
    rows: DraftRows | None = None

    @property
    def feature_layers(self) -> Layers:
        """The target layers whose outputs are read."""
        return () if self.rows is None else self.rows.feature_layers


class DraftPlan(NamedTuple):
    """What is drafted in one step.

    Attributes:
        deepest: the depth of the deepest node of a tree; 0: nothing is drafted.
        max_nodes: the most nodes of a tree, the root included.
        chain: whether the trees are chains, so that an accepted path is their beginning.
        sampled: the parents of the nodes of the shape whose children are sampled where roots say so, the root's -1;
            None: all trees are filled by rank.
        has_q: which sequences' children are, or might be, if the host has sampled for some.
        proposal: the draft of a `single` drafter.
        key: tells the trees from those of other steps.
    """

    deepest: int = 0
    max_nodes: int = 1
    chain: bool = True
    sampled: tuple[int, ...] | None = None
    has_q: Sequence[bool] | None = None
    proposal: Proposal | None = None
    key: int = 0


@runtime_checkable
class DraftBatch(Protocol):
    """Drafting for the sequences of a batch, by slot. By default no sequence has a state, and nothing is drafted.

    Attributes:
        traits: what holds for all steps.
    """

    traits: DraftTraits = DraftTraits()

    def start_sequence(self, slot: int, token: Tokens, features: TargetOutput) -> None:
        """Take in a prompt and the token behind it, with the target's outputs for the prompt."""
        return

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, with `length` rows, to a slot whose own has left."""
        return

    def resumes(self, running: int) -> bool:
        """Return whether the sequences must be started again before a step of `running` ones; asked once a step."""
        return False

    def begin(self, contexts: Sequence[Context | None], longest: int) -> DraftPlan:
        """Begin a step: choose its trees, or draft them if the host does.

        Args:
            contexts: of each sequence; None of one that does not take part.
            longest: how many rows the longest of them has.
        """
        return DraftPlan()

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: Int[Tensor, "B"], longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return the planned trees for sequences that are sampled alike.

        Args:
            max_draft_depth: below it no node is drafted if another can be.
            longest: how many rows the longest sequence has, or may have.
            allow_host_sync: whether the host may read from the device meanwhile.
        """
        ...

    def learn(self, slot: int, token: Tokens, path: list[int], logits: Float[Tensor, "M V"] | None) -> None:
        """Take in what the host has read: the committed tokens, the accepted nodes, and the logits of the pass."""
        return


@runtime_checkable
class Drafter(Protocol):
    """A drafter: weights, configuration, and what it remembers of earlier sequences.

    Attributes:
        name: what reports and errors call it.
        tree: the shape of its proposals, for reports.
        head: the trained head that drafts, whose acceptance teacher forcing can measure.
    """

    name: str
    tree: str
    head: DraftHead | None = None

    def reset(self) -> None:
        """Forget earlier sequences; by default nothing outlives one."""
        return

    def clone(self: AnyDrafter) -> AnyDrafter:
        """Return a drafter with the same weights and a memory of its own."""
        return self

    def batch(self, size: int) -> DraftBatch:
        """Return what drafts for up to `size` sequences."""
        ...
