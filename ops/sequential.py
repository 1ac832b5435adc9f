"""A sequential test that acceptance has fallen, with a bound on ever being wrong: pure functions of numbers.

Who bets a share f of the most that is safe against "the mean is m or more", for a number x in [0, 1], multiplies a
capital by 1 + f (m - x) / (1 - m). If the mean is m or more the capital is a nonnegative supermartingale: that it ever
reaches 1 / rate times its start has at most the probability `rate`, whenever one looks (Ville, 1939; Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, arXiv 2010.09686). An average of such
capitals is one as well: over bets; over the requests at which betting begins, whose weights add up to 1, as nobody
knows when acceptance falls (Shin, Ramdas and Rinaldo, "E-detectors", arXiv 2203.03532); and over positions, categories
and lengths.

The mean m of the time before is not known, only a reference window of it. Who bets there, by 1 + f (x / m - 1), that
the mean is above m, and hands the capital on to the bets that it has fallen, has a supermartingale at the true m. So
the least of this product over all m stays below 1 / rate with the same probability, the reference's uncertainty
included. It needs no more than that requests come independently from one distribution, whatever that is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from eval.config import TURNS
from eval.inputs.drafters import overlay
from eval.measures.metrics import Passes
from heads.common.ranges import Count, Decay, NewTokens, OneOf, Positive, Within
from heads.common.resolvers import ROOT
from heads.common.typed import typed

BETS = np.array([1.0, 0.5, 0.25, 0.125, 0.0625])  # shares of the largest safe bet
PILOT = 4  # the first of so many parts of the reference decides on the scales alone
LEAST = 1e-9  # of a scale
CUT = 0.95  # of a pilot's values, the quantile that larger values are cut to
MEANS, AROUND = 128, 0.15  # how many means are bet on, and how far around the reference's most of them are
MOST = 1e150  # of a capital: what is beyond it is given away
ALL, POSITION = "all requests", "position"
QUIET, ALARM, EARLY = 0, 1, 3  # exit statuses


@dataclass(frozen=True)
class WatcherConfig:
    """When a watch raises an alarm, and how it reads a log; conf/ops/watch.yaml says what each key means."""

    alarm_rate: Annotated[float, Within(0, 0.5, above=True)]
    reference: Annotated[int, Within(20, 1_000_000)]
    tolerance: Decay
    least: Annotated[int, Within(2, 1_000_000)]
    lengths: list[Count]
    follow: bool
    poll: Positive
    turns: Annotated[str, OneOf(TURNS)]
    max_new_tokens: NewTokens

    def __post_init__(self) -> None:
        """Refuse lengths that do not rise."""
        if self.lengths != sorted(set(self.lengths)):
            raise ValueError(f"lengths is {self.lengths}: give rising numbers")


def watcher_config(given: Mapping[str, Any], prefix: str = "") -> WatcherConfig:
    """Return the values of conf/ops/watch.yaml, with those given that are not None; errors have the prefix."""
    values: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "ops" / "watch.yaml"))
    read = {field.name: values[field.name] for field in fields(WatcherConfig)}
    return typed(WatcherConfig, overlay(read, given), prefix)


@dataclass(frozen=True)
class Observation:
    """What a target accepted in one request, or in a window of a server's counters."""

    passes: Passes
    category: str = ""

    @property
    def accepted(self) -> float:
        """Accepted tokens a pass."""
        return float(self.passes.accepted / self.passes.steps)

    def at(self, depth: int) -> float | None:
        """Return P(a >= depth); None where nobody counted positions."""
        by_depth = self.passes.by_depth
        if self.passes.accepted and not by_depth:
            return None
        return float(by_depth[depth - 1] / self.passes.steps) if depth <= len(by_depth) else 0.0

    def values(self, depth: int, lengths: Sequence[int]) -> dict[str, float]:
        """Return the numbers that are watched, by what they are of: all, positions, category, length of the answer."""
        positions = {f"{POSITION} {d}": value for d in range(1, depth + 1) if (value := self.at(d)) is not None}
        groups = [f"category {self.category}"] * bool(self.category)
        if lengths:
            longest = next((length for length in lengths if self.passes.tokens < length), None)
            end = f"under {longest} tokens" if longest else f"of {lengths[-1]} tokens or more"
            groups.append(f"answers {end}")
        return {ALL: self.accepted, **positions, **dict.fromkeys(groups, self.accepted)}


@dataclass(frozen=True)
class Alarm:
    """An alarm: the request at which it came, the one from which on acceptance was lower, both from 0, and why."""

    at: int
    since: int
    what: str
    before: float
    after: float
    evidence: float
    rate: float

    def __str__(self) -> str:
        """Describe it in one line."""
        return (
            f"time to adapt, at request {self.at + 1:,}: from about request {self.since + 1:,} on the target accepts "
            f"{self.after:.2f} tokens a pass in place of {self.before:.2f}, most clearly at {self.what} (evidence "
            f"{self.evidence:.3g}; a false alarm, ever: {self.rate:g} at most)"
        )


def not_begun(count: int) -> float:
    """Return the weight of the bets that begin after so many requests, 1 after none."""
    return 1 / math.log2(count + 2)


class Mean:
    """Capital bet that a mean has fallen by more than a tolerance since a reference.

    Values are cut to `scale` and divided by it, so that one request in many does not keep all bets small.
    """

    def __init__(self, reference: NDArray[np.float64], scale: float, weight: float, tolerance: float) -> None:
        self.scale, self.weight, self.count = scale, weight, 0
        values = np.minimum(reference / scale, 1.0)
        middle = float(values.mean())
        near = np.clip(np.linspace(middle - AROUND, middle + AROUND, MEANS), 1e-3, 1 - 1e-3)
        mean = np.union1d(near, np.linspace(0, 1, MEANS // 4)[1:-1])
        # Between two of these means the capital is at least that before at the upper, times that since at the lower.
        upper, lower = np.append(mean, 1.0), np.insert(mean, 0, 0.0)
        with np.errstate(divide="ignore"):  # all is lost at a 0, where all was bet
            gains = np.log(1 + BETS[:, None, None] * (values / upper[:, None] - 1)).sum(2)
        none = np.zeros((1, len(upper)))
        before = np.logaddexp.reduce(np.concatenate([none, gains])) - math.log(1 + len(BETS))
        self.before = np.exp(np.minimum(before, math.log(MOST)))
        self.least = lower * (1 - tolerance)
        self.since = np.zeros((len(BETS), len(lower)))
        self.evidence = self._capital()  # 1 or less

    def update(self, value: float) -> None:
        """Bet on one more number."""
        begins = not_begun(self.count) - not_begun(self.count + 1)
        self.count += 1
        gain = (self.least - min(value / self.scale, 1.0)) / (1 - self.least)
        self.since = np.minimum((self.since + begins) * (1 + BETS[:, None] * gain), MOST)
        self.evidence = self._capital()

    def _capital(self) -> float:
        return float((self.before * (self.since.mean(0) + not_begun(self.count))).min())


class Detector:
    """State of a watch: it takes observations in order, and says when acceptance has fallen."""

    def __init__(self, config: WatcherConfig) -> None:
        self.config = config
        self.reference: list[Observation] = []
        self.accepted: list[float] = []  # of all observations
        self.means: dict[str, Mean] = {}
        self.depth = 0

    @property
    def ready(self) -> bool:
        """Whether the reference is whole."""
        return bool(self.means)

    def update(self, observation: Observation) -> Alarm | None:
        """Take in one more observation; return the alarm if there is one."""
        self.accepted.append(observation.accepted)
        if not self.ready:
            self.reference.append(observation)
            if len(self.reference) == self.config.reference:
                self._begin()
            return None
        for name, value in observation.values(self.depth, self.config.lengths).items():
            if name in self.means:
                self.means[name].update(value)
        evidence = sum(mean.weight * mean.evidence for mean in self.means.values())
        return None if evidence < 1 / self.config.alarm_rate else self._alarm(evidence)

    def _begin(self) -> None:
        """Choose what is watched by how often the reference has it, and divide the capital among it.

        Half is for all requests, a quarter for positions, a quarter for categories and lengths.
        """
        cut = len(self.reference) // PILOT
        pilot, rest = self.reference[:cut], self.reference[cut:]
        self.depth = max(len(one.passes.by_depth) for one in pilot)
        columns: list[dict[str, list[float]]] = [{}, {}]
        for column, observations in zip(columns, (pilot, rest), strict=True):
            for one in observations:
                for name, value in one.values(self.depth, self.config.lengths).items():
                    column.setdefault(name, []).append(value)
        scales, values = columns
        names = [name for name in scales if len(values.get(name, [])) >= self.config.least]
        positions = [name for name in names if name.startswith(POSITION)]
        groups = [name for name in names if name != ALL and name not in positions]
        for share, together in ((0.5, [ALL]), (0.25, positions), (0.25, groups)):
            for name in together:
                scale = max(float(np.quantile(scales[name], CUT)), LEAST)
                self.means[name] = Mean(np.array(values[name]), scale, share / len(together), self.config.tolerance)

    def _alarm(self, evidence: float) -> Alarm:
        at, what = len(self.accepted) - 1, max(self.means, key=lambda name: self.means[name].evidence)
        since = changed_at(np.array(self.accepted[len(self.reference) :])) + len(self.reference)
        before, after = (float(np.mean(values)) for values in (self.accepted[:since], self.accepted[since:]))
        return Alarm(at, since, what, before, after, evidence, self.config.alarm_rate)


class Outcome(NamedTuple):
    """A watch's end: its alarm if there was one, the requests or windows that it read, and whether it compared any."""

    alarm: Alarm | None
    requests: int
    compared: bool

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return ALARM if self.alarm else QUIET if self.compared else EARLY


def watched(arrivals: Iterable[Observation], config: WatcherConfig) -> Outcome:
    """Read observations until an alarm, their end, or an interruption."""
    detector = Detector(config)
    alarm = None
    try:
        for observation in arrivals:
            alarm = detector.update(observation)
            if alarm is not None:
                break
    except KeyboardInterrupt:
        pass
    return Outcome(alarm, len(detector.accepted), len(detector.accepted) > config.reference)


def changed_at(values: NDArray[np.float64]) -> int:
    """Return the index that cuts values in two whose means differ most, by the least squares of both."""
    count = len(values)
    before = np.arange(1, count)
    if not len(before):
        return 0
    sums = values.cumsum()[:-1]
    apart = sums / before - (values.sum() - sums) / (count - before)
    fell = np.where(apart > 0, apart, 0.0)
    return int((before * (count - before) * fell**2).argmax()) + 1 if fell.any() else 0
