"""Answers on disk: a part for every process while they are written, in the end one file in the prompts' order.

    FILE.parts/settings.json        the settings that shape the answers; another call resumes only with the same
    FILE.parts/R-of-W.jsonl         the result of each chat, an Outcome a line
    FILE, FILE.meta.json            the parts merged, each file whole or not at all; then the parts are removed

A part grows line by line, and only its own process writes to it. A process that is killed loses its current line and
the device's unwritten cache; the next call, of any number of processes, cuts off incomplete lines and answers the rest.
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
# The keys that are read from the JSON files, any of which may be missing.
NOTED = {"settings": dict[str, Any], "left_out": dict[str, list[str]], "shortened": dict[str, list[str]]}


class ChatLine(NamedTuple):
    """The location of a chat's line, and the chat's result; `whole` if it is a line of the merged file, of no part."""

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
        self.settings_file = self.parts / SETTINGS

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the parts against other jobs; a process that dies releases them.

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
                    if self.parts.is_dir() and not self.settings_file.is_file():
                        shutil.rmtree(self.parts)  # no job has begun

    def begin(self, settings: dict[str, Any]) -> None:
        """Save the settings that shape the answers, or compare them with those of an earlier call.

        Raises:
            ValueError: the answers there were written with other settings, or with none on record.
        """
        noted = self.settings_file if self.settings_file.is_file() else self.meta
        if not noted.is_file():
            if self.out.exists():
                raise ValueError(f"{self.out}: is there without {self.meta.name}, so not ours; name another file")
        else:
            before = _read_json(noted)["settings"]
            differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
            if differing:
                was, now = ({key: values.get(key) for key in differing} for values in (before, settings))
                raise ValueError(
                    f"{self.out}: was begun with {json.dumps(was)}, now asked for with {json.dumps(now)}; name another "
                    f"file, or remove {self.out.name}*"
                )
        replace(self.settings_file, json.dumps({"settings": settings}))

    def resolved(self) -> dict[str, ChatLine]:
        """Return the lines of all chats that need no answer any more, whichever processes wrote them.

        Raises:
            ValueError: a line is none of ours.
        """
        noted = _read_json(self.meta) if self.meta.is_file() else {"left_out": {}, "shortened": {}}
        lines = {
            id_: ChatLine(self.meta, 0, 0, False, 0, cause, True)
            for cause, ids in noted["left_out"].items()
            for id_ in ids
        }
        for file in self._parts():
            for start, end, line in _lines(file, OUTCOME):
                if not line["failed"]:
                    left_out = line["chat"] is None
                    lines[line["id"]] = ChatLine(file, start, end, False, line["answers"], line["cause"], left_out)
        if self.out.is_file():
            shortened = {id_: cause for cause, ids in noted["shortened"].items() for id_ in ids}
            for start, end, line in _lines(self.out, RECORD):
                messages = line.get("messages", [])
                if not fits(list[dict[str, Any]], messages):
                    raise _no_answer(self.out, start)
                count = sum(message.get("role") == "assistant" for message in messages) or 1
                earlier = lines.get(line["id"])  # in a part still, where a merge was killed before it wrote the causes
                cause = shortened.get(line["id"], earlier.cause if earlier else "")
                lines[line["id"]] = ChatLine(self.out, start, end, True, count, cause)
        return lines

    def failures(self) -> dict[str, str]:
        """Return the cause of every failure since the last merge, by the chat's id; a later call may have succeeded."""
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
        """Turn the error of a full disk into one that names the file, and says that the command can be resumed."""
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
        """Open this process's part for appending behind its last whole line.

        Raises:
            ValueError: the disk is full.
        """
        path = self.parts / f"{rank:05d}-of-{world:05d}.jsonl"
        with self._room(), inside(self.parts, path.name).open("ab") as file:
            file.truncate(whole_lines(path))
            yield Part(file)

    def merge(self, ids: Sequence[str], settings: dict[str, Any], notes: dict[str, Any]) -> dict[str, Any]:
        """Merge the parts into one file in the order of `ids`, others behind, and write its provenance.

        Returns:
            the provenance.

        Raises:
            ValueError: there is no answer at all.
        """
        lines = self.resolved()
        order = [id_ for id_ in ids if id_ in lines] + sorted(lines.keys() - set(ids))
        answered = [id_ for id_ in order if not lines[id_].left_out]
        ended = {
            "shortened": _by_cause({id_: lines[id_].cause for id_ in answered}),
            "left_out": _by_cause({id_: lines[id_].cause for id_ in order if lines[id_].left_out}),
            "failed": _by_cause({id_: cause for id_, cause in self.failures().items() if id_ not in lines}),
        }
        counts = {kind: {cause: len(those) for cause, those in causes.items()} for kind, causes in ended.items()}
        if not answered:
            shutil.rmtree(self.parts)
            why = counts["left_out"] | counts["failed"]
            raise ValueError(
                f"{self.out}: none of {len(ids)} chats was answered: "
                + "; ".join(f"{count} {cause} ({CAUSES.get(cause, 'the endpoint')})" for cause, count in why.items())
            )
        sha256 = self._join([lines[id_] for id_ in answered])
        answers = sum(lines[id_].answers for id_ in answered)
        totals = {"prompts": len(ids), "chats": len(answered), "answers": answers, **counts}
        meta = {"schema": SCHEMA, "settings": settings, **notes, "counts": totals, **ended, "sha256": sha256}
        replace(self.meta, json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(self.parts)
        return meta

    def _join(self, lines: list[ChatLine]) -> str:
        digest, draft = hashlib.sha256(), self.parts / "merged"
        handles = {file: file.open("rb") for file in {line.file for line in lines}}
        try:
            with draft.open("wb") as merged:
                for line in lines:
                    handle = handles[line.file]
                    handle.seek(line.start)
                    data = handle.read(line.end - line.start)
                    data = data if line.whole else _encoded(json.loads(data)["chat"])
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
    """The part that one process writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def write(self, outcome: Outcome) -> None:
        """Append a chat's result, so that it outlives this process."""
        self.file.write(_encoded(outcome._asdict()))
        self.file.flush()

    def sync(self) -> None:
        """Flush the file to the disk, so that it outlives a loss of power too."""
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
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
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
    """Return a line of JSON; half a surrogate pair, which no template showed, is escaped."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _lines(path: Path, kinds: dict[str, Any]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the whole lines of a file, which have keys of these kinds, with their first byte and the one behind."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = parse_json(line, 2 * DEEPEST)  # an outcome holds a record of the greatest depth
            except ValueError as error:
                raise _no_answer(path, start) from error
            if not isinstance(record, dict) or not all(
                k in record and fits(kind, record[k]) for k, kind in kinds.items()
            ):
                raise _no_answer(path, start)
            yield start, start + len(line), record
            start += len(line)


def _no_answer(path: Path, start: int) -> ValueError:
    return ValueError(f"{path}: byte {start} begins a line that is no answer; remove the file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is damaged ({error}); remove it, and name another file") from error
    content: dict[str, Any] = {key: {} for key in NOTED} | value if isinstance(value, dict) else {}
    if not all(fits(kind, content.get(key)) for key, kind in NOTED.items()):
        raise ValueError(f"{path}: is damaged, it is no provenance of answers; remove it, and name another file")
    return content
