"""Generations with known answers, a row of a report, and a target that only says what it is."""

from collections.abc import Sequence
from typing import Any

from eval.measures.results import ResultRow
from eval.report import render
from eval.report.write import Report
from heads.formats.store import TargetSpec
from inference.decode import Generation, Step
from inference.target.target import Target

ROW = ResultRow(
    drafter="eagle",
    rule="point mass",
    tree="chain-2",
    workload="tiny",
    temperature=0.0,
    batch_size=1,
    steps=12,
    tokens=24,
    tau=2.03,
    tau_ci=(1.81, 2.24),
    tau_request_mean=2.1,
    accepted_by_depth=[0.75, 0.28],
    conditional_by_depth=[0.75, 0.37],
    draft_tokens=24,
    accepted_per_draft_token=0.5,
    tokens_per_second=123.4,
    speedup=1.77,
    speedup_ci=(1.61, 1.93),
    speedup_hf=2.46,
    seconds={"draft": 0.12, "verify": 0.24, "other": 0.012},
    latency_s=0.5,
    memory_bytes=2**20,
    lossless={"checked": 8, "identical": 7, "near_tie": 1, "failed": 0},
)


def markdown(report: Report) -> str:
    """Return a report's Markdown."""
    return render.markdown(report.as_dict(), report.failures())


def generation(
    tokens: int | Sequence[int],
    steps: Sequence[tuple[int, int]] = (),
    seconds: float = 1.0,
    logit_gaps: Sequence[float] = (),
) -> Generation:
    """Return a run: its tokens or their number, (drafted, accepted) of each step, and the seconds of all decoding."""
    made = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    part = seconds / max(len(steps), 1)
    return Generation(
        tokens=made,
        origins=["prefill"] + ["bonus"] * (len(made) - 1),
        steps=[
            Step(
                drafted=drafted,
                accepted=accepted,
                committed=accepted + 1,
                draft_s=part / 4,
                verify_s=part / 2,
                other_s=part / 4,
                rule="point_mass" if drafted else "none",
                ranks=(0,) * accepted,
            )
            for drafted, accepted in steps
        ],
        logit_gaps=list(logit_gaps),
        prefill_s=0.1,
        decode_s=seconds,
        finish_reason="length",
    )


class StubTarget(Target):
    """A target without a model."""

    def __init__(self, **facts: Any) -> None:
        self.tokenizer: Any = None
        self.max_model_len = 64
        self.spec = TargetSpec("stub", 64, 4, 2, "f00d")
        self.__dict__.update(facts)
