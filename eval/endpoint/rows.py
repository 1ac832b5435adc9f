"""Results of served answers as rows of the report, and the losslessness check of their texts: pure functions.

Counts of passes and tokens are sums over all repeats; times are those of each request's median repeat. Concurrent
requests count with a share of the elapsed time each, and the shares add up to it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from eval.endpoint.client import Answer
from eval.live.interleaved import PLAIN
from eval.measures.losslessness import UNCHECKED, Divergence, Gate, gate_of
from eval.measures.metrics import Passes, together
from eval.measures.results import UNTIMED, Measurement, Request, Row, Source, Subset, result, with_speedups

SHOWN = 24  # characters of a text, from the first difference


class Timed(NamedTuple):
    """An answer, the weight of its seconds, and the counts of its passes, None if unknown."""

    answer: Answer
    weight: float
    passes: Passes | None

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last token."""
        return self.answer.latency_s * self.weight

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None without streaming."""
        first = self.answer.ttft_s
        return None if first is None else (self.answer.latency_s - first) * self.weight


class Runs(NamedTuple):
    """One server's answers to a workload: the repeats of each request, and the counts of passes of each batch."""

    answers: list[list[Timed]]
    passes: list[Passes]

    def texts(self) -> list[list[str]]:
        """Return the texts of every request's repeats."""
        return [[run.answer.text for run in repeats] for repeats in self.answers]

    def medians(self, indices: Sequence[int]) -> list[Timed]:
        """Return each request's repeat with the median latency, the lower one of two."""
        ordered = [sorted(self.answers[i], key=lambda run: run.seconds) for i in indices]
        return [repeats[(len(repeats) - 1) // 2] for repeats in ordered]

    def measured(self, indices: Sequence[int]) -> list[Request]:
        """Return each request as it was measured: the times of its median repeat, the counts of all its repeats."""
        counts: list[Passes | None] = [*self.by_request(indices)] or [None] * len(indices)
        return [
            Request(
                passes=passes,
                decoding=None if run.decode_s is None else (run.answer.decoded, run.decode_s),
                end_to_end=(run.answer.tokens, run.seconds),
                prefill_s=None if run.decode_s is None else run.seconds - run.decode_s,
                seconds=UNTIMED | {"other": sum(repeat.decode_s or 0.0 for repeat in self.answers[i])},
                waits={"latency_s": run.answer.latency_s, "ttft_s": run.answer.ttft_s},
            )
            for i, run, passes in zip(indices, self.medians(indices), counts, strict=True)
        ]

    def by_request(self, indices: Sequence[int]) -> list[Passes]:
        """Return each request's counts, summed over its repeats; nothing if one of them is unknown."""
        counts = [[run.passes for run in self.answers[i] if run.passes is not None] for i in indices]
        complete = all(len(repeats) == len(self.answers[i]) for repeats, i in zip(counts, indices, strict=True))
        return [together(repeats) for repeats in counts] if complete else []


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Check greedy texts for losslessness: the baseline's first text of a prompt against all repeats with drafts.

    Logits are not visible, so a difference is a failure, unless the baseline's own repeats differ there or earlier:
    then rounding decides, and the difference is a near tie.

    Args:
        plain: the baseline's texts, the repeats of each prompt.
        drafted: the texts of the same prompts with speculation.
        ids: the prompts' ids.
    """

    def compared(ours: Sequence[str], theirs: Sequence[str], prompt: str) -> tuple[Divergence | None, bool]:
        unstable = min((at for other in ours if (at := differs(ours[0], other)) is not None), default=None)
        differences = [(at, other) for other in theirs if (at := differs(ours[0], other)) is not None]
        if not differences:
            return None, False
        at, other = min(differences)
        shown = f"{other[at : at + SHOWN]!r} instead of {ours[0][at : at + SHOWN]!r}"
        return Divergence(prompt, at, None, None, None, shown), unstable is not None and at >= unstable

    return gate_of(compared(*texts) for texts in zip(plain, drafted, ids, strict=True))


def differs(one: str, other: str) -> int | None:
    """Return the index of the first character at which two texts differ, or one ends; None if they are equal."""
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def row_of(name: str, runs: Runs, base: Runs | None, gate: Gate, measurement: Measurement, subset: Subset) -> Row:
    """Return a server's row of the report.

    Args:
        name: the drafter's name.
        runs: the server's answers.
        base: the baseline's answers; None: no speedup is reported.
        gate: the losslessness check of all prompts at this batch size.
        measurement: the settings that the rows share.
        subset: the requests that count.
    """
    indices, plain = subset.indices, name == PLAIN
    total = together(runs.by_request(indices) if subset.category else runs.passes)
    rule = "none" if plain else "greedy" if measurement.temperature == 0 else "the server's"
    depths = f"served, depth {len(total.by_depth)}" if total.by_depth else "served"
    checked = gate.among([measurement.start + i for i in indices]) if measurement.temperature == 0 else UNCHECKED
    measured = runs.measured(indices)
    row = replace(
        result(Source(name, rule, "none" if plain else depths), measurement, subset, measured, total),
        tokens=sum(run.answer.decoded for i in indices for run in runs.answers[i]),
        lossless=checked.counts(),
    )
    return row if base is None else with_speedups(row, measured, base.measured(indices), subset, measurement.seed)
