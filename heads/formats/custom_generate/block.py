"""The block head (DFlash, JetSpec, DSpark): all depths in one pass, from keys and values of the model's features."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .parts import KeyValue, Layer, Rotary, Weights, attention, joined
from .readout import Readout
from .recurrent import fused
from .target import Embeddings, Seen


class Block:
    """The block: the chosen token and a mask slot a depth; in DSpark (`from_anchor`) the token's slot drafts too."""

    def __init__(self, config: dict[str, Any], weights: Weights, embeddings: Embeddings) -> None:
        self.config, self.weights, self.embeddings = config, weights, embeddings
        self.depth: int = config["depths"]
        self.feature_layers = tuple(config["feature_layers"])
        self.eps, self.length = float(config["norm_eps"]), config.get("length")
        self.idle = 0 if config.get("from_anchor") else 1  # slots that draft nothing
        rotary = Rotary(config.get("head_dim") or embeddings.head_dim, config["rope_theta"], config.get("rope_scaling"))
        self.layers = [
            Layer(weights.under(f"layers.{i}"), rotary, rotary.width, self.eps) for i in range(config["layers"])
        ]
        self.readout = Readout(weights, "lm_head", embeddings)
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.count, self.at = 0, 0
        self.true: list[KeyValue] = []
        self.slots = torch.empty(0)

    def commit(self, seen: Seen, token: Tensor) -> Tensor:
        """Take in verified rows, and draft the block behind the last one."""
        end, size = self.count + len(token), self.depth + self.idle
        place = torch.arange(self.count, end, device=token.device)
        context = self.weights.norm("hidden_norm", fused(self.weights, seen.hidden, self.eps, normed=False), self.eps)
        every = [
            joined(self.true[i] if self.true else None, layer.key_value(context, place, end))
            for i, layer in enumerate(self.layers)
        ]
        self.count = end
        at = torch.arange(end, end + size, device=token.device)
        own = torch.ones(size, size, dtype=torch.bool, device=token.device)
        own = own.tril() if self.config.get("causal") else own
        kept = torch.arange(end - every[0][0].shape[1], end, device=token.device)
        near = torch.ones(size, len(kept), dtype=torch.bool, device=token.device)
        if self.length is not None:
            near = at[:, None] - kept < self.length
        sees = torch.cat([near, own], 1)
        mask = self.weights["mask"]
        x = torch.cat([self.embeddings.embed(token[-1:]).to(mask.dtype), mask.expand(size - 1, -1)])
        for layer, pair in zip(self.layers, every, strict=True):

            def attend(query: Tensor, key: Tensor, value: Tensor, pair: KeyValue = pair) -> Tensor:
                return attention(query, joined(pair, (key, value)), sees)

            x = layer(x, at, end + size, attend)
        since = 0 if self.length is None else -self.length
        self.true = [(key[:, since:], value[:, since:]) for key, value in every]
        self.slots, self.at = self.weights.norm("norm", x, self.eps)[self.idle :], 0
        return self.draft(token[-1:])

    def draft(self, token: Tensor) -> Tensor:
        """Read the next slot; of the token before it a term of low rank depends, if at all."""
        slot = self.slots[self.at]
        self.at += 1
        if "before.weight" not in self.weights:
            return self.readout(slot)
        before = functional.embedding(token, self.weights["before.weight"])[0].to(slot.dtype)
        return self.readout(slot, self.weights.linear("bias", before))
