"""Draft heads by kind, each drafting one chain of tokens for one sequence.

`commit` takes verified rows: row t is the model's hidden states at position t, with token t + 1, which is chosen
already. It returns the logits of the token behind the last row. `draft` takes the token that was drafted from these and
returns the logits of the next one. Logits (V,) are minus infinity for tokens that a head never drafts.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from .block import Block
from .parts import Weights
from .readout import Readout, silu_residual, spread
from .recurrent import Eagle, Eagle3, Mtp, Prefix
from .target import Embeddings, Seen

MLP_EPS = 1e-6


@runtime_checkable
class Drafts(Protocol):
    """What every kind has: which of the model's layers it reads, how many tokens it drafts at most, three methods."""

    depth: int
    feature_layers: tuple[int, ...]

    def restart(self) -> None:
        """Begin another sequence."""

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows with their chosen tokens (T,); return the logits (V,) of the next one."""

    def draft(self, token: Tensor) -> Tensor:
        """Take the token (1,) that was drafted; return the logits (V,) of the one behind it."""


class Medusa:
    """Medusa: residual blocks on the model's last feature, one head a depth, which read no token."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        self.depth, self.layers, self.weights = config["heads"], config["layers"], weights
        self.readouts = [Readout(weights, f"lm_heads.{i}", embeddings) for i in range(self.depth)]
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.root, self.at = torch.empty(0), 0

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows: the last one alone is read."""
        del token
        self.root, self.at = seen.last[-1], 0
        return self._next()

    def draft(self, token: Tensor) -> Tensor:
        """Return the next head's logits."""
        del token
        return self._next()

    def _next(self) -> Tensor:
        z, i = self.root, self.at
        for j in range(self.layers):
            z = silu_residual(self.weights, f"blocks.{i}.{j}.linear", z)
        self.at += 1
        return self.readouts[i](z)


class Hydra:
    """Hydra and Hydra++: Medusa's heads, each reading the embeddings of the tokens before it too."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        self.config, self.weights, self.embeddings, self.depth = config, weights, embeddings, config["heads"]
        self.prefix = Prefix(config, weights.under("prefix"), embeddings) if config["prefix"] else None
        self.readouts = [Readout(weights, f"lm_heads.{i}", embeddings) for i in range(self.depth)]
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.joined, self.at = torch.empty(0), 0
        if self.prefix is not None:
            self.prefix.restart()

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows."""
        self.joined, self.at = seen.last[-1] if self.prefix is None else self.prefix.take(seen, token), 0
        return self.draft(token[-1:])

    def draft(self, token: Tensor) -> Tensor:
        """Go on from a token."""
        self.joined = torch.cat([self.joined, self.embeddings.embed(token)[0].to(self.joined.dtype)])
        i, part = self.at, self.weights.under(f"branches.{self.at}")
        z = part.linear("entry.res_connection", self.joined)
        z = z + functional.silu(part.linear("entry.linear", self.joined))
        for j in range(self.config["layers"] - 1):
            z = silu_residual(part, f"blocks.{0 if self.config['tied'] else j}.linear", z)
        self.at += 1
        return self.readouts[i](z)


class Mlp:
    """The recurrent MLP speculator: a state that each token is mixed into, by tables of its own."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        self.config, self.weights, self.embeddings, self.depth = config, weights, embeddings, config["heads"]
        inner, weight = weights["emb.0.weight"].shape[1], 0.5 ** (0.5 / self.depth)
        self.mix = math.sqrt((1 - weight**2) * inner / 2) / weight
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.state, self.at = torch.empty(0), 0

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows: the last one alone is read."""
        last = seen.last[-1]
        if self.config["scale_input"]:
            last = functional.rms_norm(last, last.shape, eps=MLP_EPS) / math.sqrt(2)
        self.state, self.at = last, 0
        return self.draft(token[-1:])

    def draft(self, token: Tensor) -> Tensor:
        """Go on from a token."""
        tied, weights = self.config["tied"], self.weights
        i = 0 if tied else self.at
        embedding = functional.embedding(token, weights[f"emb.{i}.weight"])[0]
        mixed = weights.linear(f"proj.{min(self.at, 1) if tied else self.at}", self.state) + self.mix * embedding
        normed = functional.rms_norm(mixed, mixed.shape, weights[f"ln.{i}.weight"], MLP_EPS) + weights[f"ln.{i}.bias"]
        self.state = functional.gelu(normed)
        self.at += 1
        return spread(weights.linear(f"head.{i}", self.state), weights.get("vocab.ids"), self.embeddings)


KINDS: dict[str, Callable[[dict[str, Any], Weights, Embeddings], Drafts]] = {
    "eagle": Eagle, "hass": Eagle, "eagle3": Eagle3, "mtp": Mtp, "medusa": Medusa, "hydra": Hydra, "mlp": Mlp,
    "block": Block,
}  # fmt: skip


def made(kind: str, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> Drafts:
    """Return a head.

    Args:
        kind: one of KINDS.
        config: its numbers, by headstart's names.
        weights: its tensors, by headstart's names.
        embeddings: the model's.
    """
    return KINDS[kind](config, weights, embeddings)
