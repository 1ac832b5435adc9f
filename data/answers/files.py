"""The job that writes the target's answers: a part for every process, merged into one file in the prompts' order.

    FILE.parts/settings.json        settings that shape the answers; a later call resumes only with the same ones
    FILE.parts/R-of-W.jsonl         outcomes of chats, one per line
    FILE, FILE.meta.json            the merged parts, each written atomically; then the parts are removed

Each process appends lines to its own part. A killed process loses its last line and whatever the device had not
written; the next call, with any number of processes, removes incomplete lines and answers the remaining chats.

Our engine or an endpoint gives the answers. The file is JSON Lines: `{"id", "messages"}` with the target's answer to
each of the user's turns, in view of its earlier answers; for a plain text `{"id", "text"}`. `data.path` reads it.
Every process answers its share of the chats; a stopped job resumes, and the resulting file is the same.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from data.answers.chats import CAUSES, Answerer, AnswerSettings, Outcome, start_chat, turns_of
from data.config import DataConfig
from data.text.files import META, PARTS, SETTINGS, content_hash
from data.text.records import Record
from data.text.sources import is_local, open_source
from heads.common.errors import redacted_values, report_on_interrupt
from heads.common.files import atomic_write, claim
from heads.common.progress import progress
from heads.common.typed import Json
from heads.common.untrusted import parsed_file

log = logging.getLogger(__name__)
SCHEMA = 1
ESCAPED = "backslashreplace"  # error handler for lone surrogates
DAMAGED = "remove it, and name another file"


class Entry(NamedTuple):
    """A finished chat: the file and the bytes of its line, and its outcome."""

    file: Path
    start: int
    end: int
    answers: int
    cause: str
    left_out: bool


class Answers:
    """The files that hold a job's answers."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.meta = out.with_name(out.name + META)
        self.parts = out.with_name(out.name + PARTS)
        self.settings = self.parts / SETTINGS

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the parts; refuse if another job holds it."""
        with claim(self.parts / "lock", wait=False) as free:
            if not free:
                raise ValueError(f"{self.out}: another job is writing it; wait for it, or name another file")
            try:
                yield
            finally:
                if self.parts.is_dir() and not self.settings.is_file():
                    shutil.rmtree(self.parts)  # the job failed before it began

    def begin(self, settings: Json) -> None:
        """Write the settings that affect the answers; refuse existing answers with other or unknown settings.

        The chats of a merged file become a part again, whose name sorts first, so that later parts override it.
        """
        earlier = self.settings if self.settings.is_file() else self.meta
        if earlier.is_file():
            before = parsed_file(earlier, DAMAGED)["settings"]
            differing = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
            if differing:
                was, now = ({key: values.get(key) for key in differing} for values in (before, settings))
                raise ValueError(
                    f"{self.out}: was begun with {json.dumps(was)}, now asked for with {json.dumps(now)}; name another "
                    f"file, or remove {self.out.name}*"
                )
        elif self.out.exists():
            raise ValueError(f"{self.out}: is there without {self.meta.name}, so not ours; name another file")
        if self.out.is_file() and self.meta.is_file():
            atomic_write(self.parts / "00000-of-00000.jsonl", map(_encoded, self._merged()))
        atomic_write(self.settings, json.dumps({"settings": settings}).encode())

    def _merged(self) -> Iterator[Json]:
        """Yield the outcomes that the merged file and its provenance hold."""
        meta = parsed_file(self.meta, DAMAGED)
        for cause, ids in meta["left_out"].items():
            yield from (Outcome(id_, None, 0, cause)._asdict() for id_ in ids)
        shortened = {id_: cause for cause, ids in meta["shortened"].items() for id_ in ids}
        for _, _, chat in _lines(self.out):
            answers = len(turns_of(chat.get("messages", []))) or 1
            yield Outcome(chat["id"], chat, answers, shortened.get(chat["id"], ""))._asdict()

    def finished(self) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return the entries of all processes' finished chats by id, and the causes of those that only failed."""
        entries = {}
        failures = {}
        for file in sorted(self.parts.glob("*-of-*.jsonl")):
            for start, end, line in _lines(file):
                if line["failed"]:
                    failures[line["id"]] = line["cause"]
                else:
                    left_out = line["chat"] is None
                    entries[line["id"]] = Entry(file, start, end, line["answers"], line["cause"], left_out)
        return entries, {id_: cause for id_, cause in failures.items() if id_ not in entries}

    def merge(self, ids: Sequence[str], settings: Json, notes: Json) -> Json:
        """Merge all parts into one file in the order of `ids`, other chats last; write and return its provenance.

        Chats without any answer are refused.
        """
        entries, failures = self.finished()
        prompts = len({*ids, *entries, *failures})  # an earlier call may have had more prompts
        order = [id_ for id_ in ids if id_ in entries] + sorted(entries.keys() - set(ids))
        answered = [entries[id_] for id_ in order if not entries[id_].left_out]
        reasons = [("left_out" if entries[id_].left_out else "shortened", entries[id_].cause, id_) for id_ in order]
        causes: dict[str, dict[str, list[str]]] = {"shortened": {}, "left_out": {}, "failed": {}}
        for kind, cause, id_ in [*reasons, *(("failed", cause, id_) for id_, cause in failures.items())]:
            if cause:
                causes[kind].setdefault(cause, []).append(id_)
        counts = {kind: {cause: len(group) for cause, group in groups.items()} for kind, groups in causes.items()}
        if not answered:
            shutil.rmtree(self.parts)
            why = counts["left_out"] | counts["failed"]
            raise ValueError(
                f"{self.out}: none of {prompts} chats was answered: "
                + "; ".join(f"{count} {cause} ({CAUSES.get(cause, 'the endpoint')})" for cause, count in why.items())
            )

        def lines() -> Iterator[bytes]:
            with ExitStack() as stack:
                files = {file: stack.enter_context(file.open("rb")) for file in {entry.file for entry in answered}}
                for entry in answered:
                    files[entry.file].seek(entry.start)
                    yield _encoded(json.loads(files[entry.file].read(entry.end - entry.start))["chat"])

        atomic_write(self.out, lines())
        answers = sum(entry.answers for entry in answered)
        meta = {
            "schema": SCHEMA,
            "settings": settings,
            **notes,
            "counts": {"prompts": prompts, "chats": len(answered), "answers": answers, **counts},
            **causes,
            "sha256": content_hash(self.out),
        }
        atomic_write(self.meta, (json.dumps(meta, indent=1, ensure_ascii=False) + "\n").encode(errors=ESCAPED))
        shutil.rmtree(self.parts)
        return meta


def _encoded(value: Json) -> bytes:
    """Encode a line of JSON; lone surrogates are escaped."""
    return (json.dumps(value, ensure_ascii=False) + "\n").encode(errors=ESCAPED)


def _lines(path: Path) -> Iterator[tuple[int, int, Json]]:
    """Yield start, end and value of a file's complete lines."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: byte {start} begins a line that is no answer; remove the file") from error
            yield start, start + len(line), value
            start += len(line)


class Worker(NamedTuple):
    """A process's share of the work: its rank, the number of processes, and their barrier."""

    rank: int
    world: int
    wait: Callable[[], object]


ALONE = Worker(0, 1, lambda: None)


class Work(NamedTuple):
    """The prompts and settings of a job."""

    records: Sequence[Record]  # the chats and texts, in the order of the file
    source: Json  # identity of the prompts, by `source_of`
    settings: AnswerSettings  # settings of sampling and chat template
    sync_every: int  # chats between two flushes to the device
    notes: Json  # further provenance, which may change on resume


def write_answers(work: Work, answerer: Answerer, out: Path, worker: Worker = ALONE) -> Json | None:
    """Write the target's answers to `out`, except for chats that are already there or in its parts.

    Returns:
        the provenance, the content of `out`.meta.json, on the main process; None on others.

    Raises:
        ValueError: the settings are impossible; `out` is another file, has other settings or belongs to a running job;
            no chat was answered; or the answerer stopped.
    """
    work.settings.options(answerer.tokenizer)
    answers = Answers(out)
    settings = redacted_values({**answerer.describe(), "data": work.source, **asdict(work.settings)})

    def kept() -> str:
        done = f"{len(answers.finished()[0])} of {len(work.records)} chats"
        return f"{done} are kept in {answers.parts}; the same command continues"

    if worker.rank:
        worker.wait()
        _answer(work, answerer, answers, worker)
        worker.wait()
        return None
    with report_on_interrupt(kept), answers.locked():
        answers.begin(settings)
        worker.wait()
        earlier = _answer(work, answerer, answers, worker)
        worker.wait()
        notes = {**redacted_values(work.notes), "world_size": worker.world, "settled_before": earlier}
        meta = answers.merge([record.id for record in work.records], settings, notes)
    for kind in ("shortened", "left_out", "failed"):
        if meta["counts"][kind]:
            log.warning("%s: %s: %s", out, kind.replace("_", " "), meta["counts"][kind])
    return meta


def _answer(work: Work, answerer: Answerer, answers: Answers, worker: Worker) -> int:
    """Answer this process's chats that are not finished yet, and return how many of all chats were finished."""
    finished, _ = answers.finished()
    records = [record for record in work.records[worker.rank :: worker.world] if record.id not in finished]
    chats = (start_chat(record, answerer.tokenizer, work.settings, answerer.context) for record in records)
    outcomes = answerer.answer(chats) if records else iter(())
    with (answers.parts / f"{worker.rank:05d}-of-{worker.world:05d}.jsonl").open("a+b") as file:
        file.seek(0)
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
        for number, outcome in enumerate(progress(outcomes, "answering chats", len(records)), 1):
            file.write(_encoded(outcome._asdict()))
            file.flush()
            if number % work.sync_every == 0:
                os.fsync(file.fileno())
        os.fsync(file.fileno())
    return len(finished)


def source_of(config: DataConfig) -> Json:
    """Return the prompts' identity: names of sources or hashes of files, mixture, split and held-out part."""
    return {
        "sources": [open_source(name, config.split).identity() if is_local(name) else name for name in config.paths],
        "weights": config.weights,
        "seed": config.seed,
        "split": config.split,
        "held_out": 0 if config.prompts else config.held_out,
        "streaming": config.streaming,
    }
