"""Progress in a log: a line now and then, with the time that is left."""

import sys
import time

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled

from heads.common import progress


def test_work_in_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    items = []
    for item in progress.progress("abcde", "measuring"):
        items.append(item)
        now[0] += 20.0
    assert items == list("abcde")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 2 of 5, 0:01:00 left",
        "measuring: 4 of 5, 0:00:20 left",
    ]


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
    with progress.waiting("uploading"):
        assert are_progress_bars_disabled()
        time.sleep(0.2)
    assert not are_progress_bars_disabled()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert set(lines) == {"uploading: 0:00:00 so far"}
