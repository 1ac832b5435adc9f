"""What a report holds besides its rows: how its heads were trained, their trees, and answers by who wrote what."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from data.prompts import Prompt
from inference.decode import Generation
from inference.drafters import Drafter
from inference.drafters.head import HeadDrafter
from inference.policy import CONFIDENT
from inference.stream import CONTROL, TextStream

METRICS = "metrics.jsonl"  # of a run's folder, by train/trackers.py
POINTS = 200  # of a training curve; more cannot be seen
ANSWERS = 3
QUESTION = 1500  # characters of a prompt's end

Records = list[dict[str, Any]]


def training(heads: Mapping[str, Path]) -> dict[str, dict[str, Records]]:
    """Return the training curves of the heads whose run's folder has them.

    Args:
        heads: the heads' folders by the report's names.

    Returns:
        By name, `steps`: the means of loss and accuracy by depth over stretches of steps, each at its last step;
        `tau`: each measurement by the verifier, with its interval.
    """
    files = {name: folder.parent / METRICS for name, folder in heads.items() if folder.name == "head"}
    return {name: curves(list(_records(file))) for name, file in files.items() if file.is_file()}


def _records(file: Path) -> Iterator[dict[str, Any]]:
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


def trees(drafters: Mapping[str, Drafter]) -> dict[str, dict[str, Any]]:
    """Return the trees of the heads: a rank path a node, and for the kinds that follow confidence one a depth."""
    found = {}
    for name, drafter in drafters.items():
        if isinstance(drafter, HeadDrafter):
            tree, note = drafter.config, "The shape is fixed."
            paths = [[0] * depth for depth in range(1, tree.depth + 1)]
            if tree.kind in CONFIDENT:
                note = (
                    f"The shape follows the head's confidence, {tree.nodes} nodes at most; drawn is a node a depth, "
                    "with P(a ≥ d)."
                )
            else:
                paths = [list(path) for path in tree.shape()]
            found[name] = {"label": tree.label, "note": note, "paths": paths}
    return found


def answers(
    made: Mapping[str, Sequence[Sequence[Generation]]],
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    tokenizer: Any,
) -> Records:
    """Return what the drafters made of the first prompts, piece by piece with who wrote it.

    Args:
        made: by name, by prompt, the repeats; the first counts.
        drafters: those to show.
        prompts: in the same order.
        tokenizer: the target's.

    Returns:
        By drafter and prompt the prompt's end and its `pieces`: text, source ("prefill", "draft" or "bonus") and the
        number of the target pass that committed it, 0 for the prefill.
    """
    found = []
    for index, prompt in enumerate(prompts[:ANSWERS]):
        question = str(tokenizer.decode(prompt.token))[-QUESTION:].translate(CONTROL)
        for name in drafters:
            run = made[name][index][0]
            steps = [[step.drafted, step.accepted, step.committed] for step in run.steps]
            told = {"drafter": name, "prompt": prompt.id, "question": question}
            found.append({**told, "pieces": pieces(run, tokenizer), "steps": steps})
    return found


def pieces(run: Generation, tokenizer: Any) -> list[tuple[str, str, int]]:
    """Return a run's text in pieces of whole characters, with the source and the pass of each one's last token."""
    passes = [0] + [number for number, step in enumerate(run.steps, 1) for _ in range(step.committed)]
    stream, found = TextStream(tokenizer), []
    source, number = "prefill", 0
    for token, source, number in zip(run.tokens, run.sources, passes, strict=False):
        if text := stream.push(token):
            found.append((text.translate(CONTROL), source, number))
    if rest := stream.rest():
        found.append((rest.translate(CONTROL), source, number))
    return found
