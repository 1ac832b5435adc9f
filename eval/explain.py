"""What another tree would give: every tree simulated along the texts, priced with this device's costs, under load too.

The tuner (eval/tune.py) decodes with the best ones and writes the winner; here nothing is decoded but for the costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eval.config import DecodingConfig, TunerConfig
from eval.inputs.texts import Text
from eval.measures.cost_model import Costs, Prediction, cycled, predict, stops_paying
from eval.tuning import costs as costing
from eval.tuning.grid import OWN, Tried, distinct, sizes_for
from eval.tuning.simulated import SIZES
from inference.decode import Settings
from inference.drafters.head import HeadDrafter
from inference.target.target import Target

TIMED = 48  # tokens of an answer that costs are measured on: a step costs what it costs
SWEPT = tuple(2**power for power in range(11))  # batch sizes between and up to the measured ones


def price(
    tuner: TunerConfig, decoding: DecodingConfig, target: Target, drafter: HeadDrafter, trees: Sequence[Tried],
    texts: Sequence[Text],
) -> dict[int, Costs]:  # fmt: skip
    """Measure what the trees' parts cost at the batch sizes of `tuner.batch_sizes`.

    Drafts cost a sequence in a batch what they cost it alone; verification is measured anew.
    """
    samples = tuner.samples
    settings = Settings(min(TIMED, decoding.max_new_tokens), decoding.sampling(0.0), seed=decoding.seed)
    short = [replace(text, token=text.token[: text.start + TIMED], limit=settings.max_new_tokens) for text in texts]
    sizes = sizes_for(trees, sorted({*SIZES, *tuner.nodes}))
    source = HeadDrafter(drafter.head, drafter.policy, "head")
    found = {1: costing.measure(target, source, short, distinct(trees), sizes, samples, settings)}
    for batch in sorted({*tuner.batch_sizes} - {1}) if target.takes_trees else ():
        several = costing.measure(target, None, short, [], sizes, samples, settings, batch)
        found[batch] = replace(several, draft=found[1].draft, commit=found[1].commit)
    return found


def explained(trees: Sequence[Tried], costs: Mapping[int, Costs]) -> dict[str, Any]:
    """Return what report.json says of other trees.

    Returns:
        `trees`: each with its τ, drafted nodes a step and predicted speedup. `own` and `best`: those of the head's own
        tree, and of the one that promises most on the texts to choose from, both told of the others. `loads`: the
        predicted speedups by batch size, between the measured ones and up to the largest, of the own tree and of the
        best there. `stops_paying`: from which of these sizes on none pays; None where the largest still does. `costs`:
        milliseconds of a plain step and of a pass by drafted nodes, at each measured size. Without costs `trees` alone,
        and no speedups.
    """
    told = [_told(one, _predicted(one, costs, 1)) for one in trees]
    if not costs:
        return {"trees": told}
    own = next((one for one in trees if one.family == OWN), None)
    loads = []
    for batch in (size for size in SWEPT if size <= max(costs)):
        best = _best(trees, costs, batch)
        mine = None if own is None else _predicted(own, costs, batch)
        loads.append(
            {
                "batch_size": batch,
                "own": None if mine is None else mine.speedup,
                "best": predict(cycled(best.held, batch), best.tree, costs, batch).speedup,
                "tree": best.tree.label,
            }
        )
    best = _best(trees, costs, 1)
    gains = {who: {each["batch_size"]: each[who] for each in loads} for who in ("own", "best")}
    return {
        "trees": told,
        "own": None if own is None else _told(own, _predicted(own, costs, 1)),
        "best": _told(best, _predicted(best, costs, 1)),
        "loads": loads,
        "measured": sorted(costs),
        "stops_paying": {who: stops_paying(each) for who, each in gains.items() if None not in each.values()},
        "costs": {
            str(batch): {
                "plain": 1e3 * one.plain,
                "verify": {str(nodes): 1e3 * seconds for nodes, seconds in one.verify.items()},
            }
            for batch, one in costs.items()
        },
    }


def _best(trees: Sequence[Tried], costs: Mapping[int, Costs], batch: int) -> Tried:
    """Return the tree that promises most on the texts to choose from."""
    return max(trees, key=lambda one: predict(cycled(one.chosen, batch), one.tree, costs, batch).speedup)


def _predicted(one: Tried, costs: Mapping[int, Costs], batch: int) -> Prediction | None:
    return predict(cycled(one.held, batch), one.tree, costs, batch) if costs else None


def _told(one: Tried, found: Prediction | None) -> dict[str, Any]:
    """Return a tree as report.json has it."""
    steps = [step for each in one.held for step in each.steps]
    tokens = sum(each.tokens for each in one.held)
    return {
        "family": one.family,
        "tree": one.tree.label,
        "tau": tokens / len(steps),
        "nodes": sum(step.nodes for step in steps) / len(steps),
        "speedup": None if found is None else found.speedup,
    }
