"""All randomness of drafting and verification, behind one protocol: the tests enumerate every outcome through it."""

import hashlib
import random
from collections.abc import Sequence, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

TINY = 1e-30  # the least exponential variate: scores divide by it
ROWS = 256  # distributions that are summed up in fp64 at a time: of 15,000 over a large vocabulary none would fit


@runtime_checkable
class Rng(Protocol):
    """The random choices that drafting and verification make.

    `depth` counts from the root to the sampled tokens, its children being at 1: noise keyed by position reads it.
    """

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> Sequence[int]:
        """Sample one token from each row, independently."""
        ...

    def sample_distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Sample `count` tokens from each row without replacement, in order, "N count"; -1 once none is left."""
        ...

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        ...

    def at(self, position: int, device: torch.device) -> "Rng":
        """Return the Rng of a draft that begins at an absolute position, for probs on a device and for any thread.

        It is independent of this one, or coupled to the positions where this one is; a second one samples the same.
        """
        ...


class SeededRng:
    """A seeded torch generator on the probs' device and one on the host, for many samples at one root."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.accept_rng = random.Random(seed)  # on the device it would make the host wait

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Sample one token from each row."""
        tokens: list[int] = self.pick(probs).tolist()
        return tokens

    def sample_distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Sample without replacement (probs over exponential noise, equal to Gumbel top-k; Kool et al., 2019)."""
        return self.pick(probs)[:, None] if count == 1 else top_scored(self.exponential_scores(probs), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        return probability >= 1 or self.accept_rng.random() < probability

    def at(self, position: int, device: torch.device) -> Rng:
        """Return a generator of the position's own."""
        return SeededRng(hashed(f"{self.seed} draft {position}"), device)

    def pick(self, probs: Float[Tensor, "N V"]) -> Int[Tensor, "N"]:
        """Sample one token from each row."""
        uniforms = torch.rand(len(probs), dtype=torch.float64, device=probs.device, generator=self.generator)
        return inverse_cdf(probs, uniforms)

    def exponential_scores(self, probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return keys whose descending order is a sample without replacement; tokens of zero probability get zero."""
        return probs / torch.empty_like(probs).exponential_(generator=self.generator).clamp_min_(TINY)


class CoupledRng:
    """Noise that depends on the seed, the absolute position and the token, and on nothing else (arXiv 2408.07978).

    The target's token at a position is then a function of the tokens before it and the seed, whatever was drafted, and
    a draft that adds the same noise to its own probs matches it often. argmax(log p + Gumbel) is argmax(p / Exp).
    Verification reads it under every rule; where the rule is not `coupled`, drafts have a `DraftRng` of their own.
    """

    def __init__(self, seed: int, device: torch.device, prefix: Sized) -> None:
        """Take the seed, the device of the probs, and the tokens before a draft, whose last one is the root."""
        self.seed, self.device, self.prefix = seed, device, prefix
        self.cached: dict[int, Tensor] = {}
        self.key, self.start, self.used_uniforms = hash_key(seed_key(seed), ACCEPT_KEY), -1, 0

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Return each row's winner under the noise of the position; equal rows have equal winners."""
        tokens: list[int] = self.exponential_scores(probs, depth).argmax(-1).tolist()
        return tokens

    def sample_distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Return the best tokens under the noise of the position, -1 once none is left."""
        return top_scored(self.exponential_scores(probs, depth), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability: the uniform numbers of a root are counted."""
        if self.start != len(self.prefix):
            self.start, self.used_uniforms = len(self.prefix), 0
        self.used_uniforms += 1
        return bool(uniform(hash_key(self.key, self.start), self.used_uniforms - 1) < probability)

    def at(self, position: int, device: torch.device) -> Rng:
        """Return the same noise from a position on."""
        return CoupledRng(self.seed, device, range(position))

    def exponential_scores(self, probs: Float[Tensor, "N V"], depth: int = 1) -> Float[Tensor, "N V"]:
        """Return the probs divided by the noise of the position `depth` below the root."""
        start = len(self.prefix)
        self.cached = {position: noise for position, noise in self.cached.items() if position >= start}
        position = start + depth - 1
        if position not in self.cached:
            where = torch.tensor([seed_key(self.seed), position], device=self.device)
            self.cached[position] = exponential_noise(where[:1], where[1:], probs.shape[-1])[0]
        return probs / self.cached[position].to(probs.dtype)


class DraftRng:
    """The Rng of drafts that are not coupled: it depends on seed, root and the number of samples taken there before.

    It is independent of what verification reads and of what was drafted at other roots, so that every draft is a sample
    of its q. It has no state but that number, so `Samples` takes those of a whole batch at once.
    """

    def __init__(self, seed: int, device: torch.device, prefix: Sized) -> None:
        """Take the seed, the device of the probs, and the tokens before a draft, whose last one is the root."""
        self.seed, self.device, self.prefix = seed, device, prefix
        self.start, self.root = -1, 0
        self.at_root: Samples

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Sample one token from each row."""
        tokens: list[int] = self.samples().sample(probs[None])[0].tolist()
        return tokens

    def sample_distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Sample without replacement."""
        return self.samples().sample_distinct(probs[None], count)[0]

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        return bool(uniform(self.root, self.samples().take(1)) < probability)

    def at(self, position: int, device: torch.device) -> Rng:
        """Return a generator of the position's own."""
        return SeededRng(self.seed, device).at(position, device)

    def samples(self) -> "Samples":
        """Return the samples of the root at hand, of which some may have been taken."""
        if self.start != len(self.prefix):
            self.start = len(self.prefix)
            self.root = hash_key(hash_key(seed_key(self.seed), DRAFT_KEY), self.start)
            self.at_root = Samples(torch.tensor([self.root], device=self.device))
        return self.at_root


class Samples:
    """Samples at the roots of B sequences, by number: the same ones of each sequence, whoever is beside it."""

    def __init__(self, root: Int[Tensor, "B"]) -> None:
        """Take the roots' keys."""
        self.root, self.taken = root, 0

    def take(self, count: int) -> int:
        """Return the number of the first of the next `count` samples."""
        self.taken += count
        return self.taken - count

    def sample(self, probs: Float[Tensor, "B K V"]) -> Int[Tensor, "B K"]:
        """Sample one token from each row."""
        uniforms = uniform(self.root[:, None], self._numbers(probs.shape[1]))
        return inverse_cdf(probs.flatten(0, 1), uniforms.flatten()).unflatten(0, uniforms.shape)

    def sample_distinct(self, probs: Float[Tensor, "B K V"], count: int) -> Int[Tensor, "B K C"]:
        """Sample `count` tokens from each row without replacement, in order; -1 once none is left.

        By probs over exponential noise, equal to Gumbel top-k (Kool et al., 2019).
        """
        if count == 1:
            return self.sample(probs)[..., None]
        root, number = torch.broadcast_tensors(self.root[:, None], self._numbers(probs.shape[1]))
        return top_scored(probs / exponential_noise(root, number, probs.shape[-1]).to(probs.dtype), count)

    def _numbers(self, count: int) -> Int[Tensor, "K"]:
        first = self.take(count)
        return torch.arange(first, first + count, device=self.root.device)


BITS = 32
MASK = (1 << BITS) - 1
DRAFT_KEY, ACCEPT_KEY = MASK, MASK - 1  # the keys of other numbers than the noise of positions, which are smaller


def seed_key(seed: int) -> int:
    """Return what counter-based numbers take for a seed: those of neighbouring seeds have nothing in common."""
    return hashed(str(seed)) & MASK


def hash_key(key: Any, counter: Any) -> Any:
    """Return a hash of a key and a counter, of 32 bits: a key again. Numbers or tensors that broadcast."""
    return _mixed(key ^ _mixed(counter))


def uniform(key: Any, counter: Any) -> Any:
    """Return numbers between 0 and 1, exclusive, in fp64: a function of key and counter alone."""
    bits = hash_key(key, counter)
    return ((bits.double() if isinstance(bits, Tensor) else bits) + 0.5) / (MASK + 1)


def exponential_noise(key: Int[Tensor, "*b"], position: Int[Tensor, "*b"], size: int) -> Float[Tensor, "*b V"]:
    """Return exponential noise for `size` tokens at absolute positions: a function of key, position and token alone.

    A hash of the three takes a generator's place, so that one call serves any number of sequences and positions, on
    every kind of device alike (Salmon et al., 2011, on counter-based random numbers).
    """
    token = torch.arange(size, device=position.device)
    return -uniform(hash_key(key, position)[..., None], token).log().float()


def _mixed(x: Any) -> Any:
    """Mix 32 bits (Wellons' hash of two rounds; both factors are below 2^31, so that no product overflows 63 bits)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def inverse_cdf(probs: Float[Tensor, "N V"], uniforms: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """Return the token of each row at a point of its cumulative sum: one random number a row in place of V."""
    chunks = zip(probs.split(ROWS), uniforms[:, None].split(ROWS), strict=True)
    tokens = []
    for some, where in chunks:
        total = some.cumsum(-1, dtype=torch.float64)
        tokens.append(torch.searchsorted(total, where * total[:, -1:], right=True)[:, 0])
    return torch.cat(tokens).clamp_max(probs.shape[-1] - 1)


def hashed(key: str) -> int:
    """Return a seed for a key: generators that are seeded with neighbouring numbers may begin alike."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def top_scored(keys: Float[Tensor, "*n V"], count: int) -> Int[Tensor, "*n C"]:
    """Return the tokens of the `count` largest keys of each row in order; -1 where a key is zero."""
    best = keys.topk(min(count, keys.shape[-1]))
    return torch.where(best.values > 0, best.indices, -1)
