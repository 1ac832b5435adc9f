"""Let the frozen target answer the prompts, so that heads train on text that the target itself would write.

Our engine or an endpoint answers. The file is JSON Lines, `{"id", "messages"}` with the target's answer to each of the
user's turns, its earlier answers in view; for a plain text `{"id", "text"}`. `data.path` reads it. Every process
answers some of the chats; a call that was stopped resumes, and the file is the same as if it had not been.
"""

import glob
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from data.answers.chats import Answerer, AnswerSettings, Outcome, Talk, talk_of
from data.answers.files import Answers
from data.config import DataConfig
from data.text.files import content_hash
from data.text.records import Record
from data.text.sources import open_source
from heads.common.redact import redacted_values

log = logging.getLogger(__name__)


class Worker(NamedTuple):
    """This process among those that answer: its rank, how many there are, and a barrier for all of them."""

    rank: int
    world: int
    wait: Callable[[], object]


ALONE = Worker(0, 1, lambda: None)


class Work(NamedTuple):
    """The records to answer, and the settings.

    Attributes:
        records: the chats and texts, in the order that the file will have.
        source: their provenance, as `source_of` returns it.
        settings: the sampling.
        sync_every: after so many chats the disk is waited for.
        notes: further provenance; unlike the settings it may change from call to call.
    """

    records: Sequence[Record]
    source: dict[str, Any]
    settings: AnswerSettings
    sync_every: int
    notes: dict[str, Any]


def write_answers(work: Work, answerer: Answerer, out: Path, worker: Worker = ALONE) -> dict[str, Any] | None:
    """Write the target's answers to `out`, but for the chats that it or its parts already hold.

    Returns:
        the provenance, which is saved in `out`.meta.json, on the main process; None on others.

    Raises:
        ValueError: settings that cannot work; `out` is not such a file, was begun with other settings or is being
            written by another job; no chat was answered; or the answerer gives up.
    """
    work.settings.options(answerer.tokenizer)
    if answerer.context <= work.settings.max_new_tokens:
        raise ValueError(
            f"max_new_tokens={work.settings.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{answerer.context} tokens; lower it"
        )
    answers = Answers(out)
    settings = redacted_values({**answerer.describe(), "data": work.source, **asdict(work.settings)})
    if worker.rank:
        worker.wait()
        _answer(work, answerer, answers, worker)
        worker.wait()
        return None
    with answers.held():
        answers.begin(settings)
        worker.wait()
        before = len(answers.resolved())
        _answer(work, answerer, answers, worker)
        worker.wait()
        notes = {**redacted_values(work.notes), "world_size": worker.world, "settled_before": before}
        meta = answers.merge([record.id for record in work.records], settings, notes)
    for kind in ("shortened", "left_out", "failed"):
        if meta["counts"][kind]:
            log.warning("%s: %s: %s", out, kind.replace("_", " "), meta["counts"][kind])
    return meta


def _answer(work: Work, answerer: Answerer, answers: Answers, worker: Worker) -> None:
    """Answer this process's chats that are not resolved yet."""
    resolved = answers.resolved()
    mine = [record for record in work.records[worker.rank :: worker.world] if record.id not in resolved]

    def talks() -> Iterator[Talk]:
        for record in mine:
            yield talk_of(record, answerer.tokenizer, work.settings, answerer.context)

    console = Console(stderr=True)
    quiet = worker.rank > 0 or not console.is_terminal
    outcomes = answerer.answer(talks()) if mine else iter(())
    with answers.part(worker.rank, worker.world) as file:
        shown: Iterator[Outcome] = iter(
            track(outcomes, "answers", total=len(mine), console=console, transient=True, disable=quiet)
        )
        for number, outcome in enumerate(shown, 1):
            file.write(outcome)
            if number % work.sync_every == 0:
                file.sync()
        file.sync()


def source_of(config: DataConfig) -> dict[str, Any]:
    """Return the provenance of the prompts: their sources' names, or hashes of files, and the split of the data."""
    return {
        "sources": [_identity(name, config.split) for name in config.paths],
        "weights": config.weights,
        "seed": config.seed,
        "split": config.split,
        "held_out": 0 if config.prompts else config.held_out,
        "streaming": config.streaming,
    }


def _identity(name: str, split: str) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return content_hash(path)
    return open_source(name, split).identity() if path.is_dir() or glob.has_magic(name) else name
