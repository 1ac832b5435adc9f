"""Packing and order: whole documents into rows, rows into the micro-batches of a step. Pure, given a seed.

The rows of a step depend on the seed and the step number alone: not on the number of processes, nor on the steps taken
before. So a run resumes from its step number, and more processes see the same global batches.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.text.cache import CachedSamples
from data.text.masks import Sample
from data.text.prompts import Prompt

Tokens = np.ndarray[Any, Any]  # one sample's tokens or mask, (T,)


class Packed(NamedTuple):
    """All packed sequences: tokens, the number of the document within its row (-1 on padding), and the loss mask."""

    token: Int[Tensor, "R T"]
    document: Int[Tensor, "R T"]
    loss_mask: Int[Tensor, "R T"]


@dataclass(frozen=True)
class Batch:
    """A micro-batch; `index` is each row's number in `Packed`, -1 for a filler row, which has no mask.

    One of drafts has the `path` of `Features`, and says which rows are `trained` at each depth.
    """

    token: Int[Tensor, "B T"]
    document: Int[Tensor, "B T"]
    loss_mask: Int[Tensor, "B T"]
    index: Int[Tensor, " B"]
    path: Int[Tensor, "B T d"] | None = None
    trained: Bool[Tensor, "d B T"] | None = None


def pack(samples: Sequence[Sample], length: int) -> Packed:
    """Pack documents into rows of `length` tokens: best fit, longest first, which leaves few gaps.

    No document that fits a row is split; of a longer one, every piece is a document of its own.
    """
    pieces = [
        (token[start : start + length], mask[start : start + length])
        for token, mask in sample_arrays(samples)
        for start in range(0, len(token), length)
    ]
    if not pieces:
        raise ValueError("no samples to pack; give data with at least one")
    rows = _best_fit([len(token) for token, _ in pieces], length)
    token = np.zeros((len(rows), length), dtype=np.int32)
    document = np.full((len(rows), length), -1, dtype=np.int32)
    mask = np.zeros((len(rows), length), dtype=np.int8)
    for r, row in enumerate(rows):
        start = 0
        for number, piece in enumerate(row):
            end = start + len(pieces[piece][0])
            token[r, start:end], mask[r, start:end] = pieces[piece]
            document[r, start:end] = number
            start = end
    return Packed(torch.from_numpy(token), torch.from_numpy(document), torch.from_numpy(mask))


def check_known(packed: Packed, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Refuse data with a token that the target does not know: a tokenizer may have some that its embedding lacks."""
    largest = {"the data": int(packed.token.max())}
    largest |= {f"prompt {prompt.id}, held out of the data,": max(prompt.token, default=0) for prompt in prompts}
    for where, last in largest.items():
        if last >= vocabulary:
            raise ValueError(
                f"{where} holds token {last} ({tokenizer.convert_ids_to_tokens(last)!r}), but the target knows "
                f"{vocabulary}: leave the text out, or give a model.path whose tokenizer is the model's own"
            )


def sample_arrays(samples: Sequence[Sample]) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the samples' tokens and masks as arrays; cached samples are not copied."""
    if isinstance(samples, CachedSamples):
        yield from samples.arrays()
    else:
        for sample in samples:
            yield np.asarray(sample.token, dtype=np.int32), np.asarray(sample.loss_mask, dtype=np.int8)


def _best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Put each size into the fullest row that still holds it, the largest sizes first; return the rows' indices."""
    rows: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(length + 1)]
    spaces = 0  # bit s is set where some row has s tokens left, so the tightest row is the lowest bit from the size on
    for piece in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = spaces >> sizes[piece]
        if fitting:
            space = sizes[piece] + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        left = space - sizes[piece]
        by_space[left].append(row)
        spaces |= 1 << left
    return rows


class Batches:
    """The micro-batches of one process, for any step.

    Rows come from one endless stream, a fresh permutation an epoch; step s takes the next `rows_per_step` of it. Rank r
    of `world` has every world-th row of those, from r on, in micro-batches of `micro_rows`. Every rank has as many.
    """

    def __init__(self, packed: Packed, rows_per_step: int, micro_rows: int, seed: int, rank: int, world: int) -> None:
        assert 0 <= rank < world
        assert min(rows_per_step, micro_rows) > 0
        self.packed, self.seed, self.rank, self.world = packed, seed, rank, world
        self.rows_per_step, self.micro_rows = rows_per_step, micro_rows
        self._order: tuple[int, Int[Tensor, " R"]] | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step's global batch, padding included."""
        return self.rows_per_step * self.packed.token.shape[1]

    def rows(self, step: int) -> Int[Tensor, " S"]:
        """Return the row numbers of a step's global batch, of all ranks."""
        size = len(self.packed.token)
        position = torch.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step)
        epochs = range(int(position[0]) // size, int(position[-1]) // size + 1)
        return torch.cat([self._permutation(epoch)[position[position // size == epoch] % size] for epoch in epochs])

    def __call__(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of optimiser step `step`, counted from 0."""
        mine = self.rows(step)[self.rank :: self.world]
        count = -(-self.rows_per_step // self.world)  # rows of the best-off rank
        batches = [self._batch(mine[start : start + self.micro_rows]) for start in range(0, len(mine), self.micro_rows)]
        # A filler trains nothing. It has a real row's tokens: a forward pass over padding alone may give NaN.
        first = self._batch(torch.zeros(1, dtype=torch.long))
        filler = replace(first, loss_mask=torch.zeros_like(first.loss_mask), index=torch.full_like(first.index, -1))
        return batches + [filler] * (-(-count // self.micro_rows) - len(batches))

    def _batch(self, index: Int[Tensor, " B"]) -> Batch:
        token, document, mask = (tensor[index].long() for tensor in self.packed)
        return Batch(token, document, mask, index)

    def _permutation(self, epoch: int) -> Int[Tensor, " R"]:
        if self._order is None or self._order[0] != epoch:
            digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            self._order = epoch, torch.randperm(len(self.packed.token), generator=generator)
        return self._order[1]


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Int[Tensor, "V"]:
    """Count how often the target would write each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for token, mask in sample_arrays(samples):
        np.add.at(counts, token[mask > 0], 1)
    return torch.from_numpy(counts)


def fingerprint(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 over the samples' lengths, tokens and masks, in their order."""
    digest = hashlib.sha256()
    for token, mask in sample_arrays(samples):
        digest.update(np.concatenate([[len(token)], token, mask]).astype("<i4").tobytes())
    return digest.hexdigest()
