"""The best tree for a head on this device and workload: predicted from costs and acceptance, measured, written.

Each kind of tree is a family. All of its trees are replayed on the target's recorded text and priced with the costs
measured in the engine; the most promising are priced again from more samples, and the best one of each family is timed
against plain decoding beside the tree that the head has now.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import track
from torch import Tensor

from data.prompts import Prompt
from eval import costs as costing
from eval import metrics
from eval.config import EvalConfig, TunerConfig
from eval.live import PLAIN, measure
from eval.lossless import gate
from eval.machine import device_facts, provenance
from eval.replay import Record, Text, record, replay, write
from eval.sources import overlay
from eval.tuned import Candidate, Measured, Tuning, conclude
from heads.hub import resolve_head
from heads.store import load_head, read_config, save_tree
from heads.typed import typed
from inference.decode import Generation, Settings
from inference.drafters import Drafter
from inference.drafters.head import HeadDrafter
from inference.policy import TreeConfig
from inference.target import Target
from inference.tuner import Costs, acceptance, best_static, draft_key, predict

OWN = "as it is"  # the family of the tree that the head has
FINALISTS = 3  # of each family, priced again
AGAIN = 4  # times as many samples for that

# Drafted nodes whose verification is timed whatever is tried: from one row to a few the cost leaps, and a line from one
# to many would pass below it.
SIZES = (0, 1, 2, 4, 8)

Families = dict[str, list[TreeConfig]]


def tune(config: EvalConfig, target: Target, prompts: Sequence[Prompt]) -> Tuning:
    """Find the best tree for the head of a run, and write it into the head's config where it beats plain decoding.

    Args:
        config: the evaluation; one run, greedy.
        target: in the dtype to be timed in.
        prompts: what the target answers.

    Raises:
        ValueError: no head, one of another target, or no answer longer than a token.
    """
    run, grid = config.runs()[0], config.tuner
    folder = resolve_head(run)
    saved = read_config(folder)["tree"]
    own = typed(TreeConfig, overlay(saved, config.tree))
    head: Any = load_head(folder, target.ends, target.spec).to(device=target.device, dtype=target.dtype).eval()
    settings = Settings(config.max_new_tokens, config.sampling(0.0), seed=config.seed)
    texts = write(target, [prompt.token for prompt in prompts], settings)
    if not texts:
        raise ValueError("the target answers every prompt with one token, so nothing is drafted: set another workload")
    deepest = min(head.max_depth, max(own.deepest, *grid.depths))
    everything = unlimited(grid, own, deepest)
    records = [record(target, head, text, everything, deepest) for text in progress("replaying", texts)]
    table = acceptance(torch.tensor([row for each in records for row in each.rank]), max(grid.top_k))
    families = proposed(grid, table, own, deepest, target.takes_trees)

    def costs_of(trees: Families, samples: int) -> Costs:
        return costing.measure(target, HeadDrafter(head, own, "head"), texts, distinct(trees), sizes, samples, settings)

    sizes = sorted({*SIZES, *grid.nodes})
    costs = costs_of(families, grid.samples)
    finalists = {name: priced(name, trees, records, costs, {})[:FINALISTS] for name, trees in families.items()}
    families = {name: [one.tree for one in each] for name, each in finalists.items()}
    costs = costs_of(families, AGAIN * grid.samples)
    contexts = costing.verification(target, sizes, grid.contexts, grid.samples, config.seed)
    ranked = {name: priced(name, trees, records, costs, contexts) for name, trees in families.items()}
    winners = {name: each[0] for name, each in ranked.items()}
    timed = measured(config, target, head, winners, prompts, settings)
    closest = max(timed.values(), key=lambda one: one.gain)
    best = closest if closest.gain > 1 else None
    done = "" if best is None else keep(best.tree, run, folder, saved)
    return Tuning(
        settings=settings_of(config, target, len(texts)),
        accepted=table.tolist(),
        costs=costs,
        contexts=contexts,
        candidates=[one for name, each in ranked.items() for one in (timed[name], *each[1:])],
        best=best,
        verdict=conclude(costs.batch, best, closest, done),
        passed=all(one.measured is None or not one.measured.lossless["failed"] for one in timed.values()),
    )


def progress(what: str, texts: Sequence[Text]) -> Iterable[Text]:
    """Return the texts; whoever watches sees how many are done."""
    console = Console(stderr=True)
    return track(texts, what, console=console, transient=True, disable=not console.is_terminal)


def unlimited(grid: TunerConfig, own: TreeConfig, depth: int) -> list[TreeConfig]:
    """Return the trees to grow at every token: of each kind and top_k the one that holds all others."""
    nodes = max(own.nodes, *grid.nodes)
    wide = sorted({*grid.top_k, *([own.top_k] if own.kind == "dynamic" else [])})
    dynamic = [TreeConfig("dynamic", depth, top_k, nodes, [], []) for top_k in wide]
    return [*dynamic, TreeConfig("best_first", depth, 0, nodes, [], [])]


def proposed(
    grid: TunerConfig, table: Float[Tensor, "D K"], own: TreeConfig, deepest: int, takes_trees: bool
) -> Families:
    """Return the trees to be priced, by family; chains alone for a target that verifies nothing else.

    Args:
        grid: what to try.
        table: acceptance by depth and rank.
        own: the tree that the head has.
        deepest: the depth that the head reaches.
        takes_trees: whether the target verifies trees.
    """
    depths = [depth for depth in grid.depths if depth <= deepest] or [deepest]
    families = {"chain": [TreeConfig("chain", depth, 0, 0, [], []) for depth in depths]}
    if takes_trees:
        static = best_static(table[: max(depths)], max(grid.nodes))
        paths = {str(found): found for found in map(static.paths, grid.nodes) if found}
        families["static"] = [TreeConfig("static", 0, 0, 0, found, []) for found in paths.values()]
        families["dynamic"] = [
            TreeConfig("dynamic", depth, top_k, nodes, [], [])
            for depth in depths
            for top_k in grid.top_k
            for nodes in grid.nodes
            if depth <= nodes <= top_k + (depth - 1) * top_k**2
        ]
        families["best_first"] = [
            TreeConfig("best_first", depth, 0, nodes, [], [])
            for depth in depths
            for nodes in grid.nodes
            if depth <= nodes
        ]
    if takes_trees or own.kind == "chain":
        families[OWN] = [own]
    return {name: trees for name, trees in families.items() if trees}


def distinct(families: Families) -> list[TreeConfig]:
    """Return one tree of each that cost the same to draft."""
    return list({draft_key(tree): tree for trees in families.values() for tree in trees}.values())


def priced(
    family: str,
    trees: Sequence[TreeConfig],
    records: Sequence[Record],
    costs: Costs,
    contexts: Mapping[int, Mapping[int, float]],
) -> list[Candidate]:
    """Replay the texts with every tree and predict its speedup, at other contexts too; the best first."""
    elsewhere = {context: costing.at_context(costs, verify) for context, verify in contexts.items()}
    tokens = sum(each.text.made - 1 for each in records)
    found = []
    for tree in trees:
        steps = [step for each in records for step in replay(each, tree)]
        far = {context: predict(steps, tokens, tree, moved).speedup for context, moved in elsewhere.items()}
        found.append(Candidate(family, tree, predict(steps, tokens, tree, costs), far))
    return sorted(found, key=lambda one: one.predicted.speedup, reverse=True)


def measured(
    config: EvalConfig,
    target: Target,
    head: Any,
    winners: Mapping[str, Candidate],
    prompts: Sequence[Prompt],
    settings: Settings,
) -> dict[str, Candidate]:
    """Return the candidates with what decoding gives, all beside plain decoding in one interleaved session.

    Their tokens are compared with plain decoding's in a round before, which is not timed.
    """
    drafters: dict[str, Drafter] = {name: HeadDrafter(head, one.tree, name) for name, one in winners.items()}
    once = measure(target, drafters, prompts, replace(settings, gaps=True), 1, 0, hf=False)
    first = {name: [repeats[0] for repeats in each] for name, each in once.items()}
    ids = [prompt.id for prompt in prompts]
    runs = measure(target, drafters, prompts, settings, config.repeats, 0, hf=False)  # all have run once already
    middle = {name: [metrics.median_run(repeats) for repeats in each] for name, each in runs.items()}
    made = {}
    for name, one in winners.items():
        verdict = gate(first[PLAIN], first[name], ids, target.dtype)
        speedup = metrics.speedup(middle[name], middle[PLAIN]) if verdict.passed else None
        interval = metrics.speedup_interval(middle[name], middle[PLAIN], config.seed) if verdict.passed else None
        tau, seconds = metrics.acceptance(middle[name]).tau, step_seconds(middle[name])
        plain = sum(step_seconds(middle[PLAIN]).values())
        made[name] = replace(one, measured=Measured(tau, speedup, interval, verdict.counts(), seconds, plain))
    return made


def step_seconds(runs: Sequence[Generation]) -> dict[str, float]:
    """Return the seconds of the average step by part."""
    steps = max(sum(len(run.steps) for run in runs), 1)
    return {part: total / steps for part, total in metrics.seconds(runs).items()}


def keep(tree: TreeConfig, run: str, folder: Path, saved: Mapping[str, Any]) -> str:
    """Write the tree into the head's config.json unless it stands there or the head is the Hub's; say what was done."""
    if asdict(tree) == dict(saved):
        return "it is the tree that the head has"
    if not Path(run).expanduser().is_dir():
        return "the head is the Hub's, so nothing is written: give its values as tree.…=…, or tune a copy of the head"
    save_tree(folder, asdict(tree))
    return f"written to {folder}"


def settings_of(config: EvalConfig, target: Target, texts: int) -> dict[str, Any]:
    """Return what the numbers depend on."""
    keys = ("max_new_tokens", "seed", "repeats")
    return {
        "run": config.runs()[0],
        "target": target.name,
        "device": device_facts(target.device, target.dtype),
        "texts": texts,
        **{key: getattr(config, key) for key in keys},
        "tuner": asdict(config.tuner),
        "provenance": provenance(),
    }
