"""Packing and order: whole documents into sequences, sequences into the micro-batches of a step. Pure, given a seed.

The sequences of a step depend only on the seed and the step number. So a run resumes from its step number, and its
global batches are the same for any number of processes.
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

from data.text.masks import Sample
from data.text.prompts import CachedSamples, Prompt
from heads.shapes import Paths, PerSequence, Sequences

TokenArray = np.ndarray[Any, Any]  # tokens or mask of a sample, (T,)


class Packed(NamedTuple):
    """All packed sequences: tokens, the number of each token's document (-1 on padding), and the loss mask."""

    token: Int[Tensor, "R T"]
    document: Int[Tensor, "R T"]
    loss_mask: Int[Tensor, "R T"]


@dataclass(frozen=True)
class Batch:
    """A micro-batch; `index` is each sequence's index in `Packed`, -1 for padding, a sequence without a mask.

    In a rollout, `path` is that of `Features`, and `trained` marks the rows that are trained at each depth.
    """

    token: Sequences
    document: Sequences
    loss_mask: Sequences
    index: PerSequence
    path: Paths = None
    trained: Bool[Tensor, "d B T"] | None = None


def pack(samples: Sequence[Sample], length: int) -> Packed:
    """Pack documents into sequences of `length` tokens: best fit, longest first, for little padding.

    Documents that fit a sequence are not split; the pieces of a longer document count as documents.
    """
    pieces = [
        (token[start : start + length], mask[start : start + length])
        for token, mask in sample_arrays(samples)
        for start in range(0, len(token), length)
    ]
    if not pieces:
        raise ValueError("no samples to pack; give data with at least one")
    sequences: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(length + 1)]
    # Bit s is set if a sequence has s tokens left, so the fullest with room is the lowest set bit from `size` on.
    spaces = 0
    for piece in sorted(range(len(pieces)), key=lambda i: -len(pieces[i][0])):
        size = len(pieces[piece][0])
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            sequence = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, sequence = length, len(sequences)
            sequences.append([])
        sequences[sequence].append(piece)
        left = space - size
        by_space[left].append(sequence)
        spaces |= 1 << left
    shape = len(sequences), length
    token = np.zeros(shape, dtype=np.int32)
    document = np.full(shape, -1, dtype=np.int32)
    mask = np.zeros(shape, dtype=np.int8)
    for r, members in enumerate(sequences):
        start = 0
        for number, piece in enumerate(members):
            end = start + len(pieces[piece][0])
            token[r, start:end], mask[r, start:end] = pieces[piece]
            document[r, start:end] = number
            start = end
    return Packed(torch.from_numpy(token), torch.from_numpy(document), torch.from_numpy(mask))


def check_known(packed: Packed, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Refuse data with tokens outside of the target's embedding: a tokenizer may have more tokens."""
    largest = {"the data": int(packed.token.max())}
    largest |= {f"prompt {prompt.id}, held out of the data,": max(prompt.token, default=0) for prompt in prompts}
    for where, last in largest.items():
        if last >= vocabulary:
            raise ValueError(
                f"{where} holds token {last} ({tokenizer.convert_ids_to_tokens(last)!r}), but the target knows "
                f"{vocabulary}: leave the text out, or give a model.path whose tokenizer is the model's own"
            )


def sample_arrays(samples: Sequence[Sample]) -> Iterator[tuple[TokenArray, TokenArray]]:
    """Yield the samples' tokens and masks as arrays; cached samples are not copied."""
    if isinstance(samples, CachedSamples):
        yield from samples.arrays()
    else:
        for sample in samples:
            yield np.asarray(sample.token, dtype=np.int32), np.asarray(sample.loss_mask, dtype=np.int8)


class Batches:
    """The micro-batches of one process, for any step.

    Sequences come from an endless stream, with a new permutation every epoch; step s takes the next
    `sequences_per_step`. Rank r of `world` takes every world-th of these sequences, from index r on, in micro-batches
    of `micro_batch_size`. All ranks have the same number of micro-batches.
    """

    def __init__(
        self, packed: Packed, sequences_per_step: int, micro_batch_size: int, seed: int, rank: int, world: int
    ) -> None:
        assert 0 <= rank < world
        assert min(sequences_per_step, micro_batch_size) > 0
        self.packed, self.seed, self.rank, self.world = packed, seed, rank, world
        self.sequences_per_step, self.micro_batch_size = sequences_per_step, micro_batch_size
        self._order: tuple[int, Int[Tensor, " R"]] | None = None

    @property
    def step_tokens(self) -> int:
        """Tokens of a step's global batch, padding included."""
        return self.sequences_per_step * self.packed.token.shape[1]

    def sequences(self, step: int) -> Int[Tensor, " S"]:
        """Return the indices of the sequences in a step's global batch, over all ranks."""
        size = len(self.packed.token)
        position = torch.arange(step * self.sequences_per_step, (step + 1) * self.sequences_per_step)
        parts = []
        for epoch in range(int(position[0]) // size, int(position[-1]) // size + 1):
            if self._order is None or self._order[0] != epoch:
                digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                self._order = epoch, torch.randperm(size, generator=generator)
            parts.append(self._order[1][position[position // size == epoch] % size])
        return torch.cat(parts)

    def __call__(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of optimiser step `step`, counted from 0."""
        mine = self.sequences(step)[self.rank :: self.world]
        count = -(-self.sequences_per_step // self.world)  # sequences of the rank with the most
        batches = [
            self._batch(mine[start : start + self.micro_batch_size])
            for start in range(0, len(mine), self.micro_batch_size)
        ]
        # A padding sequence is not trained. It has real tokens, since a forward pass over padding tokens may give NaN.
        first = self._batch(torch.zeros(1, dtype=torch.long))
        padding = replace(first, loss_mask=torch.zeros_like(first.loss_mask), index=torch.full_like(first.index, -1))
        return batches + [padding] * (-(-count // self.micro_batch_size) - len(batches))

    def _batch(self, index: PerSequence) -> Batch:
        token, document, mask = (tensor[index].long() for tensor in self.packed)
        return Batch(token, document, mask, index)


def token_counts(samples: Sequence[Sample], vocab_size: int) -> Int[Tensor, "V"]:
    """Count how often the target would write each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for token, mask in sample_arrays(samples):
        np.add.at(counts, token[mask > 0], 1)
    return torch.from_numpy(counts)


def fingerprint(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 over the samples' lengths, tokens and masks, in order."""
    digest = hashlib.sha256()
    for token, mask in sample_arrays(samples):
        digest.update(np.concatenate([[len(token)], token, mask]).astype("<i4").tobytes())
    return digest.hexdigest()
