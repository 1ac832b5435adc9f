"""Acceptance and speed from recorded generations: pure functions.

A run is one `Generation`. Its first token comes from the prefill, without drafting or verification; all counts here are
of the later tokens and of the target passes ("steps") that committed them. Ratios are ratios of sums over prompts, so a
long answer weighs more than a short one; unmeasured values are None, never NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from inference.decode import Generation

RESAMPLES = 2000
LEVEL = 0.95
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PARTS = ("draft", "verify", "other")  # parts of a step's time

Interval = tuple[float, float]
Number = int | float
Pair = tuple[Number, Number]
Runs = Sequence[Generation]  # one of each request
Pairs = Sequence[Pair]  # (tokens, seconds) of each request
Groups = Sequence[int] | None  # each request's group, for example its conversation; None: one group per request


@dataclass(frozen=True)
class SpecDecodingStats:
    """Counts of target passes and of their tokens; expected counts for sampled drafts."""

    tokens: Number  # committed tokens after the first, which is the prefill's
    steps: Number  # number of passes
    drafted: Number | None  # tokens of all drafts; None if unknown
    accepted: Number  # accepted tokens among them
    by_depth: Sequence[Number]  # number of passes that accepted at least 1, 2, … drafted tokens; empty if unknown


@dataclass(frozen=True)
class Acceptance:
    """The acceptance over a set of requests, as in a report's row; depth d is at index d - 1."""

    steps: int
    tokens: int
    tau: float | None  # tokens per target pass, bonus token included, pooled over all steps
    tau_request_mean: float | None  # mean over requests of each request's tau
    accepted_by_depth: list[float]  # P(a >= d)
    conditional_by_depth: list[float]  # P(a >= d | a >= d - 1)
    draft_tokens: int
    accepted_per_draft_token: float | None


def median_run(repeats: Runs) -> Generation:
    """Return the repeat with the median decode time, the lower of two middle ones, as a whole."""
    assert repeats, "a prompt was never measured"
    return sorted(repeats, key=lambda run: run.decode_s)[(len(repeats) - 1) // 2]


def decoded(run: Generation) -> int:
    """Return the number of tokens after the prefill's."""
    return max(len(run.tokens) - 1, 0)


def acceptance(runs: Runs) -> Acceptance:
    """Return the acceptance, given one run per request."""
    return pool([passes(run) for run in runs])


def passes(run: Generation) -> SpecDecodingStats:
    """Return the counts of a run."""
    return count_passes([step.accepted for step in run.steps], sum(step.drafted for step in run.steps), decoded(run))


def count_passes(accepted: Sequence[int], drafted: int, tokens: int) -> SpecDecodingStats:
    """Return the counts of an answer's passes, given the accepted tokens of each."""
    by_depth = [sum(count >= depth for count in accepted) for depth in range(1, max(accepted, default=0) + 1)]
    return SpecDecodingStats(tokens, len(accepted), drafted, sum(accepted), by_depth)


def pool(requests: Sequence[SpecDecodingStats], total: SpecDecodingStats | None = None) -> Acceptance:
    """Return the acceptance over requests from their counts, or from `total`, their separately counted sum."""
    total = sum_counts(requests) if total is None else total
    reached = [count for count in total.by_depth if count > 0]  # decreasing: no pass reached a depth below the first 0
    tau = ratio(total.tokens, total.steps)
    taus = [request.tokens / request.steps for request in requests if request.steps > 0]
    drafted = total.drafted or 0
    return Acceptance(
        steps=round(total.steps),
        tokens=round(total.tokens),
        tau=tau,
        tau_request_mean=ratio(math.fsum(taus), len(taus)),
        accepted_by_depth=[count / total.steps for count in reached],
        conditional_by_depth=[count / above for above, count in pairwise([total.steps, *reached])],
        draft_tokens=round(drafted),
        accepted_per_draft_token=ratio(total.accepted, drafted),
    )


def sum_counts(requests: Sequence[SpecDecodingStats]) -> SpecDecodingStats:
    """Return the sums of the requests' counts; a count that is unknown for one is unknown for all."""
    drafted = [request.drafted for request in requests if request.drafted is not None]
    has_depths = all(request.by_depth or not request.accepted for request in requests)
    by_depth = [request.by_depth for request in requests if has_depths]
    return SpecDecodingStats(
        tokens=math.fsum(request.tokens for request in requests),
        steps=math.fsum(request.steps for request in requests),
        drafted=math.fsum(drafted) if len(drafted) == len(requests) else None,
        accepted=math.fsum(request.accepted for request in requests),
        by_depth=tuple(math.fsum(counts) for counts in zip_longest(*by_depth, fillvalue=0)),
    )


def quantiles(values: Sequence[float | None]) -> dict[str, float]:
    """Return the quantiles of the measured values, as p5, p25 and so on; empty without values."""
    measured = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    if not len(measured):
        return {}
    cuts = measured.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return {f"p{level * 100:g}": value for level, value in zip(QUANTILES, cuts, strict=True)}


def rules_used(runs: Runs) -> str:
    """Return the rules that verified the drafts of a set of runs, as text."""
    return " + ".join(sorted({step.rule for run in runs for step in run.steps if step.drafted})) or "none"


def decoding(runs: Runs) -> Pairs:
    """Return each run's tokens after the prefill's, with their seconds."""
    return [(decoded(run), run.decode_s) for run in runs]


def speed(pairs: Pairs) -> float | None:
    """Return the tokens per second: total tokens over total seconds."""
    return ratio(sum(tokens for tokens, _ in pairs), sum(seconds for _, seconds in pairs))


def speed_ratio(pairs: Pairs, base: Pairs) -> float | None:
    """Return the ratio of tokens per second to those of `base`, for the same requests."""
    assert len(pairs) == len(base), "a speedup needs the same requests on both sides"
    fast, slow = speed(pairs), speed(base)
    return None if fast is None or slow is None else ratio(fast, slow)


def tau_interval(runs: Runs, seed: int, groups: Groups = None) -> Interval | None:
    """Return tau's confidence interval under resampling of the requests, groups as units."""
    return pooled_interval([passes(run) for run in runs], seed, groups)


def pooled_interval(requests: Sequence[SpecDecodingStats], seed: int, groups: Groups = None) -> Interval | None:
    """Return tau's confidence interval like `tau_interval`; None if per-request counts are unknown."""
    if not requests:
        return None
    columns = torch.tensor([[request.tokens, request.steps] for request in requests], dtype=torch.float64)
    return bootstrap(within(columns, groups), lambda total: total[:, 0] / total[:, 1], seed)


def paired_interval(
    pairs: Pairs, base: Pairs, seed: int, groups: Groups = None, compare: Callable[..., Tensor] = torch.div
) -> Interval | None:
    """Return the interval of the ratio of two speeds, or of another function `compare` of them.

    The resampling is paired: a request keeps its run and its base, so that common slowness cancels.
    """
    columns = [[*ours, *theirs] for ours, theirs in zip(pairs, base, strict=True)]
    both = within(torch.tensor(columns, dtype=torch.float64), groups)
    return bootstrap(both, lambda total: compare(total[:, 0] / total[:, 1], total[:, 2] / total[:, 3]), seed)


def difference(pairs: Pairs, base: Pairs, seed: int, groups: Groups = None) -> dict[str, float] | None:
    """Return the difference of two speeds over the same requests with its paired interval; None without an interval."""
    interval = paired_interval(pairs, base, seed, groups, torch.sub)
    ours, theirs = speed(pairs), speed(base)
    if interval is None or ours is None or theirs is None:
        return None
    return {"difference": ours - theirs, "low": interval[0], "high": interval[1]}


def within(columns: Float[Tensor, "n k"], groups: Groups) -> Float[Tensor, "g k"]:
    """Return the sums within each group of requests, in order of first appearance.

    The turns of one conversation depend on each other: resampling them separately would make the interval too narrow.
    """
    if groups is None:
        return columns
    order = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([order[group] for group in groups])
    return columns.new_zeros(len(order), columns.shape[1]).index_add(0, index, columns)


def cluster_prompts(prompts: Sequence[Sequence[Any]], groups: Groups = None) -> list[int]:
    """Return the group of each prompt; copies share a group, since repeating a prompt adds no evidence."""
    first: dict[tuple[Any, ...], int] = {}
    group_ids = range(len(prompts)) if groups is None else groups
    return [first.setdefault(tuple(prompt), group) for prompt, group in zip(prompts, group_ids, strict=True)]


def bootstrap(
    columns: Float[Tensor, "n k"], statistic: Callable[[Float[Tensor, "r k"]], Float[Tensor, "r"]], seed: int
) -> Interval | None:
    """Return a percentile interval of a statistic of sums over clusters (cluster bootstrap; Efron, 1979).

    Steps of one request depend on each other, so requests are resampled and not steps; see `within` for conversations.
    `columns` are k numbers for each of n clusters; `statistic` maps their sums to values, for r resamples at once. None
    if at most one cluster has counts, which leaves nothing to resample.
    """
    if columns.any(1).sum() < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    values = statistic(columns[torch.randint(len(columns), (RESAMPLES, len(columns)), generator=generator)].sum(1))
    values = values[values.isfinite()]  # a resample in which all requests ended in the prefill has no ratio
    if not len(values):
        return None
    low, high = values.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=values.dtype)).tolist()
    return low, high


def ratio(above: float | int, below: float | int) -> float | None:
    """Return the quotient, None for a zero divisor."""
    return above / below if below > 0 else None
