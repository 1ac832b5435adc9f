"""The losslessness check: speculative greedy decoding must emit the tokens of autoregressive greedy decoding.

Pearson's chi-square test compares sampled tokens with the target's probs, with the sample size for a given power. A
distribution at total variation δ from p gives the statistic of n samples a noncentrality of at least 4 n δ²: by Cauchy
and Schwarz, the sum over cells of (p' - p)² / p is at least (Σ |p' - p|)² = 4 δ². So n = λ / (4 δ²) samples reject it
with the given power, where λ is the noncentrality at which a chi-square variable of the test's degrees of freedom
exceeds the critical value that often. Several prefixes add up: statistics, degrees of freedom and samples.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heads.common.typed import Json, typed
from inference.decode import Generation

POWER = 0.9  # probability of rejecting a distribution at the given total variation
ALPHA = 1e-3  # probability that any test of a report rejects a correct distribution; its tests share it
CELL = 0.02  # tokens of lower probability share a cell
LEAST = 5.0  # minimum expected samples in a cell, for the chi-square approximation
Probs = Float[Tensor, "V"]


@dataclass(frozen=True)
class ChiSquareTest:
    """The results for the rule in use and for a rule that is known to be broken (the negative control)."""

    draws: int  # samples over all prefixes
    prefixes: int  # number of texts after which tokens were sampled
    freedom: int  # degrees of freedom
    statistic: float  # statistic of the rule in use
    p_value: float  # p-value of the rule in use
    tv: float  # total variation over the cells that is rejected with POWER
    power: float
    alpha: float  # the distribution is rejected below this p-value
    control_p: float  # p-value of the negative control

    @property
    def control_rejected(self) -> bool:
        """Return whether the broken rule was rejected; otherwise the test proves nothing."""
        return self.control_p < self.alpha

    @property
    def passed(self) -> bool:
        """Return whether the rule in use was not rejected and the broken rule was."""
        return self.control_rejected and self.p_value >= self.alpha

    def __str__(self) -> str:
        test = f"chi-square p {self.p_value:.2g} of {self.draws} draws (power {self.power:g} at TV {self.tv:g})"
        return f"{test}, broken control {'caught' if self.control_rejected else 'NOT caught'} (p {self.control_p:.2g})"


@dataclass(frozen=True)
class Cells:
    """The cells of a distribution: its likely tokens, and one cell for all others; `expected` holds probabilities."""

    token: list[int]
    expected: list[float]

    @property
    def degrees_of_freedom(self) -> int:
        """Return the degrees of freedom."""
        return len(self.expected) - 1


def group_rare_tokens(probs: Probs) -> Cells:
    """Return the cells of a distribution: one per token of probability CELL or more, and one for all others.

    If the others are too rare for a cell, they join the rarest token's cell.
    """
    probs = probs.double().cpu()
    likely = (probs >= CELL).nonzero().flatten().tolist()
    likely.sort(key=lambda token: -float(probs[token]))
    expected = probs[likely].tolist()
    rest = max(0.0, 1.0 - math.fsum(expected))
    if rest >= CELL / 2:
        return Cells(likely, [*expected, rest])
    return Cells(likely[:-1], [*expected[:-1], expected[-1] + rest])


def statistic(of: Cells, sampled: Sequence[int]) -> float:
    """Return Pearson's statistic of sampled tokens."""
    counts = Counter(sampled)
    likely = [counts[token] for token in of.token]
    pairs = zip([*likely, len(sampled) - sum(likely)], of.expected, strict=True)
    return math.fsum((count - len(sampled) * p) ** 2 / (len(sampled) * p) for count, p in pairs)


def p_value(value: float, freedom: int) -> float:
    """Return the probability that a chi-square variable exceeds a value."""
    from scipy.stats import chi2

    return float(chi2.sf(value, freedom))


@cache
def samples_needed(freedom: int, tv: float, alpha: float) -> int:
    """Return the number of samples that reject a distribution at total variation `tv` with POWER."""
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = chi2.isf(alpha, freedom)
    noncentrality = brentq(lambda value: ncx2.sf(critical, freedom, value) - POWER, 1e-9, 1e6)
    return math.ceil(noncentrality / (4 * tv * tv))


def samples_for(prefixes: Sequence[Cells], tv: float, alpha: float) -> int:
    """Return the number of samples after each prefix for which POWER is reached and every cell expects LEAST."""
    total = samples_needed(sum(prefix.degrees_of_freedom for prefix in prefixes), tv, alpha)
    rarest = min(min(prefix.expected) for prefix in prefixes)
    return max(math.ceil(total / len(prefixes)), math.ceil(LEAST / rarest))


# A pass over a tree sums the same numbers in another order than a pass over one token, so its logits differ by
# rounding. If no logit is off by more than e, two tokens can change ranks only if both passes see a gap of at most 2 e
# between them. float64 and float32 accumulate few units of rounding through the layers. 16-bit numbers are coarse
# themselves: between 16 and 32, where lm_heads put their best logits, the spacing is 1/64 (float16) or 1/8 (bfloat16),
# and two such steps are allowed. A wrong token from a defect shows gaps of whole units.
EPSILON = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2 / 64, torch.bfloat16: 2 / 8}


VERDICTS = ("identical", "near_tie", "failed")
COUNTS = ("checked", *VERDICTS)


def drafter_label(drafter: str, batch_size: int, request_rate: float | None = None) -> str:
    """Return a drafter's label with the batch size and the request rate, which losslessness checks do not have."""
    name = drafter if batch_size == 1 else f"{drafter} x{batch_size}"
    return name if request_rate is None else f"{name} at {request_rate:g} req/s"


@dataclass(frozen=True)
class Divergence:
    """The position where a run first differs from the baseline; a token is None if that run had already stopped.

    For texts without tokens, the position is a character's, and `shown` holds the texts there.
    """

    prompt: str
    position: int
    plain: int | None
    drafted: int | None
    gap: float | None  # the baseline's gap between its two best logits there
    shown: str = ""

    def __str__(self) -> str:
        if self.shown:
            return f"prompt {self.prompt}, character {self.position}: {self.shown}"
        gap = "unknown" if self.gap is None else f"{self.gap:.3g}"
        plain, drafted = ("the end" if token is None else f"token {token}" for token in (self.plain, self.drafted))
        return f"prompt {self.prompt}, position {self.position}: {drafted} instead of {plain} (top-2 logit gap {gap})"


class Check:
    """A losslessness check as a record of the report's JSON."""

    def as_dict(self) -> Json:
        """Return the record."""
        check: Any = self
        return {**asdict(check), "passed": check.passed}

    @classmethod
    def read(cls, record: Any) -> Any:
        """Parse a record; raise ValueError or AttributeError for one that `as_dict` does not write."""
        return typed(cls, {key: value for key, value in record.items() if key != "passed"})


@dataclass(frozen=True)
class Gate(Check):
    """The result of a losslessness check over all prompts; every prompt is identical, a near tie, or failed.

    A `lossy` rule always fails: equal answers to a few prompts prove nothing.
    """

    checked: int
    identical: int
    near_tie: int
    failed: int
    first: Divergence | None = None  # the first failure
    lossy: bool = False
    ties: tuple[Divergence, ...] = field(default=(), compare=False)  # near ties with their gaps
    verdicts: tuple[str, ...] = field(default=(), compare=False)  # one key of `counts` per prompt

    @property
    def passed(self) -> bool:
        """Return whether something was checked, nothing failed, and the rule preserves the target's distribution."""
        return self.failed == 0 and self.checked > 0 and not self.lossy

    def counts(self) -> dict[str, int]:
        """Return the four counts, for the report."""
        return {key: getattr(self, key) for key in COUNTS}

    def among(self, indices: Sequence[int]) -> "Gate":
        """Return the check of some of the prompts, by their indices; a check without details is returned unchanged."""
        if not self.verdicts:
            return self
        return replace(verdict_of(tuple(self.verdicts[index] for index in indices), [], []), lossy=self.lossy)


@dataclass(frozen=True)
class SampledGate(Check):
    """The losslessness check of a drafter at a temperature above 0."""

    drafter: str
    temperature: float
    coupled: Gate  # comparison with the baseline's tokens under coupled noise, at all batch sizes
    distribution: ChiSquareTest | None  # None if nothing could be sampled
    why: str  # why nothing could be sampled
    batch_sizes: tuple[int, ...] = (1,)  # batch sizes compared under coupled noise
    failed_at: int | None = None  # the first batch size with differing tokens, that of `coupled.first`

    @property
    def passed(self) -> bool:
        """Return whether the tokens are equal and the distribution was not rejected."""
        return self.coupled.passed and (self.distribution is None or self.distribution.passed)

    def __str__(self) -> str:
        several = f" at batch sizes {', '.join(map(str, self.batch_sizes))}" if self.batch_sizes != (1,) else ""
        same = f"{self.coupled.identical} of {self.coupled.checked} prompts equal under coupled noise{several}"
        line = f"{self.drafter} at T={self.temperature:g}: {same}; {self.distribution or self.why}"
        at = f"batch size {self.failed_at}, " if several else ""
        return line + (f"; {at}{self.coupled.first}" if self.coupled.first else "")


UNCHECKED = Gate(0, 0, 0, 0)
WITHHELD = "withheld"  # replaces the speedup of a failed result


def differs(counts: Mapping[str, int] | None) -> bool:
    """Return whether a prompt failed, given a result's counts."""
    return bool(counts and counts.get("failed"))


def in_words(counts: Mapping[str, int] | None) -> str:
    """Describe a result's counts for a table."""
    if not counts or not counts.get("checked"):
        return "-"
    ties = f", {counts['near_tie']} near tie" if counts.get("near_tie") else ""
    failed = f", {counts['failed']} FAILED" if differs(counts) else ""
    return f"{counts['identical']}/{counts['checked']}{ties}{failed}"


@dataclass(frozen=True)
class FailedChecks:
    """The failed losslessness checks of a report, and the one rule by which they fail a result.

    A result fails if one of its prompts differs, if its drafter's greedy check at its batch size failed, or if its
    check at its temperature failed. An unchecked result has not failed.
    """

    greedy: frozenset[str]  # name and batch size, in the form of `drafter_label`
    sampled: frozenset[tuple[str, float]]  # name and temperature

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "FailedChecks":
        """Return the failed checks in the settings of a report.json."""
        return cls(
            frozenset(name for name, gate in settings.get("gate", {}).items() if not gate.get("passed", True)),
            frozenset(
                (check["drafter"], check["temperature"])
                for check in settings.get("sampled_gate", [])
                if not check["passed"]
            ),
        )

    def result(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of the report has failed."""
        greedy = drafter_label(row["drafter"], row["batch_size"]) in self.greedy
        sampled = (row["drafter"], row["temperature"]) in self.sampled
        return differs(row.get("lossless")) or greedy or sampled

    def drafter(self, name: str, sizes: Sequence[int]) -> bool:
        """Return whether a drafter has failed at one of these batch sizes, or at any temperature."""
        greedy = any(drafter_label(name, size) in self.greedy for size in sizes)
        return greedy or any(drafter == name for drafter, _ in self.sampled)


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of two sequences' common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (first, second) in pairs if first != second), min(len(one), len(other)))


def first_divergence(plain: Generation, drafted: Generation, prompt: str) -> Divergence | None:
    """Return where two runs first differ, also by an earlier end; None if they are equal."""
    ours, theirs = plain.tokens, drafted.tokens
    if ours == theirs:
        return None
    position = shared_length(ours, theirs)
    return Divergence(
        prompt=prompt,
        position=position,
        plain=ours[position] if position < len(ours) else None,
        drafted=theirs[position] if position < len(theirs) else None,
        gap=plain.logit_gaps[position] if position < len(plain.logit_gaps) else None,
    )


def near_tie(divergence: Divergence, drafted: Generation, epsilon: float) -> bool:
    """Return whether rounding explains a divergence: both runs emitted a token, and both had a small logit gap.

    A run that stopped where the other continued is never a near tie, since the tokens determine the stop.
    """
    if divergence.plain is None or divergence.drafted is None or divergence.gap is None:
        return False
    gaps = divergence.gap, *drafted.logit_gaps[divergence.position : divergence.position + 1]
    return all(gap < epsilon for gap in gaps)


def gate(baseline: Sequence[Generation], drafted: Sequence[Generation], ids: Sequence[str], dtype: torch.dtype) -> Gate:
    """Compare runs of the same prompts at temperature 0; `ids` are the prompts' names for messages.

    The baseline's runs have their logit gaps; those of drafted runs, if recorded, must be small as well in a near tie.
    The target's dtype bounds the gap that rounding can flip.
    """
    compared = []
    for ours, theirs, prompt in zip(baseline, drafted, ids, strict=True):
        divergence = first_divergence(ours, theirs, prompt)
        compared.append((divergence, divergence is not None and near_tie(divergence, theirs, EPSILON[dtype])))
    return gate_of(compared)


def gate_of(compared: Iterable[tuple[Divergence | None, bool]]) -> Gate:
    """Return the gate, given each prompt's divergence (if any) and whether it is a near tie."""
    verdicts = []
    failures: list[Divergence] = []
    ties: list[Divergence] = []
    for divergence, tied in compared:
        verdicts.append("identical" if divergence is None else "near_tie" if tied else "failed")
        if divergence is not None:
            (ties if tied else failures).append(divergence)
    return verdict_of(verdicts, ties, failures)


def worst(gates: Sequence[Gate]) -> Gate:
    """Merge gates of the same prompts: the worst verdict of each prompt, and the first failure."""
    by_prompt = zip(*(gate.verdicts for gate in gates), strict=True)
    verdicts = [max(of_prompt, key=VERDICTS.index) for of_prompt in by_prompt]
    failures = [gate.first for gate in gates if gate.first is not None]
    return verdict_of(verdicts, [tie for gate in gates for tie in gate.ties], failures)


def verdict_of(verdicts: Sequence[str], ties: Sequence[Divergence], failures: Sequence[Divergence]) -> Gate:
    """Return the gate with these verdicts, near ties and failures."""
    first = failures[0] if failures else None
    identical, tied, failed = (sum(verdict == kind for verdict in verdicts) for kind in VERDICTS)
    return Gate(len(verdicts), identical, tied, failed, first, ties=tuple(ties), verdicts=tuple(verdicts))
