"""Rotary positions (RoPE; Su et al., arXiv 2104.09864) of the heads trained here and of published ones."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # the kinds by their names in config.json, with their numbers

LEAST = 4096  # positions of a table: one that is made anew changes what is compiled or captured


def scaling_of(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return a head's `rope_scaling` from a config.json's `rope_scaling` or `rope_parameters`."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return None if kind == "default" else {"rope_type": kind, **{n: parameters.get(n) for n in SCALINGS.get(kind, ())}}


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


class Rope(NamedTuple):
    """A head's rotary settings: the base, and how frequencies are scaled, None for not at all."""

    theta: float
    scaling: dict[str, Any] | None

    @classmethod
    def of(cls, config: Any) -> "Rope":
        """Return the settings in a head's configuration; refuse a scaling that is none of SCALINGS or lacks numbers."""
        scaling: dict[str, Any] | None = config.rope_scaling
        if scaling is not None:
            kind = scaling.get("rope_type")
            if kind not in SCALINGS:
                raise ValueError(f"head.rope_scaling.rope_type is {kind!r}: choose one of {', '.join(SCALINGS)}")
            missing = [name for name in SCALINGS[kind] if not _positive(scaling.get(name))]
            if missing:
                raise ValueError(
                    f"head.rope_scaling has no number {missing[0]} above 0, which rope_type={kind} needs: give it"
                )
            if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
                raise ValueError("head.rope_scaling.high_freq_factor is not above low_freq_factor: give a larger one")
        return cls(config.rope_theta, scaling)

    def frequency(self, width: int) -> Float[Tensor, "e"]:
        """Return the angle of each pair of dimensions a position, in radians.

        llama3 (arXiv 2407.21783): waves that are longer than the context of the first training are slowed down by the
        factor, those much shorter stay, and those in between are blended.
        """
        plain = self.theta ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
        if self.scaling is None:
            return plain
        slow = plain / self.scaling["factor"]
        if self.scaling["rope_type"] == "linear":
            return slow
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        waves = self.scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # in that context
        blend = ((waves - low) / (high - low)).clamp(0, 1)
        return blend * plain + (1 - blend) * slow


class Rotary:
    """The rotation in the half-split layout of Llama, from a table that grows as needed."""

    def __init__(self, width: int, rope: Rope) -> None:
        self.frequency = rope.frequency(width)
        self.table = torch.zeros(2, 0, width)

    def __call__(
        self, x: Float[Tensor, "B H T E"], position: Int[Tensor, "B T"], last: int
    ) -> Float[Tensor, "B H T E"]:
        """Rotate queries or keys to their positions, of which `last` is an upper bound."""
        if last >= self.table.shape[1] or self.table.dtype != x.dtype or self.table.device != x.device:
            with torch.inference_mode(False):  # a table built while decoding may be needed in training
                angle = torch.arange(max(2 * last, LEAST), dtype=torch.float64)[:, None] * self.frequency
                angle = torch.cat([angle, angle], -1)
                self.table = torch.stack([angle.cos(), angle.sin()]).to(x.device, x.dtype)
        cos, sin = self.table[:, position][:, :, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
