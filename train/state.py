"""What a run must keep to go on: weights, optimiser state and running average, as named whole tensors.

Names are `weight/…`, `state/…/KEY` and `average/…`, with the head's own parameter names. A tensor is whole whatever
strategy cuts it up between processes, so what is kept does not depend on the strategy nor on the number of processes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from train.optim import Average, trained_state


class TrainState:
    """The state of a head that every process holds whole (one process, or plain data parallelism)."""

    def __init__(self, head: nn.Module, optimizer: Any, average: Average) -> None:
        self.head, self.optimizer, self.average = head, optimizer, average

    def names(self) -> list[str]:
        """Return the names of all tensors, in the same order on every process."""
        parameters = trained_state(self.head)
        found = [f"weight/{name}" for name in self.head.state_dict()]
        found += [f"state/{name}/{key}" for name, p in parameters.items() for key in sorted(self._of(p))]
        return found + [f"average/{name}" for name in self.average.weights]

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU; every process calls this, for the same name."""
        kind, rest = name.split("/", 1)
        if kind == "weight":
            found = self.head.state_dict()[rest]
        elif kind == "average":
            found = self.average.weights[rest]
        else:
            parameter, key = rest.rsplit("/", 1)
            found = self._of(trained_state(self.head)[parameter])[key]
        copy: Tensor = found.detach().to("cpu", copy=True).contiguous()
        return copy

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Take one tensor; every process calls this, for the same name.

        Raises:
            KeyError: the head or its optimiser has no such tensor.
            RuntimeError: it has another shape.
        """
        kind, rest = name.split("/", 1)
        if kind == "weight":
            self.head.state_dict()[rest].copy_(value)
        elif kind == "average":
            self.average.weights[rest].copy_(value)
        else:
            parameter, key = rest.rsplit("/", 1)
            p = trained_state(self.head)[parameter]
            if value.ndim and value.shape != p.shape:
                raise RuntimeError(f"{name} is {tuple(value.shape)}, and its parameter {tuple(p.shape)}")
            self._of(p)[key] = value.to(p.device) if value.ndim else value.clone()  # step counts stay on the CPU

    def _of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of one parameter, empty before its first step."""
        plain: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        for part in getattr(plain, "parts", [plain]):
            if any(parameter is each for group in part.param_groups for each in group["params"]):
                state: dict[str, Any] = part.state[parameter]
                return state
        raise KeyError("no optimiser has this parameter")
