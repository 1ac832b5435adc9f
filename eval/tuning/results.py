"""The results of a tuning: the candidates and the verdict at every batch size, tune.json and the tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eval.measures.cost_model import Costs, Prediction, stops_paying
from eval.measures.losslessness import WITHHELD, differs
from eval.measures.metrics import Interval
from eval.measures.serving import CONFIG, config_of, is_served, ranges
from eval.report.render import rich_table
from eval.tuning.grid import CHAIN, TREE
from heads.common.files import write_whole
from heads.formats.hub import schedule_of
from inference.drafters.policy import TreeConfig

TUNED = "tune.json"
KINDS = {CHAIN: "a chain", TREE: "a tree"}
OFF = 0.2  # fraction of the measured speedup; a family whose prediction is further off is not chosen


@dataclass(frozen=True)
class Measured:
    """Measurements of a tree in the timed session; no speedup where it failed the losslessness check.

    `seconds` are those of a step, `plain` those of the baseline's, to see which part of a prediction is off: the
    predicted "draft" and "commit" together are the measured "draft", and "settle" is "other". In a batch they are a
    sequence's share.
    """

    tau: float | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speedup: float | None
    speedup_ci: Interval | None
    lossless: dict[str, int]
    seconds: dict[str, float]
    plain: float


@dataclass(frozen=True)
class Candidate:
    """A tree, its prediction, and its measurement where there is one."""

    family: str  # the kind of tree, or that it is the one the head has
    tree: TreeConfig
    predicted: Prediction
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
class AtBatch:
    """The results at one batch size."""

    batch: int
    costs: Costs
    candidates: list[Candidate]  # the most promising trees of each family, or of chains and of trees, best first
    best: Candidate | None  # None where the baseline is faster
    verdict: str  # the recommendation, in words

    def chain_tokens(self) -> int:
        """Return the tokens of the chain measured fastest, 0 where the baseline is: engines draft chains."""
        best = max((one for one in self.candidates if one.tree.kind == CHAIN), key=lambda one: one.gain, default=None)
        return 0 if best is None or best.gain <= 1 else best.tree.depth


@dataclass(frozen=True)
class Tuning:
    """All numbers of one tuning."""

    settings: dict[str, Any]  # those of the measurement
    accepted: list[list[float]]  # the share of the text's tokens by depth, then by rank, in the texts to choose from
    batches: list[AtBatch]

    @property
    def passed(self) -> bool:
        """Whether every tree that was timed is lossless."""
        timed = [one.measured for at in self.batches for one in at.candidates if one.measured is not None]
        return not any(differs(one.lossless) for one in timed)

    def stops(self) -> dict[str, dict[str, int | None]]:
        """Return from which batch size on a chain and a tree no longer pay, predicted and measured; None: they do."""
        stops: dict[str, dict[str, int | None]] = {}
        for kind in KINDS:
            predicted, measured = dict[int, float](), dict[int, float]()
            for at in self.batches:
                timed = [one for one in at.candidates if one.measured and (one.tree.kind == CHAIN) == (kind == CHAIN)]
                if timed:
                    predicted[at.batch] = max(one.predicted.speedup for one in timed)
                    measured[at.batch] = max(one.gain for one in timed)
            if measured:
                stops[kind] = {"predicted": stops_paying(predicted), "measured": stops_paying(measured)}
        return stops

    def write(self, out: Path) -> None:
        """Write tune.json, and the schedule of its chains as vLLM takes it, if it serves the head."""
        content = {"schema": 3, **asdict(self), "stops_paying": self.stops()}
        for record, at in zip(content["batches"], self.batches, strict=True):
            for written, one in zip(record["candidates"], at.candidates, strict=True):
                written["error"] = one.error
        write_whole(out / TUNED, (json.dumps(content, indent=2) + "\n").encode())
        (out / CONFIG).unlink(missing_ok=True)
        if is_served(self.settings["head"]):
            schedule = config_of(ranges({at.batch: at.chain_tokens() for at in self.batches}))
            write_whole(out / CONFIG, (json.dumps(schedule, indent=2) + "\n").encode())

    def show(self, console: Console) -> None:
        """Print the costs, the candidates and the verdicts."""
        console.print(cost_table(self.batches))
        for at in self.batches:
            console.print(candidate_table(at.batch, at.candidates))
        for at in self.batches:
            console.print(at.verdict, soft_wrap=True, markup=False)
        for kind, stops in self.stops().items() if len(self.batches) > 1 else ():
            sizes = ", ".join(f"{how} {'none' if size is None else size}" for how, size in stops.items())
            console.print(f"batch size from which on {KINDS[kind]} no longer pays: {sizes}", soft_wrap=True)


def is_tuned(head: Path) -> bool:
    """Say whether the tree of the head in a run's folder was tuned."""
    return (head.parent / TUNED).is_file() or schedule_of(head, {}) is not None


def mispredicted(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the measured trees that are further off their prediction than `OFF`."""
    return [one for one in candidates if one.error is not None and abs(one.error) > OFF]


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate with the greatest measured speedup, None if that is none; no mispredicted family's."""
    off = {one.family for one in mispredicted(candidates)}
    closest = max((one for one in candidates if one.family not in off), key=lambda one: one.gain, default=None)
    return closest if closest is not None and closest.gain > 1 else None


def conclude(batch: int, candidates: Sequence[Candidate], done: str) -> str:
    """Return the verdict at a batch size: the tree and what was done with it, or the baseline."""
    best, off = fastest(candidates), mispredicted(candidates)
    named = [f"{one.family} ({one.tree.label} {one.predicted.speedup:.2f} / {one.gain:.2f})" for one in off]
    among = " of those predicted well" if off else ""
    apart = f"predicted and measured more than {OFF:.0%} apart (tune again while nothing else runs)"
    tail = f"; not chosen, {apart}: {', '.join(named)}" if off else ""
    then = f"; {done}" if done else ""
    if best is not None:
        gain = f"{best.gain:.2f} times the baseline"
        return f"batch size {batch}: {best.tree.label} is fastest{among}, {gain}{then}{tail}"
    closest = max(candidates, key=lambda one: one.gain)
    gain = f"{closest.tree.label} at {closest.gain:.2f}" if closest.gain else "none is lossless"
    verdict = f"no tree{among} beats the baseline (best{' of all' if off else ''}: {gain})"
    return f"batch size {batch}: {verdict}; decode plainly{then}{tail}"


def cost_table(batches: Sequence[AtBatch]) -> Table:
    """Return the cost of a verification pass by drafted nodes at every batch size."""
    sizes = sorted(batches[0].costs.verify)
    costs = [(at.batch, [at.costs.plain, *map(at.costs.verify.get, sizes)]) for at in batches]
    body = [
        [str(batch), *("" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in row)] for batch, row in costs
    ]
    title = "milliseconds of a verification pass by drafted nodes, and of a plain step"
    return rich_table(title, ["sequences", "plain", *map(str, sizes)], body)


def candidate_table(batch: int, candidates: Sequence[Candidate]) -> Table:
    """Return the candidates at a batch size, a row each."""
    measured = next((one.measured for one in candidates if one.measured), None)
    rate = measured.plain_tokens_per_second if measured else None
    headers = "family, tree, predicted tau, tok/s, speedup, measured tau, tok/s, speedup, off by"
    body = []
    for one in candidates:
        expected, measured = one.predicted, one.measured
        cells = [f"{expected.tau:.2f}", f"{expected.tokens_per_second:.1f}", f"{expected.speedup:.2f}"]
        if measured is None:
            cells += ["", "", ""]
        else:
            cells += [f"{measured.tau or 0:.2f}", f"{measured.tokens_per_second or 0:.1f}"]
            cells += [f"{measured.speedup:.2f}" if measured.speedup else WITHHELD]
        cells.append("" if one.error is None else f"{100 * one.error:+.1f} %")
        body.append([one.family, one.tree.label, *cells])
    title = f"trees at batch size {batch}" + (f", plain {rate:.1f} tokens/s" if rate else "")
    return rich_table(title, headers.split(", "), body)
