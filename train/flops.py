"""Counting the floating-point operations of what runs, by torch's own formulas for matrix products and attention."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Counts while it is entered. torch's FlopCounterMode cannot follow a gradient that a forward pass takes."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and add what it costs."""
        out = func(*args, **(kwargs or {}))
        cost = flop_registry.get(func.overloadpacket)
        if cost is not None:
            self.total += cost(*args, **(kwargs or {}), out_val=out)
        return out
