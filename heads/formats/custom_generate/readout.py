"""From a head's states to logits of the model's whole vocabulary."""

from torch import Tensor
from torch.nn import functional

from .parts import Weights
from .target import Embeddings


class Readout:
    """By an lm_head of the head's own, whole or in two factors, else by the model's; of the drafted tokens alone."""

    def __init__(self, weights: Weights, name: str, embeddings: Embeddings) -> None:
        self.weights, self.name, self.embeddings, self.ids = weights, name, embeddings, weights.get("vocab.ids")
        self.own = f"{name}.weight" in weights
        self.rows = None if self.own or self.ids is None else embeddings.rows(self.ids)

    def drafted(self, state: Tensor) -> Tensor:
        """Return the logits (W,) of the tokens that are drafted."""
        if not self.own:
            return self.embeddings.logits(state, self.rows)
        if f"{self.name}.down.weight" in self.weights:
            state = self.weights.linear(f"{self.name}.down", state)
        return self.weights.linear(self.name, state)

    def __call__(self, state: Tensor, more: Tensor | None = None) -> Tensor:
        """Return the logits (V,) of a state (D,), with a term (W,) added before they are spread."""
        logits = self.drafted(state)
        return spread(logits if more is None else logits + more, self.ids, self.embeddings)


def spread(logits: Tensor, ids: Tensor | None, embeddings: Embeddings) -> Tensor:
    """Return logits of the whole vocabulary."""
    if ids is None:
        return logits
    full = logits.new_full((embeddings.vocab_size,), float("-inf"))
    full[ids] = logits
    return full


def silu_residual(weights: Weights, name: str, z: Tensor) -> Tensor:
    """Return z + SiLU(Wz + b)."""
    return z + functional.silu(weights.linear(name, z))
