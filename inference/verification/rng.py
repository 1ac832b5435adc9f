"""All randomness of drafting and verification, behind one protocol: the tests enumerate every outcome through it."""

import hashlib
import random
from collections.abc import Sequence, Sized
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

TINY = 1e-30  # the least exponential variate: a race divides by it
ROWS = 256  # distributions that are summed up in fp64 at a time: of 15,000 over a large vocabulary none would fit


@runtime_checkable
class Rng(Protocol):
    """The random choices that drafting and verification make.

    `depth` counts from the root to the sampled tokens, its children being at 1: noise keyed by position reads it.
    """

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> Sequence[int]:
        """Sample one token from each row, independently."""
        ...

    def distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
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


class Generator:
    """The Rng of real decoding: a seeded torch generator on the device of the probs, and coins on the host."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.coin = random.Random(seed)  # a coin on the device would make the host wait for it

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Sample one token from each row."""
        tokens: list[int] = self.pick(probs).tolist()
        return tokens

    def distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Sample without replacement (exponential races, equal to Gumbel top-k; Kool et al., 2019)."""
        return self.pick(probs)[:, None] if count == 1 else finishers(self.race(probs), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        return probability >= 1 or self.coin.random() < probability

    def at(self, position: int, device: torch.device) -> Rng:
        """Return a generator of the position's own."""
        return Generator(hashed(f"{self.seed} draft {position}"), device)

    def pick(self, probs: Float[Tensor, "N V"]) -> Int[Tensor, "N"]:
        """Sample one token from each row by its cumulative sum: one random number a row, where a race takes V."""
        point = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device, generator=self.generator)
        chunks = zip(probs.split(ROWS), point.split(ROWS), strict=True)
        return torch.cat([_at(some.cumsum(-1, dtype=torch.float64), where) for some, where in chunks])

    def race(self, probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return keys whose descending order is a sample without replacement; tokens of zero probability get zero."""
        return probs / torch.empty_like(probs).exponential_(generator=self.generator).clamp_min_(TINY)


class Coupled:
    """Noise that depends on the seed, the absolute position and the token, and on nothing else (arXiv 2408.07978).

    The target's token at a position is then a function of the text before it and the seed, whatever was drafted, and a
    draft that races its own probs against the same noise meets it often. argmax(log p + Gumbel) is argmax(p / Exp).
    """

    def __init__(self, seed: int, device: torch.device, text: Sized) -> None:
        """Take the seed, the device of the probs, and the text before a draft, the root its last token."""
        self.seed, self.device, self.text = seed, device, text
        self.cached: dict[int, Tensor] = {}
        self.coins = Generator(seed, device)

    def sample(self, probs: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Return each row's winner under the noise of the position; equal rows have equal winners."""
        tokens: list[int] = self.race(probs, depth).argmax(-1).tolist()
        return tokens

    def distinct(self, probs: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Return the first finishers under the noise of the position, -1 once none is left."""
        return finishers(self.race(probs, depth), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability; a drafter may ask, the coupled rule does not."""
        return self.coins.accept(probability)

    def at(self, position: int, device: torch.device) -> Rng:
        """Return the same noise from a position on."""
        return Coupled(self.seed, device, range(position))

    def race(self, probs: Float[Tensor, "N V"], depth: int = 1) -> Float[Tensor, "N V"]:
        """Return the probs divided by the noise of the position `depth` below the root."""
        start = len(self.text)
        self.cached = {position: noise for position, noise in self.cached.items() if position >= start}
        position = start + depth - 1
        if position not in self.cached:
            where = torch.tensor([key_of(self.seed), position], device=self.device)
            self.cached[position] = noise_at(where[:1], where[1:], probs.shape[-1])[0]
        return probs / self.cached[position].to(probs.dtype)


BITS = 32
MASK = (1 << BITS) - 1


def key_of(seed: int) -> int:
    """Return what coupled noise takes for a seed: those of neighbouring seeds have nothing in common."""
    return hashed(str(seed)) & MASK


def noise_at(key: Int[Tensor, "*b"], position: Int[Tensor, "*b"], size: int) -> Float[Tensor, "*b V"]:
    """Return exponential noise for `size` tokens at absolute positions: a function of key, position and token alone.

    A hash of the three takes a generator's place, so that one call serves any number of sequences and positions, on
    every kind of device alike (Salmon et al., 2011, on counter-based random numbers).
    """
    token = _mixed(torch.arange(size, device=position.device))
    bits = _mixed(token ^ _mixed(key ^ _mixed(position))[..., None])
    uniform = (bits.double() + 0.5) / (MASK + 1)
    return -uniform.log().float()


def _mixed(x: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """Mix 32 bits (Wellons' hash of two rounds; both factors are below 2^31, so that no product overflows 63 bits)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)


def _at(total: Float[Tensor, "N V"], point: Float[Tensor, "N 1"]) -> Int[Tensor, "N"]:
    """Return the tokens at points of cumulative sums, as shares of the whole sum."""
    return torch.searchsorted(total, point * total[:, -1:], right=True)[:, 0].clamp_max(total.shape[-1] - 1)


def hashed(key: str) -> int:
    """Return a seed for a key: generators that are seeded with neighbouring numbers may begin alike."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def finishers(keys: Float[Tensor, "N V"], count: int) -> Tensor:
    """Return the tokens of the `count` largest keys of each row in order, "N count"; -1 where a key is zero."""
    best = keys.topk(min(count, keys.shape[-1]))
    return torch.where(best.values > 0, best.indices, -1)
