"""Results of served answers as rows of the report, and the losslessness check of their texts: pure functions.

Counts of passes and tokens are sums over all repeats; times are those of each request's median repeat. Concurrent
requests count with a share of the elapsed time each, and the shares add up to it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from eval.endpoint.client import Answer, Request
from eval.endpoint.counters import Verified, together
from eval.live.interleaved import PLAIN
from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Divergence, Gate, verdict_of
from eval.measures.metrics import ratio
from eval.measures.results import Row

SHOWN = 24  # characters of a text, from the first difference


class Timed(NamedTuple):
    """An answer, the share of its seconds that it counts with, and the counts of its drafts, None if unknown."""

    answer: Answer
    share: float
    verified: Verified | None

    @property
    def seconds(self) -> float:
        """Seconds from the request to the last token."""
        return self.answer.latency_s * self.share

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the last; None without streaming."""
        first = self.answer.ttft_s
        return None if first is None else (self.answer.latency_s - first) * self.share


class Runs(NamedTuple):
    """One server's answers to a workload: the repeats of each request, and the counts of drafts of each batch."""

    answers: list[list[Timed]]
    verified: list[Verified]

    def texts(self) -> list[list[str]]:
        """Return the texts of every request's repeats."""
        return [[run.answer.text for run in repeats] for repeats in self.answers]

    def medians(self, indices: Sequence[int]) -> list[Timed]:
        """Return each request's repeat with the median latency, the lower one of two."""
        ordered = [sorted(self.answers[i], key=lambda run: run.seconds) for i in indices]
        return [repeats[(len(repeats) - 1) // 2] for repeats in ordered]

    def by_request(self, indices: Sequence[int]) -> list[Verified]:
        """Return each request's counts of drafts, summed over its repeats; nothing if one of them is unknown."""
        counts = [[run.verified for run in self.answers[i] if run.verified is not None] for i in indices]
        complete = all(len(repeats) == len(self.answers[i]) for repeats, i in zip(counts, indices, strict=True))
        return [together(repeats) for repeats in counts] if complete else []


@dataclass(frozen=True)
class Session:
    """Settings that all rows of one measurement share; `start` is the index of its first request in the gates."""

    workload: str
    temperature: float
    batch_size: int
    seed: int
    start: int
    requests: Sequence[Request]

    def categories(self) -> dict[str, list[int]]:
        """Return the indices of each category's requests; nothing if there is only one category."""
        indices: dict[str, list[int]] = {}
        for i, request in enumerate(self.requests):
            indices.setdefault(request.category or "other", []).append(i)
        return indices if len(indices) > 1 else {}


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Check greedy texts for losslessness: the baseline's first text of a prompt against all repeats with drafts.

    Logits are not visible, so a difference is a failure, unless the baseline's own repeats differ there or earlier:
    then rounding decides, and the difference is a near tie.

    Args:
        plain: the baseline's texts, the repeats of each prompt.
        drafted: the texts of the same prompts with speculation.
        ids: the prompts' ids.
    """
    verdicts: list[str] = []
    ties: list[Divergence] = []
    failures: list[Divergence] = []
    for ours, theirs, prompt in zip(plain, drafted, ids, strict=True):
        unstable = min((at for other in ours if (at := differs(ours[0], other)) is not None), default=None)
        differences = [(at, other) for other in theirs if (at := differs(ours[0], other)) is not None]
        if not differences:
            verdicts.append("identical")
            continue
        at, other = min(differences)
        tied = unstable is not None and at >= unstable
        verdicts.append("near_tie" if tied else "failed")
        shown = f"{other[at : at + SHOWN]!r} instead of {ours[0][at : at + SHOWN]!r}"
        (ties if tied else failures).append(Divergence(prompt, at, None, None, None, shown))
    return verdict_of(verdicts, ties, failures)


def differs(one: str, other: str) -> int | None:
    """Return the index of the first character at which two texts differ, or one ends; None if they are equal."""
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def row_of(name: str, runs: Runs, base: Runs | None, gate: Gate, session: Session, kind: tuple[str, list[int]]) -> Row:
    """Return a server's row of the report.

    Args:
        name: the drafter's name.
        runs: the server's answers.
        base: the baseline's answers; None: no speedup is reported.
        gate: the losslessness check of all prompts at this batch size.
        session: the settings that the rows share.
        kind: a category, empty for the whole workload, and the indices of its requests.
    """
    category, indices = kind
    medians, by_request = runs.medians(indices), runs.by_request(indices)
    total = together(by_request if category else runs.verified)
    groups = [session.requests[i].conversation for i in indices]
    streamed = all(run.decode_s is not None for run in medians)
    repeats = [run for i in indices for run in runs.answers[i]]
    rates = [count / total.passes for count in total.by_depth if count]
    checked = gate.among([session.start + i for i in indices]) if session.temperature == 0 else UNCHECKED
    row = Row(
        drafter=name,
        rule="none" if name == PLAIN else "greedy" if session.temperature == 0 else "the server's",
        tree="none" if name == PLAIN else f"served, depth {len(total.by_depth)}" if total.by_depth else "served",
        workload=f"{session.workload}/{category}" if category else session.workload,
        temperature=session.temperature,
        batch_size=session.batch_size,
        steps=total.passes,
        tokens=sum(run.answer.decoded for run in repeats),
        tau=total.tau,
        tau_ci=_tau_interval(by_request, session.seed, groups),
        tau_request_mean=_mean([counts.tau for counts in by_request]),
        accepted_by_depth=rates,
        conditional_by_depth=[rate / above for above, rate in zip([1.0, *rates], rates, strict=False)],
        draft_tokens=total.drafted or 0,
        accepted_per_draft_token=ratio(total.accepted, total.drafted or 0),
        tokens_per_second=_speed(medians),
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        overlap_headroom=None,
        seconds={"draft": 0.0, "verify": 0.0, "other": sum(run.decode_s or 0.0 for run in repeats)},
        latency_s=statistics.median(run.answer.latency_s for run in medians),
        memory_bytes=0,
        lossless=checked.counts(),
        category=category,
        prompts=len(indices),
        definitions=_definitions(total, by_request),
        tau_within_depth=[1 + sum(rates[: depth + 1]) for depth in range(len(rates))],
        by_request=_quantiles(medians, by_request, None),
        prefill_s=sum(run.seconds - (run.decode_s or 0.0) for run in medians) if streamed else 0.0,
        whole_tokens_per_second=_whole_speed(medians),
    )
    if base is None:
        return row
    return replace(row, **_speedups(medians, base.medians(indices), by_request, groups, session.seed))


def _speedups(
    medians: list[Timed], plain: list[Timed], by_request: list[Verified], groups: Sequence[int], seed: int
) -> dict[str, Any]:
    """Return the columns of a row that compare it with the baseline."""
    whole, plain_whole = ([[float(run.answer.tokens), run.seconds] for run in runs] for runs in (medians, plain))
    columns = {
        "by_request": _quantiles(medians, by_request, plain),
        "whole_speedup": _over(_whole_speed(medians), _whole_speed(plain)),
        "whole_speedup_ci": metrics.paired_interval(whole, plain_whole, seed, groups),
    }
    decode, base = _decoding(medians), _decoding(plain)
    if not decode or not base:  # without streaming, the prefill's time is unknown
        return columns
    return columns | {
        "speedup": _over(_speed(medians), _speed(plain)),
        "speedup_ci": metrics.paired_interval(decode, base, seed, groups),
    }


def _decoding(runs: Sequence[Timed]) -> list[list[float]]:
    """Return each request's tokens after the first, and the seconds for them; nothing if one was not streamed."""
    streamed = [[float(run.answer.decoded), run.decode_s] for run in runs if run.decode_s is not None]
    return streamed if len(streamed) == len(runs) else []


def _speed(runs: Sequence[Timed]) -> float | None:
    """Return the tokens per second of decoding, without the prefill."""
    columns = _decoding(runs)
    return ratio(sum(tokens for tokens, _ in columns), sum(seconds for _, seconds in columns))


def _whole_speed(runs: Sequence[Timed]) -> float | None:
    """Return the tokens per second, end to end."""
    return ratio(sum(run.answer.tokens for run in runs), sum(run.seconds for run in runs))


def _over(fast: float | None, slow: float | None) -> float | None:
    return None if fast is None or slow is None else ratio(fast, slow)


def _quantiles(
    runs: Sequence[Timed], by_request: Sequence[Verified], plain: Sequence[Timed] | None
) -> dict[str, dict[str, float]]:
    """Return the quantiles over the requests of each known metric."""
    values: dict[str, list[float | None]] = {
        "tau": [counts.tau for counts in by_request],
        "tokens_per_second": [_speed([run]) for run in runs],
        "latency_s": [run.answer.latency_s for run in runs],
        "ttft_s": [run.answer.ttft_s for run in runs],
    }
    if plain is not None:
        values["speedup"] = [_over(_speed([run]), _speed([base])) for run, base in zip(runs, plain, strict=True)]
    return {name: quantiles for name, column in values.items() if (quantiles := metrics.quantiles(column))}


def _tau_interval(by_request: Sequence[Verified], seed: int, groups: Sequence[int]) -> metrics.Interval | None:
    """Return tau's confidence interval by resampling of conversations."""
    if not by_request:
        return None
    committed = [[counts.accepted + counts.passes, counts.passes] for counts in by_request]
    counts = torch.tensor(committed, dtype=torch.float64)
    return metrics.bootstrap(metrics.within(counts, groups), lambda total: total[:, 0] / total[:, 1], seed)


def _definitions(total: Verified, by_request: Sequence[Verified]) -> dict[str, float | None]:
    """Return the published definitions of acceptance, by the names of `metrics.DEFINITIONS`."""
    verified = None if total.drafted is None else total.drafted + total.passes
    return {
        "mean_acceptance_length": total.tau,
        "mean_acceptance_length_by_request": _mean([counts.tau for counts in by_request]),
        "accepted_per_pass": ratio(total.accepted, total.passes),
        "accepted_per_pass_by_request": _mean([ratio(counts.accepted, counts.passes) for counts in by_request]),
        "draft_acceptance_rate": ratio(total.accepted, total.drafted or 0),
        "committed_per_verified": ratio(total.accepted + total.passes, verified or 0),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return ratio(sum(numbers), len(numbers))
