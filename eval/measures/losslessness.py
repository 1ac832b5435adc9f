"""The losslessness check: speculative greedy decoding must emit the tokens of autoregressive greedy decoding.

Sampled tokens have Pearson's chi-square test against the target's probs, with the sample size for a given power. A
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

POWER = 0.9  # the probability of rejecting a distribution at the given total variation
ALPHA = 1e-3  # the probability that any test of a report rejects a right distribution; the tests share it
CELL = 0.02  # tokens less likely than that share a cell
LEAST = 5.0  # samples expected in a cell, below which the chi-square distribution is a poor approximation


@dataclass(frozen=True)
class ChiSquareTest:
    """Result of the test for the rule in use, and for a rule that is known to be broken (the negative control)."""

    draws: int  # samples, over all prefixes
    prefixes: int  # texts after which the next token's distribution was tested
    freedom: int  # degrees of freedom
    statistic: float  # the rule in use
    p_value: float  # the rule in use
    tv: float  # the total variation, over the cells, that is rejected with the power
    power: float
    alpha: float  # below this p-value the distribution is rejected
    control_p: float  # the p-value of the negative control

    @property
    def caught(self) -> bool:
        """Whether the broken rule was rejected; if not, the test proves nothing."""
        return self.control_p < self.alpha

    @property
    def passed(self) -> bool:
        """Whether the rule in use was not rejected, and the broken one was."""
        return self.caught and self.p_value >= self.alpha

    def __str__(self) -> str:
        test = f"chi-square p {self.p_value:.2g} of {self.draws} draws (power {self.power:g} at TV {self.tv:g})"
        return f"{test}, broken control {'caught' if self.caught else 'NOT caught'} (p {self.control_p:.2g})"


@dataclass(frozen=True)
class Cells:
    """Cells of a distribution: its likely tokens, and a last cell for the others; `expected` are the probabilities."""

    token: list[int]
    expected: list[float]

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        return len(self.expected) - 1

    def count(self, sampled: Sequence[int]) -> list[int]:
        """Return the number of sampled tokens in each cell."""
        counts = Counter(sampled)
        likely = [counts[token] for token in self.token]
        return [*likely, len(sampled) - sum(likely)]


def cells(probs: Float[Tensor, "V"]) -> Cells:
    """Return the cells of a distribution: every token of probability CELL or more, and the others together.

    Where the others are too rare for a cell of their own, they join the rarest one.
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
    pairs = zip(of.count(sampled), of.expected, strict=True)
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
    """Return the number of samples after each of several prefixes that gives the power, and LEAST to every cell."""
    total = samples_needed(sum(prefix.freedom for prefix in prefixes), tv, alpha)
    rarest = min(min(prefix.expected) for prefix in prefixes)
    return max(math.ceil(total / len(prefixes)), math.ceil(LEAST / rarest))


# A pass over a tree adds up the same numbers in another order than a pass over one token, so its logits differ by
# rounding. If no logit is off by more than e, two tokens can only change ranks where both passes see a gap of at most
# 2 e between them. float64 and float32 carry few units of rounding through the layers; the 16-bit numbers are coarse by
# themselves: between 16 and 32, where lm_heads put their best logits, they are 1/64 (float16) and 1/8 (bfloat16)
# apart, and two steps of that grid are allowed. A wrong token of a defect shows gaps of whole units.
EPSILON = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2 / 64, torch.bfloat16: 2 / 8}


VERDICTS = ("identical", "near_tie", "failed")
COUNTS = ("checked", *VERDICTS)


def labelled(drafter: str, batch_size: int, request_rate: float | None = None) -> str:
    """Return a drafter's label: at a batch size, and at a rate of requests, which gates do not know."""
    name = drafter if batch_size == 1 else f"{drafter} x{batch_size}"
    return name if request_rate is None else f"{name} at {request_rate:g} req/s"


@dataclass(frozen=True)
class Divergence:
    """The position where a run first differs from the baseline; a token is None if that side had already stopped.

    Of texts whose tokens are not to be seen, the position is a character's, and `shown` has the texts there.
    """

    prompt: str
    position: int
    plain: int | None
    drafted: int | None
    gap: float | None  # the baseline's top-2 logit gap there
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
        """Return the check in a record; a ValueError or AttributeError for what `as_dict` does not write."""
        return typed(cls, {key: value for key, value in record.items() if key != "passed"})


@dataclass(frozen=True)
class Gate(Check):
    """The result of a losslessness check over all prompts; every checked prompt is identical, a near tie, or failed.

    A `lossy` rule fails whatever it emitted: equal answers of a few prompts prove nothing.
    """

    checked: int
    identical: int
    near_tie: int
    failed: int
    first: Divergence | None = None  # the first failure
    lossy: bool = False
    ties: tuple[Divergence, ...] = field(default=(), compare=False)  # the near ties, with their gaps
    verdicts: tuple[str, ...] = field(default=(), compare=False)  # on each prompt: a key of `counts`

    @property
    def passed(self) -> bool:
        """Whether something was checked, nothing failed, and the rule is meant to keep the target's distribution."""
        return self.failed == 0 and self.checked > 0 and not self.lossy

    def counts(self) -> dict[str, int]:
        """Return the four counts, as the report writes them."""
        return {key: getattr(self, key) for key in COUNTS}

    def among(self, indices: Sequence[int]) -> "Gate":
        """Return the check of some of the prompts, by their indices; one without details is returned as it is."""
        if not self.verdicts:
            return self
        verdicts = tuple(self.verdicts[index] for index in indices)
        return replace(verdict_of(verdicts, [], []), lossy=self.lossy)


@dataclass(frozen=True)
class SampledGate(Check):
    """The losslessness check of a drafter at a temperature above 0."""

    drafter: str
    temperature: float
    coupled: Gate  # prompts with the same tokens as the baseline under coupled noise, at all batch sizes
    distribution: ChiSquareTest | None  # None if nothing could be sampled
    why: str  # the reason for that
    batch_sizes: tuple[int, ...] = (1,)  # at which the tokens under coupled noise were compared
    failed_at: int | None = None  # the first of them at which tokens differ, where `coupled.first` was seen

    @property
    def passed(self) -> bool:
        """Whether the tokens are equal, and the distribution was not rejected."""
        return self.coupled.passed and (self.distribution is None or self.distribution.passed)

    def __str__(self) -> str:
        several = f" at batch sizes {', '.join(map(str, self.batch_sizes))}" if self.batch_sizes != (1,) else ""
        same = f"{self.coupled.identical} of {self.coupled.checked} prompts equal under coupled noise{several}"
        line = f"{self.drafter} at T={self.temperature:g}: {same}; {self.distribution or self.why}"
        at = f"batch size {self.failed_at}, " if several else ""
        return line + (f"; {at}{self.coupled.first}" if self.coupled.first else "")


UNCHECKED = Gate(0, 0, 0, 0)
WITHHELD = "withheld"  # shown instead of the speedup of a failed result


def differs(counts: Mapping[str, int] | None) -> bool:
    """Whether a prompt failed, by a result's counts."""
    return bool(counts and counts.get("failed"))


def in_words(counts: Mapping[str, int] | None) -> str:
    """Return a result's counts for a table."""
    if not counts or not counts.get("checked"):
        return "-"
    ties = f", {counts['near_tie']} near tie" if counts.get("near_tie") else ""
    failed = f", {counts['failed']} FAILED" if differs(counts) else ""
    return f"{counts['identical']}/{counts['checked']}{ties}{failed}"


@dataclass(frozen=True)
class FailedChecks:
    """The failed losslessness checks of a report, and the one rule by which they fail a result.

    A result fails with a differing prompt, with its drafter's greedy check at its batch size, and with
    the check at its temperature. What was not checked has not failed.
    """

    greedy: frozenset[str]  # name and batch size, as `labelled`
    sampled: frozenset[tuple[str, float]]  # name and temperature

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "FailedChecks":
        """Return those among the settings of a report.json."""
        return cls(
            frozenset(name for name, gate in settings.get("gate", {}).items() if not gate.get("passed", True)),
            frozenset(
                (check["drafter"], check["temperature"])
                for check in settings.get("sampled_gate", [])
                if not check["passed"]
            ),
        )

    def result(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the report has failed."""
        greedy = labelled(row["drafter"], row["batch_size"]) in self.greedy
        sampled = (row["drafter"], row["temperature"]) in self.sampled
        return differs(row.get("lossless")) or greedy or sampled

    def drafter(self, name: str, sizes: Sequence[int]) -> bool:
        """Whether a drafter has failed at one of these batch sizes, or at any temperature."""
        greedy = any(labelled(name, size) in self.greedy for size in sizes)
        return greedy or any(drafter == name for drafter, _ in self.sampled)


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of two sequences' common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (first, second) in pairs if first != second), min(len(one), len(other)))


def divergence(plain: Generation, drafted: Generation, prompt: str) -> Divergence | None:
    """Return where two runs first differ, an earlier end included; None if they are equal."""
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


def near_tie(where: Divergence, drafted: Generation, epsilon: float) -> bool:
    """Whether rounding explains the divergence: both runs emitted a token, and both had a small logit gap.

    A run that stopped where the other went on is never excused: where to stop follows from the tokens.
    """
    if where.plain is None or where.drafted is None or where.gap is None:
        return False
    return where.gap < epsilon and all(gap < epsilon for gap in drafted.logit_gaps[where.position : where.position + 1])


def gate(baseline: Sequence[Generation], drafted: Sequence[Generation], ids: Sequence[str], dtype: torch.dtype) -> Gate:
    """Compare runs at temperature 0 prompt by prompt; refuse a dtype whose rounding is not known.

    Args:
        baseline: the baseline's runs with their logit gaps, one a prompt.
        drafted: the drafter's runs of the same prompts; where they carry gaps, those must be small as well.
        ids: the prompts' names, for the message.
        dtype: the target's, which decides how small a gap rounding can flip.
    """
    if dtype not in EPSILON:
        raise ValueError(f"the losslessness gate does not know {dtype}: set gate_dtype to float32")
    parted = [divergence(ours, theirs, prompt) for ours, theirs, prompt in zip(baseline, drafted, ids, strict=True)]
    return gate_of(
        (where, where is not None and near_tie(where, theirs, EPSILON[dtype]))
        for where, theirs in zip(parted, drafted, strict=True)
    )


def gate_of(compared: Iterable[tuple[Divergence | None, bool]]) -> Gate:
    """Return the gate of prompts from each one's divergence, if any, and whether it is a near tie."""
    verdicts: list[str] = []
    failures: list[Divergence] = []
    ties: list[Divergence] = []
    for where, tied in compared:
        verdicts.append("identical" if where is None else "near_tie" if tied else "failed")
        if where is not None:
            (ties if tied else failures).append(where)
    return verdict_of(verdicts, ties, failures)


def worst(gates: Sequence[Gate]) -> Gate:
    """Merge several gates of the same prompts: each prompt's worst verdict, and the first failure."""
    by_prompt = zip(*(gate.verdicts for gate in gates), strict=True)
    verdicts = [max(of_prompt, key=VERDICTS.index) for of_prompt in by_prompt]
    failures = [gate.first for gate in gates if gate.first is not None]
    return verdict_of(verdicts, [tie for gate in gates for tie in gate.ties], failures)


def verdict_of(verdicts: Sequence[str], ties: Sequence[Divergence], failures: Sequence[Divergence]) -> Gate:
    """Return the gate of the prompts' verdicts, with the near ties and failures among them."""
    first = failures[0] if failures else None
    identical, tied, failed = (sum(verdict == kind for verdict in verdicts) for kind in VERDICTS)
    return Gate(len(verdicts), identical, tied, failed, first, ties=tuple(ties), verdicts=tuple(verdicts))
