"""Job that lets the frozen target answer prompts, so that heads train on the target's own text.

The answers come from our engine or an endpoint. The file is JSON Lines, `{"id", "messages"}` with the target's answer
to each of the user's turns in view of its earlier ones; for a plain text `{"id", "text"}`. `data.path` reads it. Every
process answers its share of the chats; a job that was stopped resumes, and its file is the same.
"""

import glob
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from data.answers.chats import Answerer, AnswerSettings, talk_of
from data.answers.files import Answers, append
from data.config import DataConfig
from data.text.files import content_hash
from data.text.records import Record
from data.text.sources import open_source
from heads.common.errors import keeping
from heads.common.progress import progress
from heads.common.redact import redacted_values

log = logging.getLogger(__name__)


class Worker(NamedTuple):
    """A process's share of the work: its rank, the number of processes, and their barrier."""

    rank: int
    world: int
    wait: Callable[[], object]


ALONE = Worker(0, 1, lambda: None)


class Work(NamedTuple):
    """Prompts and settings of the job."""

    records: Sequence[Record]  # the chats and texts, in the order of the file
    source: dict[str, Any]  # identity of the prompts, by `source_of`
    settings: AnswerSettings  # sampling and chat template
    sync_every: int  # chats between two flushes to the device
    notes: dict[str, Any]  # further provenance; unlike the settings it may change when the job resumes


def write_answers(work: Work, answerer: Answerer, out: Path, worker: Worker = ALONE) -> dict[str, Any] | None:
    """Write the target's answers to `out`, except for chats that it or its parts already hold.

    Returns:
        the provenance, the content of `out`.meta.json, on the main process; None on others.

    Raises:
        ValueError: the settings are impossible; `out` is another file, has other settings or belongs to a running job;
            no chat was answered; or the answerer stops.
    """
    work.settings.options(answerer.tokenizer)
    if answerer.context <= work.settings.max_new_tokens:
        raise ValueError(
            f"max_new_tokens={work.settings.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{answerer.context} tokens; lower it"
        )
    answers = Answers(out)
    settings = redacted_values({**answerer.describe(), "data": work.source, **asdict(work.settings)})

    def kept() -> str:
        done = f"{len(answers.finished())} of {len(work.records)} chats"
        return f"{done} are kept in {answers.parts}; the same command goes on"

    if worker.rank:
        worker.wait()
        _answer(work, answerer, answers, worker, answers.finished())
        worker.wait()
        return None
    with keeping(kept), answers.locked():
        answers.begin(settings)
        worker.wait()
        finished = answers.finished()
        _answer(work, answerer, answers, worker, finished)
        worker.wait()
        notes = {**redacted_values(work.notes), "world_size": worker.world, "settled_before": len(finished)}
        meta = answers.merge([record.id for record in work.records], settings, notes)
    for kind in ("shortened", "left_out", "failed"):
        if meta["counts"][kind]:
            log.warning("%s: %s: %s", out, kind.replace("_", " "), meta["counts"][kind])
    return meta


def _answer(work: Work, answerer: Answerer, answers: Answers, worker: Worker, finished: Collection[str]) -> None:
    """Answer this process's chats that are not finished yet."""
    records = [record for record in work.records[worker.rank :: worker.world] if record.id not in finished]
    talks = (talk_of(record, answerer.tokenizer, work.settings, answerer.context) for record in records)
    outcomes = answerer.answer(talks) if records else iter(())
    with answers.part(worker.rank, worker.world) as file:
        for number, outcome in enumerate(progress(outcomes, "answering chats", len(records)), 1):
            append(outcome, file)
            if number % work.sync_every == 0:
                os.fsync(file.fileno())
        os.fsync(file.fileno())


def source_of(config: DataConfig) -> dict[str, Any]:
    """Return the identity of the prompts: their sources' names or files' hashes, mixture, split and held-out part."""
    return {
        "sources": [_source_identity(name, config.split) for name in config.paths],
        "weights": config.weights,
        "seed": config.seed,
        "split": config.split,
        "held_out": 0 if config.prompts else config.held_out,
        "streaming": config.streaming,
    }


def _source_identity(name: str, split: str) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return content_hash(path)
    return open_source(name, split).identity() if path.is_dir() or glob.has_magic(name) else name
