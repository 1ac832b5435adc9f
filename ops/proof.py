"""The comparison of an adapted head with the head in service, on the same held-out requests, and the verdict.

The adapted head is better if its τ on the new traffic is higher by the paired interval's lower end, it is lossless, and
its τ on the old traffic has fallen by no more than allowed, by the lower end again. Without a comparison it is not.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from eval.measures.losslessness import FailedChecks
from eval.measures.results import LIVE
from eval.report.write import Report, read_report, report_of
from inference.target.placement import AUTO
from ops.commands import overrides_of, run_command
from train.config import EvalSettings

FAILED = 1  # exit status of an evaluation in which a head is not lossless, which its report says
LEAST = 8  # requests of a kind; with fewer an interval is uninformative
PROOFS = NEW, OLD = "proof_new.jsonl", "proof_old.jsonl"


class Verdict(NamedTuple):
    """The verdict on the adapted head in a sentence, with its numbers."""

    better: bool
    sentence: str
    evidence: dict[str, Any]


def compared(
    former: Path, adapted: Path, traffic: Path, out: Path, requests: int, settings: EvalSettings,
    model: dict[str, Any], tree: dict[str, Any],
) -> Report:  # fmt: skip
    """Measure both heads on a number of held-out requests of each kind, and return the report in `out`.

    Both draft by `tree`; if that is empty, each by its saved tree.
    """
    workloads = [str(traffic / name) for name in PROOFS if name == NEW or (traffic / name).stat().st_size]
    values = {
        "run": str(former), "compare": [str(adapted)], "workload": workloads, "out": str(out), "tier": LIVE,
        "model": model, "tree": tree, "prompts": requests, "balanced": False, "truncate": True, "hf": False,
        "warmup": 1, "max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature,
        "repeats": settings.repeats, "engine": asdict(settings.engine),
        **{key: value for key in ("dtype", "gate_dtype") if (value := getattr(settings, key)) != AUTO},
    }  # fmt: skip
    try:
        run_command("eval/run.py", overrides_of(values))
    except SystemExit as ended:
        if ended.code != FAILED:
            raise
    return report_of(read_report(out / "report.json"), str(out / "report.json"))


def verdict(report: Report, adapted: Path, old_loss: float) -> Verdict:
    """Return the verdict of a report in which the head in service comes first."""
    name = next((row.drafter for row in report.rows if row.drafter.endswith(str(adapted))), "")
    failed = FailedChecks.of(report.gates, report.sampled).drafter(name, [1])
    taus = {(row.workload, row.temperature): row.tau for row in report.rows if row.drafter not in ("plain", name)}
    pairs: dict[str, list[dict[str, Any]]] = {NEW: [], OLD: []}
    for pair in report.extras.get("paired", []):
        if pair["drafter"] == name:
            former = taus.get((pair["workload"], pair["temperature"])) or 0.0
            pairs[pair["workload"]].append({**pair["tau"], "former": former, "prompts": pair["prompts"]})
    evidence = {"lossless": name in report.gates and not failed, "new": pairs[NEW], "old": pairs[OLD]}
    new, old = (
        "; ".join("τ {former:.2f} {difference:+.2f} [{low:+.2f}, {high:+.2f}] of {prompts} requests".format(**pair)
                  for pair in pairs[kind]) or "nothing to compare"
        for kind in PROOFS
    )  # fmt: skip
    measured = {row.workload for row in report.rows}
    few = any(min((pair["prompts"] for pair in pairs[kind]), default=0) < LEAST for kind in PROOFS if kind in measured)
    sentence, better = f"better on the new traffic: {new}; on the old: {old}; lossless", False
    if not evidence["lossless"]:
        sentence = "the adapted head fails the losslessness check"
    elif few or not pairs[NEW]:
        sentence = f"too few requests to compare: {new}; on the old: {old}"
    elif not all(pair["low"] > 0 for pair in pairs[NEW]):
        sentence = f"not better on the new traffic: {new}"
    elif not all(pair["low"] >= -old_loss * pair["former"] for pair in pairs[OLD]):
        sentence = f"better on the new traffic ({new}), but the old is forgotten: {old}"
    else:
        better = True
    return Verdict(better, sentence, evidence)
