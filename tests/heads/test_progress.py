"""Progress in a log: a line each half minute, with the rate and the time that is left."""

import io
import sys
import time
from collections.abc import Callable

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled

from heads.common import progress

Read = Callable[[], list[str]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock, and forget the lines that other tests caused."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(progress.Bar, "last", -99.0)
    return clock


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    """Return a function that reads the lines on stderr."""

    def lines() -> list[str]:
        return capsys.readouterr().err.splitlines()

    return lines


def work(now: list[float], seconds: float, items: int = 5, label: str = "measuring") -> None:
    for _ in progress.progress(range(items), label):
        now[0] += seconds


def test_work_in_a_log_gets_a_line_now_and_then(now: list[float], read: Read) -> None:
    work(now, 20.0)
    assert read() == ["measuring: 2 of 5, 3.0/min, 0:01:00 left", "measuring: 4 of 5, 3.0/min, 0:00:20 left"]


def test_short_pieces_of_long_work_get_lines_too(now: list[float], read: Read) -> None:
    for label in "abc":
        work(now, 4.0, label=label)
    assert read() == ["b: 3 of 5, 15.0/min, 0:00:08 left"]
    now[0] += 100.0
    work(now, 4.0)
    assert not read(), "a short piece after a pause"


def test_work_that_goes_on_counts_what_it_does_itself(now: list[float], read: Read) -> None:
    bar = progress.Bar(100, "step", 40)
    with bar:
        now[0] += 30.0
        bar.show(100, "loss 1.0")
    assert read() == ["step: 100 of 100, loss 1.0, 2.0/s, 0:00:00 left"]


def test_a_long_item_and_work_of_unknown_size_get_lines(now: list[float], read: Read) -> None:
    for _ in progress.progress(iter("ab"), "tokenising"):
        now[0] += 30.0
        progress.tick()
    assert read() == ["tokenising: 0:00:30 so far", "tokenising: 1, 1.0/min"]
    progress.tick()
    now[0] += 99.0
    progress.tick()
    assert not read(), "the work is over"


def test_the_innermost_bar_speaks(now: list[float], read: Read) -> None:
    with progress.Bar(9, "step") as outer:
        with progress.Bar(3, "measuring"):
            now[0] += 31.0
            progress.tick()
        outer.show(2)
        now[0] += 31.0
        progress.tick()
    assert read() == ["measuring: 0 of 3, 0:00:31 so far", "step: 2 of 9, 1.9/min, 0:03:37 left"]


def test_a_terminal_gets_nested_bars_and_no_lines(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(progress.CONSOLE, "_force_terminal", True)
    monkeypatch.setattr(progress.CONSOLE, "is_interactive", True)
    monkeypatch.setattr(progress.CONSOLE, "_file", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    with progress.Bar(9, "step") as outer:
        outer.show(1, "loss 2.0")
        with progress.Bar(3, "measuring") as inner:
            now[0] += 60.0
            inner.show(2)
            progress.BARS.refresh()
        assert progress.BARS.live.is_started, "for the outer bar"
    shown = screen.getvalue()
    assert "loss 2.0" in shown
    assert "2/3" in shown
    assert "left" not in shown
    assert not progress.BARS.live.is_started


@pytest.mark.parametrize("said", [True, False])
def test_what_the_user_says_of_bars_stands(
    said: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", said)
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", said)
    with progress.waiting("uploading"):
        assert are_progress_bars_disabled() is said
    assert not recwarn.list


def test_a_wait_in_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.02)
    monkeypatch.setattr(progress.Bar, "last", 0.0)
    with progress.waiting("uploading"):
        assert are_progress_bars_disabled()
        time.sleep(0.2)
    assert not are_progress_bars_disabled()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert set(lines) == {"uploading: 0:00:00 so far"}
