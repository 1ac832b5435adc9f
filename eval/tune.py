"""Find the best tree for a head on this device and workload: predict it from costs and acceptance, measure, write it.

Each kind of tree is a family. All of its trees are replayed on the target's recorded text and priced with the costs
measured in the engine; the most promising are priced again from more samples, and the best one of each family, and the
one predicted best of all, are timed against autoregressive decoding beside the head's present tree. At further batch
sizes the best chain and the best tree are, and the winners make a schedule. A family that is not as fast as predicted
is not chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from data.text.prompts import Prompt
from eval.config import DecodingConfig, TunerConfig
from eval.inputs.texts import Text, write
from eval.live.interleaved import PLAIN, Setup, decoded_once, measure, rows
from eval.measures.cost_model import Costs, cycled, rising
from eval.measures.losslessness import gate, labelled
from eval.measures.machine import device_facts, provenance
from eval.measures.results import Measurement, Row
from eval.tuning import costs as costing
from eval.tuning.grid import AGAIN, FINALISTS, SIZES, Tried, distinct, halves, hopeful, simulate, sizes_for
from eval.tuning.results import AtBatch, Candidate, Measured, Tuning, conclude, fastest
from heads.common.progress import progress
from heads.formats.hub import kind_of, resolve_head
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config, save_tree
from inference.batch import Batch
from inference.decode import Settings
from inference.drafters.head import HeadDrafter, load_for, saved_tree
from inference.drafters.plain import Plain
from inference.drafters.policy import TreeConfig
from inference.protocol import Drafter
from inference.target.target import Target
from inference.tree_config import Schedule, scheduled

Group = Callable[[Tried], str]
T = TypeVar("T")


@dataclass(frozen=True)
class TunePlan:
    """Settings of a tuning of the tree of one run's head."""

    run: str  # a folder or Hub id
    tree: dict[str, Any]  # overrides of that tree, where the search begins
    grid: TunerConfig  # the values to try
    decoding: DecodingConfig  # greedy decoding settings, and the batch sizes
    repeats: int  # timed passes over the prompts

    @property
    def settings(self) -> Settings:
        """The request settings of the recorded texts."""
        return self.decoding.settings(0.0)

    @property
    def sizes(self) -> list[int]:
        """The numbers of drafted nodes whose verification pass is timed."""
        return sorted({*SIZES, *self.grid.nodes})

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes, each once."""
        return sorted(set(self.decoding.batch_sizes()))


def tune(plan: TunePlan, target: Target, prompts: Sequence[Prompt], engine: str) -> Tuning:
    """Find the best tree for the head of a run at every batch size; `engine` is the engine's name in reports.

    The one for the smallest is written into the head's config where it beats autoregressive decoding; of several sizes
    the schedule is too. Half of the prompts choose; the choice is predicted for the other half, and measured on it.

    Raises:
        ValueError: no head, one of another target, no answer longer than a token, or a batch that the target cannot
            verify.
    """
    plan = replace(plan, grid=plan.grid.within(target.context))
    # Fails now, not after minutes, if the target takes no batch.
    Batch(target, [Plain(target.device)] * plan.batch_sizes[-1])
    folder = resolve_head(plan.run)
    if is_published(folder):
        raise ValueError(
            f"{folder}: tune=true writes the tree into the head, and this one is of another project's format"
        )
    head = load_for(folder, target)
    drafter = HeadDrafter(head, saved_tree(folder, plan.tree), "head")
    grid = plan.grid
    answered = [
        (prompt, text)
        for prompt in progress(prompts, "writing the texts")
        for text in write(target, [prompt.token], plan.settings)
    ]
    if not answered:
        raise ValueError("the target answers every prompt with one token, so nothing is drafted: set another workload")
    texts = [text for _, text in answered]
    trees, table = simulate(grid, target, drafter, texts)
    bench = Bench(plan, target, drafter, texts, halves([prompt for prompt, _ in answered])[1])
    costs: dict[int, Costs] = {}
    results: list[AtBatch] = []
    for batch in sorted({1, *plan.batch_sizes}):
        trees = hopeful(trees, costs)
        costs[batch] = bench.costs(trees, grid.samples, batch)
        if batch in plan.batch_sizes:
            group: Group = (lambda one: one.kind) if results else (lambda one: one.family)
            finalists = [one for members in ranked(trees, costs, batch, group) for one in members[:FINALISTS]]
            costs[batch] = bench.costs(finalists, AGAIN * grid.samples, batch, costs[batch])
            candidates = bench.measured(ranked(finalists, costs, batch, group), costs, batch)
            results.append(AtBatch(batch, costs[batch], candidates, fastest(candidates), ""))
    settings = settings_of(plan, target, texts, engine)
    return Tuning(settings, table.tolist(), concluded(results, plan.run, folder))


def ranked(trees: Sequence[Tried], costs: Mapping[int, Costs], batch: int, group: Group) -> list[list[Tried]]:
    """Return the trees by group, in the order of their predicted speedup on the texts to choose by."""
    gain = {id(one): one.promised(costs, batch).speedup for one in trees}
    groups: dict[str, list[Tried]] = {}
    for one in sorted(trees, key=lambda one: gain[id(one)], reverse=True):
        groups.setdefault(group(one), []).append(one)
    return list(groups.values())


@dataclass(frozen=True)
class Bench:
    """The setup of measurements: target, head, all texts, and the prompts held back from the choice."""

    plan: TunePlan
    target: Target
    head: HeadDrafter
    texts: list[Text]
    held: list[Prompt]

    def costs(self, trees: Sequence[Tried], samples: int, batch: int, first: Costs | None = None) -> Costs:
        """Measure the trees' costs at a batch size; those measured `first` fill the gaps."""
        sizes = sizes_for(trees, self.plan.sizes)
        costs = costing.measure(
            self.target, self.head, self.texts, distinct(trees), sizes, samples, self.plan.settings, batch
        )
        return costs if first is None else merged(first, costs)

    def measured(self, groups: Sequence[Sequence[Tried]], costs: Mapping[int, Costs], batch: int) -> list[Candidate]:
        """Return the candidates; the first of each group and the one predicted best of all are decoded with."""
        priced = [[Candidate(one.family, one.tree, one.predicted(costs, batch)) for one in group] for group in groups]
        every = [one for members in priced for one in members]
        best = max(every, key=lambda one: one.predicted.speedup)
        promising = [one for one in every if one is best or any(one is members[0] for members in priced)]
        timed = {id(one): result for one, result in zip(promising, self.timed(promising, batch), strict=True)}
        return [timed.get(id(one), one) for one in every]

    def timed(self, candidates: Sequence[Candidate], batch: int) -> list[Candidate]:
        """Return the candidates with the results of decoding, all in one interleaved session.

        Their tokens are compared with the baseline's in an earlier round, which is not timed.
        """
        drafters: dict[str, Drafter] = {
            str(i): HeadDrafter(self.head.head, one.tree, str(i)) for i, one in enumerate(candidates)
        }
        plan, setup = self.plan, Setup(self.target, drafters, cycled(self.held, batch), self.plan.settings)
        once = decoded_once(setup._replace(settings=replace(plan.settings, gaps=True)), batch)
        ids, dtype = [prompt.id for prompt in setup.prompts], self.target.dtype
        gates = {labelled(name, batch): gate(once[PLAIN], once[name], ids, dtype) for name in drafters}
        # All have run once already: no warm-up.
        runs = measure(setup, plan.repeats, (), hf=False, batch_size=batch)
        plain, *measured = rows(runs, drafters, gates, Measurement("", 0.0, batch, 0, plan.decoding.seed))
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
                    seconds=step_seconds(row),
                    plain=sum(step_seconds(plain).values()),
                ),
            )
            for one, row in zip(candidates, measured, strict=True)
        ]


def merged(first: Costs, again: Costs) -> Costs:
    """Return the later costs; those measured first alone are scaled to the machine's later speed."""
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


def step_seconds(row: Row) -> dict[str, float]:
    """Return the seconds of the average step by part."""
    return {name: total / max(row.steps, 1) for name, total in row.seconds.items()}


def concluded(results: Sequence[AtBatch], run: str, folder: Path) -> list[AtBatch]:
    """Write what is best into the head's config; return the results with their verdicts, of which the first says so."""
    best = [(at.batch, None if at.best is None else at.best.tree) for at in results]
    schedule, tree = scheduled(best) if len(best) > 1 else None, best[0][1]
    done = "nothing is written" if tree is None and schedule is None else keep(tree, schedule, run, folder)
    first, *others = results
    verdicts = [conclude(first.batch, first.candidates, done)]
    verdicts += [conclude(at.batch, at.candidates, "") for at in others]
    return [replace(at, verdict=verdict) for at, verdict in zip(results, verdicts, strict=True)]


def keep(tree: TreeConfig | None, schedule: Schedule | None, run: str, folder: Path) -> str:
    """Write the tree, or the schedule with it, into the head's config.json; return a message that says so.

    Nothing is written where the head has them or is the Hub's. A tree of None leaves the head its own.
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


def settings_of(plan: TunePlan, target: Target, texts: Sequence[Text], engine: str) -> dict[str, Any]:
    """Return the settings and the environment of a tuning."""
    chosen, held = map(len, halves(texts))
    return {
        "run": plan.run,
        "head": kind_of(resolve_head(plan.run)),
        "target": target.name,
        "device": device_facts(target.device, target.dtype),
        "texts": {"chosen": chosen, "held": held},
        "max_new_tokens": plan.decoding.max_new_tokens,
        "seed": plan.decoding.seed,
        "repeats": plan.repeats,
        "engine": engine,
        "tuner": asdict(plan.grid),
        "provenance": provenance(),
    }
