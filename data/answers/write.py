"""Let the frozen target answer the prompts, so that heads train on what the target itself would say.

Who answers is our engine or an endpoint. The file is JSON Lines, `{"id", "messages"}` with the target's answer to each
of the user's turns, its earlier answers in view; for a plain text `{"id", "text"}`. `data.path` reads it. Every process
takes its share of the chats; a call that was stopped goes on, and the file is the same as if it had not been.
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


class Share(NamedTuple):
    """This process's part of the work: rank of how many, and what waits until all processes are there."""

    rank: int
    world: int
    wait: Callable[[], object]


ALONE = Share(0, 1, lambda: None)


class Work(NamedTuple):
    """What is to be answered, and how.

    Attributes:
        records: the chats and texts, in the order that the file will have.
        source: what tells where they are from, as `source_of` has it.
        settings: the sampling.
        sync_every: after so many chats the disk is waited for.
        notes: what else the provenance should say; unlike the settings it may change from call to call.
    """

    records: Sequence[Record]
    source: dict[str, Any]
    settings: AnswerSettings
    sync_every: int
    notes: dict[str, Any]


def write_answers(work: Work, answerer: Answerer, out: Path, share: Share = ALONE) -> dict[str, Any] | None:
    """Write the target's answers to `out`, but for the chats that it or its parts already hold.

    Returns:
        the provenance, which stands in `out`.meta.json, on the main process; None on others.

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
    if share.rank:
        share.wait()
        _answer(work, answerer, answers, share)
        share.wait()
        return None
    with answers.held():
        answers.begin(settings)
        share.wait()
        before = len(answers.settled())
        _answer(work, answerer, answers, share)
        share.wait()
        notes = {**redacted_values(work.notes), "world_size": share.world, "settled_before": before}
        meta = answers.merge([record.id for record in work.records], settings, notes)
    for kind in ("shortened", "left_out", "failed"):
        if meta["counts"][kind]:
            log.warning("%s: %s: %s", out, kind.replace("_", " "), meta["counts"][kind])
    return meta


def _answer(work: Work, answerer: Answerer, answers: Answers, share: Share) -> None:
    """Answer this process's chats that are not settled yet."""
    settled = answers.settled()
    mine = [record for record in work.records[share.rank :: share.world] if record.id not in settled]

    def talks() -> Iterator[Talk]:
        for record in mine:
            yield talk_of(record, answerer.tokenizer, work.settings, answerer.context)

    console = Console(stderr=True)
    quiet = share.rank > 0 or not console.is_terminal
    outcomes = answerer.answer(talks()) if mine else iter(())
    with answers.part(share.rank, share.world) as part:
        shown: Iterator[Outcome] = iter(
            track(outcomes, "answers", total=len(mine), console=console, transient=True, disable=quiet)
        )
        for number, outcome in enumerate(shown, 1):
            part.write(outcome)
            if number % work.sync_every == 0:
                part.sync()
        part.sync()


def source_of(config: DataConfig) -> dict[str, Any]:
    """Return what tells the prompts from others: their sources' names, or what files hold, and what is held out."""
    return {
        "sources": [_held(name, config.split) for name in config.paths],
        "weights": config.weights,
        "seed": config.seed,
        "split": config.split,
        "held_out": 0 if config.prompts else config.held_out,
        "streaming": config.streaming,
    }


def _held(name: str, split: str) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return content_hash(path)
    return open_source(name, split).identity() if path.is_dir() or glob.has_magic(name) else name
