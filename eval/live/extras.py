"""What a report holds besides its rows and answers: how its heads were trained, and what became of tree nodes."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live.interleaved import Runs
from eval.measures.metrics import median_run
from inference.protocol import Drafter

METRICS = "metrics.jsonl"  # of a run's folder, by train/tracking/trackers.py
POINTS = 200  # of a training curve; more cannot be seen
NODES = 400  # of a tree; more cannot be told apart

Records = list[dict[str, Any]]
Ranks = tuple[int, ...]  # a node: the ranks on its way from the root


def training(heads: Mapping[str, Path]) -> dict[str, dict[str, Records]]:
    """Return the training curves of the heads whose run's folder has them.

    Args:
        heads: the heads' folders by the report's names.

    Returns:
        By name, `steps`: the means of loss and accuracy by depth over stretches of steps, each at its last step;
        `tau`: each measurement by the verifier, with its interval.
    """
    files = {name: folder.parent / METRICS for name, folder in heads.items() if folder.name == "head"}
    return {name: curves(list(records(file))) for name, file in files.items() if file.is_file()}


def records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield a run's records; a line that a killed run was writing is left out."""
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield record


def curves(records: Records) -> dict[str, Records]:
    """Return the curves of a run's records."""
    steps = [record for record in records if record.get("loss") is not None]
    stretch = -(-len(steps) // POINTS) or 1
    taus = []
    for record in records:
        if record.get("tau") is not None:
            low, high = record.get("tau_ci") or (record["tau"], record["tau"])
            taus.append({"step": record["step"], "tau": record["tau"], "low": low, "high": high})
    return {"steps": [_mean(steps[at : at + stretch]) for at in range(0, len(steps), stretch)], "tau": taus}


def _mean(steps: Records) -> dict[str, Any]:
    """Return the means of a stretch of steps."""
    known = [step["accuracy"] for step in steps if step.get("accuracy") and None not in step["accuracy"]]
    accuracy = [fmean(each) for each in zip(*known, strict=True)]
    return {"step": steps[-1]["step"], "loss": fmean(step["loss"] for step in steps), "accuracy": accuracy}


def trees(made: Runs, drafters: Mapping[str, Drafter]) -> dict[str, dict[str, Any]]:
    """Return the trees of one session's drafters, and how often the target accepted each node.

    Args:
        made: what `eval.live.interleaved.measure` returned; of each prompt its median run counts,
            as in the report's rows.
        drafters: those to show; one that never drafted is left out.

    Returns:
        By name: the tree's `label`; `paths`, a node each, the ranks on its way from the root, counted from 0 among the
        siblings; `accepted`, the share of the passes that accepted each node, so that those of a depth add up to
        P(a >= d); the number of `steps`, which are the passes; a `note` on which nodes these are.
    """
    found = {}
    for name, drafter in drafters.items():
        steps = [step for repeats in made[name] for step in median_run(repeats).steps]
        if any(step.drafted for step in steps):
            counts = Counter(step.ranks[:depth] for step in steps for depth in range(1, len(step.ranks) + 1))
            paths, note = nodes(drafter, counts)
            shares = [counts[path] / len(steps) for path in paths]
            told = {"label": drafter.tree, "note": note, "steps": len(steps)}
            found[name] = {**told, "paths": [list(path) for path in paths], "accepted": shares}
    return found


def nodes(drafter: Drafter, accepted: Counter[Ranks]) -> tuple[list[Ranks], str]:
    """Return the nodes that a drafter's tree is drawn with, parents before children, and a note on them.

    Args:
        drafter: a draft source.
        accepted: how often each node was accepted.
    """
    if drafter.shape is not None:
        return among_siblings(drafter.shape), "The shape is fixed; empty nodes were never accepted."
    often = sorted(accepted, key=lambda path: (-accepted[path], len(path), path))
    note = "The shape changes; drawn are the nodes that were accepted at least once"
    return often[:NODES], f"{note}, the {NODES} most frequent of {len(often)}." if len(often) > NODES else f"{note}."


def among_siblings(shape: Sequence[Ranks]) -> list[Ranks]:
    """Return a fixed shape's nodes by their places among their siblings, which skip no rank as the shape may."""
    known: dict[Ranks, Ranks] = {(): ()}
    born: Counter[Ranks] = Counter()
    for path in shape:
        known[path] = (*known[path[:-1]], born[path[:-1]])
        born[path[:-1]] += 1
    return [known[path] for path in shape]
