"""Served answers as rows of the report, and the gate that compares their texts: pure functions.

Counts of passes and tokens are those of all repeats; times are those of each request's median repeat. Of requests in
flight together each counts with its share of the time that passed, so that the shares add up to it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from eval.endpoint.client import Answer, Asked
from eval.endpoint.counters import Verified, together
from eval.live.interleaved import PLAIN
from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Divergence, Gate, verdict_of
from eval.measures.metrics import ratio
from eval.measures.results import Row

SHOWN = 24  # characters of a text, from where it differs
NOTHING = Verified(0, 0, None, ())


class Timed(NamedTuple):
    """An answer, the share of its seconds that count as its own, and what became of its drafts, None if not known."""

    answer: Answer
    share: float
    verified: Verified | None

    @property
    def seconds(self) -> float:
        """From the request to the last token."""
        return self.answer.latency_s * self.share

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last; None where nothing was streamed."""
        first = self.answer.ttft_s
        return None if first is None else (self.answer.latency_s - first) * self.share


class Runs(NamedTuple):
    """What one server made of a workload: the repeats of each request, and what became of all drafts, in parts."""

    answers: list[list[Timed]]
    verified: list[Verified]

    def texts(self) -> list[list[str]]:
        """Return the texts of every request."""
        return [[each.answer.text for each in repeats] for repeats in self.answers]

    def middle(self, places: Sequence[int]) -> list[Timed]:
        """Return each request's repeat with the median latency, the lower one of two middles."""
        found = [sorted(self.answers[place], key=lambda each: each.seconds) for place in places]
        return [each[(len(each) - 1) // 2] for each in found]

    def own(self, places: Sequence[int]) -> list[Verified]:
        """Return what became of each request's drafts, its repeats together; nothing where that is not known of all."""
        every = [[each.verified for each in self.answers[place]] for place in places]
        if any(verified is None for repeats in every for verified in repeats):
            return []
        return [together(each for each in repeats if each is not None) for repeats in every]


@dataclass(frozen=True)
class Session:
    """What all rows of one interleaved measurement share; `start` is the place of its first request in the gates."""

    workload: str
    temperature: float
    batch_size: int
    seed: int
    start: int
    asked: Sequence[Asked]

    def categories(self) -> dict[str, list[int]]:
        """Return the places of each category's requests; nothing where all are of one."""
        places: dict[str, list[int]] = {}
        for place, each in enumerate(self.asked):
            places.setdefault(each.category, []).append(place)
        return {name or "other": each for name, each in places.items()} if len(places) > 1 else {}


def text_gate(plain: Sequence[Sequence[str]], drafted: Sequence[Sequence[str]], ids: Sequence[str]) -> Gate:
    """Compare greedy texts, prompt by prompt, each with all its repeats.

    Logits are not to be seen, so a difference is a failure, with one exception: from where the baseline's own repeats
    differ on, rounding decides there, which counts as a near tie.

    Args:
        plain: the baseline's texts, the repeats of each prompt.
        drafted: those of the same prompts with speculation.
        ids: the prompts' names.
    """
    verdicts: list[str] = []
    ties: list[Divergence] = []
    failures: list[Divergence] = []
    for ours, theirs, prompt in zip(plain, drafted, ids, strict=True):
        wavers = min((at for other in ours if (at := differs(ours[0], other)) is not None), default=None)
        found = [(at, other) for other in theirs if (at := differs(ours[0], other)) is not None]
        if not found:
            verdicts.append("identical")
            continue
        at, other = min(found)
        tied = wavers is not None and at >= wavers
        verdicts.append("near_tie" if tied else "failed")
        shown = f"{other[at : at + SHOWN]!r} instead of {ours[0][at : at + SHOWN]!r}"
        (ties if tied else failures).append(Divergence(prompt, at, None, None, None, shown))
    return verdict_of(verdicts, ties, failures)


def differs(one: str, other: str) -> int | None:
    """Return the first character at which two texts differ, the end of the shorter one included; None: nowhere."""
    if one == other:
        return None
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def row_of(name: str, runs: Runs, base: Runs | None, gate: Gate, session: Session, kind: tuple[str, list[int]]) -> Row:
    """Return a server's row.

    Args:
        name: of the row.
        runs: what the server made of the session.
        base: what the baseline did, for the speedup; None: there is none to tell.
        gate: the verdict on the texts of all prompts at this batch size.
        session: what the rows share.
        kind: a category, empty for the whole workload, and the places of its requests.
    """
    category, places = kind
    middle, own = runs.middle(places), runs.own(places)
    whole = together(runs.verified) if not category else together(own) if own else NOTHING
    groups = [session.asked[place].conversation for place in places]
    streamed = all(each.decode_s is not None for each in middle)
    every = [each for place in places for each in runs.answers[place]]
    shares = [count / whole.passes for count in whole.by_depth if count]
    shown = gate.among([session.start + place for place in places]) if session.temperature == 0 else UNCHECKED
    row = Row(
        drafter=name,
        rule="none" if name == PLAIN else "greedy" if session.temperature == 0 else "the server's",
        tree="none" if name == PLAIN else f"served, depth {len(whole.by_depth)}" if whole.by_depth else "served",
        workload=f"{session.workload}/{category}" if category else session.workload,
        temperature=session.temperature,
        batch_size=session.batch_size,
        steps=whole.passes,
        tokens=sum(each.answer.decoded for each in every),
        tau=whole.tau,
        tau_ci=_tau_interval(own, session.seed, groups),
        tau_request_mean=_mean([each.tau for each in own]),
        accepted_by_depth=shares,
        conditional_by_depth=[share / above for above, share in zip([1.0, *shares], shares, strict=False)],
        draft_tokens=whole.drafted or 0,
        accepted_per_draft_token=ratio(whole.accepted, whole.drafted or 0),
        tokens_per_second=_speed(middle),
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        overlap_headroom=None,
        seconds={"draft": 0.0, "verify": 0.0, "other": sum(each.decode_s or 0.0 for each in every)},
        latency_s=statistics.median(each.answer.latency_s for each in middle),
        memory_bytes=0,
        lossless=shown.counts(),
        category=category,
        prompts=len(places),
        definitions=_definitions(whole, own),
        tau_within_depth=[1 + sum(shares[: depth + 1]) for depth in range(len(shares))],
        by_request=_by_request(middle, own, None),
        prefill_s=sum(each.seconds - (each.decode_s or 0.0) for each in middle) if streamed else 0.0,
        whole_tokens_per_second=_whole_speed(middle),
    )
    return row if base is None else replace(row, **_speedups(middle, base.middle(places), own, groups, session.seed))


def _speedups(
    middle: list[Timed], plain: list[Timed], own: list[Verified], groups: Sequence[int], seed: int
) -> dict[str, Any]:
    """Return the columns of a row that only a server with the baseline's texts has."""
    whole = [[float(each.answer.tokens), each.seconds] for each in middle]
    beside = [[float(each.answer.tokens), each.seconds] for each in plain]
    told = {
        "by_request": _by_request(middle, own, plain),
        "whole_speedup": _over(_whole_speed(middle), _whole_speed(plain)),
        "whole_speedup_ci": metrics.paired_interval(whole, beside, seed, groups),
    }
    decode, base = _decoding(middle), _decoding(plain)
    if not decode or not base:  # one of them was not streamed: its prefill cannot be told from the rest
        return told
    return told | {
        "speedup": _over(_speed(middle), _speed(plain)),
        "speedup_ci": metrics.paired_interval(decode, base, seed, groups),
    }


def _decoding(runs: Sequence[Timed]) -> list[list[float]]:
    """Return each request's tokens after the first, and the seconds for them; nothing where one was not streamed."""
    known = [[float(each.answer.decoded), each.decode_s] for each in runs if each.decode_s is not None]
    return known if len(known) == len(runs) else []


def _speed(runs: Sequence[Timed]) -> float | None:
    """Return the tokens per second of decoding alone."""
    columns = _decoding(runs)
    return ratio(sum(tokens for tokens, _ in columns), sum(seconds for _, seconds in columns))


def _whole_speed(runs: Sequence[Timed]) -> float | None:
    """Return the tokens per second, end to end."""
    return ratio(sum(each.answer.tokens for each in runs), sum(each.seconds for each in runs))


def _over(fast: float | None, slow: float | None) -> float | None:
    return None if fast is None or slow is None else ratio(fast, slow)


def _by_request(
    runs: Sequence[Timed], own: Sequence[Verified], plain: Sequence[Timed] | None
) -> dict[str, dict[str, float]]:
    """Return the quantiles over the requests of what is known of each."""
    values: dict[str, list[float | None]] = {
        "tau": [each.tau for each in own],
        "tokens_per_second": [_speed([each]) for each in runs],
        "latency_s": [each.answer.latency_s for each in runs],
        "ttft_s": [each.answer.ttft_s for each in runs],
    }
    if plain is not None:
        values["speedup"] = [_over(_speed([each]), _speed([base])) for each, base in zip(runs, plain, strict=True)]
    return {name: found for name, each in values.items() if (found := metrics.quantiles(each))}


def _tau_interval(own: Sequence[Verified], seed: int, groups: Sequence[int]) -> metrics.Interval | None:
    """Return tau's interval under resampling of the requests, those of a conversation together."""
    if not own:
        return None
    counts = torch.tensor([[each.accepted + each.passes, each.passes] for each in own], dtype=torch.float64)
    return metrics.bootstrap(metrics.within(counts, groups), lambda total: total[:, 0] / total[:, 1], seed)


def _definitions(whole: Verified, own: Sequence[Verified]) -> dict[str, float | None]:
    """Return the published definitions of acceptance, by the names of `metrics.DEFINITIONS`."""
    verified = None if whole.drafted is None else whole.drafted + whole.passes
    return {
        "mean_acceptance_length": whole.tau,
        "mean_acceptance_length_by_request": _mean([each.tau for each in own]),
        "accepted_per_pass": ratio(whole.accepted, whole.passes),
        "accepted_per_pass_by_request": _mean([ratio(each.accepted, each.passes) for each in own]),
        "draft_acceptance_rate": ratio(whole.accepted, whole.drafted or 0),
        "committed_per_verified": ratio(whole.accepted + whole.passes, verified or 0),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return ratio(sum(known), len(known))
