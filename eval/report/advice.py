"""Other trees, in words and tables: what report.json's `other_trees` says to who must decide."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.report.tables import grid, number

Told = Mapping[str, Any]

LITTLE = 0.02  # of the speedup: costs are not known closer
NOTE = (
    "Every tree is simulated along the target's own answers and priced with what its parts cost on this device: a step "
    "of plain decoding, passes of every size, the head's drafts. The tree is chosen on half of the answers; what is "
    "said of it is predicted for the others. Nothing was decoded with it: tune=true does, and writes the best one."
)
MOST = 8  # trees shown in Markdown


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


def sections(extras: Told) -> list[str]:
    """Return the parts of the Markdown report on other trees and on the head along the text."""
    told: list[str] = []
    for name, found in extras.get("other_trees", {}).items():
        told += [f"## Other trees for {name}", *lines(name, found), _trees(found["trees"])]
        if "loads" in found:
            told += [_loads(found["loads"]), NOTE]
    for name, found in extras.get("teacher_forced", {}).items():
        told += [f"## {name} along the text, from one target pass", FORCED, _ranks(found)]
    return told


FORCED = (
    "The share of the text's tokens by depth and by rank among the head's guesses, given the text's own tokens before "
    "it. n-alpha is the acceptance after n drafted states, n = depth - 1: the first column at temperature 0, the mass "
    "that both laws share above. P(a≥k) is of a chain after every token; decoding begins only some of them."
)


def _trees(trees: Sequence[Told]) -> str:
    """Return the trees that promise most, or accept most where nothing was priced."""
    ranked = sorted(trees, key=lambda each: each["speedup"] or each["tau"], reverse=True)[:MOST]
    body = [
        [each["family"], each["tree"], number(each["nodes"], 1), number(each["tau"], 2), number(each["speedup"], 2)]
        for each in ranked
    ]
    return grid(("family", "tree", "nodes a step", "τ", "predicted speedup"), body)


def _loads(loads: Sequence[Told]) -> str:
    body = [[str(each["batch_size"]), number(each["own"], 2), number(each["best"], 2), each["tree"]] for each in loads]
    return grid(("batch size", "predicted speedup of the own tree", "of the best", "which is"), body)


def _ranks(found: Told) -> str:
    ranks = len(found["rank"][0])
    header = ("depth", "n-alpha", "P(a≥k)", *(f"rank {rank}" for rank in range(1, ranks + 1)))
    parts = zip(found["n_alpha"], found["at_every_token"], found["rank"], strict=True)
    body = [
        [str(depth), number(alpha, 3), number(reached, 3), *(number(share, 3) for share in row)]
        for depth, (alpha, reached, row) in enumerate(parts, 1)
    ]
    return grid(header, body)
