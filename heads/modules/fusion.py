"""From the hidden states of several target layers to one: which layers, and how they are joined."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heads.modules.layers import RMSNorm

EAGLE3, DFLASH = 3, 5  # how many layers each fuses


def default_layers(count: int, num_layers: int) -> list[int]:
    """Return the layers that a head reads of a target if it is not told which, `count` spread over the depth.

    Three are EAGLE-3's: the outputs of layers 1, half of all minus 1, and all minus 4. More are spread evenly between
    layer 1 and the one of all minus 3 (DFlash, arXiv 2602.06036).
    """
    if count == EAGLE3:
        return [1, num_layers // 2 - 1, num_layers - 4]
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def chosen_layers(wanted: list[int] | None, count: int, num_layers: int) -> tuple[int, ...]:
    """Return the feature layers of a head: those asked for, or the default ones.

    Raises:
        ValueError: a layer does not exist, stands twice, or the target is too shallow for the default ones.
    """
    if wanted is None:
        found = default_layers(count, num_layers)
        if found[0] < 0 or sorted(set(found)) != found or found[-1] >= num_layers:
            raise ValueError(
                f"head.feature_layers: the default choice, {found}, falls together on a target of {num_layers} layers; "
                f"name them, from 0 to {num_layers - 1}, such as head.feature_layers={suggestion(num_layers)}"
            )
        return tuple(found)
    if not wanted or sorted(set(wanted)) != sorted(wanted) or min(wanted) < 0 or max(wanted) >= num_layers:
        raise ValueError(
            f"head.feature_layers is {wanted}: give different layers from 0 to {num_layers - 1}, the target has "
            f"{num_layers}"
        )
    return tuple(wanted)


def suggestion(num_layers: int) -> str:
    """Return layers for a shallow target, as they are written on the command line."""
    return f"[{','.join(map(str, sorted({0, num_layers // 2, num_layers - 1})))}]"


class Fusion(nn.Module):
    """fc of the layers' states one after the other; `normed` norms each by itself before (EAGLE-3.1)."""

    def __init__(self, width: int, layers: int, eps: float, *, normed: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(layers * width, width, bias=False)
        self.norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(layers if normed else 0))

    def forward(self, hidden: Float[Tensor, "B T L D"]) -> Float[Tensor, "B T D"]:
        """Return the fused states."""
        if self.norms:
            hidden = torch.stack([norm(hidden[..., i, :]) for i, norm in enumerate(self.norms)], -2)
        return self.fc(hidden.flatten(-2))
