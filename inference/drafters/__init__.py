"""Draft sources: each proposes a tree after the committed tokens and learns from what the target made of it."""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from inference.sample import Sampling
from inference.target import Pass
from inference.tree import DraftTree
from inference.verify import Rng


class Context(NamedTuple):
    """What a proposal may read: the tokens so far, how the target is sampled, the randomness, and the depth left."""

    token: list[int]
    sampling: Sampling
    rng: Rng
    room: int


class Commit(NamedTuple):
    """What a target pass settled.

    `token` holds for each committed row the token that follows it (the last one is the next root), `rows` their true
    features, `tree` and `logits` the whole verified tree with the target's logits at its nodes, None after a prefill.
    """

    token: Int[Tensor, "T"]
    rows: Pass
    tree: DraftTree | None
    logits: Float[Tensor, "N V"] | None


@runtime_checkable
class Drafter(Protocol):
    """A draft source. `rule` names how its proposals are verified, `tree` their shape, for reports."""

    name: str
    rule: str
    tree: str
    feature_layers: tuple[int, ...]

    def reset(self, prompt: list[int]) -> None:
        """Forget the last sequence."""
        ...

    def observe(self, commit: Commit) -> None:
        """Take in committed rows."""
        ...

    def propose(self, context: Context) -> tuple[DraftTree, Float[Tensor, "N V"] | None]:
        """Return a tree rooted at the last token and, where its children were sampled, the laws q they came from."""
        ...
