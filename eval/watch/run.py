"""A watch from the first observation to its line and exit status, and a head played along a log's records."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data.text.records import parse, readable
from eval.config import ClientConfig, WatchConfig, WatcherConfig
from eval.endpoint.client import Server
from eval.inputs.texts import recorded
from eval.measures.metrics import Passes, together
from eval.offline.teacher_forced import passes_along, record
from eval.tiers import within_context
from eval.watch.arrivals import Log, Replay, windows
from eval.watch.sequential import Alarm, Detector, Observation
from inference.drafters.head import HeadDrafter
from inference.drafters.policy import CONFIDENT
from inference.target.target import Target

QUIET, ALARM, EARLY = 0, 1, 3  # exit statuses


class Player:
    """A head that is played along the answers of a log's records, under its tree as greedy decoding grows it.

    Target and head are loaded with the first record that does not count its own passes.
    """

    def __init__(self, load: Callable[[], tuple[Target, HeadDrafter]], name: str, turns: str, most: int) -> None:
        self.load, self.name, self.turns, self.most = load, name, turns, most
        self.loaded: tuple[Target, HeadDrafter] | None = None

    def __call__(self, raw: dict[str, Any], number: int) -> Passes:
        """Return the passes that the answers of a record would have taken, each cut to `most` tokens.

        Raises:
            ValueError: it has no answer, is of no known shape, or of another tokenizer.
        """
        self.loaded = self.loaded or self.load()
        target, drafter = self.loaded
        entry = parse(readable(raw, number, self.name), number, self.name)
        texts = [answer.text for answer in recorded(entry, target, self.turns, self.most)]
        tree = drafter.policy
        grown = [tree] if tree.kind in CONFIDENT else []
        depth = min(drafter.head.max_depth, tree.deepest)
        return together(
            [
                passes_along(record(target, drafter.head, fitting, grown, depth, steps_alone=True), tree)
                for fitting in (within_context(text, entry.id, self.name, target, truncate=True) for text in texts)
            ]
        )


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


def observations(watch: WatchConfig, client: ClientConfig, replay: Replay | None) -> Iterable[Observation]:
    """Return the observations of `watch.watch`: a server's windows, or a log's records."""
    assert watch.watch is not None
    if watch.watch.startswith(("http://", "https://")):
        return windows(Server(watch.watch, client, "watch"), watch.watcher, client.timeout)
    return Log(Path(watch.watch).expanduser(), watch.watcher, replay)


def follow(watch: WatchConfig, client: ClientConfig, replay: Replay | None) -> int:
    """Watch; print the alarm alone on stdout, and how it ended on stderr; return the exit status."""
    config = watch.watcher
    arrivals = observations(watch, client, replay)
    if not isinstance(arrivals, Log):
        config = replace(config, lengths=[])  # of no answer's, in a window of many
    outcome = watched(arrivals, config)
    if outcome.alarm is not None:
        print(outcome.alarm, flush=True)
    ends = {QUIET: "no alarm", EARLY: f"too few yet to compare: the first {config.reference} are the reference"}
    left_out = f", {arrivals.skipped} lines left out" if isinstance(arrivals, Log) and arrivals.skipped else ""
    if outcome.status in ends:
        print(
            f"{watch.watch}: {outcome.requests} requests or windows{left_out}: {ends[outcome.status]}", file=sys.stderr
        )
    return outcome.status
