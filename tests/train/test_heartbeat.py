"""Signs of life name who is missing, and nobody else."""

import time
from pathlib import Path

import pytest

from train.distributed import control
from train.distributed.control import Heartbeat


@pytest.fixture
def hearts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    monkeypatch.setattr(control, "BEAT", 0.05)
    monkeypatch.setattr(control, "GRACE", 0.5)
    made = [Heartbeat(tmp_path / ".ranks", rank, 3) for rank in range(3)]
    for each in made:
        each.start()
    return made


def test_nobody_is_missing(hearts: list[Heartbeat]) -> None:
    hearts[0].move()
    assert hearts[0].missing(timeout=600) == "", "an error of this process's own is no other one's fault"
    for each in hearts:
        each.end()
    assert not hearts[0].folder.exists()


def test_who_ended_is_named_by_the_first_that_is_left(hearts: list[Heartbeat]) -> None:
    hearts[0].end("out of memory")
    for left in hearts[1:]:
        assert left.missing(timeout=600).endswith("ended: out of memory")
        assert left.missing(timeout=600).startswith("rank 0 (")
    assert [left.speaks() for left in hearts[1:]] == [True, False]
    hearts[1].end("", lost=True)
    assert "rank 1" not in hearts[2].missing(timeout=600), "who ends since another one is lost is not missing"
    hearts[2].end()


def test_who_hangs_is_named_after_the_time_out(hearts: list[Heartbeat]) -> None:
    for each in hearts[:2]:
        each.move()
    assert hearts[0].missing(timeout=0).startswith("rank 2 (")
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
