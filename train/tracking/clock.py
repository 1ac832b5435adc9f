"""Breakdown of a step's time by part, without synchronising with the device.

The time between two events belongs to one part, so the parts add up to the whole. On an accelerator these are CUDA
events in its stream, read once the device has passed them.
"""

import time
from typing import Any

import torch

PARTS = ("data", "target", "head", "optimiser", "wait", "other")


class Clock:
    """Accumulate seconds by part since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[str | None, Any]] = []  # each with the part before it, None for none

    def begin(self) -> None:
        """Start measuring: the time before belongs to no part."""
        self._record(None)

    def lap(self, name: str) -> None:
        """Assign the time since the last event to the part `name`."""
        assert name in PARTS
        self._record(name)

    def read(self, stall: float) -> dict[str, float]:
        """Return the seconds of every part since the last call; `stall` of the target's count as the data's.

        On an accelerator only events that it has passed count; the others come with the next call.
        """
        passed = 0
        cuda = self.device.type == "cuda"
        while passed + 1 < len(self._events) and (not cuda or self._events[passed + 1][1].query()):
            (_, first), (name, last) = self._events[passed : passed + 2]
            if name is not None:
                self.spent[name] += first.elapsed_time(last) / 1e3 if cuda else last - first
            passed += 1
        del self._events[:passed]
        moved = min(stall, self.spent["target"])
        seconds = self.spent | {"data": self.spent["data"] + moved, "target": self.spent["target"] - moved}
        self.spent = dict.fromkeys(PARTS, 0.0)
        return seconds

    def _record(self, name: str | None) -> None:
        if self.device.type != "cuda":
            self._events.append((name, time.perf_counter()))
            return
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events.append((name, event))
