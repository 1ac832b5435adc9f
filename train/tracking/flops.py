"""Floating-point operations: a counter by torch's formulas for matrix products and attention, and devices' peaks."""

import re
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Dense bf16, in 10^12 a second, by a word of the name that torch gives the device; NVIDIA's data sheets.
PEAKS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "A10": 125}


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


def peak_flops(device: torch.device, given: float | None) -> float | None:
    """Return a device's peak in floating-point operations a second, None where it is not known.

    It is the `given` one in 10^12 a second, else that of the device's name.
    """
    if given is not None:
        return given * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for word, peak in PEAKS.items() if word in re.split(r"[ -]", name)]
    return peaks[0] * 1e12 if peaks else None
