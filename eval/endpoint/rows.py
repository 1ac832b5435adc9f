"""Results of served answers as rows of the report, and the losslessness check of their texts: pure functions.

Counts of passes and tokens are sums over all repeats; times are those of each request's median repeat. Concurrent
requests count with a share of the elapsed time each, and the shares add up to it, without the time in which none was
under way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from eval.endpoint.client import Answer
from eval.live.interleaved import PLAIN, judged
from eval.live.request_rate import Served, waited
from eval.measures.losslessness import Divergence, Gate, gate_of, shared_length
from eval.measures.metrics import Passes, together
from eval.measures.results import UNTIMED, Measurement, Request, Row, Source, Subset, result
from inference.decode import Generation

SHOWN = 24  # characters of a text, from the first difference


class Runs(NamedTuple):
    """One server's answers to a workload: the repeats of each request, and the counts of passes of each batch."""

    answers: list[list[Answer]]
    passes: list[Passes]

    def texts(self) -> list[list[str]]:
        """Return the texts of every request's repeats."""
        return [[run.text for run in repeats] for repeats in self.answers]


def _measured(repeats: Sequence[Answer]) -> Request:
    """Return a request with the times of its median repeat, the lower one of two, and the counts of all repeats."""
    run = sorted(repeats, key=lambda run: run.seconds)[(len(repeats) - 1) // 2]
    passes = [repeat.passes for repeat in repeats if repeat.passes is not None]
    return Request(
        passes=together(passes) if len(passes) == len(repeats) else None,
        decoding=None if run.decode_s is None else (run.decoded, run.decode_s),
        end_to_end=(run.tokens, run.seconds),
        prefill_s=None if run.decode_s is None else run.seconds - run.decode_s,
        seconds=UNTIMED | {"other": sum(repeat.decode_s or 0.0 for repeat in repeats)},
        waits={"latency_s": run.latency_s, "ttft_s": run.ttft_s},
    )


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Check greedy texts for losslessness: the baseline's first text of a prompt against all repeats with drafts.

    Logits are not visible, so a difference is a failure, unless the baseline's own repeats differ there or earlier:
    then rounding decides, and the difference is a near tie.
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
    return None if one == other else shared_length(one, other)


def rows(by_server: Mapping[str, Runs], gates: Mapping[str, Gate], measurement: Measurement) -> list[Row]:
    """Return the servers' rows of a measurement, given their answers by drafter name; the baseline's may be missing."""
    requests = {name: [_measured(repeats) for repeats in runs.answers] for name, runs in by_server.items()}
    timed = [
        judged(_row(name, runs, subset, subset.of(requests[name])), subset, requests, gates)
        for subset in measurement.parts(len(next(iter(requests.values()))))
        for name, runs in by_server.items()
    ]
    if measurement.request_rate is None:
        return timed
    rounds = {name: [[_served(run) for run in repeats] for repeats in runs.answers] for name, runs in by_server.items()}
    return waited(timed, {PLAIN: next(iter(rounds.values())), **rounds}, measurement)


def _served(answer: Answer) -> Served:
    """Return an answer whose request arrived at a rate as `waited` reads it: its times, and as many tokens."""
    generation = Generation(tokens=[0] * answer.tokens, steps=[], latency_s=answer.latency_s)
    return Served(generation, answer.arrived, answer.queue_s, answer.ttft_s)


def _row(name: str, runs: Runs, subset: Subset, requests: Sequence[Request]) -> Row:
    counts = [request.passes for request in requests if request.passes is not None]
    total = together((counts if len(counts) == len(requests) else []) if subset.category else runs.passes)
    rule = "none" if name == PLAIN else "greedy" if subset.measurement.temperature == 0 else "the server's"
    depths = f"served, depth {len(total.by_depth)}" if total.by_depth else "served"
    row = result(Source(name, rule, "none" if name == PLAIN else depths), subset, requests, total)
    return replace(row, tokens=sum(run.decoded for repeats in subset.of(runs.answers) for run in repeats))
