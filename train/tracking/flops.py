"""Floating-point operations: a counter by torch's formulas for matrix products and attention."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Count operations while entered. torch's FlopCounterMode cannot follow a gradient that a forward pass takes."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add its count."""
        out = func(*args, **(kwargs or {}))
        self.add(func, args, kwargs, out)
        return out

    def add(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Add the count of an operation that has run."""
        cost = flop_registry.get(func.overloadpacket)
        if cost is not None:
            shapes = [x for x in args if not isinstance(x, torch.dtype)]  # addmm's formula takes a dtype for a shape
            self.total += cost(*shapes, **(kwargs or {}), out_val=out)
