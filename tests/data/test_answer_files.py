import errno
import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.answers.files import Answers, write_answers
from heads.common.command import command
from tests.data.answering import Quick, quick_bytes, records, settings, work

COUNT = 24
KILLS = 8
Events = Callable[[], None]


def dies_at(event: int) -> Events:
    """Return what is to be called at every write to disk, and kills this process without warning at one of them."""
    left = [event]

    def happen() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return happen


def around(happen: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step that a kill could fall between be an event; a line of a part counts twice, once half written."""

    def opened(path: Path, mode: str = "r", *args: Any, **named: Any) -> Any:
        file: Any = opening(path, mode, *args, **named)
        write = file.write

        def halves(line: bytes) -> None:
            for piece in (line[: len(line) // 2], line[len(line) // 2 :]):
                write(piece)
                file.flush()
                happen()

        if mode == "a+b":
            file.write = halves
        return file

    def noisy(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            happen()
            done = call(*args)
            happen()
            return done

        return made

    opening = Path.open
    monkeypatch.setattr(Path, "open", opened)
    for module, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, noisy(getattr(module, name)))


def attempt(out: Path, event: int) -> bool:
    """Write in a process that dies at an event; return whether it came through."""

    def run() -> None:
        logging.disable()
        with pytest.MonkeyPatch.context() as patch:
            around(dies_at(event), patch)
            quick_bytes(records(COUNT), out)

    process = multiprocessing.get_context("fork").Process(target=run)  # no import, no wait
    process.start()
    process.join()
    return process.exitcode == 0


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """Return what an undisturbed call writes: chats that are whole, shortened and left out."""
    data = quick_bytes(records(COUNT), tmp_path / "whole")
    meta = json.loads((tmp_path / "whole.meta.json").read_text())
    counts = meta["counts"]
    assert all(counts[kind]["unfinished"] for kind in ("shortened", "left_out"))
    assert counts["prompts"] == COUNT == counts["chats"] + sum(counts["left_out"].values())
    assert counts["answers"] == data.count(b'"assistant"')
    assert (meta["settings"]["by"], meta["settings"]["data"]) == ("quick", {"path": "chats"})
    assert meta["sha256"] == hashlib.sha256(data).hexdigest()
    return data


def counted(out: Path) -> list[Any]:
    """Return the counts of a file, and the causes of its shortened chats."""
    meta = json.loads(out.with_name(out.name + ".meta.json").read_text())
    return [meta["counts"], meta["shortened"]]


def test_a_job_killed_at_any_point_gives_the_same_bytes(whole: bytes, tmp_path: Path) -> None:
    happened = [0]

    def count() -> None:
        happened[0] += 1

    with pytest.MonkeyPatch.context() as patch:
        around(count, patch)
        assert quick_bytes(records(COUNT), tmp_path / "counted") == whole
    draw = random.Random(0)
    points = sorted(draw.sample(range(1, happened[0] + 1), KILLS))
    for point in points:
        out = tmp_path / str(point) / "a"
        out.parent.mkdir()
        assert not attempt(out, point)
        assert quick_bytes(records(COUNT), out) == whole
        assert counted(out) == counted(tmp_path / "whole")
        assert sorted(path.name for path in out.parent.iterdir()) == ["a", "a.meta.json"]


def test_sigterm_says_what_is_kept_and_the_same_command_goes_on(
    whole: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, asked = tmp_path / "a", list[str]()

    def stops(id_: str) -> None:
        if id_ == "chat5":
            os.kill(os.getpid(), signal.SIGTERM)

    @command("data")
    def task(_: Any) -> None:
        write_answers(work(records(COUNT), settings(keep_unfinished=False)), Quick(before=stops), out)

    def run() -> None:
        sys.argv = ["data/run.py"]
        task()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 143
    assert (
        f"stopped by SIGTERM; 5 of {COUNT} chats are kept in {out}.parts; the same command continues\n"
        in capfd.readouterr().err
    )
    write_answers(work(records(COUNT), settings(keep_unfinished=False)), Quick(before=asked.append), out)
    assert asked == [f"chat{number}" for number in range(5, COUNT)], "no chat is answered twice"
    assert out.read_bytes() == whole
    write_answers(work(records(COUNT), settings(keep_unfinished=False)), Quick(before=asked.append), out)
    assert len(asked) == COUNT - 5


def test_a_disk_that_is_full_at_any_moment_is_named_and_loses_nothing(whole: bytes, tmp_path: Path) -> None:
    sync = os.fsync
    # The settings and their folder, the part, the merged file and its folder, the provenance and its folder.
    for event in (1, 2, 3, 16, 17, 18, 19):
        left, out = [event], tmp_path / str(event) / "a"
        out.parent.mkdir()

        def full(number: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match=r"No space left on device"):
                quick_bytes(records(COUNT), out)
        assert not [file for file in out.parent.rglob("*") if "partial" in file.name or file.name == "merged"]
        assert quick_bytes(records(COUNT), out) == whole
        assert counted(out) == counted(tmp_path / "whole"), "a cut before the provenance loses no cause"


def test_other_jobs_settings_and_foreign_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    with Answers(tmp_path / "a").locked(), pytest.raises(ValueError, match="another job is writing it"):
        quick_bytes(records(2), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    before = quick_bytes(records(3), tmp_path / "a")
    with pytest.raises(
        ValueError, match=r'begun with \{"temperature": 0.0\}, now asked for with \{"temperature": 1.0\}'
    ):
        write_answers(work(records(3), settings(1.0, keep_unfinished=False)), Quick(), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    (tmp_path / "b").write_text('{"id": "x", "prompt": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=r"b: is there without b.meta.json, so not ours; name another file"):
        quick_bytes(records(3), tmp_path / "b")
    (tmp_path / "a").write_text("no answer\n")
    with pytest.raises(ValueError, match=r"a: byte 0 begins a line that is no answer"):
        quick_bytes(records(3), tmp_path / "a")
    (tmp_path / "a.meta.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.meta.json: damaged"):
        quick_bytes(records(3), tmp_path / "c"), quick_bytes(records(3), tmp_path / "a")
