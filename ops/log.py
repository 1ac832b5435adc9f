"""Observations in order of arrival: the records of a log that grows, and a head played along those without counts."""

import logging
import os
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from data.text.exact import reply_in
from data.text.files import LONGEST, OPENERS
from data.text.records import label, parse, readable
from eval.inputs.drafters import model_of
from eval.inputs.workloads import recorded
from eval.measures.counters import of_reply
from eval.measures.metrics import Passes, counted, together
from eval.sessions import within_context
from eval.teacher_forced import passes_along, record
from heads.common.untrusted import parse_json, visible
from heads.formats.hub import resolve_head
from inference.drafters.head import HeadDrafter, load_drafter, saved_tree
from inference.drafters.policy import CONFIDENT
from inference.target.target import Target
from ops.sequential import Observation, WatcherConfig

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


class Player:
    """A head that is played along the answers of a log's records, under its tree as greedy decoding grows it.

    Target and head are loaded with the first record that does not count its own passes.
    """

    def __init__(self, load: Callable[[], tuple[Target, HeadDrafter]], config: WatcherConfig, name: str) -> None:
        self.load, self.config, self.name = cache(load), config, name

    def __call__(self, raw: dict[str, Any], number: int) -> Passes:
        """Return the passes that the answers of a record would have taken, each cut to `max_new_tokens`.

        Raises:
            ValueError: it has no answer, is of no known shape, or of another tokenizer.
        """
        target, drafter = self.load()
        entry = parse(readable(raw, number, self.name), number, self.name)
        tree = drafter.policy
        grown = [tree] if tree.kind in CONFIDENT else []
        depth = min(drafter.head.max_depth, tree.deepest)
        texts = [
            within_context(answer.text, entry.id, self.name, target, truncate=True)
            for answer in recorded(entry, target, self.config.turns, self.config.max_new_tokens)
        ]
        return together(
            [passes_along(record(target, drafter.head, text, grown, depth, steps_alone=True), tree) for text in texts]
        )


def player(run: str, given: Mapping[str, Any], tree: Mapping[str, Any], config: WatcherConfig, name: str) -> Player:
    """Return the head of a run, to be played along the log of a name.

    `given` and `tree` have what the user says of the target and of the head's tree, None what is left as it is.

    Raises:
        ValueError: no such run, a run without a head, or a tree that the head cannot draft.
    """
    folder = resolve_head(run)
    saved_tree(folder, tree)

    def load() -> tuple[Target, HeadDrafter]:
        target = Target.of(model_of(run, given))
        return target, load_drafter(folder, tree, target, "head")

    return Player(load, config, name)
