"""Linear layers on a CPU, for the few rows of a decoding step.

torch gives oneDNN a bfloat16 weight in rows, and oneDNN copies it into its own blocks in every call; float32 goes to
MKL. A weight that is kept in oneDNN's blocks makes a product of 1 to 16 rows up to 2.7 times as fast
(benchmarks/packed.py), with the same bits in bfloat16.
"""

from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn

KINDS = torch.float32, torch.bfloat16
MAX_ROWS = 64  # a larger product hides the copy
MIN_SIZE = 2**17  # numbers of a weight; of a smaller one the call costs more than the product
PACKED: WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = WeakKeyDictionary()


def prepack_weights(module: nn.Module) -> None:
    """Let a module's linear layers keep packed copies of their weights from the first step on, if memory allows."""
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear and is_packable(layer.weight)]
    if 2 * sum(layer.weight.nbytes for layer in linears) < psutil.virtual_memory().available:
        for layer in linears:
            vars(layer).setdefault("forward", MethodType(forward, layer))


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN has a fast product for a weight of this kind."""
    if weight.device.type != "cpu" or weight.dtype not in KINDS or weight.numel() < MIN_SIZE:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return a linear layer's output, of few rows by the packed weight."""
    few = x.numel() <= MAX_ROWS * x.shape[-1]
    if not few or torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_packable(layer.weight):
        return nn.Linear.forward(layer, x)
    weight = layer.weight
    state = weight.data_ptr(), 0 if weight.is_inference() else weight._version  # a weight may be written in place
    entry = PACKED.get(layer)
    if entry is None or entry[0] != state:
        mkldnn: Any = torch.ops.mkldnn
        entry = PACKED[layer] = state, mkldnn._reorder_linear_weight(weight.detach(), MAX_ROWS)
    return torch.ops.mkldnn._linear_pointwise(x, entry[1], layer.bias, "none", [], "")
