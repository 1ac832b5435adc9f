"""The adapted head beside the head in service: one evaluation of both on the same held-out requests, and the verdict.

Better is better on the new traffic beyond the paired interval's lower end, lossless, and on the old traffic no worse
than allowed, the interval's lower end again. Whatever cannot be compared is not better.
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

LEAST = 8  # requests of a kind: of fewer, an interval says little
PROOFS = NEW, OLD = "proof_new.jsonl", "proof_old.jsonl"


class Verdict(NamedTuple):
    """Whether the adapted head takes over, in a sentence, with the numbers behind it."""

    better: bool
    sentence: str
    evidence: dict[str, Any]


def compared(
    former: Path, adapted: Path, traffic: Path, out: Path, requests: int, settings: EvalSettings,
    model: dict[str, Any], tree: dict[str, Any],
) -> Report:  # fmt: skip
    """Measure both heads on that many held-out requests of each kind, and return the report in `out`.

    Both draft by `tree`, or by those that they are saved with where it is empty.
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
    file = out / "report.json"
    return report_of(read_report(file), str(file))


def verdict(report: Report, adapted: Path, old_loss: float) -> Verdict:
    """Return the verdict of a report in which the head in service comes first."""
    name = next((row.drafter for row in report.rows if row.drafter.endswith(str(adapted))), "")
    failed = FailedChecks.of(report.gates, report.sampled).source(name, [1])
    pairs = [pair for pair in report.extras.get("paired", []) if pair["drafter"] == name]
    taus = {(row.workload, row.temperature): row.tau for row in report.rows if row.drafter not in ("plain", name)}
    pairs_of: dict[str, list[dict[str, Any]]] = {NEW: [], OLD: []}
    for pair in pairs:
        of = taus.get((pair["workload"], pair["temperature"])) or 0.0
        pairs_of[pair["workload"]].append({**pair["tau"], "former": of, "prompts": pair["prompts"]})
    evidence = {"lossless": name in report.gates and not failed, "new": pairs_of[NEW], "old": pairs_of[OLD]}
    gains = "; ".join(map(_in_words, pairs_of[NEW])) or "nothing to compare"
    losses = "; ".join(map(_in_words, pairs_of[OLD])) or "no old requests"
    few = [
        name for name, pairs in pairs_of.items()
        if any(row.workload == name for row in report.rows) and min((p["prompts"] for p in pairs), default=0) < LEAST
    ]  # fmt: skip
    if not evidence["lossless"]:
        return Verdict(False, "the adapted head fails the losslessness check", evidence)
    if few or not pairs_of[NEW]:
        return Verdict(False, f"too few requests to compare: {gains}; on the old: {losses}", evidence)
    if not all(pair["low"] > 0 for pair in pairs_of[NEW]):
        return Verdict(False, f"not better on the new traffic: {gains}", evidence)
    if not all(pair["low"] >= -old_loss * pair["former"] for pair in pairs_of[OLD]):
        return Verdict(False, f"better on the new traffic ({gains}), but the old is forgotten: {losses}", evidence)
    return Verdict(True, f"better on the new traffic: {gains}; on the old: {losses}; lossless", evidence)


def _in_words(pair: dict[str, Any]) -> str:
    change = f"{pair['difference']:+.2f} [{pair['low']:+.2f}, {pair['high']:+.2f}]"
    return f"τ {pair['former']:.2f} {change} of {pair['prompts']} requests"
