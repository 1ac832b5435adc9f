"""Predict the speed of other trees: each is simulated along the texts and priced with this device's costs, at any load.

The tuner (eval/tune.py) decodes with the best ones and writes the winner; here decoding only measures costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from eval.config import DecodingConfig, TunerConfig
from eval.inputs.texts import Text
from eval.measures.cost_model import Costs, stops_paying
from eval.tuning import costs as costing
from eval.tuning.grid import OWN, SIZES, Tried, distinct, sizes_for
from inference.decode import Settings
from inference.drafters.head import HeadDrafter
from inference.target.target import Target

TIMED = 48  # tokens of an answer that costs are measured on: a step's costs hardly depend on more
SWEPT = tuple(2**power for power in range(11))  # batch sizes to predict, up to the largest measured one


def price(
    tuner: TunerConfig, decoding: DecodingConfig, target: Target, drafter: HeadDrafter, trees: Sequence[Tried],
    texts: Sequence[Text],
) -> dict[int, Costs]:  # fmt: skip
    """Measure the costs of the trees' steps at the batch sizes of `tuner.batch_sizes`.

    In a batch the draft of each family's best tree is timed, and the others' are taken to cost as much more.
    """
    samples = tuner.samples
    settings = Settings(min(TIMED, decoding.max_new_tokens), decoding.sampling(0.0), seed=decoding.seed)
    short = [replace(text, token=text.token[: text.start + TIMED], limit=settings.max_new_tokens) for text in texts]
    sizes = sizes_for(trees, sorted({*SIZES, *tuner.nodes}))
    costs = {1: costing.measure(target, drafter, short, distinct(trees), sizes, samples, settings)}
    best = {one.family: one for one in sorted(trees, key=lambda one: one.predicted(costs, 1).speedup)}
    for batch in sorted({*tuner.batch_sizes} - {1}) if target.takes_trees else ():
        some = distinct(list(best.values()))
        batched = costing.measure(target, drafter, short, some, sizes, samples, settings, batch)
        costs[batch] = replace(batched, draft=scaled(costs[1].draft, batched.draft))
    return costs


def scaled(alone: Mapping[str, float], batched: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of all drafts in a batch, given those of some."""
    slower = fmean(seconds / alone[key] for key, seconds in batched.items())
    return {key: slower * seconds for key, seconds in alone.items()} | dict(batched)


def explained(trees: Sequence[Tried], costs: Mapping[int, Costs]) -> dict[str, Any]:
    """Return report.json's predictions for other trees.

    Returns:
        `trees`: each with its τ, drafted nodes a step and predicted speedup. `own` and `best`: the same of the head's
        own tree, and of the tree with the highest predicted speedup on the texts to choose by, both on the texts held
        back. `loads`: the predicted speedups by batch size, up to the largest measured one, of the own tree and of the
        best there. `stops_paying`: the size from which on none pays; None where the largest still does. `costs`:
        milliseconds of an autoregressive step and of a verification pass by drafted nodes, at each measured size.
        Without costs `trees` alone, and no speedups.
    """
    summaries = [_summary(tree, costs) for tree in trees]
    if not costs:
        return {"trees": summaries}
    current = next((tree for tree in trees if tree.family == OWN), None)
    loads = []
    for batch in (size for size in SWEPT if size <= max(costs)):
        best = _best(trees, costs, batch)
        mine = None if current is None else current.predicted(costs, batch).speedup
        top = best.predicted(costs, batch).speedup
        loads.append({"batch_size": batch, "own": mine, "best": top, "tree": best.tree.label})
    gains_of = {key: {load["batch_size"]: load[key] for load in loads} for key in ("own", "best")}
    return {
        "trees": summaries,
        "own": None if current is None else _summary(current, costs),
        "best": _summary(_best(trees, costs, 1), costs),
        "loads": loads,
        "measured": sorted(costs),
        "stops_paying": {key: stops_paying(gains) for key, gains in gains_of.items() if None not in gains.values()},
        "costs": {
            str(batch): {
                "plain": 1e3 * one.plain,
                "verify": {str(nodes): 1e3 * seconds for nodes, seconds in one.verify.items()},
            }
            for batch, one in costs.items()
        },
    }


def _best(trees: Sequence[Tried], costs: Mapping[int, Costs], batch: int) -> Tried:
    return max(trees, key=lambda one: one.promised(costs, batch).speedup)


def _summary(one: Tried, costs: Mapping[int, Costs]) -> dict[str, Any]:
    steps = [step for text in one.held for step in text.steps]
    return {
        "family": one.family,
        "tree": one.tree.label,
        "tau": sum(text.tokens for text in one.held) / len(steps),
        "nodes": sum(step.nodes for step in steps) / len(steps),
        "speedup": one.predicted(costs, 1).speedup if costs else None,
    }
