"""Committed rows that a head has not taken in yet, while nothing is drafted.

To take in a row at every step costs a pass of the head over one row of each sequence; many rows of each cost little
more. Nothing here is read by the host, and no buffer moves.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from heads.base import Features
from heads.modules.kv_cache import SPARE
from inference.target.model import TargetOutput

MOST = SPARE  # rows of a sequence that may wait: as many as a KV cache's ring takes in at once


class DeferredRows:
    """The rows of all slots of a batch that wait for the head.

    Attributes:
        count: how many each slot has.
        waiting: at least the largest of them, known without asking the device; who adds rows counts it.
    """

    def __init__(self, size: int, token: Int[Tensor, "B T"], features: TargetOutput) -> None:
        self.count = torch.zeros(size, dtype=torch.long, device=token.device)
        like = token, features.hidden, features.last
        self.rows = tuple(tensor.new_zeros(size, MOST, *tensor.shape[2:]) for tensor in like)
        self.waiting = 0

    def add(self, token: Int[Tensor, "B 1"], features: TargetOutput, count: Int[Tensor, "B"]) -> None:
        """Add a row of each of the first sequences that counts one, and none of one that counts 0."""
        slot, waiting = torch.arange(len(token), device=token.device), self.count[: len(token)]
        for buffer, new in zip(self.rows, (token, features.hidden, features.last), strict=True):
            buffer[slot, waiting] = new[:, 0]
        waiting += count

    def take(self, sequences: int) -> tuple[Features, Int[Tensor, "B T"], Int[Tensor, "B"]]:
        """Return the first sequences' rows, padded, with how many each has; none waits any longer."""
        token, hidden, last = (buffer[:sequences, : self.waiting] for buffer in self.rows)
        count = self.count[:sequences].clone()
        self.count.zero_()
        self.waiting = 0
        return Features(token, hidden, last, torch.zeros_like(token)), token, count

    def clear(self, slot: int) -> None:
        """Drop a slot's rows: another sequence takes it."""
        self.count[slot] = 0

    def move(self, source: int, slot: int) -> None:
        """Move a sequence's rows into another slot."""
        for buffer in (self.count, *self.rows):
            buffer[slot] = buffer[source]
