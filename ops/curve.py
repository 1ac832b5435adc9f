"""The learning curve of τ: a power function of the trained tokens through a few points, and its interval."""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.9  # confidence level of a forecast's interval
FLOOR = 0.01  # the least standard error of a measured τ, as a share of it: no curve is exactly a power function
EXPONENTS = (0.03, 3.0)


class Predicted(NamedTuple):
    """τ of a longer training, with the ends of its interval."""

    tau: float
    low: float
    high: float


def power_function(tokens: NDArray[np.float64], limit: float, rise: float, exponent: float) -> NDArray[np.float64]:
    """Return τ after N tokens: limit - rise tokens^-exponent (Hestness et al., arXiv 1712.00409)."""
    return np.asarray(limit - rise * tokens**-exponent)


def predict(
    tokens: Sequence[float], tau: Sequence[float], error: Sequence[float], at: float, bound: float
) -> Predicted:
    """Return τ after `at` tokens by a power function through three points or more, with its interval of LEVEL.

    The interval is that of the function, by the covariance of its three numbers; a new measurement varies more.

    Args:
        tokens: trained tokens of each point, increasing.
        tau: τ at each point.
        error: Standard errors of τ.
        at: a number of tokens, not below the last point's.
        bound: the most tokens that a pass can commit.
    """
    from scipy.optimize import curve_fit  # late: half a second that no other run needs

    x, y = np.asarray(tokens, dtype=float) / tokens[-1], np.asarray(tau, dtype=float)
    rise = max(float(y[-1] - y[0]), 0.01)
    values, covariance = curve_fit(
        power_function, x, y, p0=(min(y[-1] + rise, bound), rise, 0.5), sigma=np.maximum(error, FLOOR * y),
        absolute_sigma=True, bounds=((1.0, 1e-3, EXPONENTS[0]), (bound, 2 * bound, EXPONENTS[1])),
    )  # fmt: skip
    ratio, (_, rise, exponent) = at / tokens[-1], values
    gradient = np.array([1.0, -(ratio**-exponent), rise * ratio**-exponent * math.log(ratio)])
    middle = float(power_function(np.array(ratio), *values))
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * math.sqrt(gradient @ covariance @ gradient)
    return Predicted(*(min(max(end, 1.0), bound) for end in (middle, middle - half, middle + half)))


def with_interval(values: Predicted, unit: str = "") -> str:
    """Return a forecast with its interval as text."""
    return f"{values.tau:.2f}{unit} [{values.low:.2f}, {values.high:.2f}]"
