"""Where a step's time goes, by part, without holding the device up.

Time is cut at marks, and what lies between two of them belongs to one part, so the parts add up to the whole. On an
accelerator the marks are events that it passes when it gets to them; they are read later, when it has passed them.
"""

import time
from typing import Any

import torch

PARTS = ("data", "target", "head", "optimiser", "wait", "other")


class Clock:
    """Seconds by part since they were last read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._marks: list[tuple[str | None, Any]] = []  # the part that ends at a mark, None where nothing does

    def begin(self) -> None:
        """Start anew: what lies before belongs to no part."""
        self._mark(None)

    def lap(self, part: str) -> None:
        """Say that the time since the last mark was that part's."""
        assert part in PARTS
        self._mark(part)

    def read(self, stall: float) -> dict[str, float]:
        """Return the seconds of every part since the last call; `stall` of the target's are the data's.

        On an accelerator those of marks that it has passed; the others, of the update that it is still at, come with
        the next call.
        """
        passed = 0
        while passed + 1 < len(self._marks) and self._done(self._marks[passed + 1][1]):
            (_, first), (part, last) = self._marks[passed : passed + 2]
            if part is not None:
                self.spent[part] += self._between(first, last)
            passed += 1
        del self._marks[:passed]
        moved = min(stall, self.spent["target"])
        found = self.spent | {"data": self.spent["data"] + moved, "target": self.spent["target"] - moved}
        self.spent = dict.fromkeys(PARTS, 0.0)
        return found

    def _mark(self, part: str | None) -> None:
        if self.device.type != "cuda":
            self._marks.append((part, time.perf_counter()))
            return
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append((part, event))

    def _done(self, mark: Any) -> bool:
        return self.device.type != "cuda" or bool(mark.query())

    def _between(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) / 1e3 if self.device.type == "cuda" else last - first
