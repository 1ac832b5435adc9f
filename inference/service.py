"""The drafter in service, which another one may replace while requests run."""

import logging
from threading import Lock

from inference.protocol import Drafter

log = logging.getLogger(__name__)


class Service:
    """Holds the drafter in service; `speculate` and `generate` take it in a drafter's place.

    `swap` may be called at any time, from `on_tokens` or from another thread too: decoding continues with the new
    drafter at its next pass, running requests included. No text changes: the target decides every token.

    Attributes:
        drafter: the one in service, for every batch from its next step on.
        working: the last one that a batch took.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = self.working = drafter
        self.lock = Lock()

    def swap(self, drafter: Drafter) -> None:
        """Put another drafter for the same target into service."""
        with self.lock:
            self.drafter = drafter

    def refuse(self, drafter: Drafter, error: Exception, former: Drafter) -> None:
        """Put a batch's former drafter back in place of one that failed, unless a third one is in service by now."""
        with self.lock:
            if self.drafter is drafter:
                self.drafter = self.working = former
        cause = str(error).strip().split("\n")[0]
        log.warning("%s is put back: %s fails (%s)", former.name, drafter.name, cause)
