"""Fusion of the hidden states of several target layers into one."""

import torch
from torch import nn

from heads.base import Layers
from heads.modules.layers import RMSNorm
from heads.shapes import LayerRows, Rows

EAGLE3_LAYERS, DFLASH_LAYERS = 3, 5  # number of feature layers of EAGLE-3 and DFlash


def default_layers(count: int, num_layers: int) -> list[int]:
    """Return a head's default feature layers, `count` layers spread over the target's depth.

    Of L layers: EAGLE-3's three, 1, L // 2 - 1 and L - 4; more, evenly from 1 to L - 3 (DFlash, arXiv 2602.06036).
    """
    if count == EAGLE3_LAYERS:
        return [1, num_layers // 2 - 1, num_layers - 4]
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def chosen_layers(named: list[int] | None, count: int, num_layers: int) -> Layers:
    """Return a head's feature layers: the `named` ones, or `count` default ones; refuse unknown and repeated layers.

    If the target is too shallow, the default layers are spaced from its first layer to the last but one, or to the last
    if the target has only that: engines read a layer's output as the next layer's input, which the last lacks.
    """
    if named is None:
        layers = default_layers(count, num_layers)
        if layers[0] < 0 or sorted(set(layers)) != layers or layers[-1] >= num_layers:
            last = num_layers - (2 if num_layers > count else 1)
            layers = sorted({i * last // (count - 1) for i in range(count)})
        return tuple(layers)
    if not named or sorted(set(named)) != sorted(named) or min(named) < 0 or max(named) >= num_layers:
        raise ValueError(
            f"head.feature_layers is {named}: give different layers from 0 to {num_layers - 1}, the target has "
            f"{num_layers}"
        )
    return tuple(named)


class Fusion(nn.Module):
    """Fusion by a linear layer (fc) over the concatenated states.

    `normed` norms each layer's states first (EAGLE-3.1), `joint` the concatenation (speculators' norm_before_fc).
    """

    def __init__(self, width: int, layers: int, eps: float, *, normed: bool, joint: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(layers * width, width, bias=False)
        self.norms = nn.ModuleList(RMSNorm(width, eps) for _ in range(layers if normed else 0))
        self.joint_norm = RMSNorm(layers * width, eps) if joint else None

    def forward(self, hidden: LayerRows) -> Rows:
        """Return the fused states."""
        if self.norms:
            hidden = torch.stack([norm(hidden[..., i, :]) for i, norm in enumerate(self.norms)], -2)
        joined = hidden.flatten(-2)
        return self.fc(joined if self.joint_norm is None else self.joint_norm(joined))
