"""Answers on disk: a part for every process while they are written, in the end one file in the prompts' order.

    FILE.parts/settings.json        what shapes the answers; another call goes on only with the same
    FILE.parts/R-of-W.jsonl         what became of each chat, an Outcome a line
    FILE, FILE.meta.json            what the parts are merged into, each whole or not at all; then the parts go

A part grows line by line, and only its own process writes to it. Whoever is killed loses the line at hand and what the
device still held; the next call, of any number of processes, cuts off what is no whole line and answers the rest.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from data.answers.chats import CAUSES, Outcome
from data.features.store_files import write_whole
from data.text.files import CHUNK, META, PARTS, SETTINGS
from heads.common.typed import fits
from heads.common.untrusted import DEEPEST, inside, parse_json
from heads.formats.store import flush

SCHEMA = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RECORD = {"id": str}
OUTCOME = {**RECORD, "chat": dict[str, Any] | None, "answers": int, "cause": str, "failed": bool}  # its first fields
# What the files of JSON are read for, any part of which may be missing.
NOTED = {"settings": dict[str, Any], "left_out": dict[str, list[str]], "shortened": dict[str, list[str]]}


class Place(NamedTuple):
    """Where a chat's line stands, and what became of the chat; `whole` if the line is the file's own and no part's."""

    file: Path
    start: int
    end: int
    whole: bool
    answers: int = 0
    cause: str = ""
    left_out: bool = False


class Answers:
    """The files of one call's answers."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.meta = out.with_name(out.name + META)
        self.parts = out.with_name(out.name + PARTS)
        self.known = self.parts / SETTINGS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other jobs away from the parts; a process that dies lets go.

        Raises:
            ValueError: another job is at work on them, or the disk is full.
        """
        with self._room():
            self.parts.mkdir(parents=True, exist_ok=True)
            with (self.parts / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(
                        f"{self.out}: another job is writing it; wait for it, or name another file"
                    ) from None
                try:
                    yield
                finally:
                    if self.parts.is_dir() and not self.known.is_file():
                        shutil.rmtree(self.parts)  # nothing was begun

    def begin(self, settings: dict[str, Any]) -> None:
        """Note what shapes the answers, or compare it with what an earlier call noted.

        Raises:
            ValueError: the answers there were written otherwise, or by nobody that says how.
        """
        noted = self.known if self.known.is_file() else self.meta
        if not noted.is_file():
            if self.out.exists():
                raise ValueError(f"{self.out}: is there without {self.meta.name}, so not ours; name another file")
        else:
            before = _read_json(noted)["settings"]
            differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
            if differing:
                was, now = ({key: each.get(key) for key in differing} for each in (before, settings))
                raise ValueError(
                    f"{self.out}: was begun with {json.dumps(was)}, now asked for with {json.dumps(now)}; name another "
                    f"file, or remove {self.out.name}*"
                )
        replace(self.known, json.dumps({"settings": settings}))

    def settled(self) -> dict[str, Place]:
        """Return where every chat stands that needs no answer any more, whichever processes wrote it.

        Raises:
            ValueError: a line that is none of ours.
        """
        noted = _read_json(self.meta) if self.meta.is_file() else {"left_out": {}, "shortened": {}}
        found = {
            id_: Place(self.meta, 0, 0, False, 0, cause, True)
            for cause, ids in noted["left_out"].items()
            for id_ in ids
        }
        for file in self._parts():
            for start, end, line in _lines(file, OUTCOME):
                if not line["failed"]:
                    left_out = line["chat"] is None
                    found[line["id"]] = Place(file, start, end, False, line["answers"], line["cause"], left_out)
        if self.out.is_file():
            shortened = {id_: cause for cause, ids in noted["shortened"].items() for id_ in ids}
            for start, end, line in _lines(self.out, RECORD):
                messages = line.get("messages", [])
                if not fits(list[dict[str, Any]], messages):
                    raise _no_answer(self.out, start)
                count = sum(message.get("role") == "assistant" for message in messages) or 1
                known = found.get(line["id"])  # in a part still, where a merge was killed before it wrote the causes
                cause = shortened.get(line["id"], known.cause if known else "")
                found[line["id"]] = Place(self.out, start, end, True, count, cause)
        return found

    def failures(self) -> dict[str, str]:
        """Return the cause of every failure since the last merge, by the chat's id; a later call may have mended it."""
        return {
            line["id"]: line["cause"]
            for file in self._parts()
            for _, _, line in _lines(file, OUTCOME)
            if line["failed"]
        }

    def _parts(self) -> list[Path]:
        return [inside(self.parts, file.name) for file in sorted(self.parts.glob("*-of-*.jsonl"))]

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Say of a disk that is full what was being written, and that it goes on."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise ValueError(
                f"{self.out}: cannot be written ({error.strerror}); what was answered is kept: free space, and the "
                "same command goes on"
            ) from error

    @contextmanager
    def part(self, rank: int, world: int) -> Iterator["Part"]:
        """Open this process's part behind its last whole line.

        Raises:
            ValueError: the disk is full.
        """
        path = self.parts / f"{rank:05d}-of-{world:05d}.jsonl"
        with self._room(), inside(self.parts, path.name).open("ab") as file:
            file.truncate(whole_lines(path))
            yield Part(file)

    def merge(self, ids: Sequence[str], settings: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
        """Join everything to one file in the order of `ids`, others behind, and write down where it came from.

        Returns:
            the provenance.

        Raises:
            ValueError: there is no answer at all.
        """
        found = self.settled()
        order = [id_ for id_ in ids if id_ in found] + sorted(found.keys() - set(ids))
        kept = [id_ for id_ in order if not found[id_].left_out]
        ended = {
            "shortened": _by_cause({id_: found[id_].cause for id_ in kept}),
            "left_out": _by_cause({id_: found[id_].cause for id_ in order if found[id_].left_out}),
            "failed": _by_cause({id_: cause for id_, cause in self.failures().items() if id_ not in found}),
        }
        counts = {kind: {cause: len(those) for cause, those in causes.items()} for kind, causes in ended.items()}
        if not kept:
            shutil.rmtree(self.parts)
            why = counts["left_out"] | counts["failed"]
            raise ValueError(
                f"{self.out}: none of {len(ids)} chats was answered: "
                + "; ".join(f"{count} {cause} ({CAUSES.get(cause, 'the endpoint')})" for cause, count in why.items())
            )
        sha256 = self._join([found[id_] for id_ in kept])
        answers = sum(found[id_].answers for id_ in kept)
        totals = {"prompts": len(ids), "chats": len(kept), "answers": answers, **counts}
        meta = {"schema": SCHEMA, "settings": settings, **notes, "counts": totals, **ended, "sha256": sha256}
        replace(self.meta, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(self.parts)
        return meta

    def _join(self, places: list[Place]) -> str:
        digest, draft = hashlib.sha256(), self.parts / "merged"
        handles = {file: file.open("rb") for file in {place.file for place in places}}
        try:
            with draft.open("wb") as merged:
                for place in places:
                    handle = handles[place.file]
                    handle.seek(place.start)
                    line = handle.read(place.end - place.start)
                    data = line if place.whole else _encoded(json.loads(line)["chat"])
                    digest.update(data)
                    merged.write(data)
                merged.flush()
                os.fsync(merged.fileno())
        except OSError:
            draft.unlink()
            raise
        for handle in handles.values():
            handle.close()
        os.replace(draft, self.out)
        flush(self.out.parent)
        return digest.hexdigest()


class Part:
    """The file of one process."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, outcome: Outcome) -> None:
        """Append what became of a chat, so that it outlives this process."""
        self.file.write(_encoded(outcome._asdict()))
        self.file.flush()

    def sync(self) -> None:
        """Let what was written outlive the machine's power too."""
        os.fsync(self.file.fileno())


def replace(path: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    write_whole(path, text.encode("utf-8", "backslashreplace"))


def whole_lines(path: Path) -> int:
    """Return the bytes of a file up to the end of its last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - CHUNK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _by_cause(causes: dict[str, str]) -> dict[str, list[str]]:
    """Return the ids of each cause; an empty cause is none."""
    grouped: dict[str, list[str]] = {}
    for id_, cause in causes.items():
        if cause:
            grouped.setdefault(cause, []).append(id_)
    return grouped


def _encoded(value: dict[str, Any]) -> bytes:
    """Return a line of JSON; half a surrogate pair, which no template showed, stands as its escape."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _lines(path: Path, kinds: dict[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the whole lines of a file, which have keys of these kinds, with where they begin and end."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                told = parse_json(line, 2 * DEEPEST)  # a record as deep as is read stands in its outcome
            except ValueError as error:
                raise _no_answer(path, start) from error
            if not isinstance(told, dict) or not all(key in told and fits(kinds[key], told[key]) for key in kinds):
                raise _no_answer(path, start)
            yield start, start + len(line), told
            start += len(line)


def _no_answer(path: Path, start: int) -> ValueError:
    return ValueError(f"{path}: byte {start} begins a line that is no answer; remove the file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is damaged ({error}); remove it, and name another file") from error
    known: dict[str, Any] = {key: {} for key in NOTED} | value if isinstance(value, dict) else {}
    if not all(fits(kind, known.get(key)) for key, kind in NOTED.items()):
        raise ValueError(f"{path}: is damaged, it is no provenance of answers; remove it, and name another file")
    return known
