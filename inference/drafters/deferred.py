"""Committed rows that a head has not taken in yet, while nothing is drafted.

To take in a row at every step costs a pass of the head over one row of each sequence, and many rows in one pass cost
less. Rows of a sequence that ends before anything is drafted again cost nothing. Nothing here is read by the host, and
no buffer moves.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from heads.base import Features
from heads.modules.kv_cache import SPARE
from inference.target.model import TargetOutput

BYTES = 1 << 28  # of all rows that may wait; a sequence may have `SPARE` of them in any case


class DeferredRows:
    """The rows of all slots of a batch that wait for the head: `max_rows` of a slot."""

    def __init__(self, size: int, token: Int[Tensor, "B T"], features: TargetOutput, capacity: int) -> None:
        like = token, features.hidden, features.last_hidden
        row = size * sum(tensor[0, 0].nbytes for tensor in like)
        self.max_rows = max(SPARE, min(capacity, BYTES // row))
        self.count = torch.zeros(size, dtype=torch.long, device=token.device)
        self.rows = tuple(tensor.new_zeros(size, self.max_rows, *tensor.shape[2:]) for tensor in like)
        self.waiting = 0  # at least the largest count, known without asking the device; who adds rows counts it

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [self.count, *self.rows]

    def add(self, features: Features, count: Int[Tensor, "B"]) -> None:
        """Add a row of each of the first sequences that counts one, and none of one that counts 0."""
        slot, waiting = torch.arange(len(count), device=count.device), self.count[: len(count)]
        for buffer, new in zip(self.rows, features[:3], strict=True):
            buffer[slot, waiting] = new[:, 0]
        waiting += count

    def take(self, sequences: int) -> Iterator[tuple[Features, Int[Tensor, "B"]]]:
        """Yield the first sequences' rows, padded, with how many each has, as many as a KV cache's ring takes at once.

        Then none waits any longer.
        """
        for first in range(0, self.waiting, SPARE):
            some = slice(first, min(first + SPARE, self.waiting))
            token, hidden, last = (buffer[:sequences, some] for buffer in self.rows)
            count = (self.count[:sequences] - first).clamp(0, SPARE)
            yield Features(token, hidden, last, torch.zeros_like(token)), count
        self.count.zero_()
        self.waiting = 0

    def clear(self, slot: int) -> None:
        """Drop a slot's rows: another sequence takes it."""
        self.count[slot] = 0

    def move(self, from_slot: int, slot: int) -> None:
        """Move a sequence's rows into another slot."""
        for buffer in (self.count, *self.rows):
            buffer[slot] = buffer[from_slot]
