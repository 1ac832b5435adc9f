"""Observations in order of arrival: the records of a log that grows, or windows of a server's counters."""

import logging
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.text.exact import reply_in
from data.text.files import LONGEST, OPENERS
from data.text.records import label
from eval.config import WatcherConfig
from eval.endpoint.client import Server
from eval.endpoint.counters import ENGINES, between, decoded_between, of_reply, restarted
from eval.measures.metrics import Passes, counted
from eval.watch.sequential import Observation
from heads.common.untrusted import parse_json, visible

log = logging.getLogger(__name__)

Replay = Callable[[dict[str, Any], int], Passes]  # of a record, by its number
DEEPEST = 1000  # accepted tokens of a pass
TRIES = 20  # records without acceptance that may come before half of all must have it


def check_log(path: Path) -> None:
    """Refuse a log that is not there, no file, or packed."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the log that the service writes")
    if path.suffix in OPENERS:
        raise ValueError(f"{path}: a log that grows is read as it is, not packed; unpack it")


def growing(path: Path, *, follow: bool, poll: float) -> Iterator[bytes]:
    """Yield the lines of a file, and those that are added to it; an incomplete one waits for its end.

    Where another file takes its name, the rest of the old one comes first; one that was cut begins anew. Without
    `follow` it ends where the file does.

    Raises:
        ValueError: there is no such file at first, it is packed, or a line is too long for a record.
    """
    check_log(path)
    file = path.open("rb")
    try:
        while True:
            start, replaced = file.tell(), follow and _replaced(file.fileno(), path)
            line = file.readline(LONGEST + 1)
            if len(line) > LONGEST:
                raise ValueError(f"{path}: a line has more than {LONGEST} bytes: write a record a line")
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


def _replaced(handle: int, path: Path) -> bool:
    """Whether another file has a path's name by now; between two names there may be none for a while."""
    try:
        return not os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


class Log:
    """A log's observations: what its records count by themselves, else what a head would have had accepted along them.

    `skipped` counts the records that say neither; `numbers` has the line, from 0, of each observation.
    """

    def __init__(self, path: Path, config: WatcherConfig, replay: Replay | None, begin: int = 0) -> None:
        self.path, self.config, self.replay, self.begin = path, config, replay, begin
        self.lines = self.skipped = 0
        self.numbers: list[int] = []

    def __iter__(self) -> Iterator[Observation]:
        """Yield an observation for each record with an answer of two tokens or more.

        Raises:
            ValueError: more than half of the records have no acceptance, so that the watch would see nothing.
        """
        for line in growing(self.path, follow=self.config.follow, poll=self.config.poll):
            self.lines += 1
            if not line.strip() or self.lines <= self.begin:
                continue
            try:
                observation = self._read(line)
            except ValueError as error:
                self._skip(error)
                continue
            if observation.passes.steps:
                self.numbers.append(self.lines - 1)
                yield observation

    def _read(self, line: bytes) -> Observation:
        raw = parse_json(line)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        passes = counts_in(raw)
        if passes is None:
            if self.replay is None:
                raise ValueError("it counts no accepted tokens: give run=, whose head is then played along it")
            passes = self.replay(raw, self.lines)
        return Observation(passes, label(raw.get("category") or ""))

    def _skip(self, error: ValueError) -> None:
        self.skipped += 1
        where = f"{self.path}: line {self.lines}"
        if self.skipped > TRIES and 2 * self.skipped > self.lines - self.begin:
            raise ValueError(f"{where}: {error}; so do {self.skipped} of {self.lines} lines") from error
        if self.skipped == 1:
            log.warning("%s is left out, as others like it will be: %s", where, visible(str(error)))


def counts_in(raw: Mapping[str, Any]) -> Passes | None:
    """Return what a record counts of its answer's passes, None where it does not.

    That is `accepted`, how many tokens each pass accepted, or what vLLM's and SGLang's replies have.
    """
    accepted = raw.get("accepted")
    if isinstance(accepted, list) and all(type(count) is int and 0 <= count <= DEEPEST for count in accepted):
        return replace(counted(accepted, 0, sum(accepted) + len(accepted)), drafted=None)
    reply = reply_in(raw)
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return of_reply(reply, max(tokens - 1, 0) if type(tokens) is int else 0)


def windows(server: Server, config: WatcherConfig, patience: float) -> Iterator[Observation]:
    """Yield windows of a server's counters, each of `config.passes` passes or more, other clients' among them.

    A restart begins a window anew. A server that is away is waited for, `patience` seconds at most.

    Raises:
        ValueError: it has no counters, answers without drafts, or stays away.
    """
    before, last = server.counters(), time.monotonic()
    if before is None:
        raise ValueError(f"{server.url}/metrics has no counters of {', '.join(ENGINES)}: turn its metrics on")
    while True:
        time.sleep(config.poll)
        overdue = time.monotonic() - last > patience
        after = server.counters() if overdue else server.reading()
        if after is None:
            continue
        last = time.monotonic()
        if restarted(before, after):
            before = after
        elif after.drafts is None and (after.finished or 0) > (before.finished or 0):
            raise ValueError(f"{server.url} answers without drafts: give the server that speculates")
        elif after.drafts is not None and (
            passes := between(before, after, decoded_between(before, after))
        ).steps >= max(config.passes, 1):
            yield Observation(passes)
            before = after
