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

    `depth` counts from the root to the drawn tokens, its children being at 1: noise that is keyed by position reads it.
    """

    def draw(self, law: Float[Tensor, "N V"], depth: int = 1) -> Sequence[int]:
        """Draw one token from each row's law, independently."""
        ...

    def distinct(self, law: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Draw `count` tokens from each row without replacement, in order, "N count"; -1 once the law is used up."""
        ...

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        ...

    def at(self, position: int, device: torch.device) -> "Rng":
        """Return the Rng of a draft that begins at an absolute position, for laws on a device and for any thread.

        It is independent of this one, or coupled to the positions where this one is; asked again, it draws the same.
        """
        ...


class Generator:
    """The Rng of real decoding: a seeded torch generator on the device of the laws, and coins on the host."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.coin = random.Random(seed)  # a coin on the device would make the host wait for it

    def draw(self, law: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Draw one token from each row's law."""
        drawn: list[int] = self.pick(law).tolist()
        return drawn

    def distinct(self, law: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Draw without replacement (exponential races, equal to Gumbel top-k; Kool et al., 2019)."""
        return self.pick(law)[:, None] if count == 1 else finishers(self.race(law), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability."""
        return probability >= 1 or self.coin.random() < probability

    def at(self, position: int, device: torch.device) -> Rng:
        """Return a generator of the position's own."""
        return Generator(hashed(f"{self.seed} draft {position}"), device)

    def pick(self, law: Float[Tensor, "N V"]) -> Int[Tensor, "N"]:
        """Draw one token from each row by its cumulative sum: one random number a row, where a race takes V."""
        total = law.cumsum(-1, dtype=torch.float64)
        point = torch.rand(len(law), 1, dtype=torch.float64, device=law.device, generator=self.generator)
        return torch.searchsorted(total, point * total[:, -1:], right=True)[:, 0].clamp_max(law.shape[-1] - 1)

    def race(self, law: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
        """Return keys whose descending order is a draw without replacement; tokens of zero probability get zero."""
        return law / torch.empty_like(law).exponential_(generator=self.generator).clamp_min_(TINY)


class Coupled:
    """Noise that depends on the seed, the absolute position and the token, and on nothing else (arXiv 2408.07978).

    The target's token at a position is then a function of the text before it and the seed, whatever was drafted, and a
    draft that races its own law against the same noise meets it often. argmax(log p + Gumbel) is argmax(p / Exp).
    """

    def __init__(self, seed: int, device: torch.device, position: Callable[[], int]) -> None:
        """Take the seed, the laws' device, and what tells the absolute position of the token after the root."""
        self.seed, self.device, self.position = seed, device, position
        self.known: dict[int, Tensor] = {}
        self.own = Generator(seed, device)

    def draw(self, law: Float[Tensor, "N V"], depth: int = 1) -> list[int]:
        """Return each law's winner under the noise of the position; equal laws have equal winners."""
        drawn: list[int] = self.race(law, depth).argmax(-1).tolist()
        return drawn

    def distinct(self, law: Float[Tensor, "N V"], count: int, depth: int = 1) -> Tensor:
        """Return the first finishers under the noise of the position, -1 once the law is used up."""
        return finishers(self.race(law, depth), count)

    def accept(self, probability: float) -> bool:
        """Return true with the given probability; a drafter may ask, the coupled rule does not."""
        return self.own.accept(probability)

    def at(self, position: int, device: torch.device) -> Rng:
        """Return the same noise from a position on; on another kind of device it is other noise."""
        return Coupled(self.seed, device, lambda: position)

    def race(self, law: Float[Tensor, "N V"], depth: int = 1) -> Float[Tensor, "N V"]:
        """Return the laws divided by the noise of the position `depth` below the root."""
        start = self.position()
        self.known = {position: noise for position, noise in self.known.items() if position >= start}
        position = start + depth - 1
        if position not in self.known:
            self.known[position] = self.noise(position, law.shape[-1])
        return law / self.known[position].to(law.dtype)

    def noise(self, position: int, size: int) -> Float[Tensor, "V"]:
        """Return a position's exponential noise, in float32 whatever the laws are in."""
        generator = torch.Generator(self.device).manual_seed(hashed(f"{self.seed} {position}"))
        return torch.empty(size, device=self.device).exponential_(generator=generator).clamp_min_(TINY)


def hashed(key: str) -> int:
    """Return a seed for a key: generators that are seeded with neighbouring numbers may begin alike."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def finishers(keys: Float[Tensor, "N V"], count: int) -> Tensor:
    """Return the tokens of the `count` largest keys of each row in order, "N count"; -1 where a key is zero."""
    best = keys.topk(min(count, keys.shape[-1]))
    return torch.where(best.values > 0, best.indices, -1)
