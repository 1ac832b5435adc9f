"""Losslessness checks as report.json records them, read back.

Raises ValueError, KeyError, TypeError or AttributeError for what eval/ does not write.
"""

from dataclasses import replace
from typing import Any

from eval.measures.chi_square import LawTest
from eval.measures.losslessness import Divergence, Gate, SampledGate
from heads.common.typed import fits, typed
from heads.common.untrusted import shown

COUNTS = ("checked", "identical", "near_tie", "failed")


def greedy_check(told: Any) -> Gate:
    """Return the check of a drafter at temperature 0; one that failed without a failure is that of a lossy rule."""
    gate = typed(Gate, {key: told[key] for key in (*COUNTS, "first")})
    ties = tuple(typed(Divergence, each) for each in told.get("ties", []))
    return replace(gate, ties=ties, lossy=gate.passed and not told["passed"])


def sampled_check(told: Any) -> SampledGate:
    """Return the check of a drafter above temperature 0."""
    equal, drawn = told["coupled"], told["law"]
    law = None if drawn is None else {key: value for key, value in drawn.items() if key != "control_caught"}
    sizes, failed_at = tuple(equal.get("batch_sizes", (1,))), equal.get("failed_at")
    if not fits(tuple[int, ...], sizes) or not fits(int | None, failed_at):
        raise ValueError(f"batch_sizes {shown(sizes)} and failed_at {shown(failed_at)} are no batch sizes")
    return SampledGate(
        drafter=str(told["drafter"]),
        temperature=float(told["temperature"]),
        coupled=greedy_check({**equal, "passed": equal["checked"] > 0 and not equal["failed"]}),
        law=None if law is None else typed(LawTest, law),
        why=str(told["why_no_law"]),
        batch_sizes=sizes,
        failed_at=failed_at,
    )
