"""All randomness of drafting and verification, behind one protocol: the tests enumerate every outcome through it."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

TINY = 1e-30  # the least exponential variate: a race divides by it


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
        total = probs.cumsum(-1, dtype=torch.float64)
        point = torch.rand(len(probs), 1, dtype=torch.float64, device=probs.device, generator=self.generator)
        return torch.searchsorted(total, point * total[:, -1:], right=True)[:, 0].clamp_max(probs.shape[-1] - 1)

    def race(self, probs: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return keys whose descending order is a sample without replacement; tokens of zero probability get zero."""
        return probs / torch.empty_like(probs).exponential_(generator=self.generator).clamp_min_(TINY)


class Coupled:
    """Noise that depends on the seed, the absolute position and the token, and on nothing else (arXiv 2408.07978).

    The target's token at a position is then a function of the text before it and the seed, whatever was drafted, and a
    draft that races its own probs against the same noise meets it often. argmax(log p + Gumbel) is argmax(p / Exp).
    """

    def __init__(self, seed: int, device: torch.device, position: Callable[[], int]) -> None:
        """Take the seed, the device of the probs, and what returns the position of the token after the root."""
        self.seed, self.device, self.position = seed, device, position
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
        """Return the same noise from a position on; on another kind of device it is other noise."""
        return Coupled(self.seed, device, lambda: position)

    def race(self, probs: Float[Tensor, "N V"], depth: int = 1) -> Float[Tensor, "N V"]:
        """Return the probs divided by the noise of the position `depth` below the root."""
        start = self.position()
        self.cached = {position: noise for position, noise in self.cached.items() if position >= start}
        position = start + depth - 1
        if position not in self.cached:
            self.cached[position] = self.noise(position, probs.shape[-1])
        return probs / self.cached[position].to(probs.dtype)

    def noise(self, position: int, size: int) -> Float[Tensor, "V"]:
        """Return a position's exponential noise, in float32 whatever the probs are in."""
        generator = torch.Generator(self.device).manual_seed(hashed(f"{self.seed} {position}"))
        return torch.empty(size, device=self.device).exponential_(generator=generator).clamp_min_(TINY)


def hashed(key: str) -> int:
    """Return a seed for a key: generators that are seeded with neighbouring numbers may begin alike."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def finishers(keys: Float[Tensor, "N V"], count: int) -> Tensor:
    """Return the tokens of the `count` largest keys of each row in order, "N count"; -1 where a key is zero."""
    best = keys.topk(min(count, keys.shape[-1]))
    return torch.where(best.values > 0, best.indices, -1)
