"""The adapted head beside the head in service: one evaluation of both on the same held-out requests, and the verdict.

Better is better on the new traffic beyond the paired interval's lower end, lossless, and on the old traffic no worse
than allowed, the interval's lower end again. Whatever cannot be compared is not better.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from eval.config import eval_config
from eval.measures.losslessness import FailedChecks
from eval.measures.results import LIVE
from eval.report.write import Report
from eval.run import evaluate
from inference.target.placement import AUTO

LEAST = 8  # requests of a kind: of fewer, an interval says little
PROOFS = NEW, OLD = "proof_new.jsonl", "proof_old.jsonl"


class Verdict(NamedTuple):
    """Whether the adapted head takes over, in a sentence, with the numbers behind it."""

    better: bool
    sentence: str
    evidence: dict[str, Any]


def compared(
    former: Path, adapted: Path, traffic: Path, model: dict[str, Any], tree: dict[str, Any], run: Any, out: Path
) -> Report:
    """Measure both heads on the held-out requests, and write the report that shows them side by side.

    Both draft by `tree`, or by those that they are saved with where it is empty.
    """
    workloads = [str(traffic / name) for name in PROOFS if name == NEW or (traffic / name).stat().st_size]
    settings = {"max_new_tokens": run.eval.max_new_tokens, "repeats": run.eval.repeats, "hf": False, "warmup": 1}
    dtypes = {key: given for key in ("dtype", "gate_dtype") if (given := getattr(run.eval, key)) != AUTO}
    config = eval_config(
        run=str(former), compare=[str(adapted)], workload=workloads, model=model, out=str(out), tier=LIVE,
        tree=tree, prompts=run.loop.requests, balanced=False, truncate=True, temperature=run.eval.temperature,
        engine=asdict(run.eval.engine), **settings, **dtypes,
    )  # fmt: skip
    return evaluate(config)


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
