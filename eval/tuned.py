"""What a tuning found: the candidates, the verdict, tune.json and the tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.metrics import Interval
from inference.policy import TreeConfig
from inference.tuner import Costs, Prediction

TUNED = "tune.json"


@dataclass(frozen=True)
class Measured:
    """What a tree gave in the timed session; no speedup where it failed the gate.

    `seconds` are those of a step, `plain` those of plain decoding's, to see which part of a prediction is off: the
    predicted "draft" and "commit" together are the measured "draft", and "settle" is "other".
    """

    tau: float | None
    speedup: float | None
    speedup_ci: Interval | None
    lossless: dict[str, int]
    seconds: dict[str, float]
    plain: float


@dataclass(frozen=True)
class Candidate:
    """A tree, what is expected of it, and what came of it where it was measured.

    Attributes:
        family: the kind of tree, or that it is the one the head has.
        at_contexts: the predicted speedup by tokens of context, at the same acceptance.
    """

    family: str
    tree: TreeConfig
    predicted: Prediction
    at_contexts: dict[int, float]
    measured: Measured | None = None

    @property
    def gain(self) -> float:
        """The measured speedup, 0 where there is none."""
        return 0.0 if self.measured is None else self.measured.speedup or 0.0

    @property
    def error(self) -> float | None:
        """How far the predicted speedup is from the measured one, as a share of that."""
        return self.predicted.speedup / self.gain - 1 if self.gain else None


@dataclass(frozen=True)
class Tuning:
    """All numbers of one tuning.

    Attributes:
        settings: what they were measured under.
        accepted: the share of the text's tokens by depth, then by rank.
        costs: of the parts of a step, at one batch size.
        contexts: the seconds of a verification pass by tokens of context, then by drafted nodes.
        candidates: the most promising trees of each family, best first.
        best: None where plain decoding is faster.
        verdict: what to do, in words.
        passed: whether every tree that was timed is lossless.
    """

    settings: dict[str, Any]
    accepted: list[list[float]]
    costs: Costs
    contexts: dict[int, dict[int, float]]
    candidates: list[Candidate]
    best: Candidate | None
    verdict: str
    passed: bool

    def write(self, out: Path) -> None:
        """Write tune.json."""
        content = {"schema": 1, **asdict(self)}
        for told, one in zip(content["candidates"], self.candidates, strict=True):
            told["error"] = one.error
        out.mkdir(parents=True, exist_ok=True)
        (out / TUNED).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def show(self, console: Console) -> None:
        """Print the costs, the candidates and the verdict."""
        console.print(cost_table(self.costs, self.contexts))
        console.print(candidate_table(self.candidates))
        console.print(self.verdict, soft_wrap=True, markup=False)


def conclude(batch: int, found: Candidate | None, closest: Candidate | None, done: str) -> str:
    """Return the verdict at a batch size: the tree and what was done with it, or plain decoding."""
    if found is None:
        gain = f"{closest.tree.label} at {closest.gain:.2f}" if closest and closest.gain else "none is lossless"
        return f"batch size {batch}: no tree beats plain decoding (best: {gain}); decode plainly, nothing is written"
    return f"batch size {batch}: {found.tree.label} is fastest, {found.gain:.2f} times plain decoding; {done}"


def cost_table(costs: Costs, contexts: Mapping[int, Mapping[int, float]]) -> Table:
    """Return the cost of a verification pass by drafted nodes, at the workload's own contexts and at others."""
    table = Table(title=f"milliseconds of a verification pass (a plain step: {1e3 * costs.plain:.2f})")
    shown = [size for size in sorted(costs.verify) if all(size in each for each in contexts.values())]
    table.add_column("context \\ nodes")
    for size in shown:
        table.add_column(str(size), justify="right")
    for name, row in [("workload", costs.verify), *((str(context), each) for context, each in contexts.items())]:
        table.add_row(name, *(f"{1e3 * row[size]:.2f}" for size in shown))
    return table


def candidate_table(candidates: Sequence[Candidate]) -> Table:
    """Return the candidates, a row each."""
    table = Table(title="trees")
    headers = (
        "family",
        "tree",
        "predicted tau",
        "speedup",
        "measured tau",
        "speedup",
        "off by",
        "predicted by context",
    )
    for name in headers:
        table.add_column(name, justify="left" if name in ("family", "tree") else "right")
    for one in candidates:
        elsewhere = ", ".join(f"{context}: {gain:.2f}" for context, gain in one.at_contexts.items())
        found = one.measured
        tau = "" if found is None or found.tau is None else f"{found.tau:.2f}"
        gain = "" if found is None else f"{found.speedup:.2f}" if found.speedup else "withheld"
        error = "" if one.error is None else f"{100 * one.error:+.1f} %"
        predicted = (f"{one.predicted.tau:.2f}", f"{one.predicted.speedup:.2f}")
        table.add_row(one.family, one.tree.label, *predicted, tau, gain, error, elsewhere)
    return table
