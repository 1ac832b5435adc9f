"""Learning curves of τ, fitted to a few short trainings and continued to a budget, as samples of what may come out.

τ(N) = τ_inf - a N^-b, a power function of the tokens (Hestness et al., arXiv 1712.00409; Viering and Loog, arXiv
2103.10948, compare forms), for all heads together: the exponents have a common prior whose centre is estimated (partial
pooling, as in Gelman and Hill, 2007, chapter 12), and so has the size of the residuals, since the few points of one
head determine neither. The posterior is exact but for the grids of exponents and residuals: given these τ_inf and a are
Gaussian.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.9
EXPONENTS = np.geomspace(0.03, 3.0, 28)
RESIDUALS = np.geomspace(0.005, 0.2, 10)  # as shares of τ - 1
RESAMPLES, EACH = 200, 10  # of the prompts, and samples of the posterior for each
TRIES = 20  # for a sample within the bounds
TINY = 1e-300


@dataclass(frozen=True)
class Prior:
    """What is assumed of a curve before it is measured; tuned by benchmarks/forecast.py.

    Attributes:
        centre: of the heads' exponents, which is estimated.
        centre_width: its standard deviation, on a log scale as the next.
        width: of a head's exponent around the centre.
        residual: of the measured points around the curve, as a share of τ - 1, which is estimated.
        residual_width: its standard deviation on a log scale.
        early: how much more of it a point has for each doubling that it lies before the last: early training follows
            no power of the tokens.
        slope: scale of the gain by e times the tokens, at the last point, as a share of τ - 1.
        drift: standard deviation of what the later curve gains, as a share of the gain forecast.
    """

    centre: float = 0.4
    centre_width: float = 0.6
    width: float = 0.9
    residual: float = 0.02
    residual_width: float = 0.7
    early: float = 0.5
    slope: float = 1.0
    drift: float = 0.6


PRIOR = Prior()


@dataclass(frozen=True)
class Curve:
    """What was measured of one head.

    Attributes:
        tokens: the lengths of its trainings.
        counts: [points, prompts, 2], the tokens of each prompt's answer and the passes that they took.
        bound: the most tokens that a pass can commit.
    """

    tokens: Array
    counts: Array
    bound: float

    def tau(self, weight: Array) -> Array:
        """Return τ at every point, the prompts weighed by [resamples, prompts]: [resamples, points]."""
        tokens, passes = np.moveaxis(np.einsum("rp,npk->rnk", weight, self.counts), 2, 0)
        return np.asarray(tokens / passes)


def forecast(curves: Sequence[Curve], at: Sequence[Sequence[float]], others: int, prior: Prior = PRIOR) -> list[Array]:
    """Return samples of each head's τ after each of `at` tokens, as measured on `others` prompts of the same kind.

    All curves are of the same prompts, and of two points or more.

    Returns:
        [lengths, RESAMPLES * EACH] of each head; samples of one index share their resample of the prompts.
    """
    rng = np.random.default_rng(0)
    prompts = curves[0].counts.shape[1]
    weight = rng.multinomial(prompts, [1 / prompts] * prompts, RESAMPLES).astype(float)
    fits = [Fit(curve, curve.tau(weight), prior) for curve in curves]
    evidence = np.exp([fit.evidence for fit in fits])  # [heads, resamples, exponents, residuals]
    scale = np.log(EXPONENTS)
    by_centre = np.stack([gaussian(scale, middle, prior.width) for middle in scale])
    # the likelihood of a centre and a residual: every head's exponent is summed out
    shared = np.log(np.einsum("hrbs,cb->hrcs", evidence, by_centre) + TINY).sum(0)
    shared += np.log(gaussian(scale, np.log(prior.centre), prior.centre_width))[:, None]
    shared += np.log(gaussian(np.log(RESIDUALS), np.log(prior.residual), prior.residual_width))
    middle, residual = np.unravel_index(categorical(rng, shared.reshape(RESAMPLES, -1)), shared.shape[1:])
    errors = [relative_error(curve, weight) * np.sqrt(prompts / others) for curve in curves]
    return [
        fit.sample(rng, np.asarray(lengths, dtype=float), by_centre[middle], residual, error)
        for fit, lengths, error in zip(fits, at, errors, strict=True)
    ]


class Fit:
    """The Gaussian posteriors of one curve's level at its last point and its slope there, by exponent and residual.

    With t tokens in units of the last point's: τ = level + slope (1 - t^-b) / b.
    """

    def __init__(self, curve: Curve, tau: Array, prior: Prior) -> None:
        self.curve, self.tau, self.drift = curve, tau, prior.drift
        basis = bent(curve.tokens / curve.tokens[-1])  # [exponents, points]
        design = np.stack([np.ones_like(basis), basis], -1)  # [exponents, points, 2]
        self.unit = max(float(tau[:, -1].mean()) - 1, 0.05)  # the scale of residuals and slopes
        before = np.diag([4.0, prior.slope**2]) * self.unit**2
        noise = (RESIDUALS * self.unit) ** 2
        centred = tau - tau[:, -1:]  # the level's prior is around the last point
        early = np.diag((1 + prior.early * np.log2(curve.tokens[-1] / curve.tokens)) ** 2)
        covariance = (design @ before @ design.swapaxes(1, 2))[:, None] + noise[:, None, None] * early
        inverse = np.linalg.inv(covariance)  # [exponents, residuals, points, points]
        distance = np.einsum("rn,bsnm,rm->rbs", centred, inverse, centred)
        log = -0.5 * (distance + np.linalg.slogdet(covariance)[1])
        self.evidence = log - log.max((1, 2), keepdims=True)
        gain = before @ design.swapaxes(1, 2)[:, None] @ inverse  # [exponents, residuals, 2, points]
        self.mean = np.einsum("bskn,rn->rbsk", gain, centred)
        value, vector = np.linalg.eigh(before - gain @ design[:, None] @ before)  # by rounding a value may be below 0
        self.root = vector * np.sqrt(np.maximum(value, 0.0))[..., None, :]

    def sample(
        self, rng: np.random.Generator, at: Array, exponents: Array, residual: NDArray[np.int64], error: float
    ) -> Array:
        """Return samples of what is measured after `at` tokens: of the exponent, of level and slope, and of the noise.

        Curves that fall or rise beyond the bound are sampled again.
        """
        rows = np.repeat(np.arange(RESAMPLES), EACH)
        log = np.log(exponents + TINY) + self.evidence[np.arange(RESAMPLES), :, residual]
        level, slope, exponent = np.zeros((3, len(rows)))
        left = np.arange(len(rows))
        for _ in range(TRIES):
            row = rows[left]
            b, noise = categorical(rng, log[row]), residual[row]
            pair = self.mean[row, b, noise] + np.einsum(
                "ikl,il->ik", self.root[b, noise], rng.normal(size=(len(left), 2))
            )
            level[left], slope[left], exponent[left] = pair[:, 0] + self.tau[row, -1], pair[:, 1], EXPONENTS[b]
            left = left[(slope[left] < 0) | (level[left] + slope[left] / exponent[left] > self.curve.bound)]
            if not len(left):
                break
        ratio = at[:, None] / self.curve.tokens[-1]
        gain = np.maximum(slope, 0) * (1 - ratio**-exponent) / exponent
        drift, residue = rng.normal(size=(2, len(rows)))
        prompts = rng.standard_t(max(2, self.curve.counts.shape[1] - 1), len(rows))  # their spread is estimated too
        result = level + gain * (1 + self.drift * drift) + RESIDUALS[residual[rows]] * self.unit * residue
        return np.clip(result + (result - 1) * error * prompts, 1.0, self.curve.bound)


def bent(ratio: Array) -> Array:
    """Return (1 - t^-b) / b for every exponent b and ratio t: the logarithm where b is small."""
    return np.asarray((1 - ratio[None] ** -EXPONENTS[:, None]) / EXPONENTS[:, None])


def relative_error(curve: Curve, weight: Array) -> float:
    """Return the standard error of τ by its sample of prompts, as a share of τ - 1, with which it grows."""
    last, prompts = curve.tau(weight)[:, -1], curve.counts.shape[1]
    return float(last.std() / max(last.mean() - 1, 0.05) * np.sqrt(prompts / max(1, prompts - 1)))


def gaussian(x: Array, mean: float, width: float) -> Array:
    """Return the normalised weights of a Gaussian on a grid."""
    weight = np.exp(-0.5 * ((x - mean) / width) ** 2)
    return np.asarray(weight / weight.sum())


def categorical(rng: np.random.Generator, log: Array) -> NDArray[np.int64]:
    """Return an index for every row of log-weights, by Gumbel's trick."""
    return np.asarray((log + rng.gumbel(size=log.shape)).argmax(1))


def interval(samples: Array) -> tuple[float, float, float]:
    """Return the median and the ends of the central interval of LEVEL."""
    low, middle, high = np.quantile(samples, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return float(middle), float(low), float(high)
