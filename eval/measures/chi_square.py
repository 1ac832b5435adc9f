"""Pearson's chi-square test of emitted tokens against the target's probs, with the sample size for a given power.

A distribution at total variation δ from p gives the statistic of n samples a noncentrality of at least 4 n δ²: by
Cauchy and Schwarz, the sum over cells of (p' - p)² / p is at least (Σ |p' - p|)² = 4 δ². So n = λ / (4 δ²) samples
reject it with the given power, where λ is the noncentrality at which a chi-square variable of the test's degrees of
freedom exceeds the critical value that often. Several prefixes add up: statistics, degrees of freedom and samples.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jaxtyping import Float
from torch import Tensor

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
    statistic: float  # of the rule in use
    p_value: float  # of the rule in use
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
