"""Seconds by what they were spent on, without waiting for a device.

The time between two marks belongs to one part, so the parts add up to the whole. On an accelerator the marks are CUDA
events in its stream, read once the device has passed them.
"""

import time
from collections import defaultdict
from typing import Any

import torch


class PhaseTimer:
    """The laps since the last `seconds`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.events = device, device.type == "cuda"
        self.marks: list[tuple[str | None, Any]] = []

    def mark(self, ended: str | None) -> None:
        """End a lap, which was spent on what has `ended`; None: on nothing that counts."""
        if not self.events:
            self.marks.append((ended, time.perf_counter()))
            return
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append((ended, event))

    def seconds(self) -> dict[str, float]:
        """Return the sums of the laps that have ended, of a device those that it has passed; others come next time."""
        sums: defaultdict[str, float] = defaultdict(float)
        while len(self.marks) > 1 and (not self.events or self.marks[1][1].query()):
            (_, first), (ended, last) = self.marks[:2]
            if ended is not None:
                sums[ended] += first.elapsed_time(last) / 1e3 if self.events else last - first
            del self.marks[0]
        return sums
