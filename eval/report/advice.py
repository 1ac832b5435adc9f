"""Advice on other trees: `other_trees` of report.json as sentences."""

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

LITTLE = 0.02  # of the speedup: costs are not known closer
NOTE = (
    "Every tree is simulated along the target's own answers and priced with what its parts cost on this device: a step "
    "of the baseline, passes of every size, the head's drafts. The tree is chosen on half of the answers; what is "
    "said of it is predicted for the others. Nothing was decoded with it: tune=true does, and writes the best one."
)


def lines(name: str, record: Record) -> list[str]:
    """Return which tree to take and at which load to stop, for a head, a sentence each; nothing without prices."""
    if "loads" not in record:
        return []
    current, best, loads = record["own"], record["best"], record["loads"]
    sentences = []
    if current is None or best["tree"] == current["tree"]:
        sentences.append(f"{name}: no tree tried promises more than its own, {_tree(best)}.")
    elif best["speedup"] <= current["speedup"] * (1 + LITTLE):
        sentences.append(
            f"{name}: its own tree, {_tree(current)}, is as good as any that was tried; next is {_tree(best)}."
        )
    else:
        sentences.append(f"{name}: of the trees tried, {_tree(best)} promises most; its own is {_tree(current)}.")
    if len(loads) > 1:
        sentences.append(
            f"{name}: {_stops(record, 'own', 'its own tree')}; {_stops(record, 'best', 'the best for each size')}."
        )
    return sentences


def _tree(tree: Record) -> str:
    return f"{tree['tree']} (τ {tree['tau']:.2f}, {tree['nodes']:.1f} nodes a step, speedup {tree['speedup']:.2f})"


def _stops(record: Record, who: str, name: str) -> str:
    """Return at which batch size a tree stops paying, in words."""
    largest = record["loads"][-1]["batch_size"]
    if who not in record["stops_paying"]:
        return f"{name} has no prediction"
    size = record["stops_paying"][who]
    gain = record["loads"][-1][who]
    return (
        f"{name} still pays at batch size {largest} ({gain:.2f})"
        if size is None
        else f"{name} no longer pays from batch size {size} on"
    )


FORCED = (
    "The share of the text's tokens by depth and by rank among the head's guesses, given the text's own tokens before "
    "it. n-alpha is the acceptance after n drafted states, n = depth - 1: the first column at temperature 0, the mass "
    "that both distributions share above. P(a≥k) is of a chain after every token; decoding begins only some of them."
)
