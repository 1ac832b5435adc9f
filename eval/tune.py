"""Find the best tree for a head on this device and workload: predict it from costs and acceptance, measure, write it.

Each kind of tree is a family. All trees are replayed on the target's recorded text and priced with costs measured in
the engine; the most promising are priced again from more samples. The best tree of each family, the predicted best and
the head's present tree are timed against the baseline. At further batch sizes the best chain and the best tree are
timed, and the winners make a schedule.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from data.text.prompts import Prompt
from eval.config import TuneConfig
from eval.inputs.workloads import Text, write
from eval.live.interleaved import PLAIN, Setup, decoded_once, measure, rows
from eval.measures.cost_model import Costs, Prediction, cycled, rising
from eval.measures.losslessness import WITHHELD, differs, gate, labelled
from eval.measures.machine import device_facts, provenance
from eval.measures.metrics import Interval
from eval.measures.results import Measurement
from eval.measures.serving import CONFIG, config_of, is_served, ranges
from eval.report.render import rich_table
from eval.tuning import costs as costing
from eval.tuning.grid import AGAIN, CHAIN, FINALISTS, SIZES, Tried, distinct, halves, simulate, sizes_for, worth_timing
from heads.common.files import atomic_write
from heads.common.progress import progress
from heads.formats.hub import kind_of, resolve_head, schedule_of
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config, save_tree
from inference.batch import Batch
from inference.drafters.head import HeadDrafter, load_for, saved_tree
from inference.drafters.plain import Baseline
from inference.drafters.policy import Schedule, TreeConfig, scheduled
from inference.protocol import Drafter
from inference.target.target import Target

TUNED = "tune.json"


@dataclass(frozen=True)
class Measured:
    """A tree's measurements in the timed session; no speedup if it failed the losslessness check."""

    tau: float | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speedup: float | None
    speedup_ci: Interval | None
    lossless: dict[str, int]


@dataclass(frozen=True)
class Candidate:
    """A candidate tree, its prediction, and its measurement if it was timed."""

    family: str  # the tree's kind, or OWN for the head's present tree
    tree: TreeConfig
    predicted: Prediction
    measured: Measured | None = None

    @property
    def gain(self) -> float:
        """The measured speedup, 0 without one."""
        return 0.0 if self.measured is None else self.measured.speedup or 0.0

    @property
    def error(self) -> float | None:
        """The relative error of the predicted speedup."""
        return self.predicted.speedup / self.gain - 1 if self.gain else None


@dataclass(frozen=True)
class AtBatch:
    """The results at one batch size."""

    batch: int
    costs: Costs
    candidates: list[Candidate]  # the most promising trees of each family, or chains and trees, best first
    best: Candidate | None  # None if the baseline is faster
    verdict: str  # the recommendation, in words

    def chain_tokens(self) -> int:
        """Return the tokens of the fastest measured chain, 0 if the baseline is faster: engines draft chains."""
        best = max((one for one in self.candidates if one.tree.kind == CHAIN), key=lambda one: one.gain, default=None)
        return 0 if best is None or best.gain <= 1 else best.tree.depth


@dataclass(frozen=True)
class Tuning:
    """The results of a tuning."""

    settings: dict[str, Any]  # those of the measurement
    accepted: list[list[float]]  # acceptance by depth and rank in the texts to choose by
    batches: list[AtBatch]

    @property
    def passed(self) -> bool:
        """Whether every timed tree is lossless."""
        timed = [one.measured for at in self.batches for one in at.candidates if one.measured is not None]
        return not any(differs(one.lossless) for one in timed)

    def write(self, out: Path) -> None:
        """Write tune.json, and vLLM's schedule of chains if it serves the head."""
        content = {"schema": 3, **asdict(self)}
        for record, at in zip(content["batches"], self.batches, strict=True):
            for written, one in zip(record["candidates"], at.candidates, strict=True):
                written["error"] = one.error
        atomic_write(out / TUNED, (json.dumps(content, indent=2) + "\n").encode())
        (out / CONFIG).unlink(missing_ok=True)
        if is_served(self.settings["head"]):
            schedule = config_of(ranges({at.batch: at.chain_tokens() for at in self.batches}))
            atomic_write(out / CONFIG, (json.dumps(schedule, indent=2) + "\n").encode())

    def show(self, console: Console) -> None:
        """Print the candidates and the verdicts."""
        for at in self.batches:
            console.print(candidate_table(at.batch, at.candidates))
        for at in self.batches:
            console.print(at.verdict, soft_wrap=True, markup=False)


def is_tuned(head: Path) -> bool:
    """Return whether the tree of a run's head was tuned."""
    return (head.parent / TUNED).is_file() or schedule_of(head, {}) is not None


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate with the greatest measured speedup, None if the baseline is faster."""
    best = max(candidates, key=lambda one: one.gain)
    return best if best.gain > 1 else None


def conclude(batch: int, candidates: Sequence[Candidate], done: str) -> str:
    """Return the verdict at a batch size, in words: the fastest tree, or the baseline."""
    best = max(candidates, key=lambda one: one.gain)
    then = f"; {done}" if done else ""
    if best.gain > 1:
        return f"batch size {batch}: {best.tree.label} is fastest, {best.gain:.2f} times the baseline{then}"
    gain = f"{best.tree.label} at {best.gain:.2f}" if best.gain else "none is lossless"
    return f"batch size {batch}: no tree beats the baseline (best: {gain}); decode plainly{then}"


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


Group = Callable[[Tried], str]
T = TypeVar("T")


def tune(config: TuneConfig, target: Target, prompts: Sequence[Prompt]) -> Tuning:
    """Find the best tree for the head of a run at every batch size.

    The tree for the smallest size is written into the head's config if it beats the baseline; with several sizes the
    schedule is written too. Half of the prompts choose the tree; the other half predicts and measures its speed.

    Raises:
        ValueError: no head, one of another target, no answer longer than a token, or a batch that the target cannot
            verify.
    """
    grid = config.tuner.within(target.context)
    config = replace(config, tuner=grid)
    settings, sizes, (run,) = config.settings(0.0), sorted(set(config.batch_sizes())), config.runs()
    # Fails now, not after minutes, if the target takes no batch.
    Batch(target, Baseline(target.device), sizes[-1])
    folder = resolve_head(run)
    if is_published(folder):
        raise ValueError(
            f"{folder}: tune=true writes the tree into the head, and this one is of another project's format"
        )
    head = load_for(folder, target)
    drafter = HeadDrafter(head, saved_tree(folder, config.tree), "head")
    answered = [
        (prompt, text)
        for prompt in progress(prompts, "writing the texts")
        for text in write(target, [prompt.token], settings)
    ]
    if not answered:
        raise ValueError("the target answers every prompt with one token, so nothing is drafted: set another workload")
    texts = [text for _, text in answered]
    trees, table = simulate(grid, target, drafter, texts)
    bench = Bench(config, target, drafter, texts, halves([prompt for prompt, _ in answered])[1])
    costs: dict[int, Costs] = {}
    results: list[AtBatch] = []
    for batch in sorted({1, *sizes}):
        trees = worth_timing(trees, costs)
        costs[batch] = bench.costs(trees, grid.samples, batch)
        if batch in sizes:
            group: Group = (lambda one: one.kind) if results else (lambda one: one.family)
            finalists = [one for members in ranked(trees, costs, batch, group) for one in members[:FINALISTS]]
            costs[batch] = bench.costs(finalists, AGAIN * grid.samples, batch, costs[batch])
            candidates = bench.measured(ranked(finalists, costs, batch, group), costs, batch)
            results.append(AtBatch(batch, costs[batch], candidates, fastest(candidates), ""))
    return Tuning(settings_of(config, target, texts), table.tolist(), concluded(results, run, folder))


def ranked(trees: Sequence[Tried], costs: Mapping[int, Costs], batch: int, group: Group) -> list[list[Tried]]:
    """Return the trees by group, sorted by predicted speedup on the texts to choose by."""
    gain = {id(one): one.promised(costs, batch).speedup for one in trees}
    groups: dict[str, list[Tried]] = {}
    for one in sorted(trees, key=lambda one: gain[id(one)], reverse=True):
        groups.setdefault(group(one), []).append(one)
    return list(groups.values())


@dataclass(frozen=True)
class Bench:
    """The setup of measurements: configuration, target, head, texts, and the held-out prompts."""

    config: TuneConfig
    target: Target
    head: HeadDrafter
    texts: list[Text]
    held: list[Prompt]

    def costs(self, trees: Sequence[Tried], samples: int, batch: int, first: Costs | None = None) -> Costs:
        """Measure the trees' costs at a batch size; those measured `first` fill the gaps."""
        settings, sizes = self.config.settings(0.0), sizes_for(trees, [*SIZES, *self.config.tuner.nodes])
        costs = costing.measure(self.target, self.head, self.texts, distinct(trees), sizes, samples, settings, batch)
        return costs if first is None else merged(first, costs)

    def measured(self, groups: Sequence[Sequence[Tried]], costs: Mapping[int, Costs], batch: int) -> list[Candidate]:
        """Return the candidates; the first of each group and the predicted best are timed."""
        priced = [[Candidate(one.family, one.tree, one.predicted(costs, batch)) for one in group] for group in groups]
        every = [one for members in priced for one in members]
        best = max(every, key=lambda one: one.predicted.speedup)
        promising = [one for one in every if one is best or any(one is members[0] for members in priced)]
        timed = {id(one): result for one, result in zip(promising, self.timed(promising, batch), strict=True)}
        return [timed.get(id(one), one) for one in every]

    def timed(self, candidates: Sequence[Candidate], batch: int) -> list[Candidate]:
        """Return the candidates with their timings in one interleaved session.

        An earlier untimed round compares their tokens with the baseline's.
        """
        drafters: dict[str, Drafter] = {
            str(i): HeadDrafter(self.head.head, one.tree, str(i)) for i, one in enumerate(candidates)
        }
        settings = self.config.settings(0.0)
        setup = Setup(self.target, drafters, cycled(self.held, batch), settings)
        once = decoded_once(setup._replace(settings=replace(settings, logit_gaps=True)), batch)
        ids, dtype = [prompt.id for prompt in setup.prompts], self.target.dtype
        gates = {labelled(name, batch): gate(once[PLAIN], once[name], ids, dtype) for name in drafters}
        # All have run once already: no warm-up.
        runs = measure(setup, self.config.repeats, (), hf=False, batch_size=batch)
        plain, *measured = rows(runs, drafters, gates, Measurement("", 0.0, batch, 0, settings.seed))
        return [
            replace(
                one,
                measured=Measured(
                    tau=row.tau,
                    tokens_per_second=row.tokens_per_second,
                    plain_tokens_per_second=plain.tokens_per_second,
                    speedup=row.speedup,
                    speedup_ci=row.speedup_ci,
                    lossless=row.lossless,
                ),
            )
            for one, row in zip(candidates, measured, strict=True)
        ]


def merged(first: Costs, again: Costs) -> Costs:
    """Return the later costs; costs that were measured only first are scaled to the machine's later speed."""
    faster = again.plain / first.plain

    def both(old: Mapping[T, float], new: Mapping[T, float]) -> dict[T, float]:
        return {**{key: faster * seconds for key, seconds in old.items()}, **new}

    return Costs(
        batch=first.batch,
        plain=again.plain,
        verify=rising(both(first.verify, again.verify)),
        settle=(both(first.settle[0], again.settle[0]), both(first.settle[1], again.settle[1])),
        draft=both(first.draft, again.draft),
        commit=both(first.commit, again.commit),
    )


def concluded(results: Sequence[AtBatch], run: str, folder: Path) -> list[AtBatch]:
    """Write the best tree into the head's config; return the results with their verdicts."""
    best = [(at.batch, None if at.best is None else at.best.tree) for at in results]
    schedule, tree = scheduled(best) if len(best) > 1 else None, best[0][1]
    done = "nothing is written" if tree is None and schedule is None else keep(tree, schedule, run, folder)
    first, *others = results
    verdicts = [conclude(first.batch, first.candidates, done)]
    verdicts += [conclude(at.batch, at.candidates, "") for at in others]
    return [replace(at, verdict=verdict) for at, verdict in zip(results, verdicts, strict=True)]


def keep(tree: TreeConfig | None, schedule: Schedule | None, run: str, folder: Path) -> str:
    """Write the tree, or the schedule with it, into the head's config.json; return a message about it.

    Nothing is written if the head has them already or is on the Hub. A tree of None keeps the head's own.
    """
    saved = read_config(folder)
    values = saved["tree"] if tree is None else asdict(tree)
    lines = None if schedule is None else asdict(schedule)["lines"]
    name = "" if schedule is None else f", with the schedule {schedule.label}"
    if (values, lines) == (saved["tree"], saved.get(SCHEDULE)):
        return f"it is the tree that the head has{name}"
    if not Path(run).expanduser().is_dir():
        return "the head is the Hub's, so nothing is written: give its values as tree.…=…, or tune a copy of the head"
    save_tree(folder, values, lines)
    return f"written to {folder}{name}"


def settings_of(config: TuneConfig, target: Target, texts: Sequence[Text]) -> dict[str, Any]:
    """Return the settings and the environment of a tuning."""
    chosen, held = map(len, halves(texts))
    return {
        "run": config.runs()[0],
        "head": kind_of(resolve_head(config.runs()[0])),
        "target": target.name,
        "device": device_facts(target.device, target.dtype),
        "texts": {"chosen": chosen, "held": held},
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "repeats": config.repeats,
        "engine": config.engine.label,
        "tuner": asdict(config.tuner),
        "provenance": provenance(),
    }
