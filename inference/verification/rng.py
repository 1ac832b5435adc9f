"""All randomness of drafting and verification: hashes of a request's key and of counters, equal on every device."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heads.modules.vocab import argmax
from heads.shapes import PerSequence
from inference.verification.sample import Distributions, Sampling, distribution

CACHED_ROWS = 4  # rows of a large vocabulary that a CPU's cache holds
ROWS = 256  # distributions summed up in fp64 at a time: 15,000 over a large vocabulary do not fit into memory


@dataclass
class RequestRng:
    """The random numbers of one sequence's draft on the host: samples of its root by depth, or the noise of positions.

    Samples are independent of the numbers of verification and of drafts at other roots, so that every draft is a sample
    of its q. If `coupled`, the noise is the one that samples the target's tokens (arXiv 2408.07978), so that a draft
    sampled with it often equals them.
    """

    key: int  # a request's
    position: int  # the absolute position of the first drafted token
    coupled: bool

    def token(self, probs: Float[Tensor, "1 V"], depth: int) -> int:
        """Sample the token at a depth, counted from the root's children at 1."""
        if self.coupled:
            return int((probs / self.noise(range(depth - 1, depth), probs)).argmax())
        samples = self.samples(probs.device)
        samples.taken = depth - 1
        return int(samples.sample(probs[None]))

    def samples(self, device: torch.device) -> "Samples":
        """Return the samples of the root, from the first on."""
        return Samples(torch.tensor([hash_key(hash_key(self.key, DRAFT_KEY), self.position)], device=device))

    def noise(self, below: range, probs: Distributions) -> Float[Tensor, "P V"]:
        """Return the noise of positions, counted from that of the root's children, for probs like these."""
        position = self.position + torch.tensor(below, device=probs.device)
        return exponential_noise(torch.full_like(position, self.key), position, probs.shape[-1])

    def at(self, position: int) -> "RequestRng":
        """Return the random numbers of a draft at another position, which do not depend on when this is called."""
        return RequestRng(self.key, position, self.coupled)


class Samples:
    """Samples at the roots of B sequences, by number: those of a sequence do not depend on its batch."""

    def __init__(self, root: PerSequence) -> None:
        self.root, self.taken = root, 0

    def sample(self, probs: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        """Sample one token from each row."""
        numbers = uniform(self.root[:, None], self._numbers(probs.shape[1]))
        tokens = []  # inverse transform sampling: one random number per row instead of V
        for block, uniforms in zip(probs.flatten(0, 1).split(ROWS), numbers.view(-1, 1).split(ROWS), strict=True):
            total = block.cumsum(-1, dtype=torch.float64)
            tokens.append(torch.searchsorted(total, uniforms * total[:, -1:], right=True)[:, 0])
        return torch.cat(tokens).clamp_max(probs.shape[-1] - 1).view(numbers.shape)

    def sample_distinct(self, probs: Float[Tensor, "B K V"], count: int) -> Int[Tensor, "B K C"]:
        """Sample `count` tokens from each row without replacement, in order; -1 once none is left.

        The tokens with the highest probs over exponential noise, which is Gumbel top-k (Kool et al., 2019).
        """
        if count == 1:
            return self.sample(probs)[..., None]
        root, number = torch.broadcast_tensors(self.root[:, None], self._numbers(probs.shape[1]))
        scores = probs / exponential_noise(root, number, probs.shape[-1]).to(probs.dtype)
        best = scores.topk(min(count, scores.shape[-1]))
        return torch.where(best.values > 0, best.indices, -1)

    def _numbers(self, count: int) -> Int[Tensor, "K"]:
        self.taken += count
        return torch.arange(self.taken - count, self.taken, device=self.root.device)


BITS = 32
MASK = (1 << BITS) - 1
ROUNDS = (16, 0x21F0AAAD), (15, 0x735A2D97)  # Wellons' hash; both factors are below 2^31: no product exceeds 63 bits
DRAFT_KEY, ACCEPT_KEY = MASK, MASK - 1  # keys of the other random numbers; positions are smaller


def seed_key(seed: int) -> int:
    """Return the random key of a seed; keys of neighbouring seeds are unrelated."""
    return hashed(str(seed)) & MASK


def hash_key(key: Any, counter: Any) -> Any:
    """Return a hash of a key and a counter, of 32 bits: a key again. Numbers or tensors that broadcast."""
    return _mixed(key ^ _mixed(counter))


def uniform(key: Any, counter: Any) -> Any:
    """Return numbers between 0 and 1, exclusive, in fp64: a function of only key and counter."""
    bits = hash_key(key, counter)
    return ((bits.double() if isinstance(bits, Tensor) else bits) + 0.5) / (MASK + 1)


def exponential_noise(key: Int[Tensor, "*b"], position: Int[Tensor, "*b"], size: int) -> Float[Tensor, "*b V"]:
    """Return exponential noise for `size` tokens at absolute positions: a function of only key, position and token.

    A hash of the three replaces a generator, so that one call serves any number of sequences and positions and every
    kind of device gives equal numbers (Salmon et al., 2011, on counter-based random numbers).
    """
    keys = hash_key(key, position).int()
    token = _mixed(torch.arange(size, device=keys.device)).int()
    noise = torch.empty(*keys.shape, size, device=keys.device)
    for some, some_keys in in_cache(noise.view(-1, size), keys.view(-1, 1)):
        # The hash is `_mixed`'s, in 32 bits and in place: intermediates of 64 bits are eight times as slow.
        bits = token ^ some_keys
        for shift, factor in (*ROUNDS, (15, 1)):
            bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << BITS - shift) - 1)).mul_(factor)
        # log(u) is log1p(u - 1), and 1 - u has all bits of fp32 where the noise is small and decides.
        some.copy_(bits.bitwise_not_()).add_(0.5).mul_(0.5**BITS)
        some.sub_(some.floor()).clamp_max_(1 - 2**-24).neg_().log1p_().neg_()
    return noise


def sample_tokens(
    logits: Float[Tensor, "B V"], sampling: Sampling, key: PerSequence, position: PerSequence
) -> PerSequence:
    """Return the target's token of each row: the best one, or the one that the noise of its position samples."""
    if sampling.temperature == 0:
        return argmax(logits)
    tokens = []
    for some, keys, positions in in_cache(logits, key, position):
        tokens.append((distribution(some, sampling) / exponential_noise(keys, positions, logits.shape[-1])).argmax(-1))
    return torch.cat(tokens)


def in_cache(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors along their first dimension: on a CPU into blocks whose intermediates fit into its cache."""
    few = rows[0].device.type == "cpu" and not torch.compiler.is_compiling()
    return zip(*(tensor.split(CACHED_ROWS if few else max(len(tensor), 1)) for tensor in rows), strict=True)


def _mixed(x: Any) -> Any:
    for shift, factor in ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 15)


def hashed(key: str) -> int:
    """Return a seed for a string, by a hash: generators with neighbouring seeds may start with similar numbers."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
