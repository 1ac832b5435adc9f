"""Other trees, in words: what report.json's `other_trees` says to who must decide."""

from collections.abc import Mapping
from typing import Any

Told = Mapping[str, Any]

LITTLE = 0.02  # of the speedup: costs are not known closer
NOTE = (
    "Every tree is simulated along the target's own answers and priced with what its parts cost on this device: a step "
    "of plain decoding, passes of every size, the head's drafts. The tree is chosen on half of the answers; what is "
    "said of it is predicted for the others. Nothing was decoded with it: tune=true does, and writes the best one."
)


def lines(name: str, found: Told) -> list[str]:
    """Return which tree to take and at which load to stop, for a head, a sentence each; nothing without prices."""
    if "loads" not in found:
        return []
    own, best, loads = found["own"], found["best"], found["loads"]
    said = []
    if own is None or best["tree"] == own["tree"]:
        said.append(f"{name}: no tree that was tried promises more than its own, {_tree(best)}.")
    elif best["speedup"] <= own["speedup"] * (1 + LITTLE):
        said.append(f"{name}: its own tree, {_tree(own)}, is as good as any that was tried; next is {_tree(best)}.")
    else:
        said.append(f"{name}: of the trees that were tried, {_tree(best)} promises most; its own is {_tree(own)}.")
    if len(loads) > 1:
        said.append(
            f"{name}: {_stops(found, 'own', 'its own tree')}; {_stops(found, 'best', 'the best for each size')}."
        )
    return said


def _tree(told: Told) -> str:
    return f"{told['tree']} (τ {told['tau']:.2f}, {told['nodes']:.1f} nodes a step, speedup {told['speedup']:.2f})"


def _stops(found: Told, who: str, called: str) -> str:
    """Return at which batch size a tree stops paying, in words."""
    largest = found["loads"][-1]["batch_size"]
    if who not in found["stops_paying"]:
        return f"{called} has no prediction"
    size = found["stops_paying"][who]
    gain = found["loads"][-1][who]
    return (
        f"{called} still pays at batch size {largest} ({gain:.2f})"
        if size is None
        else f"{called} no longer pays from batch size {size} on"
    )


FORCED = (
    "The share of the text's tokens by depth and by rank among the head's guesses, given the text's own tokens before "
    "it. n-alpha is the acceptance after n drafted states, n = depth - 1: the first column at temperature 0, the mass "
    "that both laws share above. P(a≥k) is of a chain after every token; decoding begins only some of them."
)
