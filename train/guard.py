"""Guarding against bad steps: a loss or a gradient norm that is not finite, or a loss far above the recent ones.

Every process checks the same numbers, summed over all of them, so all decide alike. A bad step leaves the weights, the
optimiser and the average as they were; its batch is saved, and the run continues or stops by `trainer.on_bad_step`.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from safetensors.torch import save as to_bytes

from data.batches import Batches
from data.features.store_files import write_whole
from train.config import TrainerConfig

BAD = "bad"
WINDOW = 50  # good steps whose median is the reference for a spike; with fewer no spike is detected


class Guard:
    """Detect bad steps and decide whether they stop the run.

    Its state lies in `progress`, which checkpoints keep: `recent` losses, the number of `skipped` steps, and the last
    of them `in_a_row`. So a resumed run decides as an uninterrupted one.
    """

    def __init__(self, config: TrainerConfig, progress: dict[str, Any]) -> None:
        self.config, self.progress = config, progress
        for key, value in {"recent": [], "skipped": 0, "in_a_row": 0}.items():
            progress.setdefault(key, value)

    def check(self, loss: float, norm: float) -> str | None:
        """Return the reason why a step of this loss and gradient norm is bad, None if it is good, and record it."""
        recent: list[float] = self.progress["recent"]
        usual, reason = statistics.median(recent) if len(recent) == WINDOW else math.inf, None
        if not math.isfinite(loss):
            reason = f"its loss is {loss}"
        elif not math.isfinite(norm):
            reason = f"the norm of its gradient is {norm}"
        elif self.config.spike is not None and loss > self.config.spike * usual:
            reason = f"its loss is {loss:.4g}, {loss / usual:.1f} times the median of the last {WINDOW}"
        if reason is None:
            self.progress |= {"recent": [*recent, loss][-WINDOW:], "in_a_row": 0}
        else:
            self.progress |= {key: self.progress[key] + 1 for key in ("skipped", "in_a_row")}
        return reason

    def stops(self) -> bool:
        """Whether the bad step just recorded stops the run."""
        return self.config.on_bad_step == "stop" or self.progress["in_a_row"] >= self.config.bad_steps

    def take_back(self) -> None:
        """Undo the record of the last bad step: a run that it stops is saved as it was before it."""
        self.progress |= {key: self.progress[key] - 1 for key in ("skipped", "in_a_row")}

    def remedy(self) -> str:
        """Return the remedy for a run that was stopped."""
        if self.config.on_bad_step == "stop":
            return "trainer.on_bad_step=skip resume=true goes on without it"
        return (
            f"{self.progress['in_a_row']} bad steps in a row, as many as trainer.bad_steps allows: fix the data, "
            "or start again with a lower trainer.lr"
        )


def keep_batch(folder: Path, batches: Batches, step: int, why: str) -> str:
    """Write the global batch of step `step`, counted from 0, into `folder`; return a message that says so, or why not.

    `step-N.safetensors` has the rows' numbers and their tokens, documents and masks; N counts from 1, as metrics.jsonl
    does. `step-N.json` has the seed, the world size and the reason.
    """
    row, path = batches.rows(step), folder / f"step-{step + 1}.safetensors"
    names = ("token", "document", "mask")
    tensors = {"row": row, **{name: field[row] for name, field in zip(names, batches.packed, strict=True)}}
    record = {"step": step + 1, "seed": batches.seed, "why": why, "world_size": batches.world}
    try:
        write_whole(path, to_bytes(tensors))
        write_whole(path.with_suffix(".json"), (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        return f"its batch could not be kept ({error})"
    return f"its batch is in {path}"
