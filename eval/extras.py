"""Extra sections of a report: training curves of its heads, acceptance of every tree node, sample answers."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from eval.live import Prompts, Runs
from eval.measures.metrics import median_run
from heads.common.typed import Json
from heads.common.untrusted import visible
from inference.decode import Generation
from inference.protocol import Drafter
from inference.target.tokenizer import TextStream

METRICS = "metrics.jsonl"  # a file of a run's folder, written by train/trackers.py
POINTS = 200  # maximum points of a training curve
NODES = 400  # maximum nodes of a tree
ANSWERS, QUESTION = 3, 1500  # sample answers per drafter; characters shown of a prompt's end

Records = list[Json]


def training(heads: Mapping[str, Path]) -> dict[str, dict[str, Records]]:
    """Return the training curves of heads, given their folders, from the runs' folders.

    By name, `steps` are means of the loss over stretches of steps, each at its last step; `tau` are the measurements by
    the verifier, with their intervals.
    """
    files = {name: folder.parent / METRICS for name, folder in heads.items() if folder.name == "head"}
    return {name: curves(list(records(file))) for name, file in files.items() if file.is_file()}


def records(file: Path) -> Iterator[Json]:
    """Yield a run's records; an incomplete last line of a killed run is skipped."""
    for line in file.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def curves(records: Records) -> dict[str, Records]:
    """Return the curves of a run's records."""
    steps = [record for record in records if record.get("loss") is not None]
    stretch = -(-len(steps) // POINTS) or 1
    taus = []
    for record in records:
        if record.get("tau") is not None:
            low, high = record.get("tau_ci") or (record["tau"], record["tau"])
            taus.append({"step": record["step"], "tau": record["tau"], "low": low, "high": high})
    stretches = (steps[at : at + stretch] for at in range(0, len(steps), stretch))
    losses = [{"step": some[-1]["step"], "loss": fmean(step["loss"] for step in some)} for some in stretches]
    return {"steps": losses, "tau": taus}


def trees(runs: Runs, drafters: Mapping[str, Drafter]) -> dict[str, Json]:
    """Return the trees that a session's drafters drafted, and each node's acceptance, by name.

    `paths` are the most often accepted nodes' ranks among siblings, counted from 0, from the root on; `accepted` is the
    share of the passes, `steps` in number, that accepted each.
    """
    summaries = {}
    for name, drafter in drafters.items():
        steps = [step for repeats in runs[name] for step in median_run(repeats).steps]
        counts = Counter(step.ranks[:depth] for step in steps for depth in range(1, len(step.ranks) + 1))
        often = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:NODES]
        paths, accepted = list(map(list, often)), [counts[path] / len(steps) for path in often]
        if any(step.drafted for step in steps):
            summaries[name] = {"label": drafter.tree, "steps": len(steps), "paths": paths, "accepted": accepted}
    return summaries


def answers(runs: Runs, drafters: Sequence[str], prompts: Prompts, tokenizer: Any) -> Records:
    """Return, by prompt and drafter, the end of the first prompts and the `pieces` of the first answer."""
    return [
        {
            "drafter": name,
            "prompt": prompt.id,
            "question": visible(str(tokenizer.decode(prompt.token))[-QUESTION:]),
            "pieces": pieces(runs[name][index][0], tokenizer),
        }
        for index, prompt in enumerate(prompts[:ANSWERS])
        for name in drafters
    ]


def pieces(run: Generation, tokenizer: Any) -> Records:
    """Return a run's `text`, divided into pieces of whole characters.

    With each is its last token's `source` ("prefill", "draft" or "bonus") and its `step`'s number, 0 for the prefill.
    """
    passes = [0] + [index for index, step in enumerate(run.steps, 1) for _ in range(step.committed)]
    stream, records = TextStream(tokenizer), []
    piece = {}
    for token, source, index in zip(run.tokens, run.origins, passes, strict=True):
        piece = {"source": source, "step": index}
        if text := stream.push(token):
            records.append({"text": visible(text), **piece})
    if rest := stream.rest():
        records.append({"text": visible(rest), **piece})
    return records
