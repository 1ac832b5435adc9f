"""Draft sources: each proposes a tree after the committed tokens and learns from what the target made of it."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from inference.target.cache import TargetCache
from inference.target.model import TargetOutput
from inference.target.stack import Entered
from inference.verification.rng import Rng
from inference.verification.sample import Sampling
from inference.verification.tree import DraftTree, LookAhead


class Context(NamedTuple):
    """What a proposal may read: the tokens so far, how the target is sampled, the randomness, and the depth left.

    No node or rider may lie deeper than `room`: there the target's context or the answer ends. `cache` holds the
    target's rows before the last token. Only a source that drafts with the target itself writes to it: rows behind the
    committed ones, which it drops again, or hands on as `Proposal.entered`.
    """

    token: list[int]
    sampling: Sampling
    rng: Rng
    room: int
    cache: TargetCache | None = None


class Proposal(NamedTuple):
    """A tree rooted at the last token; where its children were sampled, the laws q they came from; and riders.

    Sampled siblings are in drawn order, without `replacement` unless it says so. `entered` says that all nodes
    have run through the target's first layers; then there are no riders.
    """

    tree: DraftTree
    q: Float[Tensor, "N V"] | None = None
    look_ahead: LookAhead | None = None
    replacement: bool = False
    entered: Entered | None = None


class Verified(NamedTuple):
    """A verified proposal: its tree, the accepted nodes from the root on, the target's logits at nodes and riders."""

    tree: DraftTree
    path: list[int]
    logits: Float[Tensor, "N V"]
    look_ahead: Float[Tensor, "R V"] | None


class Commit(NamedTuple):
    """What a target pass settled.

    `token` holds for each committed row the token that follows it (the last one is the next root), `rows` their true
    features, `verified` what was proposed and what became of it, None after a prefill.
    """

    token: Int[Tensor, "T"]
    rows: TargetOutput
    verified: Verified | None


@runtime_checkable
class Drafter(Protocol):
    """A draft source. `tree` names the shape of its proposals, for reports."""

    name: str
    tree: str
    feature_layers: tuple[int, ...]

    def reset(self, prompt: list[int]) -> None:
        """Begin a new sequence."""
        ...

    def forget(self) -> None:
        """Forget what earlier sequences have taught."""
        ...

    def observe(self, commit: Commit) -> None:
        """Take in committed rows."""
        ...

    def propose(self, context: Context) -> Proposal:
        """Draft what may follow the last token."""
        ...
