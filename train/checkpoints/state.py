"""The state of a run that checkpoints hold: weights, optimiser state and running average, as named whole tensors.

Names are `weight/…`, `state/…/KEY` and `average/…`, with the head's own parameter names. A tensor is gathered whole
from its shards, so checkpoints depend neither on the strategy nor on the number of processes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from train.distributed.strategy import counts_on, held, master_state, put, put_master, whole, zero_stage
from train.optim import Average, trained_state


class TrainState:
    """The state of a head, its optimiser and the average of its weights, under any strategy."""

    def __init__(self, head: nn.Module, optimizer: Any, average: Average) -> None:
        self.head, self.optimizer, self.average = head, optimizer, average

    def names(self) -> list[str]:
        """Return the names of all tensors, in the same order on every process."""
        parameters = trained_state(self.head)
        names = [f"weight/{name}" for name in self.head.state_dict()]
        names += [f"state/{name}/{key}" for name, p in parameters.items() for key in sorted(self._of(p))]
        return names + [f"average/{name}" for name in self.average.weights]

    def read(self, name: str) -> Tensor:
        """Return a copy of one tensor on the CPU; a collective call with the same name."""
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        if kind == "weight":
            value = whole(p, held(p))
        elif kind == "average":
            value = whole(p, self.average.weights[rest])
        elif zero_stage(p) and key != "step":
            value = master_state(p, key)
        else:
            value = whole(p, self._of(p)[key])
        copy: Tensor = value.detach().to("cpu", copy=True).contiguous()
        return copy

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Load one tensor; a collective call with the same name and value.

        Raises:
            KeyError: the head or its optimiser has no such tensor.
            RuntimeError: it has another shape.
        """
        kind, rest, key = split(name)
        p = self.head.state_dict(keep_vars=True)[rest]
        shape = vars(p).get("ds_shape", p.shape)
        if value.ndim and value.shape != shape:
            raise RuntimeError(f"{name} is {tuple(value.shape)}, and its parameter {tuple(shape)}")
        if kind == "weight":
            put(p, held(p), value)
            if zero_stage(p) and p.requires_grad:
                put_master(p, value)
        elif kind == "average":
            put(p, self.average.weights[rest], value)
        elif not value.ndim:
            for state in self._states(p):
                state[key] = value.to(counts_on(self._optimizer(p), p), copy=True)
        elif zero_stage(p):
            put_master(p, value, key)
        else:
            state = self._of(p)
            state[key] = torch.empty_like(p)
            put(p, state[key], value)

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights to evaluate and to save, on the CPU: the average's if there is one."""
        averaged = self.average.weights
        kinds = {name: "average" if name in averaged else "weight" for name in self.head.state_dict()}
        return {name: self.read(f"{kind}/{name}") for name, kind in kinds.items()}

    def _of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimiser's state of one parameter, empty before its first step."""
        return self._states(parameter)[0]

    def _states(self, parameter: Tensor) -> list[dict[str, Any]]:
        """Return the optimiser's state dicts that hold one parameter: under ZeRO those of all flat partitions.

        They step together, so each of them has the count of steps.
        """
        optimizer = self._optimizer(parameter)
        return list(optimizer.state.values()) if zero_stage(parameter) else [optimizer.state[parameter]]

    def _optimizer(self, parameter: Tensor) -> Any:
        """Return the optimiser of one parameter."""
        plain: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # DeepSpeed wraps it
        for optimizer in getattr(plain, "optimizers", [plain]):
            if zero_stage(parameter) or any(
                parameter is p for group in optimizer.param_groups for p in group["params"]
            ):
                return optimizer
        raise KeyError("no optimiser has this parameter")


def split(name: str) -> tuple[str, str, str]:
    """Parse a tensor's name into its kind, the parameter, and the key of the optimiser's state, else empty."""
    kind, rest = name.split("/", 1)
    parameter, _, key = rest.rpartition("/") if kind == "state" else (rest, "", "")
    return kind, parameter, key
