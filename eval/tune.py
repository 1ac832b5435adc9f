"""Find the best tree for a head on this device and workload: acceptance from replays, measured costs and speed.

Each kind of tree is a family. Half of the target's recorded texts choose: all trees are replayed on them, and their
steps are timed in the engine; those of the most promising trees are timed again for longer. The best tree of each
family is timed against the baseline on the other half. At further batch sizes the best chain and the best tree are
timed, and the winners make a schedule. The static tree with the highest acceptance follows from acceptance by depth and
rank. A tree's size is its drafted nodes, without the root.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console

from eval.config import TuneConfig, TunerConfig
from eval.inputs.workloads import cycled, write
from eval.live import Prompts, Setup, decoded_once, measure, rows
from eval.measures.losslessness import WITHHELD, differs, drafter_label, gate
from eval.measures.machine import device_facts, provenance
from eval.measures.metrics import sum_counts
from eval.measures.results import BASELINE, Measurement, ResultRow
from eval.report.render import rich_table
from eval.report.view import shown
from eval.report.write import SERVING, is_served, serving_config
from eval.teacher_forced import RankedText, Rates, acceptance, passes_along, rank_text
from heads.base import Tokens
from heads.common.files import write_json
from heads.common.progress import Bar, print_line, progress
from heads.common.typed import Json
from heads.formats.hub import kind_of, resolve_head
from heads.formats.published import is_published
from heads.formats.store import SCHEDULE, read_config, save_tree
from inference.batch import Batch, batch_of
from inference.decode import RequestParams
from inference.drafters.head import HeadDrafter, load_for, saved_trees
from inference.drafters.plain import Baseline
from inference.drafters.policy import Schedule, ScheduleLine, TreeConfig, best_schedule
from inference.request import clock
from inference.target.target import Target

TUNED = "tune.json"
OWN = "as it is"  # the family of the head's saved tree
CHAIN = "chain"
FINALISTS = 3  # trees per family whose steps are timed again
AGAIN = 8  # factor of the samples for the second timing
PER_BASELINE = 4  # steps with a draft per step of the baseline
HOPELESS = 0.8  # a tree predicted slower than this is not tried in larger batches, where a node costs more


class Tried(NamedTuple):
    """A tree with its τ along the selection texts and along the held-out texts."""

    family: str  # the tree's kind, or OWN for the head's saved tree
    tree: TreeConfig
    chosen: float
    held_out_tau: float

    @property
    def kind(self) -> str:
        """Return "chain" or "tree"."""
        return CHAIN if self.tree.kind == CHAIN else "tree"


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a tree."""

    tau: float  # tokens per step
    seconds: float  # seconds per step, for all sequences
    tokens_per_second: float  # over all sequences
    speedup: float  # over autoregressive decoding at the same batch size


@dataclass(frozen=True)
class Candidate:
    """A candidate tree, its prediction, and its measurement if it was timed."""

    family: str
    tree: TreeConfig
    predicted: Prediction
    measured: ResultRow | None = None

    @property
    def gain(self) -> float:
        """Return the measured speedup, 0 without a measurement."""
        return 0.0 if self.measured is None else self.measured.speedup or 0.0


@dataclass(frozen=True)
class AtBatch:
    """The results at one batch size."""

    batch: int
    baseline: float | None  # the baseline's tokens per second
    candidates: list[Candidate]  # the most promising trees per family, or chains and trees, best first
    verdict: str = ""  # the recommendation as text

    @property
    def best(self) -> Candidate | None:
        """Return the candidate with the greatest measured speedup; None if the baseline is faster."""
        best = max(self.candidates, key=lambda one: one.gain)
        return best if best.gain > 1 else None


@dataclass(frozen=True)
class Tuning:
    """The results of a tuning."""

    settings: Json  # settings of the measurement
    accepted: list[list[float]]  # acceptance by depth and rank in the selection texts
    batches: list[AtBatch]

    @property
    def passed(self) -> bool:
        """Return whether every timed tree is lossless."""
        timed = [one.measured for at in self.batches for one in at.candidates if one.measured is not None]
        return not any(differs(row.lossless) for row in timed)

    def write(self, out: Path) -> None:
        """Write tune.json and, if vLLM serves the head, vLLM's schedule of the fastest chains."""
        batches = [{**asdict(at), "best": at.best and asdict(at.best)} for at in self.batches]
        write_json(out / TUNED, {"schema": 5, **asdict(self), "batches": batches})
        (out / SERVING).unlink(missing_ok=True)
        if is_served(self.settings["head"]):
            tokens = {}
            for at in self.batches:
                chains = replace(at, candidates=[one for one in at.candidates if one.tree.kind == CHAIN])
                tokens[at.batch] = chains.best.tree.depth if chains.candidates and chains.best else 0
            write_json(out / SERVING, serving_config(tokens))

    def show(self, console: Console) -> None:
        """Print the candidates and the verdicts."""
        headers = ["family", "tree", "predicted tau", "tok/s", "speedup", "measured tau", "tok/s", "speedup"]
        for at in self.batches:
            body = []
            for one in at.candidates:
                cells = [one.family, one.tree.label]
                speeds: list[Any] = [one.predicted, one.measured]
                for speed in filter(None, speeds):
                    cells += [shown(speed.tau), shown(speed.tokens_per_second, 1), shown(speed.speedup or WITHHELD)]
                body.append(cells)
            rate = "" if at.baseline is None else f", baseline {at.baseline:.1f} tokens/s"
            console.print(rich_table(f"trees at batch size {at.batch}{rate}", headers, body))
        for at in self.batches:
            print_line(at.verdict)


def tune(config: TuneConfig, target: Target, prompts: Prompts) -> Tuning:
    """Find the best tree for the head of a run at every batch size.

    If it beats the baseline, the tree for the smallest size is written into the head's config; with several sizes the
    schedule is written too. Half of the prompts select the tree; the other half predicts and measures its speed. Refuse
    another target's head, answers of one token, and a batch size that the target cannot verify.
    """
    nodes = [nodes for nodes in config.tuner.nodes if nodes < target.max_model_len]
    grid = replace(config.tuner, nodes=nodes or [1])
    params, sizes, (run,) = config.params(0.0), sorted(set(config.batch_size)), config.runs()
    # Fails now instead of after minutes if the target supports no batch.
    Batch(target, Baseline(target.device), sizes[-1])
    folder = resolve_head(run)
    if is_published(folder):
        raise ValueError(
            f"{folder}: tune=true writes the tree into the head, and this one is of another project's format"
        )
    head, current = load_for(folder, target), saved_trees(folder, config.tree)[0]
    answered = [
        (prompt, text)
        for prompt in progress(prompts, "writing the texts")
        for text in write(target, [prompt.token], params)
    ]
    if not answered:
        raise ValueError("the target answers every prompt with one token, so nothing is drafted: set another workload")
    tree_depth = min(head.max_depth, max(current.tree_depth, *grid.depths))
    grown = largest(grid, current, tree_depth)
    ranked = [rank_text(target, head, text, grown, tree_depth) for _, text in progress(answered, "simulating")]
    chosen, held = ranked[::2], ranked[1::2] or ranked  # a single text is in both
    table = acceptance(torch.tensor([ranks for text in chosen for ranks in text.rank]), max(grid.top_k))
    trees = [
        Tried(family, tree, tau_along(chosen, tree), tau_along(held, tree))
        for family, members in proposed(grid, table, current, tree_depth, target.takes_trees).items()
        for tree in members
    ]
    tokens = [prompt.token for prompt, _ in answered]
    held_prompts = [prompt for prompt, _ in answered[1::2] or answered]
    results: list[AtBatch] = []
    for batch in sizes:
        finalists, group = trees, "kind" if results else "family"
        for samples in (grid.samples, AGAIN * grid.samples):
            of_baseline, seconds = step_seconds(
                target, head, [one.tree for one in finalists], tokens, params, samples, batch
            )
            priced = sorted(zip(finalists, seconds, strict=True), key=lambda pair: pair[1] / pair[0].chosen)
            if finalists is trees:
                fastest = {one.kind: one for one, _ in reversed(priced)}
                trees = [
                    one for one, step in priced
                    if one is fastest[one.kind] or one.chosen * of_baseline / step >= HOPELESS
                ]  # fmt: skip
            groups: dict[str, list[Candidate]] = {}
            for one, step in priced:
                predicted = Prediction(
                    one.held_out_tau, step, batch * one.held_out_tau / step, one.held_out_tau * of_baseline / step
                )
                groups.setdefault(getattr(one, group), []).append(Candidate(one.family, one.tree, predicted))
            best_trees = {id(one.tree) for members in groups.values() for one in members[:FINALISTS]}
            finalists = [one for one in finalists if id(one.tree) in best_trees]
        results.append(timed(config, target, head, list(groups.values()), held_prompts, batch))
    measured = {
        "run": run,
        "head": kind_of(folder),
        "target": target.name,
        "device": device_facts(target.device, target.dtype),
        "texts": {"chosen": len(chosen), "held": len(held)},
        **{key: getattr(config, key) for key in ("max_new_tokens", "seed", "repeats")},
        "engine": config.engine.label,
        "tuner": asdict(config.tuner),
        "provenance": provenance(),
    }
    return Tuning(measured, table.tolist(), concluded(results, run, folder))


def tau_along(records: Sequence[RankedText], tree: TreeConfig) -> float:
    """Return τ of decoding recorded texts with a tree."""
    passes = sum_counts([passes_along(record, tree) for record in records])
    return passes.tokens / passes.steps


@torch.inference_mode()
def step_seconds(
    target: Target,
    head: Any,
    trees: Sequence[TreeConfig],
    prompts: Sequence[Tokens],
    params: RequestParams,
    samples: int,
    batch: int,
) -> tuple[float, list[float]]:
    """Return the seconds per step of the baseline and of each tree, for `batch` sequences.

    Each tree drafts for one step, in a new random order each time, with the baseline in between, so that a temporary
    slowdown of the machine affects all. The first step of each tree, which is slower, is not counted.
    """
    schedule = Schedule([ScheduleLine(1 + i, tree) for i, tree in enumerate(trees)])  # one line per tree
    seconds: list[list[float]] = [[] for _ in trees]
    of_baseline = []
    shuffle = random.Random(params.seed)
    with target.uncaptured(), Bar((1 + samples) * len(trees), f"timing steps, batch size {batch}") as bar:
        baseline = timed_steps(batch_of(target, Baseline(target.device), batch), prompts, params)
        rotating = batch_of(target, HeadDrafter(head, trees[0], "trees", schedule), batch)
        drafting, drafts = timed_steps(rotating, prompts, params), cast(Any, rotating.draft_batch)
        select_tree = drafts.select_tree
        next(baseline)
        for turn in range(1 + samples):
            for index in shuffle.sample(range(len(trees)), len(trees)):
                if bar.done % PER_BASELINE == 0:
                    of_baseline.append(next(baseline))
                drafts.select_tree = lambda _, line=1 + index: select_tree(line)
                spent = next(drafting)
                seconds[index] += [spent] if turn else []
                bar.show(bar.done + 1)
    return typical(of_baseline), list(map(typical, seconds))


def timed_steps(batch: Batch, prompts: Sequence[Tokens], params: RequestParams) -> Iterator[float]:
    """Decode prompts in a batch repeatedly; yield the seconds of every step."""
    waiting = enumerate(cycle(prompts))
    while True:
        while batch.free:
            batch.admit(*next(waiting), params)
        begin = clock(batch.target.device)
        batch.step()
        yield clock(batch.target.device) - begin
        batch.release()


def typical(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest twentieth.

    The median would ignore the few, long interruptions; the plain mean would count single outliers.
    """
    from scipy.stats import trim_mean  # late: the import takes half a second, also before a refusal

    return float(trim_mean(values, 0.05))


def timed(
    config: TuneConfig, target: Target, head: Any, groups: Sequence[Sequence[Candidate]], prompts: Prompts, batch: int
) -> AtBatch:
    """Return the candidates; the first of each group is timed, in one session, once their tokens are compared."""
    drafters = {str(i): HeadDrafter(head, members[0].tree, str(i)) for i, members in enumerate(groups)}
    setup = Setup(target, drafters, cycled(prompts, batch), config.params(0.0))
    once = decoded_once(setup._replace(params=replace(setup.params, logit_gaps=True)), batch)
    ids = [prompt.id for prompt in setup.prompts]
    gates = {drafter_label(name, batch): gate(once[BASELINE], once[name], ids, target.dtype) for name in drafters}
    # All have already run once, so no warm-up is needed.
    runs = measure(setup, config.repeats, (), hf=False, batch_size=batch)
    baseline, *measured = rows(runs, drafters, gates, Measurement("", 0.0, batch, 0, config.seed))
    candidates = [
        one
        for (first, *others), row in zip(groups, measured, strict=True)
        for one in (replace(first, measured=row), *others)
    ]
    return AtBatch(batch, baseline.tokens_per_second, candidates)


def concluded(results: Sequence[AtBatch], run: str, folder: Path) -> list[AtBatch]:
    """Write the best tree into the head's config; return the results with their verdicts as text."""
    best = [(at.batch, None if at.best is None else at.best.tree) for at in results]
    schedule, tree = best_schedule(best) if len(best) > 1 else None, best[0][1]
    done = "nothing is written" if tree is None and schedule is None else keep(tree, schedule, run, folder)
    concluded_results = []
    for at in results:
        one, then = max(at.candidates, key=lambda one: one.gain), f"; {done}" * (at is results[0])
        gain = f"{one.tree.label} at {one.gain:.2f}" if one.gain else "none is lossless"
        verdict = f"no tree beats the baseline (best: {gain}); decode without drafts"
        if one.gain > 1:
            verdict = f"{one.tree.label} is fastest, {one.gain:.2f} times the baseline"
        concluded_results.append(replace(at, verdict=f"batch size {at.batch}: {verdict}{then}"))
    return concluded_results


def keep(tree: TreeConfig | None, schedule: Schedule | None, run: str, folder: Path) -> str:
    """Write the tree, or the schedule with it, into the head's config.json; return a message about it.

    Nothing is written if the head already has them or is on the Hub. With tree None the head's tree stays.
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


def best_static(acceptance: Rates, nodes: int) -> list[list[int]]:
    """Return the rank paths of the best static trees, of which the first n are the best tree of n nodes.

    A tree is expected to accept the sum of its nodes' probabilities, and no node is more probable than its parent, so
    the most probable nodes are the best tree: that of Sequoia's dynamic programming (arXiv 2402.12374). As there, a
    node's acceptance depends on the path to it only by its length; here also on its depth, since heads get worse with
    it. Nodes that are never accepted are left out. `acceptance` is the probability that the target's token has rank k
    among the children of an accepted node at depth d - 1, `nodes` the maximum size.
    """
    table, paths = [*acceptance.tolist(), []], list[list[int]]()
    waiting = [(-1.0, list[int]())]  # the most probable first
    while waiting and len(paths) <= nodes:
        probability, path = heappop(waiting)
        paths.append(path)
        for rank, share in enumerate(table[len(path)]):
            if share > 0:
                heappush(waiting, (probability * share, [*path, rank]))
    return paths[1:]  # without the root


def non_increasing(table: Rates) -> Rates:
    """Return the nearest acceptance table that does not increase with rank.

    A few texts may by chance have a token of rank 3 but none of rank 2, and a tree would skip rank 2.
    """
    from scipy.optimize import isotonic_regression  # late: the import takes half a second, also before a refusal

    rows = [isotonic_regression(row, increasing=False).x.tolist() for row in table.numpy()]
    return torch.tensor(rows, dtype=table.dtype)


def largest(grid: TunerConfig, current: TreeConfig, depth: int) -> list[TreeConfig]:
    """Return the trees to grow at every token: the largest per kind and top_k, which contains the others."""
    nodes = max(current.nodes, *grid.nodes)
    wide = sorted({*grid.top_k, *([current.top_k] if current.kind == "dynamic" else [])})
    dynamic = [TreeConfig("dynamic", depth, top_k, nodes, [], []) for top_k in wide]
    return [*dynamic, TreeConfig("best_first", depth, 0, nodes, [], [])]


def proposed(
    grid: TunerConfig, table: Rates, current: TreeConfig, tree_depth: int, takes_trees: bool
) -> dict[str, list[TreeConfig]]:
    """Return the trees to try, by family; only chains if the target verifies only chains.

    `table` is the acceptance by depth and rank, `current` the head's saved tree, `tree_depth` the head's depth.
    """
    depths = [depth for depth in grid.depths if depth <= tree_depth] or [tree_depth]
    families = {CHAIN: [TreeConfig("chain", depth, 0, 0, [], []) for depth in depths]}
    if takes_trees:
        static = best_static(non_increasing(table[: max(depths)]), max(grid.nodes))
        shapes = {str(paths): paths for nodes in grid.nodes if (paths := sorted(static[:nodes], key=len))}
        families["static"] = [TreeConfig("static", 0, 0, 0, paths, []) for paths in shapes.values()]
        sizes = [(depth, nodes) for depth in depths for nodes in grid.nodes if depth <= nodes]
        families["dynamic"] = [
            TreeConfig("dynamic", depth, top_k, nodes, [], [])
            for depth, nodes in sizes
            for top_k in grid.top_k
            if nodes <= top_k + (depth - 1) * top_k**2
        ]
        families["best_first"] = [TreeConfig("best_first", depth, 0, nodes, [], []) for depth, nodes in sizes]
    if takes_trees or current.kind == CHAIN:
        families[OWN] = [current]
    return {name: trees for name, trees in families.items() if trees}
