"""A sequential test that acceptance has fallen, with a bound on its false alarms: pure functions of numbers.

A bet of a share f of the most that is safe against "the mean is m or more", for a number x in [0, 1], multiplies a
capital by 1 + f (m - x) / (1 - m). If the mean is m or more the capital is a nonnegative supermartingale: that it ever
reaches 1 / rate times its start has at most the probability `rate`, whenever one looks (Ville, 1939; Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, arXiv 2010.09686). So is an average of
such capitals over bets, and over the requests at which betting begins, as nobody knows when acceptance falls (Shin,
Ramdas and Rinaldo, "E-detectors", arXiv 2203.03532).

The mean m of the time before is not known, only a reference window of it. Bets there, by 1 + f (x / m - 1), that the
mean is above m, whose capital goes on to the bets that it has fallen, are a supermartingale at the true m. So the least
of this product over all m stays below 1 / rate with the same probability, the reference's uncertainty included. It
needs no more than that requests come independently from one distribution.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from eval.config import TURNS
from eval.inputs.drafters import overlay
from eval.measures.metrics import SpecDecodingStats
from heads.common.ranges import Decay, NewTokens, OneOf, Positive, Within
from heads.common.resolvers import ROOT
from heads.common.typed import typed

BETS = np.array([1.0, 0.5, 0.25, 0.125, 0.0625])  # shares of the largest safe bet
PILOT = 4  # the first of N equal parts of the reference decides on the scale only
LEAST = 1e-9  # the smallest scale
CUT = 0.95  # quantile of the pilot's values that larger values are cut to
MEANS, AROUND = 128, 0.15  # how many means are bet on, and how far around the reference's most of them are
MOST = 1e150  # cap of a capital; any excess is dropped
QUIET, ALARM, EARLY = 0, 1, 3  # exit statuses

Array = NDArray[np.float64]


@dataclass(frozen=True)
class WatcherConfig:
    """The configuration of a watch; conf/ops/watch.yaml explains the keys."""

    alarm_rate: Annotated[float, Within(0, 0.5, above=True)]
    reference: Annotated[int, Within(20, 1_000_000)]
    tolerance: Decay
    follow: bool
    poll: Positive
    turns: Annotated[str, OneOf(TURNS)]
    max_new_tokens: NewTokens


def watcher_config(given: Mapping[str, Any], prefix: str = "") -> WatcherConfig:
    """Return the values of conf/ops/watch.yaml, with those given that are not None; errors have the prefix."""
    values: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "ops" / "watch.yaml"))
    read = {field.name: values[field.name] for field in fields(WatcherConfig)}
    return typed(WatcherConfig, overlay(read, given), prefix)


class Alarm(NamedTuple):
    """An alarm: the request at which it came, the one from which on acceptance was lower, both from 0, and why."""

    at: int
    since: int
    before: float
    after: float
    evidence: float
    rate: float

    def __str__(self) -> str:
        """Describe it in one line."""
        return (
            f"time to adapt, at request {self.at + 1:,}: from about request {self.since + 1:,} on the target accepts "
            f"{self.after:.2f} tokens per pass in place of {self.before:.2f} (evidence {self.evidence:.3g}; a false "
            f"alarm, ever: {self.rate:g} at most)"
        )


class Mean:
    """Capital bet that a mean has fallen by more than a tolerance since a reference; all values are in [0, 1]."""

    def __init__(self, reference: Array, tolerance: float) -> None:
        middle = float(reference.mean())
        near = np.clip(np.linspace(middle - AROUND, middle + AROUND, MEANS), 1e-3, 1 - 1e-3)
        mean = np.union1d(near, np.linspace(0, 1, MEANS // 4)[1:-1])
        # Between two of these means the capital is at least that before at the upper, times that since at the lower.
        upper, lower = np.append(mean, 1.0), np.insert(mean, 0, 0.0)
        with np.errstate(divide="ignore"):  # all is lost at a 0, where all was bet
            gains = np.log(1 + BETS[:, None, None] * (reference / upper[:, None] - 1)).sum(2)
        before = np.logaddexp.reduce([np.zeros(len(upper)), *gains]) - math.log(1 + len(BETS))
        self.before = np.exp(np.minimum(before, math.log(MOST)))
        self.least, self.count = lower * (1 - tolerance), 0
        self.since = np.zeros((len(BETS), len(lower)))

    def update(self, value: float) -> float:
        """Bet on one more number, and return the evidence."""
        begins = self._waiting()
        self.count += 1
        gain = (self.least - value) / (1 - self.least)
        self.since = np.minimum((self.since + begins - self._waiting()) * (1 + BETS[:, None] * gain), MOST)
        return float((self.before * (self.since.mean(0) + self._waiting())).min())

    def _waiting(self) -> float:
        """Return the weight of the bets that begin later, 1 at first."""
        return 1 / math.log2(self.count + 2)


class Detector:
    """The detector of a watch: it takes observations in order, and raises the alarm.

    Accepted tokens per pass are cut to `scale` and divided by it, so that one request in many does not keep bets small.
    """

    def __init__(self, config: WatcherConfig) -> None:
        self.config, self.scale = config, 1.0
        self.accepted: list[float] = []
        self.mean: Mean | None = None

    def update(self, passes: SpecDecodingStats) -> Alarm | None:
        """Take in the passes of one more request or window; return the alarm if there is one."""
        self.accepted.append(float(passes.accepted / passes.steps))
        count = self.config.reference
        if self.mean is None:
            if len(self.accepted) == count:
                cut = count // PILOT
                self.scale = max(float(np.quantile(self.accepted[:cut], CUT)), LEAST)
                values = np.minimum(np.array(self.accepted[cut:]) / self.scale, 1.0)
                self.mean = Mean(values, self.config.tolerance)
            return None
        evidence = self.mean.update(min(self.accepted[-1] / self.scale, 1.0))
        if evidence < 1 / self.config.alarm_rate:
            return None
        since = changed_at(np.array(self.accepted[count:])) + count
        before, after = (float(np.mean(values)) for values in (self.accepted[:since], self.accepted[since:]))
        return Alarm(len(self.accepted) - 1, since, before, after, evidence, self.config.alarm_rate)


class Outcome(NamedTuple):
    """A watch's end: its alarm if there was one, the requests or windows that it read, and its exit status."""

    alarm: Alarm | None
    requests: int
    status: int


def watched(arrivals: Iterable[SpecDecodingStats], config: WatcherConfig) -> Outcome:
    """Read observations until an alarm, their end, or an interruption."""
    detector = Detector(config)
    alarm = None
    with suppress(KeyboardInterrupt):
        alarm = next((alarm for passes in arrivals if (alarm := detector.update(passes)) is not None), None)
    count = len(detector.accepted)
    return Outcome(alarm, count, ALARM if alarm else QUIET if count > config.reference else EARLY)


def changed_at(values: Array) -> int:
    """Return the index that cuts values in two of which the second's mean is lower, by the least squares of both."""
    before = np.arange(1, len(values))
    sums, after = values.cumsum()[:-1], len(values) - before
    fell = np.maximum(sums / before - (values.sum() - sums) / after, 0.0)
    return int((before * after * fell**2).argmax()) + 1 if fell.any() else 0
