"""An undisturbed run, and what must be the same after a disturbed one has gone on."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.train import driver, jobs

STEPS, BATCHES = 16, 4  # of a run; micro-batches of a step


class Toy:
    """One undisturbed run, and runs beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.overrides = [*jobs.make(folder), f"trainer.steps={STEPS}", "eval.prompts=0"]
        driver.start(folder, [*self.overrides, f"out={folder / 'whole'}"])[0].finish()
        self.losses = jobs.losses(folder / "whole")

    def new(self) -> Path:
        """Return a fresh folder for a run and its hooks."""
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir()
        return place

    def start(self, place: Path, *words: str, hooks: tuple[str, ...] = (), world: int = 1) -> list[driver.Job]:
        """Start a run in a folder."""
        return driver.start(place, [*self.overrides, f"out={place / 'out'}", *words], *hooks, world=world)

    def same(self, place: Path) -> None:
        """Check that a run has ended as the undisturbed one, bit for bit."""
        out, whole = place / "out", self.folder / "whole"
        assert steps(out) == list(range(1, STEPS + 1)), "a step is missing, or stands there twice"
        assert jobs.losses(out) == self.losses
        assert taus(out) == taus(whole)
        ours, theirs = (load_file(run / "head" / "model.safetensors") for run in (out, whole))
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in ours)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out: Path) -> list[int]:
    return [record["step"] for record in records(out) if "loss" in record]


def taus(out: Path) -> dict[int, float]:
    return {record["step"]: record["tau"] for record in records(out) if "tau" in record}
