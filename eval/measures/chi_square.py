"""Pearson's chi-square test of emitted tokens against the target's law, with the sample size that its power asks for.

A law that is off by the total variation δ gives the statistic of n draws a noncentrality of at least 4 n δ²: by Cauchy
and Schwarz, the sum over cells of (p' - p)² / p is at least (Σ |p' - p|)² = 4 δ². So n = λ / (4 δ²) draws reject it
with the wanted power, where λ is the noncentrality at which a chi-square variable of the test's degrees of freedom
exceeds the critical value that often. Several prefixes add up: their statistics, degrees of freedom and draws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

POWER = 0.9  # with which a law that is off by the wanted total variation is rejected
ALPHA = 1e-3  # with which any test of a report rejects a right law; the tests share it
CELL = 0.02  # tokens less likely than that share a cell
LEAST = 5.0  # draws expected in a cell, below which the chi-square law is a poor approximation


@dataclass(frozen=True)
class LawTest:
    """What the draws say about a law, and whether the same draws caught a rule that is known to be broken.

    Attributes:
        draws: over all prefixes.
        prefixes: texts after which the law of the next token was tested.
        freedom: degrees of freedom.
        statistic, p_value: of the rule in use.
        tv: the total variation, over the cells, that is rejected with the power.
        alpha: below this p-value the law is wrong.
        control_p: the p-value of the negative control.
    """

    draws: int
    prefixes: int
    freedom: int
    statistic: float
    p_value: float
    tv: float
    power: float
    alpha: float
    control_p: float

    @property
    def caught(self) -> bool:
        """Whether the broken rule was rejected; if not, the test proves nothing."""
        return self.control_p < self.alpha

    @property
    def passed(self) -> bool:
        """Whether the rule in use was not rejected, and the broken one was."""
        return self.caught and self.p_value >= self.alpha

    def __str__(self) -> str:
        """Describe it for a message."""
        found = f"chi-square p {self.p_value:.2g} of {self.draws} draws (power {self.power:g} at TV {self.tv:g})"
        return f"{found}, broken control {'caught' if self.caught else 'NOT caught'} (p {self.control_p:.2g})"


@dataclass(frozen=True)
class Cells:
    """The likely tokens of a law, and a last cell for all others; `expected` are the cells' probabilities."""

    token: list[int]
    expected: list[float]

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        return len(self.expected) - 1

    def count(self, drawn: Sequence[int]) -> list[int]:
        """Return how many draws fell into each cell."""
        place = {token: cell for cell, token in enumerate(self.token)}
        counts = [0] * len(self.expected)
        for token in drawn:
            counts[place.get(token, len(counts) - 1)] += 1
        return counts


def cells(law: Float[Tensor, "V"]) -> Cells:
    """Return the cells of a law: every token of probability CELL or more, and the others together.

    Where the others are too rare for a cell of their own, they join the rarest one.
    """
    law = law.double().cpu()
    likely = (law >= CELL).nonzero().flatten().tolist()
    likely.sort(key=lambda token: -float(law[token]))
    expected = law[likely].tolist()
    rest = max(0.0, 1.0 - math.fsum(expected))
    if rest >= CELL / 2 or not likely:
        return Cells(likely, [*expected, rest])
    return Cells(likely[:-1], [*expected[:-1], expected[-1] + rest])


def statistic(of: Cells, drawn: Sequence[int]) -> float:
    """Return Pearson's statistic of draws."""
    pairs = zip(of.count(drawn), of.expected, strict=True)
    return math.fsum((count - len(drawn) * share) ** 2 / (len(drawn) * share) for count, share in pairs)


def p_value(value: float, freedom: int) -> float:
    """Return the probability that a chi-square variable exceeds a value."""
    return float(torch.special.gammaincc(_double(freedom / 2), _double(value / 2)))


def critical(freedom: int, alpha: float) -> float:
    """Return the value that a chi-square variable exceeds with probability alpha."""
    return _root(lambda value: alpha - p_value(value, freedom))


def power(noncentrality: float, freedom: int, alpha: float) -> float:
    """Return how often a noncentral chi-square variable exceeds the critical value: a Poisson mixture of central ones.

    That the mean of the mixture is half the noncentrality is its definition (Johnson, Kotz and Balakrishnan, 1995).
    """
    half, bar = noncentrality / 2, critical(freedom, alpha)
    terms = torch.arange(int(half + 12 * math.sqrt(half) + 30), dtype=torch.float64)
    weight = torch.exp(terms * math.log(max(half, 1e-300)) - half - torch.lgamma(terms + 1))
    return float((weight * torch.special.gammaincc(freedom / 2 + terms, _double(bar / 2).expand_as(terms))).sum())


def draws_needed(freedom: int, tv: float, alpha: float) -> int:
    """Return the draws that reject a law off by the total variation `tv` with POWER."""
    wanted = _root(lambda value: power(value, freedom, alpha) - POWER)
    return math.ceil(wanted / (4 * tv * tv))


def draws_for(laws: Sequence[Cells], tv: float, alpha: float) -> int:
    """Return the draws after each of several prefixes: those that the power asks for, and no cell too thin."""
    whole = draws_needed(sum(each.freedom for each in laws), tv, alpha)
    rarest = min(min(each.expected) for each in laws)
    return max(math.ceil(whole / len(laws)), math.ceil(LEAST / rarest))


def _root(rising: Callable[[float], float]) -> float:
    """Return where a rising function of positive numbers crosses 0, by bisection."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def _double(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
