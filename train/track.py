"""Where a run's numbers go: metrics.jsonl always, a progress bar on the terminal, wandb when asked."""

import json
import os
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Tracker:
    """Writes one JSON object a line, in full precision; active on the main process alone.

    A resumed run drops the lines after the step it resumes from, so that each step stands there once.
    """

    def __init__(
        self, out: Path, *, active: bool, steps: int, start: int, wandb_mode: str, config: dict[str, Any]
    ) -> None:
        self.active, self.path = active, out / "metrics.jsonl"
        self.wandb: Any = None
        if not active:
            return
        self._truncate(start)
        self.file = self.path.open("a")
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.progress.start()
        self.task = self.progress.add_task("train", total=steps, completed=start, numbers="")
        if wandb_mode != "off":
            import wandb

            mode: Literal["offline", "online"] = "offline" if wandb_mode == "offline" else "online"
            self.wandb = wandb.init(project="headstart", dir=str(out), mode=mode, config=config, name=out.name)

    def _truncate(self, start: int) -> None:
        if not self.path.exists():
            return
        lines = []
        for line in self.path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= start:
                    lines.append(line + "\n")
            except json.JSONDecodeError:
                continue  # the line that a killed run was writing
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(lines))
        os.replace(partial, self.path)

    def log(self, record: dict[str, Any]) -> None:
        """Write one record, which has at least `step`."""
        if not self.active:
            return
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])
        if "loss" in record:
            accuracy = " ".join(f"{a:.2f}" for a in record["accuracy"])
            numbers = f"loss {record['loss']:.4f}  accuracy {accuracy}  {record['tokens_per_second']:.0f} tok/s"
            self.progress.update(self.task, completed=record["step"], numbers=numbers)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.active:
            self.progress.console.print(text, highlight=False)

    def close(self) -> None:
        """Finish the file, the bar and the wandb run."""
        if self.active:
            self.file.close()
            self.progress.stop()
            if self.wandb is not None:
                self.wandb.finish()
