"""python ops/watch.py log=log.jsonl run=outputs/NAME: a line when the acceptance of a head in service has fallen."""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: the checkout's root in place of this folder, or `import heads` would fail
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from data.answers.client import check_url
from eval.measures.counters import ENGINES, between, decoded_between, restarted
from heads.common.command import command, ending_alone
from heads.common.errors import user_errors
from heads.common.ranges import Count, Positive
from heads.common.typed import typed
from ops.log import Log, player
from ops.sequential import EARLY, QUIET, Observation, WatcherConfig, watched
from ops.served.client import Metrics


@dataclass(frozen=True)
class WatchConfig(WatcherConfig):
    """A head in service that is watched, by a log or by a server's counters."""

    log: str | None
    run: str | None
    url: str | None
    api_key_env: str
    away: Positive
    passes: Count
    model: dict[str, Any]
    tree: dict[str, Any]

    def __post_init__(self) -> None:
        """Refuse a watch of nothing or of two things, and an end of what has none."""
        super().__post_init__()
        if (self.log is None) == (self.url is None):
            raise ValueError("give what to watch: log=FILE, or url=http://localhost:8000 of a server's counters")
        if self.url is not None:
            check_url("url", self.url)
            if not self.follow:
                raise ValueError("follow=false reads a log to its end, and a server's counters have none: leave it out")


def follow(config: WatchConfig) -> int:
    """Watch; print the alarm on stdout, and on stderr how it ended; return 0 without an alarm, 1 with one, 3 too early.

    Raises:
        ValueError: there is no such log, head or server, or nothing says how many tokens were accepted.
    """
    log: Log | None = None
    if config.url is not None:
        # A window holds many answers, so it has no length of one.
        outcome = watched(windows(Metrics(config.url, config.api_key_env), config), replace(config, lengths=[]))
    else:
        name = str(config.log)
        play = player(config.run, config.model, config.tree, config, name) if config.run else None
        log = Log(Path(name).expanduser(), config, play)
        outcome = watched(log, config)
    if outcome.alarm is not None:
        print(outcome.alarm, flush=True)
    ends = {QUIET: "no alarm", EARLY: f"too few yet to compare: the first {config.reference} are the reference"}
    if outcome.status in ends:
        count = f"{outcome.requests} requests or windows" + (
            f", {log.skipped} lines left out" * bool(log.skipped) if log else ""
        )
        print(f"{config.log or config.url}: {count}: {ends[outcome.status]}", file=sys.stderr)
    return outcome.status


def windows(server: Metrics, config: WatchConfig) -> Iterator[Observation]:
    """Yield windows of a server's counters, each of `config.passes` passes or more, other clients' among them.

    A restart begins a new window. A server may be away for `config.away` seconds.

    Raises:
        ValueError: it has no counters, answers without drafts, or stays away.
    """
    before, last = server.counters(), time.monotonic()
    if before is None:
        raise ValueError(f"{server.url}/metrics has no counters of {', '.join(ENGINES)}: turn its metrics on")
    while True:
        time.sleep(config.poll)
        overdue = time.monotonic() - last > config.away
        after = server.counters() if overdue else server.reading()
        if after is None:
            continue
        last = time.monotonic()
        if restarted(before, after):
            before = after
        elif after.drafts is None:
            if (after.finished or 0) > (before.finished or 0):
                raise ValueError(f"{server.url} answers without drafts: give the server that speculates")
        elif (passes := between(before, after, decoded_between(before, after))).steps >= config.passes:
            yield Observation(passes)
            before = after


@command("ops/watch")
def main(cfg: DictConfig) -> None:
    """Watch; exit with 0 without an alarm, 1 with one, 2 for a mistake, 3 where nothing could be compared yet."""
    with ending_alone(), user_errors():
        raise SystemExit(follow(typed(WatchConfig, cfg)))


if __name__ == "__main__":
    main()
