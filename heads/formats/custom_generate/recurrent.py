"""Heads that draft one token after another by attention: EAGLE, HASS, EAGLE-3, multi-token prediction.

Such a head makes, of a token and the state before it, the next state and what its logits are read from. The first
state comes from the model, from then on it is the head's own. Verified rows stay as keys and values; drafted ones are
dropped when the next rows are committed, which enter with the model's own states again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .parts import Attend, KeyValue, Layer, Rotary, Weights, attention, joined
from .readout import Readout
from .target import Embeddings, Seen

MOST = 64  # tokens that are drafted at once
ROWS = 512  # of a prompt that are taken in at once, so that no mask is of its length squared


class Recurrent(ABC):
    """What these heads share. `length` is how far back a row looks, None for everything."""

    depth = MOST
    feature_layers: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        self.config, self.weights, self.embeddings = config, weights, embeddings
        self.eps: float = config["norm_eps"]
        self.length: int | None = config.get("length")
        width = config.get("head_dim") or embeddings.head_dim
        rotary = Rotary(width, config["rope_theta"], config.get("rope_scaling"))
        self.layers = [Layer(weights.under(name), rotary, width, self.eps) for name in self.names()]
        self.restart()

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the layers' names."""

    def restart(self) -> None:
        """Begin another sequence."""
        self.count, self.steps = 0, 0
        self.true: list[KeyValue] = []
        self.drafted: list[KeyValue] = []
        self.state: Tensor | None = None

    def begin(self, seen: Seen) -> Tensor:
        """Return the states (T, D) that rows enter with."""
        return seen.last

    def inject(self, _start: Tensor, _position: Tensor, _end: int) -> list[KeyValue]:
        """Return keys and values of the true rows, a pair a layer, where these are not the head's own rows."""
        return []

    @abstractmethod
    def advance(
        self, token: Tensor, state: Tensor, position: Tensor, end: int, attend: list[Attend]
    ) -> tuple[Tensor, Tensor]:
        """Return the states behind `state` once `token` is chosen, and what the logits are read from."""

    def take(self, seen: Seen, token: Tensor) -> Tensor:
        """Commit rows; return what the logits of the last one are read from, (D,)."""
        start, self.drafted, self.steps = self.begin(seen), [], 0
        place = torch.arange(self.count, self.count + len(token), device=token.device)
        if pairs := self.inject(start, place, self.count + len(token)):
            self._keep(pairs, len(token))
            return self._step(token[-1:], start[-1:])
        read = start
        for rows in zip(start.split(ROWS), token.split(ROWS), place.split(ROWS), strict=True):
            read = self._append(*rows)
        return read[-1]

    def go_on(self, token: Tensor) -> Tensor:
        """Draft one row more from the token (1,) that was drafted last; return what its logits are read from."""
        assert self.state is not None
        self.steps += 1
        return self._step(token, self.state)

    def _append(self, start: Tensor, token: Tensor, place: Tensor) -> Tensor:
        before, every = self.true, torch.cat([self._kept(place), place])
        sees = (every <= place[:, None]) & self._near(place, every)
        grown: list[KeyValue] = []

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            grown.append(joined(before[i] if before else None, (key, value)))
            return attention(query, grown[i], sees)

        end = self.count + len(token)
        states, read = self.advance(token, start, place, end, self._each(attend))
        self.true, self.state = [], states[-1:]
        self._keep(grown, len(token))
        return read

    def _step(self, token: Tensor, state: Tensor) -> Tensor:
        place = torch.tensor([self.count - 1 + self.steps], device=token.device)
        near = self._near(place, self._kept(place))
        before, self.drafted = self.drafted, []

        def attend(i: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            own = joined(before[i] if before else None, (key, value))
            self.drafted.append(own)
            sees = torch.cat([near, near.new_ones(1, own[0].shape[1])], 1)
            return attention(query, joined(self.true[i], own), sees)

        self.state, read = self.advance(token, state, place, self.count + self.steps, self._each(attend))
        return read[-1]

    def _keep(self, pairs: list[KeyValue], rows: int) -> None:
        """Add rows behind the true ones, of which those that no row to come looks at go."""
        every = [joined(self.true[i] if self.true else None, pair) for i, pair in enumerate(pairs)]
        since = 0 if self.length is None else -self.length
        self.true = [(key[:, since:], value[:, since:]) for key, value in every]
        self.count += rows

    def _kept(self, like: Tensor) -> Tensor:
        """Return the positions of the true rows that are kept."""
        kept = self.true[0][0].shape[1] if self.true else 0
        return torch.arange(self.count - kept, self.count, device=like.device)

    def _near(self, place: Tensor, every: Tensor) -> Tensor:
        distance = place[:, None] - every
        return torch.ones_like(distance, dtype=torch.bool) if self.length is None else distance < self.length

    def _each(self, attend: Any) -> list[Attend]:
        return [partial(attend, i) for i in range(len(self.layers))]


class Reading(Recurrent):
    """One that reads its logits out by an lm_head."""

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        super().__init__(config, weights, embeddings)
        self.readout = Readout(weights, "lm_head", embeddings)

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows."""
        return self.readout(self.take(seen, token))

    def draft(self, token: Tensor) -> Tensor:
        """Go on from a drafted token."""
        return self.readout(self.go_on(token))


class Eagle(Reading):
    """EAGLE-1/2 and HASS: fc of embedding and feature, decoder layers; the output is the next feature."""

    def names(self) -> Sequence[str]:
        """Return the layers' names."""
        return [f"layers.{i}" for i in range(self.config["layers"])]

    def advance(
        self, token: Tensor, state: Tensor, position: Tensor, end: int, attend: list[Attend]
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted features."""
        x = self.weights.linear("fc", torch.cat([self.embeddings.embed(token).to(state.dtype), state], -1))
        for layer, pattern in zip(self.layers, attend, strict=True):
            x = layer(x, position, end, pattern)
        return x, x


class Mtp(Reading):
    """Multi-token prediction: one decoder layer over normed embedding and state, used again for every depth."""

    def names(self) -> Sequence[str]:
        """Return the layer's name."""
        return ["block"]

    def advance(
        self, token: Tensor, state: Tensor, position: Tensor, end: int, attend: list[Attend]
    ) -> tuple[Tensor, Tensor]:
        """Return the normed states."""
        embedding = self.weights.norm("enorm", self.embeddings.embed(token).to(state.dtype), self.eps)
        x = self.weights.linear("eh_proj", torch.cat([embedding, self.weights.norm("hnorm", state, self.eps)], -1))
        x = self.weights.norm("norm", self.layers[0](x, position, end, attend[0]), self.eps)
        return x, x


class Eagle3(Reading):
    """EAGLE-3 and 3.1: features of several layers, fused; the first layer's attention reads the embedding beside."""

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        super().__init__(config, weights, embeddings)
        self.feature_layers = tuple(config["feature_layers"])

    def names(self) -> Sequence[str]:
        """Return the layers' names."""
        return ["first", *(f"layers.{i}" for i in range(self.config["layers"] - 1))]

    def begin(self, seen: Seen) -> Tensor:
        """Return the fused features."""
        return fused(self.weights, seen.hidden, self.eps, normed=bool(self.config.get("feature_norm")))

    def inject(self, start: Tensor, position: Tensor, end: int) -> list[KeyValue]:
        """Return keys and values of the fused features with `kv_injection`."""
        if not self.config.get("kv_injection"):
            return []
        normed = self.weights.norm("inject_norm", start, self.eps)
        return [layer.key_value(normed, position, end, "inject") for layer in self.layers]

    def advance(
        self, token: Tensor, state: Tensor, position: Tensor, end: int, attend: list[Attend]
    ) -> tuple[Tensor, Tensor]:
        """Return the states that are fed back, and the normed ones."""
        first = self.layers[0]
        normed = first.weights.norm("hidden_norm", state, self.eps)
        embedding = first.weights.norm("input_layernorm", self.embeddings.embed(token).to(state.dtype), self.eps)
        mixed = first.attend(torch.cat([embedding, normed], -1), position, end, attend[0])
        x = first.feed_forward((normed if self.config.get("norm_before_residual") else state) + mixed)
        for layer, pattern in zip(self.layers[1:], attend[1:], strict=True):
            x = layer(x, position, end, pattern)
        read = self.weights.norm("norm", x, self.eps)
        return (read if self.config.get("norm_output") else x), read


class Prefix(Recurrent):
    """Hydra++'s summary of all rows: a decoder layer over the model's features, and a norm."""

    def names(self) -> Sequence[str]:
        """Return the layer's name."""
        return ["layer"]

    def advance(
        self, _token: Tensor, state: Tensor, position: Tensor, end: int, attend: list[Attend]
    ) -> tuple[Tensor, Tensor]:
        """Return the summaries."""
        summary = self.weights.norm("norm", self.layers[0](state, position, end, attend[0]), self.eps)
        return summary, summary


def fused(weights: Weights, hidden: Tensor, eps: float, *, normed: bool) -> Tensor:
    """Return fc of the layers' states (T, L, D) one after the other, each normed by itself before if asked."""
    if normed:
        norms = [weights.norm(f"fusion.norms.{i}", hidden[:, i], eps) for i in range(hidden.shape[1])]
        hidden = torch.stack(norms, 1)
    return weights.linear("fusion.fc", hidden.flatten(1))
