"""Results of one draft source on one workload at one temperature and batch size, and the settings behind them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eval.measures.losslessness import Gate
from eval.measures.metrics import Groups, Interval

LIVE, TEACHER_FORCED, REPLAY = TIERS = ("live", "teacher_forced", "replay")  # the first alone has a clock


@dataclass(frozen=True)
class Row:
    """One drafter on one workload at one temperature and batch size; None stands for what was not measured.

    `tokens` and `steps` are the decoded tokens and the target passes that committed them; `seconds` are the steps'.
    `latency_s` is the median over the requests of their latencies, each from its prefill on.
    `request_rate` is in requests a second; None where each request came when one before it had ended. Under a rate
    `latency_s` counts from the arrival, `batch_size` is the most sequences in one pass, `tokens_per_second` is over the
    time from the first arrival to the last end, and `speedup` is the baseline's mean latency over the drafter's.
    `overlap_headroom` is how many times faster the steps would be if drafting hid behind verification entirely.
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
    overlap_headroom: float | None
    seconds: dict[str, float]
    latency_s: float | None
    memory_bytes: int
    lossless: dict[str, int]
    category: str = ""  # empty: all prompts of the workload
    prompts: int = 0
    state: str = "none"  # of a source with memory: warm from the requests before, or cold
    definitions: dict[str, float | None] = field(default_factory=dict)  # by the names of metrics.DEFINITIONS
    tau_within_depth: list[float | None] = field(default_factory=list)  # had every draft ended at depth 1, 2, …
    by_request: dict[str, dict[str, float]] = field(default_factory=dict)  # quantiles over the requests
    prefill_s: float = 0.0  # of all requests
    whole_tokens_per_second: float | None = None  # end to end, with the prefill
    whole_speedup: float | None = None
    whole_speedup_ci: Interval | None = None
    agreement: dict[str, Any] = field(default_factory=dict)  # the timed greedy tokens against the baseline's
    tier: str = LIVE
    request_rate: float | None = None
    report: str = ""  # where reports stand side by side, the one that it is from

    @property
    def has_speedup(self) -> bool:
        """Whether it has a number that only a lossless drafter has."""
        speedups = {self.speedup, self.speedup_ci, self.speedup_hf, self.whole_speedup, self.whole_speedup_ci}
        return speedups != {None}


class Subset(NamedTuple):
    """Some requests of a measurement: a category (empty: all), their indices, and the groups resampled together."""

    category: str
    indices: Sequence[int]
    groups: Groups


@dataclass(frozen=True)
class Measurement:
    """The settings and checks that all results of one measurement share.

    Attributes:
        start: the index of its first prompt among those that the losslessness check compared.
        categories: the indices of each category's prompts in it.
        conversations: of each prompt; intervals come from resampling these. Empty: each prompt is one.
        coupled: at a temperature above 0, each drafter's verdict under coupled noise.
        not_lossless: drafters that are given no speedup at this temperature.
        agreement: of each drafter's timed tokens with those of autoregressive decoding, the baseline.
    """

    workload: str
    temperature: float
    batch_size: int
    memory_bytes: int
    seed: int
    start: int = 0
    categories: Mapping[str, Sequence[int]] = field(default_factory=dict)
    conversations: Sequence[int] = ()
    coupled: Mapping[str, Gate] = field(default_factory=dict)
    not_lossless: frozenset[str] = frozenset()
    agreement: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    request_rate: float | None = None
    tier: str = LIVE

    def parts(self, count: int) -> Iterator[Subset]:
        """Yield all of so many requests, then those of each category."""
        for category, indices in {"": range(count), **self.categories}.items():
            groups = [self.conversations[index] for index in indices] if self.conversations else None
            yield Subset(category, indices, groups)
