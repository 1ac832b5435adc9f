"""Faults planted in what a pass over a tree is told: its mask, its positions, its window; a probe must refuse each."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from inference.target.attention import SLIDING
from inference.target.model import TargetModel
from inference.verification import tree
from inference.verification.tree import DraftTree, LookAhead

Fault = Callable[[DraftTree, int, Tensor, Tensor], tuple[Tensor, Tensor]]
LAYOUT, ATTENTION_MASK = tree.layout, TargetModel.attention_mask


def _without(seen: Tensor, column: int) -> Tensor:
    return seen.index_fill(1, torch.tensor([column]), False)


def _missing_parent(drafted: DraftTree, prefix: int, position: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    seen = seen.clone()
    seen[torch.arange(1, len(seen)), prefix + drafted.parent[1:]] = False
    return position, seen


IN_LAYOUT: dict[str, Fault] = {
    "prefix off by one": lambda _, prefix, position, seen: (position, _without(seen, prefix - 1)),
    "rows off by one": lambda _, _prefix, position, seen: (position, torch.cat([seen[:1], seen[:-1]])),
    "missing root": lambda _, prefix, position, seen: (position, torch.cat([seen[:1], _without(seen[1:], prefix)])),
    "missing parent": _missing_parent,
    "siblings seen": lambda drafted, prefix, position, seen: (
        position,
        torch.cat([seen[:, :prefix], seen[:, prefix:] | (drafted.parent[:, None] == drafted.parent).tril()], 1),
    ),
    "positions off by one": lambda _, _prefix, position, seen: (torch.cat([position[:1], position[1:] + 1]), seen),
    "positions in order": lambda _, prefix, position, seen: (prefix + torch.arange(len(position)), seen),
}
WINDOWS = {"window ignored": 2**20, "window off by one": 1}  # tokens by which it is too wide


def faults_of(target: TargetModel) -> list[str]:
    """Return the faults that change a pass of a target: those of a window where it has one."""
    config: Any = target.config
    kinds = getattr(config, "layer_types", None) or [SLIDING]
    windowed = getattr(config, "sliding_window", None) and SLIDING in kinds
    return [*IN_LAYOUT, *(WINDOWS if windowed else ())]


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant a fault in all passes that verify."""

    def layout(drafted: DraftTree, prefix: int, look_ahead: LookAhead | None = None) -> tuple[Tensor, Tensor]:
        return IN_LAYOUT[fault](drafted, prefix, *LAYOUT(drafted, prefix, look_ahead))

    def attention_mask(self: TargetModel, *args: Any) -> Any:
        config: Any = self.config
        with mock.patch.object(config, "sliding_window", config.sliding_window + WINDOWS[fault]):
            return ATTENTION_MASK(self, *args)

    where: Any = (tree, "layout", layout) if fault in IN_LAYOUT else (TargetModel, "attention_mask", attention_mask)
    with mock.patch.object(*where):
        yield
