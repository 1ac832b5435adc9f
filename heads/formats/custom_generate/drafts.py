"""A draft head as the drafter of one chain of tokens for one sequence."""

from typing import Any

import torch
from torch import Tensor

from heads.base import Features, Level
from heads.modules.vocab import scatter_logits


class Drafts:
    """A head with the state of one sequence.

    Attributes:
        depth: how many tokens the head drafts at most.
        feature_layers: which of the model's layers it reads.
    """

    def __init__(self, head: Any) -> None:
        self.head, self.depth = head, int(head.max_depth)
        self.feature_layers: tuple[int, ...] = head.feature_layers
        self.restart()

    def restart(self) -> None:
        """Begin another sequence."""
        self.state: Any = None
        self.level: Level | None = None
        self.drafted = 0

    def commit(self, features: Features, token: Tensor) -> Tensor:
        """Take in verified rows.

        Args:
            features: the model's hidden states of T new rows, B = 1.
            token: row t's chosen next token t + 1, (T,).

        Returns:
            The logits (V,) of the token behind the last row, minus infinity for tokens that a head never drafts.
        """
        self.state, self.level = self.head.extend(self.state, features, token[None])
        self.drafted = 0
        return self.logits()

    def draft(self, token: Tensor) -> Tensor:
        """Take the token (1,) that was drafted last; return the logits (V,) of the one behind it."""
        self.drafted += 1
        path = torch.ones(1, 1, self.drafted, dtype=torch.bool, device=token.device)
        above = torch.zeros_like(token)[None]
        self.level = self.head.expand(self.state, self.level, token[None], above, path, self.drafted)
        return self.logits()

    def logits(self) -> Tensor:
        """Return the level's logits over the model's vocabulary."""
        assert self.level is not None
        return scatter_logits(self.head.vocab, self.level.logits[0, 0])
