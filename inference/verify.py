"""The acceptance rules: which drafted path stands, and which token comes after it, so that the target's law is kept.

Both rules are exact at every temperature and filter; at temperature 0 the laws are one-hot and nothing changes. All
randomness enters through `Rng`, so that the tests can enumerate every outcome of this very code.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from inference.tree import DraftTree, children


@runtime_checkable
class Rng(Protocol):
    """The random choices that drafting and verification make."""

    def draw(self, law: Float[Tensor, "N V"]) -> Sequence[int]:
        """Draw one token from each row's law, independently."""
        ...

    def distinct(self, law: Float[Tensor, "N V"], count: int) -> Tensor:
        """Draw `count` tokens from each row without replacement, in order, "N count"; -1 once the law is used up."""
        ...

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        ...


class Generator:
    """The Rng of real decoding: a seeded torch generator on the device of the laws."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def race(self, law: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return keys whose descending order is a draw without replacement; tokens of zero probability get zero."""
        return law / torch.empty_like(law).exponential_(generator=self.generator).clamp_min_(1e-30)

    def draw(self, law: Float[Tensor, "N V"]) -> list[int]:
        """Draw one token from each row's law."""
        drawn: list[int] = self.race(law).argmax(-1).tolist()
        return drawn

    def distinct(self, law: Float[Tensor, "N V"], count: int) -> Tensor:
        """Draw without replacement (exponential races, equal to Gumbel top-k; Kool et al., 2019)."""
        best = self.race(law).topk(min(count, law.shape[-1]))
        return torch.where(best.values > 0, best.indices, -1)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        if probability >= 1:
            return True
        return bool(torch.rand((), generator=self.generator, device=self.generator.device).item() < probability)


def verify(tree: DraftTree, p: Float[Tensor, "N V"], q: Float[Tensor, "N V"] | None, rng: Rng) -> tuple[list[int], int]:
    """Choose the accepted path and the token that follows it.

    Args:
        tree: the draft tree.
        p: the target's law after each node.
        q: the law from which each node's children were drawn without replacement; None if the children are a
            deterministic choice (or any choice made before the target's own draw), each a point mass.
        rng: the randomness.

    Returns:
        The accepted nodes from the root on, and the next token: the bonus or correction, not part of the tree.
    """
    return _point_mass(tree, p, rng) if q is None else _recursive_rejection(tree, p, q, rng)


def _point_mass(tree: DraftTree, p: Float[Tensor, "N V"], rng: Rng) -> tuple[list[int], int]:
    """Draw the target's own token at each node and follow it while it was drafted.

    The same law and acceptance as trying each child with probability p and renormalising after a rejection.
    """
    below, token, drawn = children(tree), tree.token.tolist(), rng.draw(p)
    path = [0]
    while True:
        chosen = drawn[path[-1]]
        child = next((c for c in below[path[-1]] if token[c] == chosen), None)
        if child is None:
            return path, chosen
        path.append(child)


def _recursive_rejection(
    tree: DraftTree, p: Float[Tensor, "N V"], q: Float[Tensor, "N V"], rng: Rng
) -> tuple[list[int], int]:
    """Try siblings in drawn order, each against what the target's law has left (SpecInfer, EAGLE, Sequoia)."""
    below, token = children(tree), tree.token.tolist()
    path = [0]
    while True:
        target, draft = p[path[-1]], q[path[-1]].clone()
        for child in below[path[-1]]:
            x = token[child]
            if rng.accept(float(target[x] / draft[x])):
                path.append(child)
                break
            target = _residual(target, draft)
            draft[x] = 0.0
            draft = draft / draft.sum().clamp_min(torch.finfo(draft.dtype).tiny)
        else:
            return path, rng.draw(target[None])[0]


def _residual(target: Float[Tensor, "V"], draft: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
    """Return what the target's law has left after a rejected draft."""
    left = (target - draft).clamp_min(0)
    total = left.sum()
    # Equal laws never reject in exact arithmetic; where rounding did, nothing is left and the target's law stands.
    return left / total if total > 0 else target
