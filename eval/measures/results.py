"""Results of one drafter on one workload at one temperature and batch size, built from its measured requests.

A row of the report is built from counted passes and, if they were timed, requests.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

from eval.measures import metrics
from eval.measures.losslessness import UNCHECKED, Gate
from eval.measures.metrics import PARTS, Groups, Interval, Number, Pair, SpecDecodingStats

T = TypeVar("T")
LIVE, TEACHER_FORCED = TIERS = ("live", "teacher_forced")  # only the first is timed
BASELINE = "plain"  # the name of autoregressive decoding in results
ENDPOINT = "endpoint"  # drafter and device type of a measured server
UNTIMED = dict.fromkeys(PARTS, 0.0)  # seconds


@dataclass(frozen=True)
class ResultRow:
    """One drafter on one workload at one temperature and batch size; None means not measured.

    `tokens` and `steps` are the decoded tokens and the target passes that committed them; `seconds` are the steps'.
    `latency_s` is the median over the requests of their latencies, each from its prefill on. `request_rate` is in
    requests per second; None if each request started when an earlier one had ended. Under a rate, `latency_s` counts
    from the arrival, `batch_size` is the maximum of sequences in one pass, `tokens_per_second` is over the time from
    the first arrival to the last end, and `speedup` is the baseline's mean latency over the drafter's.
    """

    drafter: str
    rule: str
    tree: str
    workload: str
    temperature: float
    batch_size: int
    steps: int
    tokens: int
    tau: float | None
    tau_ci: Interval | None
    tau_request_mean: float | None
    accepted_by_depth: list[float]
    conditional_by_depth: list[float]
    draft_tokens: int
    accepted_per_draft_token: float | None
    tokens_per_second: float | None
    speedup: float | None
    speedup_ci: Interval | None
    speedup_hf: float | None
    seconds: dict[str, float]
    latency_s: float | None
    memory_bytes: int
    lossless: dict[str, int]
    category: str = ""  # empty: all prompts of the workload
    prompts: int = 0
    by_request: dict[str, dict[str, float]] = field(default_factory=dict)  # quantiles over the requests
    prefill_s: float = 0.0  # sum over all requests
    whole_tokens_per_second: float | None = None  # end to end, including the prefill
    whole_speedup: float | None = None
    whole_speedup_ci: Interval | None = None
    tier: str = LIVE
    request_rate: float | None = None


@dataclass(frozen=True)
class Measurement:
    """The settings and checks that all results of one measurement share."""

    workload: str
    temperature: float
    batch_size: int
    memory_bytes: int
    seed: int
    start: int = 0  # index of the first prompt among those of the losslessness check
    categories: Mapping[str, Sequence[int]] = field(default_factory=dict)  # indices of each category's prompts
    conversations: Sequence[int] = ()  # conversation of each prompt, the unit of resampling; empty: each prompt is one
    coupled: Mapping[str, Gate] = field(default_factory=dict)  # each drafter's, above temperature 0
    not_lossless: frozenset[str] = frozenset()  # drafters that get no speedup at this temperature
    request_rate: float | None = None
    tier: str = LIVE

    def parts(self, count: int) -> "Iterator[Subset]":
        """Yield the subset of all `count` requests, then one per category."""
        for category, indices in {"": range(count), **self.categories}.items():
            groups = [self.conversations[index] for index in indices] if self.conversations else None
            yield Subset(self, category, indices, groups)


class Subset(NamedTuple):
    """Some requests of a measurement: a category (empty: all), their indices, and their groups for resampling."""

    measurement: Measurement
    category: str
    indices: Sequence[int]
    groups: Groups

    def of(self, items: Sequence[T]) -> list[T]:
        """Return these requests' items."""
        return [items[index] for index in self.indices]


@dataclass(frozen=True)
class MeasuredRequest:
    """One measured request; None means not measured.

    `latencies` are the sender's waiting times in seconds: `latency_s` to the last token, `ttft_s` to the first.
    """

    passes: SpecDecodingStats | None  # None if a server counts all requests together
    decoding: Pair | None = None  # the tokens after the first, with their seconds
    end_to_end: Pair | None = None  # all tokens, with the seconds from the start of the prefill
    prefill_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=lambda: UNTIMED)  # the steps' seconds, by activity
    latencies: Mapping[str, Any] = field(default_factory=dict)
    arrived: float = 0.0  # seconds from the round's first arrival, under a request rate

    @property
    def decoded(self) -> Number:
        """Return the number of tokens after the first."""
        return 0 if self.end_to_end is None else max(self.end_to_end[0] - 1, 0)

    @property
    def latency_s(self) -> float:
        """Return the latency, which must have been measured."""
        return float(self.latencies["latency_s"])

    @property
    def user_speed(self) -> float | None:
        """Return the tokens per second after the first token, as seen by the sender."""
        latency, first = self.latencies.get("latency_s"), self.latencies.get("ttft_s", self.prefill_s)
        if self.decoding is None or latency is None or first is None:
            return None
        return metrics.ratio(self.decoding[0], latency - first)


Requests = Sequence[MeasuredRequest]


def result(
    drafter: str, rule: str, tree: str, subset: Subset, requests: Requests, total: SpecDecodingStats | None = None
) -> ResultRow:
    """Return a drafter's result on a subset of a measurement, without speedups; `rule` verified its drafts.

    `total` is the sum of the requests' counts, if it is known without, or more exactly than, each one's.
    """
    measurement, counts = subset.measurement, known(requests, "passes")
    latencies = [wait for request in requests if (wait := request.latencies.get("latency_s")) is not None]
    return ResultRow(
        drafter=drafter,
        rule=rule,
        tree=tree,
        workload=f"{measurement.workload}/{subset.category}" if subset.category else measurement.workload,
        temperature=measurement.temperature,
        batch_size=measurement.batch_size,
        **vars(metrics.pool(counts, total)),
        tau_ci=metrics.pooled_interval(counts, measurement.seed, subset.groups),
        tokens_per_second=metrics.speed(known(requests, "decoding")),
        speedup=None,
        speedup_ci=None,
        speedup_hf=None,
        seconds={key: sum(request.seconds[key] for request in requests) for key in UNTIMED},
        latency_s=statistics.median(latencies) if latencies else None,
        memory_bytes=measurement.memory_bytes,
        lossless=UNCHECKED.counts(),
        category=subset.category,
        prompts=len(requests),
        by_request=by_request(requests),
        prefill_s=sum(known(requests, "prefill_s"), 0.0),
        whole_tokens_per_second=metrics.speed(known(requests, "end_to_end")),
        tier=measurement.tier,
        request_rate=measurement.request_rate,
    )


def known(requests: Requests, key: str) -> list[Any]:
    """Return a field of each request; empty if one is unknown."""
    values = [getattr(request, key) for request in requests]
    return [] if None in values else values


def by_request(requests: Requests, base: Requests | None = None) -> dict[str, dict[str, float]]:
    """Return the quantiles over the requests of τ, tokens per second, latencies and, over `base`, the speedup."""
    values = {
        "tau": [metrics.ratio(counts.tokens, counts.steps) for counts in known(requests, "passes")],
        "tokens_per_second": [metrics.speed(known([request], "decoding")) for request in requests],
        "user_tokens_per_second": [request.user_speed for request in requests],
    }
    for name in dict.fromkeys(name for request in requests for name in request.latencies):
        values[name] = [request.latencies.get(name) for request in requests]
    if base is not None:
        pairs = [
            (known([request], "decoding"), known([baseline], "decoding"))
            for request, baseline in zip(requests, base, strict=True)
        ]
        values["speedup"] = [metrics.speed_ratio(fast, slow) if fast and slow else None for fast, slow in pairs]
    return {name: cut for name, numbers in values.items() if (cut := metrics.quantiles(numbers))}


def finite(value: Any) -> Any:
    """Return the value as dicts, lists and scalars, with None for every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else finite(asdict(value))
