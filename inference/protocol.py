"""The protocol of drafters: `Drafter` is the model, `DraftBatch` drafts for a batch; the records that they exchange."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heads.base import Layers, Tokens
from heads.shapes import Nodes, PerSequence
from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.verification.rng import RequestRng, Samples
from inference.verification.sample import Distributions, Sampling
from inference.verification.tree import AncestorMask, DraftTree, LookAhead

AnyDrafter = TypeVar("AnyDrafter")
PassLogits = Float[Tensor, "M V"] | None  # the target's, at nodes and look-ahead tokens; None if they are not read
GREEDY_INVERSE_TEMPERATURE = 2.0  # chosen by benchmarks/ranking.py (docs/engine.md)


def inverse_temperature_of(sampling: Sampling) -> float:
    """Return the factor of the draft logits when nodes of different parents are compared.

    Greedy decoding accepts the target's best token at any probability, so a draft's best guess is accepted more often
    than its probability, which is trained to equal the target's.
    """
    return GREEDY_INVERSE_TEMPERATURE if sampling.temperature == 0 else 1.0


class DraftInputs(NamedTuple):
    """The roots of B trees, and the parameters for ranking or sampling their nodes.

    Attributes:
        token: the roots' tokens.
        sampling: the target's sampling parameters, equal for all trees.
        seen_tokens: mask of the tokens in each prefix; None without a repetition penalty.
        noise: exponential noise of the P positions after each root, if drafts are coupled: tokens are ranked with it.
        samples: random samples for the children in a fixed shape; None if they are ranked.
    """

    token: Int[Tensor, "B 1"]
    sampling: Sampling
    seen_tokens: Bool[Tensor, "B 1 V"] | None = None
    noise: Float[Tensor, "B P V"] | None = None
    samples: Samples | None = None


class Drafted(NamedTuple):
    """The drafts of B sequences.

    Attributes:
        tree: the trees "B N".
        ancestor_mask: mask of each node's ancestors and itself.
        q: the probs that children were sampled from, for the M nodes with children; None if they were ranked.
        depth: depth of each node; None if it is the number of its ancestors.
        noise: the noise of `DraftInputs`.
    """

    tree: DraftTree
    ancestor_mask: AncestorMask
    q: Float[Tensor, "B M V"] | None = None
    depth: Nodes | None = None
    noise: Float[Tensor, "B P V"] | None = None

    @property
    def node_depth(self) -> Nodes:
        """The depth of each node, once it is known."""
        assert self.depth is not None
        return self.depth

    def first(self, count: int) -> "Drafted":
        """Return the drafts of the first sequences."""
        q, depth, noise = (None if rows is None else rows[:count] for rows in self[2:])
        return Drafted(DraftTree(*(rows[:count] for rows in self.tree)), self.ancestor_mask[:count], q, depth, noise)


class DraftContext(NamedTuple):
    """The input of a drafter on the host: a sequence's tokens, sampling parameters, random numbers and depth limit.

    No node is deeper than `max_draft_depth`, where the target's context or the answer ends; deeper look-ahead tokens
    run at the position of that depth.
    `cache` has the target's entries before the last token. Only a drafter that runs the target itself writes to it,
    after the committed entries, and drops its entries again.
    """

    token: Tokens
    sampling: Sampling
    draws: RequestRng
    max_draft_depth: int
    cache: TargetCache | None = None

    def seen_tokens(self, like: Float[Tensor, "*n V"] | Bool[Tensor, "*n V"]) -> Bool[Tensor, "1 1 V"] | None:
        """Return the mask of the text's tokens for logits or a mask `like`; None without a repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return None
        seen = torch.zeros(1, 1, like.shape[-1], dtype=torch.bool, device=like.device)
        seen[..., self.token] = True
        return seen

    def roots(self, like: Distributions, tree_depth: int) -> DraftInputs:
        """Return the draft inputs of this sequence for a tree of depth `tree_depth` and logits `like`."""
        token = torch.tensor([self.token[-1:]], device=like.device)
        seen_tokens = self.seen_tokens(like)
        noise = samples = None
        if self.sampling.temperature > 0 and self.draws.coupled:
            noise = self.draws.noise(range(tree_depth), like)[None]
        elif self.sampling.temperature > 0:
            samples = self.draws.samples(like.device)
        return DraftInputs(token, self.sampling, seen_tokens, noise, samples)


Contexts = Sequence[DraftContext | None]  # contexts by slot; None for an idle one


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

    Logits are None unless the drafter reads them (`HostDrafter.reads_logits`).
    """

    tree: DraftTree
    path: list[int]
    logits: Float[Tensor, "N V"] | None = None
    look_ahead: Float[Tensor, "R V"] | None = None


class CommittedTokens(NamedTuple):
    """The tokens that a target pass committed, and the verified proposal, None after a prefill."""

    token: Tokens
    verified: Verified | None = None


class DraftTraits(NamedTuple):
    """Constants of a draft batch.

    Attributes:
        on_device: whether drafts are a function of tensors, which can be captured or compiled.
        reads_logits: whether `update` reads the target's logits.
        single: whether it supports only one sequence: a batch then has one slot.
        max_nodes: the most nodes of a tree, the root included; drafters on the host state it in each step's plan.
        head_batch: the batch of a head, which reads verified rows (`HeadBatch`); None if it reads no features.
    """

    on_device: bool = True
    reads_logits: bool = False
    single: bool = False
    max_nodes: int = 1
    head_batch: Any = None

    @property
    def feature_layers(self) -> Layers:
        """The target layers whose outputs the drafter reads."""
        return () if self.head_batch is None else self.head_batch.feature_layers


class DraftPlan(NamedTuple):
    """The plan of one step's drafts.

    Attributes:
        tree_depth: the greatest depth of a node; 0 if nothing is drafted.
        max_nodes: the most nodes of a tree, the root included.
        chain: whether the trees are chains, so that an accepted path is a prefix of them.
        sampled: parent index of each node (-1: the root) in the fixed tree that is sampled at temperatures above 0;
            None if all trees are filled by rank.
        has_q: for each sequence, whether its children are sampled or it has none; empty if all are equal.
        proposal: the proposal of a `single` drafter.
        tree_id: id of the tree policy, part of the graph key.
    """

    tree_depth: int = 0
    max_nodes: int = 1
    chain: bool = True
    sampled: tuple[int, ...] | None = None
    has_q: Sequence[bool] = ()
    proposal: Proposal | None = None
    tree_id: int = 0


@runtime_checkable
class DraftBatch(Protocol):
    """Drafts for the sequences of a batch, by slot. The defaults keep no state and draft nothing.

    Attributes:
        traits: constants of the batch.
    """

    traits: DraftTraits = DraftTraits()

    def start_sequence(self, slot: int, token: Tokens, features: TargetOutput) -> None:
        """Prefill a prompt and the token after it, with the target's outputs for the prompt."""
        return

    def move(self, from_slot: int, slot: int, length: int) -> None:
        """Move the last sequence, with `length` rows, to a free slot."""
        return

    def needs_prefill(self, running: int) -> bool:
        """Return whether the `running` sequences must be prefilled again before a step; called once a step."""
        return False

    def begin(self, contexts: Contexts, longest: int) -> DraftPlan:
        """Begin a step: choose its trees; a drafter on the host also drafts them.

        Args:
            contexts: the context of each sequence; None for an idle one.
            longest: the number of rows of the longest sequence.
        """
        return DraftPlan()

    def draft_trees(
        self, roots: DraftInputs, max_draft_depth: PerSequence, longest: int, *, allow_host_sync: bool
    ) -> Drafted:
        """Return the planned trees for sequences with equal sampling parameters.

        Args:
            max_draft_depth: the depth limit of each sequence; verification ignores deeper nodes.
            longest: the number of rows of the longest sequence, or an upper bound.
            allow_host_sync: whether the host may wait for the device.
        """

    def update(self, slot: int, token: Tokens, path: list[int], logits: PassLogits) -> None:
        """Update a sequence's state with the committed tokens, the accepted nodes, and the logits of the pass."""
        return


@runtime_checkable
class Drafter(Protocol):
    """A drafter: weights, configuration, and memory of earlier sequences.

    Attributes:
        name: its name in reports and errors.
        tree: the shape of its proposals, for reports.
    """

    name: str
    tree: str

    def reset(self) -> None:
        """Forget earlier sequences; by default there is no such memory."""
        return

    def clone(self: AnyDrafter) -> AnyDrafter:
        """Return a drafter with the same weights and separate memory."""
        return self

    def batch(self, size: int) -> DraftBatch:
        """Return the draft batch for up to `size` sequences."""
