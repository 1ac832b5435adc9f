"""What else would be worth trying after a run: a head that did better here, or else one that docs/heads.md names."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose

from eval.measures.serving import is_served
from eval.report.reading import read_report
from eval.report.view import results_of
from heads import head_config
from heads.common.target_config import best_head
from heads.common.typed import typed
from heads.formats.hub import kind_of
from train.config import RunConfig
from train.losses import ObjectiveConfig
from train.planning.plan import plan_inputs, sized, work

FREE = "suffix"  # drafts from text, by engines too, and is cheap to try (docs/choosing.md)
SERVED = "eagle3"  # the head that most engines serve (docs/heads.md, "Which head")


class Outcome(NamedTuple):
    """What a run's head reached: its kind, the target's fingerprint, the speedup at temperature 0, the training.

    `high` is the upper end of the speedup's interval, or the speedup where it has none; `seconds` are of `steps`.
    """

    head: str
    target: str
    speedup: float
    high: float
    seconds: float
    steps: int

    def __str__(self) -> str:
        """Describe it."""
        return f"{_named(self.head)} reached {self.speedup:.2f}x in {self.seconds:,.0f} s of training"


def outcomes(out: Path) -> Iterator[Outcome]:
    """Yield what the head of a run reached, by its report; nothing where that is missing or damaged."""
    try:
        report, head = read_report(out / "report.json"), kind_of(out / "head")
        cost = json.loads((out / "training.json").read_text())
        seconds, steps = cost["seconds"], cost["steps"]
    except (OSError, ValueError, KeyError):
        return
    for result in results_of(report):
        row, trusted = result.row, result.overall and not result.failed
        greedy = (row["drafter"], row["temperature"], row["batch_size"]) == (head, 0, 1)
        if trusted and greedy and row.get("speedup") is not None:
            high = (row["speedup_ci"] or [row["speedup"]])[-1]
            yield Outcome(head, report["target"].get("fingerprint", ""), row["speedup"], high, seconds, steps)


def worth_trying(run: RunConfig) -> str | None:
    """Return lines on what else to try for a run's target; None where its report has no speedup.

    It compares the head with others, and names the draft source that costs no training but an evaluation.
    """
    mine = next(outcomes(Path(run.out)), None)
    if mine is None:
        return None
    return (
        f"{_other_heads(run, mine)}\nworth trying: {FREE}, which needs no training: "
        f"python eval/run.py run={run.out} drafter=[head,{FREE}]"
    )


def _other_heads(run: RunConfig, mine: Outcome) -> str:
    """Return the comparison of a head with those of the runs in the folders beside it, by their reports.

    Without a better one among them it names the first head of docs/heads.md that none of them has, at the cost of the
    plan for all of the run's steps, of which its patience may have left out some.
    """
    out = Path(run.out)
    others = [
        outcome
        for report in sorted(out.parent.glob("*/report.json"))
        if report.parent != out
        for outcome in outcomes(report.parent)
        if outcome.target == mine.target
    ]
    best = max(others, key=lambda outcome: outcome.speedup, default=mine)
    if best.speedup > mine.high and best.head != mine.head:
        return f"{mine}; {best} of the same target: head={best.head}"
    favoured, _ = best_head(run.model.path, run.model.shape, run.model.trust_remote_code)
    measured = {mine.head, *(outcome.head for outcome in others)}
    candidates = [head for head in (favoured, SERVED) if is_served(head) or not is_served(mine.head)]
    if untried := [head for head in candidates if head not in measured]:
        all_steps = mine.seconds / mine.steps * run.trainer.steps
        seconds = all_steps * _operations(_with_head(run, untried[0])) / _operations(run)
        why = "docs/heads.md favours" if untried[0] == favoured else "most engines serve"
        return f"{mine}\nworth trying: head={_named(untried[0])}, which {why}, about {seconds:,.0f} s by the plan"
    return f"{mine}; none of the {len(measured)} heads that are measured here is clearly faster"


def _named(head: str) -> str:
    """Return a head's kind, with a remark where no engine serves it."""
    return head if is_served(head) else f"{head} (which no serving engine loads)"


def _with_head(run: RunConfig, head: str) -> RunConfig:
    """Return a run with another head, as head=… gives it to the command that is running."""
    cfg = compose("train", [f"head={head}", f"data.length={run.data.length}"])
    objective: Any = typed(ObjectiveConfig, cfg.objective)
    return replace(run, head=head_config(cfg.head), objective=objective)


def _operations(run: RunConfig) -> float:
    """Return the operations of a run, those of the target included where its features are computed in it."""
    costs = work(plan_inputs(sized(run)))
    return float(costs["head_flops"] + (costs["target_flops"] if run.features.runs_target else 0))
