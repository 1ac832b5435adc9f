"""Rotary positions (RoPE; Su et al., arXiv 2104.09864) of targets and heads, read and scaled as transformers does."""

import copy
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from heads.common.errors import one_line
from heads.common.typed import Json
from heads.shapes import HeadRows, Sequences

# The kinds of scaling that heads support, with the numbers that each needs.
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")  # keys of a config.json
LENGTHS = ("max_position_embeddings", "original_max_position_embeddings")  # the lengths that a scaling may refer to
FULL = "full_attention"  # the layer kind whose positions a head takes if a model has several kinds

LEAST = 4096  # positions of a new table; a longer table invalidates compiled and captured code


class Rope(NamedTuple):
    """Rotary positions: base, scaling (transformers' keys), and the rotated share of the dimensions."""

    theta: float
    scaling: Json | None = None  # None without scaling
    share: float = 1.0  # share of an attention head's dimensions that is rotated; draft heads need 1.0

    @property
    def unsupported(self) -> str | None:
        """The option that heads here do not support; None if all are supported."""
        if self.share != 1:
            return f"partial_rotary_factor={self.share:g}"
        kind = "default" if self.scaling is None else self.scaling["rope_type"]
        return None if kind in ("default", *SCALINGS) else f"rope_scaling of type {kind}"

    @classmethod
    def of(cls, config: Any) -> "Rope":
        """Return the rotary positions of a head's configuration; refuse a scaling not in SCALINGS or incomplete."""
        scaling = config.rope_scaling
        if scaling is not None:
            kind = scaling.get("rope_type")
            if kind not in SCALINGS:
                raise ValueError(f"head.rope_scaling.rope_type is {kind!r}: choose one of {', '.join(SCALINGS)}")
            for name in SCALINGS[kind]:
                if not isinstance(scaling.get(name), int | float) or scaling[name] <= 0:
                    raise ValueError(
                        f"head.rope_scaling has no number {name} above 0, which rope_type={kind} needs: give it"
                    )
            if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
                raise ValueError("head.rope_scaling.high_freq_factor is not above low_freq_factor: give a larger one")
        return cls(config.rope_theta, scaling)

    def frequency(self, width: int) -> tuple[Float[Tensor, "e"], float]:
        """Return the inverse frequencies, one for each pair of dimensions, and the factor of cosine and sine.

        The scalings are transformers' own: linear, llama3 (arXiv 2407.21783), YaRN (arXiv 2309.00071).
        """
        if self.scaling is None:
            half = torch.arange(width // 2, dtype=torch.float64, device="cpu")  # while a head is outlined too
            return self.theta ** (-half / (width // 2)), 1.0
        scaling = {**self.scaling, "rope_theta": self.theta}
        length = int(scaling.get("original_max_position_embeddings", LEAST) * max(scaling["factor"], 1))
        config = transformers.LlamaConfig(
            head_dim=width, hidden_size=width, num_attention_heads=1, max_position_embeddings=length,
            rope_parameters=scaling,
        )  # fmt: skip
        return transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)


def positions_of(config: Json) -> Rope | None:
    """Return the rotary positions that transformers' LlamaConfig reads from a config.json, None without any.

    If `rope_parameters` has one entry per kind of layer, the only entry counts, or full attention's.
    Refuse, in one line, values that transformers does not take.
    """
    # A copy, since transformers changes the dict.
    declared = {key: copy.deepcopy(config[key]) for key in ROPE_KEYS if config.get(key) is not None}
    if not declared:
        return None
    kinds = set(config.get("layer_types") or ())
    kind = kinds.pop() if len(kinds) == 1 else FULL
    for key in ("rope_scaling", "rope_parameters"):
        by_kind = [value for value in (declared.get(key) or {}).values() if isinstance(value, dict)]
        if by_kind:
            declared[key] = declared[key].get(kind) or by_kind[0]
    try:
        read: Any = transformers.LlamaConfig(
            **declared, **{key: config[key] for key in LENGTHS if config.get(key) is not None}
        )
        read.standardize_rope_params()  # twice, as models do: a length outside `rope_parameters` overrides one inside
        parameters = dict(read.rope_parameters)
        theta, share = float(parameters.pop("rope_theta")), float(parameters.pop("partial_rotary_factor", 1))
    except Exception as error:  # transformers raises many types of error at unexpected values
        raise ValueError(f"rotary positions that transformers does not read ({one_line(error)})") from error
    scaling = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    return Rope(theta, None if scaling["rope_type"] == "default" else scaling, share)


class Rotary:
    """Rotate queries and keys in Llama's half-split layout, by a table of cosines and sines that grows as needed."""

    def __init__(self, width: int, rope: Rope) -> None:
        self.frequency, self.factor = rope.frequency(width)
        self.table = torch.zeros(2, 0, width)

    def __call__(self, x: HeadRows, position: Sequences, max_position: int) -> HeadRows:
        """Rotate queries or keys to their positions, of which `max_position` is an upper bound."""
        if max_position >= self.table.shape[1] or self.table.dtype != x.dtype or self.table.device != x.device:
            with torch.inference_mode(False):  # a normal tensor: a table built while decoding may be needed in training
                angle = torch.arange(max(2 * max_position, LEAST), dtype=torch.float64)[:, None] * self.frequency
                angle = torch.cat([angle, angle], -1)
                self.table = (self.factor * torch.stack([angle.cos(), angle.sin()])).to(x.device, x.dtype)
        cos, sin = self.table[:, position][:, :, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
