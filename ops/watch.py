"""python ops/watch.py log=log.jsonl run=outputs/NAME: an alarm when a served head's acceptance has fallen.

The test bets a share f of the largest safe bet against "the mean is at least m": for a number x in [0, 1] it multiplies
a capital by 1 + f (m - x) / (1 - m). If the mean is at least m, the capital is a nonnegative supermartingale, so it
reaches 1 / rate times its start with probability at most `rate`, whenever one looks (Ville, 1939; Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting", JRSS B 2024, arXiv 2010.09686). The same holds for
averages of such capitals over shares f, and over the request at which betting begins, since the time of a fall is
unknown (Shin, Ramdas and Rinaldo, "E-detectors", arXiv 2203.03532).

The mean m before the fall is unknown; there is only a reference window. Bets on the reference that the mean is above m,
by 1 + f (x / m - 1), whose capital passes to the bets that it has fallen, form a supermartingale at the true m. So the
minimum of this product over all m stays below 1 / rate with the same probability, the reference's uncertainty included.
The only assumption is that requests are independent and come from one distribution.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the checkout's root replaces the script's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import logging
import math
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from data.answers.client import check_url
from data.text.files import OPENERS
from data.text.records import parse, reply_in, to_known_shape
from eval.config import Turns
from eval.inputs.drafters import model_of
from eval.inputs.workloads import recorded
from eval.measures.counters import ENGINES, between, decoded_between, of_reply, restarted
from eval.measures.metrics import SpecDecodingStats, count_passes, sum_counts
from eval.teacher_forced import passes_along, rank_text, within_context
from heads.common.command import command
from heads.common.typed import Count, Decay, Json, NewTokens, Positive, Within, typed
from heads.common.untrusted import parse_json, visible
from heads.formats.hub import resolve_head
from inference.drafters.head import HeadDrafter, load_drafter, saved_trees
from inference.drafters.policy import BY_CONFIDENCE
from inference.target.target import Target
from ops.served import Metrics, Record

BETS = np.array([1.0, 0.5, 0.25, 0.125, 0.0625])  # shares of the largest safe bet
PILOT = 4  # one of N equal parts of the reference sets only the scale
LEAST = 1e-9  # minimum scale
CUT = 0.95  # quantile of the pilot's values at which values are cut
MEANS, AROUND = 128, 0.15  # number of means that are bet on; range around the reference that holds most
MOST = 1e150  # cap of a capital, which drops the excess
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
    turns: Turns
    max_new_tokens: NewTokens


class Alarm(NamedTuple):
    """An alarm: the request of the alarm, the first request of lower acceptance, both from 0, and the reason."""

    at: int
    since: int
    before: float
    after: float
    evidence: float
    rate: float

    def __str__(self) -> str:
        return (
            f"time to adapt, at request {self.at + 1:,}: from about request {self.since + 1:,} on the target accepts "
            f"{self.after:.2f} tokens per pass in place of {self.before:.2f} (evidence {self.evidence:.3g}; a false "
            f"alarm, ever: {self.rate:g} at most)"
        )


class BettingTest:
    """Capital bet that a mean has fallen by more than a tolerance since a reference; all values are in [0, 1]."""

    def __init__(self, reference: Array, tolerance: float) -> None:
        middle = float(reference.mean())
        near = np.clip(np.linspace(middle - AROUND, middle + AROUND, MEANS), 1e-3, 1 - 1e-3)
        mean = np.union1d(near, np.linspace(0, 1, MEANS // 4)[1:-1])
        # Between two means the capital is at least (before, at the upper mean) times (since, at the lower mean).
        upper, lower = np.append(mean, 1.0), np.insert(mean, 0, 0.0)
        with np.errstate(divide="ignore"):  # a bet of everything loses all at a 0
            gains = np.log(1 + BETS[:, None, None] * (reference / upper[:, None] - 1)).sum(2)
        before = np.logaddexp.reduce([np.zeros(len(upper)), *gains]) - math.log(1 + len(BETS))
        self.before = np.exp(np.minimum(before, math.log(MOST)))
        self.least, self.count = lower * (1 - tolerance), 0
        self.since = np.zeros((len(BETS), len(lower)))

    def update(self, value: float) -> float:
        """Bet on one more value, and return the evidence."""
        begins = self._waiting()
        self.count += 1
        gain = (self.least - value) / (1 - self.least)
        self.since = np.minimum((self.since + begins - self._waiting()) * (1 + BETS[:, None] * gain), MOST)
        return float((self.before * (self.since.mean(0) + self._waiting())).min())

    def _waiting(self) -> float:
        """Return the weight of bets that have not begun, 1 at the start."""
        return 1 / math.log2(self.count + 2)


class Outcome(NamedTuple):
    """The outcome of a watch: its alarm or None, the number of observations, and the exit status."""

    alarm: Alarm | None
    requests: int
    status: int


def watched(arrivals: Iterable[SpecDecodingStats], config: WatcherConfig) -> Outcome:
    """Read observations until an alarm, their end, or an interruption.

    Accepted tokens per pass are cut to a scale and divided by it, so that rare large values do not keep bets small.
    """
    accepted, count, rate = [], config.reference, config.alarm_rate
    scale, mean, alarm = 1.0, None, None
    with suppress(KeyboardInterrupt):
        for passes in arrivals:
            accepted.append(float(passes.accepted / passes.steps))
            if mean is not None and (evidence := mean.update(min(accepted[-1] / scale, 1.0))) >= 1 / rate:
                since = changed_at(np.array(accepted[count:])) + count
                before, after = (float(np.mean(values)) for values in (accepted[:since], accepted[since:]))
                alarm = Alarm(len(accepted) - 1, since, before, after, evidence, rate)
                break
            if len(accepted) == count:
                scale = max(float(np.quantile(accepted[: count // PILOT], CUT)), LEAST)
                mean = BettingTest(np.minimum(np.array(accepted[count // PILOT :]) / scale, 1.0), config.tolerance)
    return Outcome(alarm, len(accepted), ALARM if alarm else QUIET if len(accepted) > count else EARLY)


def changed_at(values: Array) -> int:
    """Return the index that splits values with the least squared error such that the second mean is lower."""
    before = np.arange(1, len(values))
    sums, after = values.cumsum()[:-1], len(values) - before
    fell = np.maximum(sums / before - (values.sum() - sums) / after, 0.0)
    return int((before * after * fell**2).argmax()) + 1 if fell.any() else 0


log = logging.getLogger(__name__)

Replay = Callable[[Json, int], SpecDecodingStats]  # record, index -> passes of a replay
DEEPEST = 1000  # maximum accepted tokens of a pass
TRIES = 20  # records without acceptance that may come before at least half must have it


@dataclass(frozen=True)
class WatchConfig(WatcherConfig):
    """The configuration of a watch of a head in service, by a log or by a server's counters."""

    log: str | None
    run: str | None
    url: str | None
    api_key_env: str
    away: Positive
    passes: Count
    model: Json
    tree: Json

    def __post_init__(self) -> None:
        """Refuse both a log and a server, or neither."""
        if (self.log is None) == (self.url is None):
            raise ValueError("give what to watch: log=FILE, or url=http://localhost:8000 of a server's counters")
        if self.url is not None:
            check_url("url", self.url)


def follow(config: WatchConfig) -> int:
    """Watch and print the alarm; return 0 without an alarm, 1 with one, 3 too early. Refuse a missing log."""
    skipped = ""
    if config.url is not None:
        outcome = watched(windows(Metrics(config.url, config.api_key_env), config), config)
    else:
        name = str(config.log)
        play = player(config.run, config.model, config.tree, config, name) if config.run else None
        source = Log(Path(name).expanduser(), config, play)
        outcome = watched(source, config)
        skipped = f", {source.skipped} lines left out" if source.skipped else ""
    if outcome.alarm is not None:
        print(outcome.alarm, flush=True)
    ends = {QUIET: "no alarm", EARLY: f"too few yet to compare: the first {config.reference} are the reference"}
    if outcome.status in ends:
        count = f"{outcome.requests} requests or windows{skipped}"
        print(f"{config.log or config.url}: {count}: {ends[outcome.status]}", file=sys.stderr)
    return outcome.status


def windows(server: Metrics, config: WatchConfig) -> Iterator[SpecDecodingStats]:
    """Yield windows of a server's counters, each of `config.passes` passes or more, other clients' passes included.

    A restart begins a new window. Refuse a server without counters or drafts, or away for over `config.away` seconds.
    """
    before, last = server.counters(), time.monotonic()
    if before is None:
        raise ValueError(f"{server.url}/metrics has no counters of {', '.join(ENGINES)}: turn its metrics on")
    while True:
        time.sleep(config.poll)
        away = time.monotonic() - last > config.away
        after = server.counters() if away else server.reading()
        if after is None:
            if away:
                raise ValueError(f"{server.url}/metrics has been an error for more than {config.away:g} s")
            continue
        last = time.monotonic()
        if restarted(before, after):
            before = after
        elif after.drafts is None:
            if (after.finished or 0) > (before.finished or 0):
                raise ValueError(f"{server.url} answers without drafts: give the server that speculates")
        elif (passes := between(before, after, decoded_between(before, after))).steps >= config.passes:
            yield passes
            before = after


def check_log(path: Path) -> None:
    """Refuse a log that is missing, not a file, or compressed."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the log that the service writes")
    if path.suffix in OPENERS:
        raise ValueError(f"{path}: a growing log must be uncompressed; unpack it")


def growing(path: Path, *, follow: bool, poll: float) -> Iterator[bytes]:
    """Yield a file's lines, including lines added later; an incomplete line is held until it ends.

    Where another file takes its name, the rest of the old one comes first; one that was cut begins again. Without
    `follow` it ends where the file does. Refuse a missing or packed file at first.
    """
    check_log(path)
    file = path.open("rb")
    try:
        while True:
            start, replaced = file.tell(), False
            with suppress(FileNotFoundError):  # during a rename the file may be missing for a moment
                replaced = follow and not os.path.samestat(os.fstat(file.fileno()), path.stat())
            line = file.readline()
            if line.endswith(b"\n") or (line and (replaced or not follow)):
                yield line if start else line.removeprefix(BOM_UTF8)
            elif replaced:
                file.close()
                file = path.open("rb")
            elif not follow:
                return
            else:
                file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
                time.sleep(poll)
    finally:
        file.close()


def json_object(line: bytes) -> Json:
    """Return a line's JSON object; refuse anything else."""
    raw = parse_json(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    return raw


@dataclass
class Log:
    """A log's observations: the counts in its records, or those of a head replayed along them.

    `skipped` counts the records that have neither; `numbers` holds the line, from 0, of each observation.
    """

    path: Path
    config: WatcherConfig
    replay: Replay | None
    begin: int = 0
    lines: int = 0
    skipped: int = 0
    numbers: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[SpecDecodingStats]:
        """Yield the passes of records of two tokens or more; refuse a log half of which has no acceptance."""
        for line in growing(self.path, follow=self.config.follow, poll=self.config.poll):
            self.lines += 1
            if not line.strip() or self.lines <= self.begin:
                continue
            try:
                raw = json_object(line)
                passes = counts_in(raw)
                if passes is None:
                    if self.replay is None:
                        raise ValueError(
                            "it counts no accepted tokens: give run=, whose head is then replayed along it"
                        )
                    passes = self.replay(raw, self.lines)
            except ValueError as error:
                self.skipped += 1
                where = f"{self.path}: line {self.lines}"
                if self.skipped > TRIES and 2 * self.skipped > self.lines - self.begin:
                    raise ValueError(f"{where}: {error}; so do {self.skipped} of {self.lines} lines") from error
                if self.skipped == 1:
                    log.warning("%s is left out, as others like it will be: %s", where, visible(str(error)))
                continue
            if passes.steps:
                self.numbers.append(self.lines - 1)
                yield passes


def counts_in(raw: Record) -> SpecDecodingStats | None:
    """Return the counts of passes in a record, None without counts.

    They are `accepted`, the accepted tokens of each pass, or the counts in vLLM's and SGLang's replies.
    """
    accepted = raw.get("accepted")
    if isinstance(accepted, list) and all(type(count) is int and 0 <= count <= DEEPEST for count in accepted):
        return replace(count_passes(accepted, 0, sum(accepted) + len(accepted)), drafted=None)
    reply = reply_in(raw)
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return of_reply(reply, max(tokens - 1, 0) if type(tokens) is int else 0)


def player(run: str, given: Record, tree: Record, config: WatcherConfig, name: str) -> Replay:
    """Return the replay of a run's head along the log `name`; target and head are loaded at the first record.

    `given` and `tree` have what the user says of the target and of the head's tree, None what is left as it is. Refuse
    a run without a head, and a tree that the head cannot draft.
    """
    folder = resolve_head(run)
    saved_trees(folder, tree)

    @cache
    def load() -> tuple[Target, HeadDrafter]:
        target = Target.of(model_of(run, given))
        return target, load_drafter(folder, tree, target, "head")

    return lambda raw, number: replayed(*load(), config, to_known_shape(raw, number, name), number, name)


def replayed(
    target: Target, drafter: HeadDrafter, config: WatcherConfig, raw: Json, number: int, name: str
) -> SpecDecodingStats:
    """Return the passes of a record's answers by the head's tree, greedy; refuse a record without answers."""
    entry, tree = parse(raw, number, name), drafter.policy
    grown = [tree] if tree.kind in BY_CONFIDENCE else []
    depth = min(drafter.head.max_depth, tree.tree_depth)
    texts = [
        within_context(answer.text, entry.id, name, target, truncate=True)
        for answer in recorded(entry, target, config.turns, config.max_new_tokens)
    ]
    return sum_counts(
        [passes_along(rank_text(target, drafter.head, text, grown, depth, steps_alone=True), tree) for text in texts]
    )


@command("ops/watch")
def main(cfg: DictConfig) -> None:
    """Watch; exit with 0 without an alarm, 1 with one, 2 for invalid input, 3 if nothing could be compared yet."""
    raise SystemExit(follow(typed(WatchConfig, cfg)))


if __name__ == "__main__":
    main()
