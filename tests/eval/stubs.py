"""Generations with known answers, and a target that only says what it is."""

from collections.abc import Sequence
from typing import Any

from inference.decode import Generation, Step
from inference.target import Target


def generation(
    tokens: int | Sequence[int],
    steps: Sequence[tuple[int, int]] = (),
    seconds: float = 1.0,
    gaps: Sequence[float] = (),
) -> Generation:
    """Return a run: its tokens or their number, (drafted, accepted) of each step, and the seconds of all decoding."""
    made = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    part = seconds / max(len(steps), 1)
    return Generation(
        tokens=made,
        sources=["prefill"] + ["bonus"] * (len(made) - 1),
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
        gaps=list(gaps),
        prefill_s=0.1,
        decode_s=seconds,
        finish="length",
    )


class StubTarget(Target):
    """A target without a model."""

    def __init__(self, **facts: Any) -> None:
        self.tokenizer: Any = None
        self.context = 64
        self.__dict__.update(facts)
