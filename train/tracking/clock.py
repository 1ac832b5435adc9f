"""Breakdown of a training step's time by part, without synchronising with the device."""

import torch

from inference.laps import Laps

PARTS = ("data", "rollout", "target", "head", "optimiser", "wait", "other")


class Clock:
    """Accumulate seconds by part since the last `read`."""

    def __init__(self, device: torch.device) -> None:
        self.laps = Laps(device)

    def begin(self) -> None:
        """Start measuring: the time before belongs to no part."""
        self.laps.mark(None)

    def lap(self, name: str) -> None:
        """Assign the time since the last event to the part `name`."""
        assert name in PARTS
        self.laps.mark(name)

    def read(self, stall: float) -> dict[str, float]:
        """Return the seconds of every part since the last call; `stall` of the target's count as the data's.

        On an accelerator only events that it has passed count; the others come with the next call.
        """
        spent = dict.fromkeys(PARTS, 0.0) | self.laps.seconds()
        moved = min(stall, spent["target"])
        return spent | {"data": spent["data"] + moved, "target": spent["target"] - moved}
