"""The draft source in service: replaced while requests run; the old one returns where the new one accepts less."""

import logging
import math
from collections import deque
from statistics import NormalDist
from threading import Lock
from typing import NamedTuple

from inference.protocol import Drafter

log = logging.getLogger(__name__)

LOOKS = (8, 16, 32, 64)  # requests after which a new drafter is compared with the old one; it stays after the last
ALPHA = 0.01  # the chance that one that accepts as much is put back, over all looks


class Accepted(NamedTuple):
    """Tokens accepted a pass by a drafter: the mean over requests' passes, its variance, and how many requests."""

    mean: float
    variance: float
    requests: int

    @classmethod
    def of(cls, requests: deque[tuple[int, int]]) -> "Accepted":
        """Return that of requests' passes and accepted tokens.

        Passes of a request are alike, so that it is requests that vary independently: the variance is that of a ratio
        of two sums over clusters (Cochran, Sampling Techniques, 1977, chapter 2).
        """
        count, passes = len(requests), sum(size for size, _ in requests)
        mean = sum(accepted for _, accepted in requests) / passes
        squares = sum((accepted - mean * size) ** 2 for size, accepted in requests)
        return cls(mean, squares / passes**2 * count / (count - 1), count)


def is_less(new: Accepted, old: Accepted, alpha: float) -> bool:
    """Whether a mean is below another, by a one-sided test that errs with a chance of `alpha` at most where it is not.

    The degrees of freedom are those of the smaller sample: with Welch's, of few requests, the test erred twice as often
    as it should.
    """
    variance, freedom = new.variance + old.variance, min(new.requests, old.requests) - 1
    if variance == 0:
        return new.mean < old.mean
    z = NormalDist().inv_cdf(1 - alpha)
    # Student's quantile from the normal one (Abramowitz and Stegun, 26.7.5).
    terms = z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    quantile = z + sum(t / (d * freedom**i) for i, (t, d) in enumerate(zip(terms, (4, 96, 384), strict=True), 1))
    return new.mean - old.mean < -quantile * math.sqrt(variance)


class Service:
    """Holds the draft source in service; `speculate` and `generate` take it in a drafter's place.

    `swap` may be called at any time, from `on_tokens` or from another thread too: decoding goes on with the new drafter
    at its next pass, running requests included. No text changes: the target decides every token, as it does without.

    Attributes:
        drafter: the one in service, for every batch from its next step on.
        working: the last one that a batch took.
        proven: the one to put back if that accepts fewer tokens a pass.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = self.working = self.proven = drafter
        self.requests = {drafter: deque[tuple[int, int]](maxlen=LOOKS[-1])}  # of both: passes and accepted tokens
        self.lock = Lock()

    def swap(self, drafter: Drafter, *, roll_back: bool = True) -> None:
        """Put another drafter into service.

        It is compared with the old one's last requests after as many of its own as LOOKS says, and after the last look
        the old one is dropped. Acceptance is no speed: of a smaller tree, or of none, it is lower as it should be.

        Args:
            drafter: for the same target.
            roll_back: whether to put the old one back where that accepted significantly more tokens a pass.
        """
        with self.lock:
            self.drafter = drafter
            if not roll_back:
                self.proven = drafter
            self._hold()

    def refuse(self, drafter: Drafter, error: Exception, former: Drafter) -> None:
        """Put a batch's former drafter back in place of one that failed, unless a third one is in service by now."""
        with self.lock:
            if self.drafter is drafter:
                self.drafter = self.working = former
                self.proven = former if self.proven is drafter else self.proven
                self._hold()
        cause = str(error).strip().split("\n")[0]
        log.warning("%s is put back: %s fails (%s)", former.name, drafter.name, cause)

    def note(self, drafter: Drafter, passes: int, accepted: int) -> None:
        """Take note of a request's passes with a drafter; put the old one back where it is time."""
        with self.lock:
            if drafter not in self.requests:
                return
            self.requests[drafter].append((passes, accepted))
            if drafter is not self.drafter or drafter is self.proven or len(self.requests[drafter]) not in LOOKS:
                return
            self._compare()
            self._hold()

    def _compare(self) -> None:
        """Look at both drafters' requests: put the old one back, go on, or after the last look let the new one stay."""
        old, new = self.proven, self.drafter
        if len(self.requests[old]) >= LOOKS[0]:
            before, after = (Accepted.of(self.requests[drafter]) for drafter in (old, new))
            if is_less(after, before, ALPHA / len(LOOKS)):
                self.drafter = old
                log.warning(
                    "%s is put back: %s accepted %.2f tokens a pass in %d requests, the one before %.2f in %d",
                    old.name, new.name, after.mean, after.requests, before.mean, before.requests,
                )  # fmt: skip
                return
        if len(self.requests[new]) == LOOKS[-1]:
            self.proven = new

    def _hold(self) -> None:
        """Hold the requests of the two drafters at hand alone."""
        pair = dict.fromkeys((self.proven, self.drafter))
        self.requests = {one: self.requests.get(one, deque(maxlen=LOOKS[-1])) for one in pair}
