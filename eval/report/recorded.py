"""Reading losslessness checks back from report.json.

Raises ValueError, KeyError, TypeError or AttributeError for what eval/ does not write.
"""

from dataclasses import replace
from typing import Any

from eval.measures.chi_square import ChiSquareTest
from eval.measures.losslessness import Divergence, Gate, SampledGate
from heads.common.typed import fits, typed
from heads.common.untrusted import shown

COUNTS = ("checked", "identical", "near_tie", "failed")


def greedy_check(record: Any) -> Gate:
    """Return the check of a drafter at temperature 0; one that failed without a failure is that of a lossy rule."""
    gate = typed(Gate, {key: record[key] for key in (*COUNTS, "first")})
    ties = tuple(typed(Divergence, tie) for tie in record.get("ties", []))
    return replace(gate, ties=ties, lossy=gate.passed and not record["passed"])


def sampled_check(record: Any) -> SampledGate:
    """Return the check of a drafter above temperature 0."""
    equal, test = record["coupled"], record["law"]
    statistics = None if test is None else {key: value for key, value in test.items() if key != "control_caught"}
    sizes, failed_at = tuple(equal.get("batch_sizes", (1,))), equal.get("failed_at")
    if not fits(tuple[int, ...], sizes) or not fits(int | None, failed_at):
        raise ValueError(f"batch_sizes {shown(sizes)} and failed_at {shown(failed_at)} are no batch sizes")
    return SampledGate(
        drafter=str(record["drafter"]),
        temperature=float(record["temperature"]),
        coupled=greedy_check({**equal, "passed": equal["checked"] > 0 and not equal["failed"]}),
        distribution=None if statistics is None else typed(ChiSquareTest, statistics),
        why=str(record["why_no_law"]),
        batch_sizes=sizes,
        failed_at=failed_at,
    )
