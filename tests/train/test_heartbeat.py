"""Signs of life name who is missing, and nobody else."""

import sys
import time
from pathlib import Path

import pytest

from train.distributed import control
from train.distributed.control import Heartbeat


@pytest.fixture
def hearts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(control, "BEAT", 0.05)
    monkeypatch.setattr(control, "GRACE", 0.5)
    made = [Heartbeat(tmp_path / ".ranks", rank, 3, 600) for rank in range(3)]
    for each in made:
        each.start()
    return made


def test_nobody_is_missing(hearts: list[Heartbeat]) -> None:
    hearts[0].move()
    assert hearts[0].missing() == "", "an error of this process's own is no other one's fault"
    for each in hearts:
        each.end()
    assert not hearts[0].folder.exists()


def test_who_ended_is_named_by_the_first_that_is_left(hearts: list[Heartbeat]) -> None:
    hearts[0].end("out of memory")
    for left in hearts[1:]:
        assert left.missing().endswith("ended: out of memory")
        assert left.missing().startswith("rank 0 (")
    assert [left.speaks() for left in hearts[1:]] == [True, False]
    hearts[1].end("", lost=True)
    assert "rank 1" not in hearts[2].missing(), "who ends since another one is lost is not missing"
    hearts[2].end()


def test_who_hangs_is_named_after_the_time_out(hearts: list[Heartbeat]) -> None:
    for each in hearts[:2]:
        each.move()
    hearts[0].timeout = 0
    assert hearts[0].missing().startswith("rank 2 (")
    for each in hearts:
        each.end()


def test_who_was_waited_for_is_named_though_the_end_follows_at_once(
    hearts: list[Heartbeat], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "BEAT", 60.0)
    monkeypatch.setattr(control, "SLOW", 0.2)
    hearts[0].move()
    until = time.monotonic() + 20
    while hearts[0]._waiting is None and time.monotonic() < until:
        time.sleep(0.3)
        hearts[0]._watch()
    hearts[0].move()
    for each in hearts:
        each.end()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waited 0.")
    assert "s for rank 1 (" in line


@pytest.fixture
def ending(hearts: list[Heartbeat], monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """The threads beat on, and this test looks in their place."""
    monkeypatch.setattr(control, "LOST", 0.4)
    monkeypatch.setattr(control.os, "_exit", sys.exit)
    return hearts


def looked(heart: Heartbeat, seconds: float) -> None:
    """Let a heart look for lost processes as often as its thread would."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        heart._end_if_waiting_in_vain()
        time.sleep(0.05)


def test_a_process_that_works_ends_for_no_other_one(ending: list[Heartbeat]) -> None:
    ending[2].end("out of memory")
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        ending[0].wake()
        looked(ending[0], 0.1)
    for heart in ending[:2]:
        heart.end()


def test_a_process_that_waits_for_those_that_live_goes_on_until_the_time_out(
    ending: list[Heartbeat], capsys: pytest.CaptureFixture[str]
) -> None:
    ending[0].move()
    looked(ending[0], 1.5)
    ending[0].timeout = 1
    with pytest.raises(SystemExit, match="2"):
        looked(ending[0], 1.5)
    assert "did not get as far as the others in 1 s" in capsys.readouterr().err
    for heart in ending:
        heart.end()


def test_only_the_first_that_waits_names_the_lost_one(
    ending: list[Heartbeat], capsys: pytest.CaptureFixture[str]
) -> None:
    ending[0].end("out of memory")
    for heart, says in zip(ending[1:], (True, False), strict=True):
        with pytest.raises(SystemExit, match="2"):
            looked(heart, 3)
        line = capsys.readouterr().err
        assert line.startswith("error: rank 0 (") == says
        assert line.endswith("ended: out of memory; the others have stopped, and resume=true goes on from the last "
                             "checkpoint\n") == says  # fmt: skip
        heart.end()


def test_nobody_is_lost_where_the_whole_machine_stood_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LOST", 0.1)
    monkeypatch.setattr(control, "BEAT", 0.05)
    monkeypatch.setattr(control.os, "_exit", sys.exit)
    heart, _ = pair = [Heartbeat(tmp_path, rank, 2, 600) for rank in range(2)]
    for each in pair:
        each._write("")
    looked(heart, 0.3)  # the clock runs, and neither writes a heartbeat
    for _ in range(3):
        heart._write("")
    with pytest.raises(SystemExit, match="2"):
        looked(heart, 0.1)
